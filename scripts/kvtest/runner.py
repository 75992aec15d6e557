"""Runs parts, counts what they say, reports."""

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

LOGS = Path("build/test-logs")
TAIL_LINES = 60


@dataclass
class Part:
    """One row of the table in test.py."""

    name: str
    about: str
    limit_s: int
    run: object
    needs: list = field(default_factory=list)
    # Returns the reason why this machine cannot run the part, or None.
    machine: object = lambda: None
    # Set while it runs.
    log: object = None
    verbose: bool = False
    deadline: float = 0.0


@dataclass
class Count:
    """What one command, or one part, came to. `notes` are reasons of failures and skips."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    notes: list = field(default_factory=list)

    def add(self, other):
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        self.notes += other.notes
        return self


def fail(note):
    return Count(failed=1, notes=[note])


def run(part, argv, env=None, limit_s=None):
    """Runs a command in a process group of its own; returns (exit code, output).

    The code is None when the time was up. Whatever the command leaves running is ended, so a part
    cannot disturb the next one.
    """
    left = part.deadline - time.monotonic()
    limit_s = left if limit_s is None else min(limit_s, left)
    part.log.write(f"$ {' '.join(argv)}\n")
    part.log.flush()
    begin = part.log.tell()
    full = dict(os.environ, **(env or {}))
    try:
        child = subprocess.Popen(argv, stdout=part.log, stderr=subprocess.STDOUT, env=full,
                                 stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as e:
        part.log.write(f"{argv[0]}: {e.strerror}\n")
        return 127, f"{argv[0]}: {e.strerror}"
    code = None
    try:
        until = time.monotonic() + limit_s
        shown = begin
        while code is None and time.monotonic() < until:
            try:
                code = child.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                pass
            shown = show(part, shown)
    finally:
        end_group(child)
    output = read_from(part, begin)
    if code is None:
        part.log.seek(0, os.SEEK_END)
        part.log.write(f"ended after {limit_s:.0f} s\n")
    return code, output


def read_from(part, begin):
    with open(part.log.name, encoding="utf-8", errors="replace") as log:
        log.seek(begin)
        return log.read()


def show(part, shown):
    """With VERBOSE=1, passes on what the log has got since `shown`."""
    if not part.verbose:
        return shown
    text = read_from(part, shown)
    sys.stdout.write(text)
    sys.stdout.flush()
    return shown + len(text.encode("utf-8", errors="replace"))


def end_group(child):
    """Ends the command and everything of its group that still runs."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
        except ProcessLookupError:
            break
        for _ in range(20):
            child.poll()
            try:
                os.killpg(child.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.05)
    child.wait()


def command(part, argv, env=None):
    """One command is one check."""
    code, output = run(part, argv, env)
    if code == 0:
        return Count(passed=1)
    return fail(outcome(argv, code, output))


def outcome(argv, code, output):
    what = "ran out of time" if code is None else f"exit code {code}"
    lines = [line for line in output.splitlines() if line.strip()]
    last = f": {lines[-1].strip()[:120]}" if lines else ""
    return f"{Path(argv[0]).name} {' '.join(argv[1:4])}: {what}{last}"


CARGO_RESULT = re.compile(
    r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", re.MULTILINE)
CARGO_FAILED = re.compile(r"^test (\S+)(?: - .*)? \.\.\. FAILED$", re.MULTILINE)
CARGO_IGNORED = re.compile(r"^test (\S+)(?: - .*)? \.\.\. ignored(?:, (.*))?$", re.MULTILINE)


def count_cargo(argv, code, output):
    """Counts the summaries of cargo's test programs. A run of no test is a failure."""
    count = Count()
    for passed, failed, ignored in CARGO_RESULT.findall(output):
        count.add(Count(int(passed), int(failed), int(ignored)))
    count.notes += [f"{name} failed" for name in CARGO_FAILED.findall(output)]
    count.notes += [f"{name} ignored: {why or 'no reason given'}"
                    for name, why in CARGO_IGNORED.findall(output)]
    if code != 0 and count.failed == 0 or code is None:
        count.add(fail(outcome(argv, code, output)))
    elif count.passed + count.failed == 0:
        count.add(fail(f"{' '.join(argv[:4])}: no test was run"))
    return count


def cargo(part, argv, env=None):
    # Every test program runs, also after one that failed. A caller's harness options come last.
    at = argv.index("--") if "--" in argv else len(argv)
    argv = [*argv[:at], "--no-fail-fast", *argv[at:]]
    code, output = run(part, argv, env)
    return count_cargo(argv, code, output)


def count_junit(path):
    """Counts a junit file: tests, failures, errors and skips with their reasons."""
    count = Count()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}"
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        skip = case.find("skipped")
        if bad is not None:
            count.add(fail(f"{name}: {(bad.get('message') or '').splitlines()[:1]}"))
        elif skip is not None:
            count.add(Count(skipped=1, notes=[f"{name} skipped: {skip.get('message')}"]))
        else:
            count.passed += 1
    return count


def pytest(part, python, folder):
    junit = LOGS / f"{part.name}.xml"
    junit.unlink(missing_ok=True)
    argv = [python, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--junitxml={junit}",
            folder]
    # The tests choose the plugin themselves.
    env = {"PYTHONPATH": "bindings/python", "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ.pop("NIXL_PLUGIN_DIR", None)
    code, output = run(part, argv, env)
    if not junit.exists():
        return fail(outcome(argv, code, output))
    count = count_junit(junit)
    if code != 0 and count.failed == 0:
        count.add(fail(outcome(argv, code, output)))
    elif count.passed + count.failed == 0:
        count.add(fail(f"{folder}: no test was run"))
    return count


def has(program):
    def check():
        return None if shutil.which(program) else f"{program} is not installed"

    return check


def wheels_run():
    """The published NIXL wheels are for glibc on two machines."""
    machine, (libc, version) = platform.machine(), platform.libc_ver()
    if machine not in ("x86_64", "aarch64"):
        return f"there is no NIXL wheel for {machine}"
    if libc != "glibc":
        return f"the NIXL wheels need glibc; this is {libc or 'another libc'} {version}".rstrip()
    return None


def run_part(part, strict):
    """Runs one part; returns what it came to."""
    missing = [path for path in part.needs if not Path(path).exists()]
    if missing:
        return fail(f"{', '.join(missing)}: not in this checkout")
    reason = part.machine()
    if reason and strict:
        return fail(f"cannot run here, and STRICT=1 allows no skip: {reason}")
    if reason:
        return Count(skipped=1, notes=[f"SKIPPED, {reason}"])
    part.deadline = time.monotonic() + part.limit_s
    with open(LOGS / f"{part.name}.log", "w", encoding="utf-8") as part.log:
        try:
            count = part.run(part)
        except Exception as e:  # a fault of the driver is a red part, not the end of the run
            count = fail(f"the driver failed: {type(e).__name__}: {e}")
    if count.passed + count.failed + count.skipped == 0:
        count.add(fail("nothing was run"))
    return count


def run_all(parts, strict=False, verbose=False):
    LOGS.mkdir(parents=True, exist_ok=True)
    results = []
    for number, part in enumerate(parts, 1):
        part.verbose = verbose
        print(f"[{number}/{len(parts)}] {part.name}: {part.about}", flush=True)
        started = time.monotonic()
        count = run_part(part, strict)
        seconds = time.monotonic() - started
        print(f"      {line(count)} in {seconds:.0f} s", flush=True)
        for note in count.notes:
            print(f"      - {note}", flush=True)
        log = LOGS / f"{part.name}.log"
        if count.failed and log.exists() and not verbose:
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
            print(f"      the last lines of {log}:", *tail, sep="\n      | ", flush=True)
        results.append((part, count, seconds))
    return results


def line(count):
    return f"{count.passed} passed, {count.failed} failed, {count.skipped} skipped"


def report(results, seconds):
    """Prints the table and the closing line; returns the exit code."""
    total = Count()
    print(f"\n{'part':<10}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for part, count, took in results:
        print(f"{part.name:<10}{count.passed:>8}{count.failed:>8}{count.skipped:>9}{took:>9.0f}")
        total.add(Count(count.passed, count.failed, count.skipped,
                        [f"{part.name}: {note}" for note in count.notes]))
    if total.notes:
        print("\nfailures and skips, with their reasons:")
        for note in total.notes:
            print(f"  {note}")
    print(f"\n{len(results)} parts in {seconds:.0f} s; logs in {LOGS}/")
    print(line(total))
    return 1 if total.failed or not results else 0
