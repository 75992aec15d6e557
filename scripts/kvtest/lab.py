"""The part `lab`: scripts/lab.sh, which boots a kernel with Soft-RoCE and runs suites inside."""

import os
import re

from . import runner

SCRIPT = "scripts/lab.sh"
CANNOT = 77
CLOSING = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", re.MULTILINE)
NOTE = re.compile(r"^  (\S.*)$", re.MULTILINE)


def judge(code, output, strict=False):
    """A count from what the script printed: its closing line, and the notes in front of it."""
    closing = list(CLOSING.finditer(output))
    if not closing:
        return runner.fail(runner.outcome([SCRIPT], code, output))
    last = closing[-1]
    # Notes are the indented lines right before the closing line.
    lines = output[: last.start()].splitlines()
    notes = []
    while lines and (note := NOTE.fullmatch(lines[-1])):
        notes.insert(0, note.group(1))
        lines.pop()
    if code == CANNOT:
        why = notes[-1] if notes else "no reason was given"
        if strict:
            return runner.fail(f"STRICT=1 allows no skip: {why}")
        return runner.Count(skipped=1, notes=[why])
    count = runner.Count(*(int(number) for number in last.groups()), notes)
    if code != 0 and count.failed == 0:
        count.add(runner.fail(runner.outcome([SCRIPT], code, output)))
    elif count.passed + count.failed == 0:
        count.add(runner.fail(f"{SCRIPT}: no suite gave a verdict"))
    return count


def suites(part):
    code, output = runner.run(part, [SCRIPT])
    return judge(code, output, os.environ.get("STRICT") == "1")
