"""Reads what callgrind wrote: instructions by phase, by function and by line of source.

Callgrind was run with names and positions in full (--compress-strings=no --compress-pos=no) and
with --dump-instr=yes, so each cost line stands alone and names the instruction. What the compiler
inlined is counted where it is written: addr2line knows the chain of inlined calls, and the
innermost that is the project's own gets the cost.
"""

import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

PHASES = ("prepare", "post", "poll", "release")

class Counts:
    """One run, or the difference of two."""

    def __init__(self):
        self.total = Counter()  # event -> count, of all that was collected
        self.phases = Counter()  # (phase, event) -> count, callees included
        self.places = Counter()  # (object, address) -> instructions
        self.entries = {}  # function -> its lowest (object, address): where it begins

    def minus(self, other):
        """What a longer run did more than a shorter one."""
        out = Counts()
        for name in ("total", "phases", "places"):
            mine = getattr(self, name).copy()
            mine.subtract(getattr(other, name))
            setattr(out, name, mine)
        out.entries = other.entries | self.entries
        return out

    def calls(self, *names):
        """How often functions of these names were entered: their first instruction says it.
        Callgrind's own figures of calls also count those outside what is collected."""
        return sum(self.places[self.entries[name]] for name in names if name in self.entries)


def phase_of(function):
    found = re.search(r"\bphase_(\w+?)\b", function)
    return found.group(1) if found and found.group(1) in PHASES else None


def read(path, phase_of=phase_of):
    """The counts in one file of callgrind's. `phase_of`: what a function is a phase of, or None."""
    out, events, binary, function, called = Counts(), [], "", "", None
    for text in Path(path).read_text(errors="replace").splitlines():
        head, equals, value = text.partition("=")
        if text.startswith("events:"):
            events = text.split()[1:]
        elif equals and head == "ob":
            binary = value
        elif equals and head == "fn":
            function = value
        elif equals and head == "cfn":
            called = value
        elif equals and head == "calls":
            continue
        elif text.startswith("0x"):
            address, _, *costs = text.split()
            costs = dict(zip(events, map(int, costs)))
            phase = phase_of(function)
            if phase:
                for event, cost in costs.items():
                    out.phases[phase, event] += cost
            if called is None:
                out.total.update(costs)
                place = binary, int(address, 16)
                out.places[place] += costs.get("Ir", 0)
                out.entries[function] = min(out.entries.get(function, place), place)
            called = None
    return out


def frames(binary, addresses):
    """The chain of calls at each address, innermost first: (function, file, line)."""
    command = ["addr2line", "-a", "-i", "-f", "-C", "-e", binary]
    given = "\n".join(map(hex, addresses))
    text = subprocess.run(command, input=given, capture_output=True, text=True,
                          check=True).stdout
    out, lines = [], iter(text.splitlines())
    for line in lines:
        if line.startswith("0x"):
            out.append([])
            continue
        path, _, number = next(lines).split(" ")[0].rpartition(":")
        out[-1].append((line, path, number))
    return dict(zip(addresses, out))


def by_source(counts, root):
    """(file, function, line) -> instructions; a file below `root` is named from there."""
    objects, out = defaultdict(list), Counter()
    for binary, address in counts.places:
        objects[binary].append(address)
    for binary, addresses in objects.items():
        known = frames(binary, addresses) if Path(binary).is_file() else {}
        for address in addresses:
            chain = known.get(address) or [("?", binary, "?")]
            own = [f for f in chain if Path(f[1]).is_relative_to(root)]
            name, path, line = (own or chain)[0]
            short = Path(path).relative_to(root) if own else "/".join(Path(path).parts[-3:])
            # Generic arguments and paths make names long; the last part says enough.
            name = re.sub(r"<.*>", "", name).split("::")[-1] or name
            out[str(short), name, line] += counts.places[binary, address]
    return out
