"""Reads what callgrind wrote: instructions by phase, by function and by line of source.

Callgrind was run with names and positions in full (--compress-strings=no --compress-pos=no) and
with --dump-line=yes, so each cost line stands alone. A line's file is the one that it was written
in, so what the compiler inlined is counted where it is written.
"""

import re
from collections import Counter
from pathlib import Path

PHASES = ("prepare", "post", "poll", "release")
RUST_FN = re.compile(r"^\s*(?:pub(?:\([^)]*\))? )?(?:const |unsafe |extern \"C\" )*fn (\w+)")


class Counts:
    """One run, or the difference of two."""

    def __init__(self):
        self.total = Counter()  # event -> count, of all that was collected
        self.phases = Counter()  # (phase, event) -> count, callees included
        self.lines = Counter()  # (file, line) -> instructions
        self.calls = Counter()  # function -> calls

    def minus(self, other):
        """What a longer run did more than a shorter one."""
        out = Counts()
        for name in ("total", "phases", "lines", "calls"):
            mine = getattr(self, name).copy()
            mine.subtract(getattr(other, name))
            setattr(out, name, mine)
        return out


def phase_of(function):
    found = re.search(r"\bphase_(\w+?)\b", function)
    return found.group(1) if found and found.group(1) in PHASES else None


def read(path):
    """The counts in one file of callgrind's."""
    out, events, source, function, called = Counts(), [], "", "", None
    for text in Path(path).read_text(errors="replace").splitlines():
        head, equals, value = text.partition("=")
        if text.startswith("events:"):
            events = text.split()[1:]
        elif equals and head in ("fl", "fi", "fe"):
            source = value
        elif equals and head == "fn":
            function = value
        elif equals and head == "cfn":
            called = value
        elif equals and head == "calls":
            out.calls[called] += int(value.split()[0])
        elif text[:1].isdigit():
            line, *costs = (int(number) for number in text.split())
            costs = dict(zip(events, costs))
            phase = phase_of(function)
            if phase:
                for event, cost in costs.items():
                    out.phases[phase, event] += cost
            if called is None:
                out.total.update(costs)
                out.lines[source, line] += costs.get("Ir", 0)
            called = None
    return out


class Functions:
    """Names the function that a line of Rust is written in."""

    def __init__(self):
        self.files = {}

    def starts(self, path):
        if path not in self.files:
            try:
                lines = Path(path).read_text(errors="replace").splitlines()
            except OSError:
                lines = []
            found = ((i, RUST_FN.match(line)) for i, line in enumerate(lines, 1))
            self.files[path] = [(i, match.group(1)) for i, match in found if match]
        return self.files[path]

    def name(self, path, line):
        before = [name for start, name in self.starts(path) if start <= line]
        return before[-1] if before else "?"


def by_function(counts, root):
    """(file, function) -> instructions; a file below `root` is named from there."""
    functions, out = Functions(), Counter()
    for (path, line), cost in counts.lines.items():
        whole = Path(path) if Path(path).is_absolute() else Path(root, path)
        short = whole.relative_to(root) if whole.is_relative_to(root) else shortened(path)
        out[str(short), functions.name(str(whole), line)] += cost
    return out


def shortened(path):
    """The end of the name of a file of the compiler's library or of libc."""
    return "/".join(Path(path).parts[-3:])


def calls_of(counts, *names):
    """Calls of functions that end in one of these names."""
    return sum(n for function, n in counts.calls.items()
               if function and re.split(r"[:\s']", function)[0] in names)
