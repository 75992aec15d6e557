"""Parts that are a script which counts its own checks: notes, then "N passed, M failed"."""

import re

from . import runner

CANNOT = 77
CLOSING = re.compile(r"^(\d+) passed, (\d+) failed(?:, (\d+) skipped)?$", re.MULTILINE)
NOTE = re.compile(r"^  (\S.*)$", re.MULTILINE)


def judge(argv, code, output):
    """A count from what a script printed: its closing line, and the notes in front of it. A script
    that says it cannot run here (77) is a skip, also where the driver is strict: the machine is as
    it is."""
    closing = list(CLOSING.finditer(output))
    if not closing:
        return runner.fail(runner.outcome(argv, code, output))
    last = closing[-1]
    # Notes are the indented lines right before the closing line.
    lines = output[: last.start()].splitlines()
    notes = []
    while lines and (note := NOTE.fullmatch(lines[-1])):
        notes.insert(0, note.group(1))
        lines.pop()
    if code == CANNOT:
        why = notes[-1] if notes else "no reason was given"
        return runner.Count(skipped=1, notes=[why])
    count = runner.Count(*(int(number or 0) for number in last.groups()), notes)
    if code != 0 and count.failed == 0:
        count.add(runner.fail(runner.outcome(argv, code, output)))
    elif count.passed + count.failed == 0:
        count.add(runner.fail(f"{argv[0]}: no check gave a verdict"))
    return count


def counted(*argv):
    """The run of a part that is this command."""

    def run(part):
        code, output = runner.run(part, list(argv))
        return judge(list(argv), code, output)

    return run
