"""What a drive sees of the engines from outside, and what it does to their links.

Every process with our backend appends kvrail's log to a file of its own (KVRAIL_LOG); one with NICs
of the fake libibverbs also keeps its engine's figures in another (KVRAIL_STATS).
"""

import json
import re
import subprocess
import time
from pathlib import Path

HANG = 120.0  # seconds; only against hangs
# Bytes a second of each link while a drive wants a transfer to be under way. One completion tells
# of eight work requests of WORK bytes, after half a second; the cases have kvrail wait longer.
SLOW, WORK = 2 << 20, 128 << 10
CRAWL = 512 << 10  # the same, where nobody waits for a completion: 16 s for 8 MiB
# kvrail's times, in milliseconds. They are set for every process, so nothing depends on defaults.
LIMITS = {"rail_timeout_ms": 500, "keepalive_ms": 1000, "peer_timeout_ms": 4000}
ROOM = 30.0  # seconds that a slow machine may add to a bound; only against hangs


class Failed(Exception):
    """A process answered with an error, ended, or said nothing; or something never came."""


def until(what, true, seen=lambda: "nothing to show"):
    """The first value of `true()` that is one; `seen()` tells what there is in its place."""
    end = time.perf_counter() + HANG
    while not (value := true()):
        if time.perf_counter() > end:
            raise Failed(f"never seen in {HANG:.0f} s: {what}; seen: {seen()}")
        time.sleep(0.01)
    return value


def limits(case):
    return {**LIMITS, **case["limits"]}


def bound(case):
    """Seconds in which a request to a dead peer has failed: an idle rail asks whether the peer is
    there, is silent for twice the limit, and then the peer has time to come back."""
    times = limits(case)
    return (times["keepalive_ms"] + 2 * times["rail_timeout_ms"] + times["peer_timeout_ms"]) / 1000


def own_nics(case, rank):
    """The names of a rank's NICs, where they are this machine's."""
    return case["nics"][0 if rank.produces else 1].split(",") if case["nics"] else []


def environment(case, rank):
    """What a rank needs for its files, for `case["limits"]` and for its transport."""
    host = rank.host
    folder = Path(case["folder"])
    made = {f"KVRAIL_{name.upper()}": str(ms) for name, ms in limits(case).items()}
    made["KVRAIL_LOG"] = f"info,{folder}/log-{host}"
    if case["rails"] or case["nics"]:
        made.update(KVRAIL_TRANSPORT="verbs", KVRAIL_LISTEN_IP="127.0.0.1")
        made["KVRAIL_STATS"] = f"{folder}/figures-{host}"
        # So that a slow link is not taken for a silent one.
        made["KVRAIL_SLICE_BYTES"] = str(WORK)
    if case["nics"]:
        made["KVRAIL_NICS"] = ",".join(own_nics(case, rank))
    return made


class Wires:
    """Logs, figures and links of a case's processes."""

    def __init__(self, case):
        self.case = case
        self.folder = Path(case["folder"])
        self.field = "bytes_read" if case["direction"] == "pull" else "bytes_written"

    def log(self, process):
        path = self.folder / f"log-{process.rank.host}"
        return path.read_text(errors="replace") if path.exists() else ""

    def until_said(self, processes, *words):
        """Waits for a line with these words in the log of each."""
        for process in processes:
            until(f"{' '.join(words)!r} in the log of process {process.rank.host}",
                  lambda p=process: any(all(word in line for word in words)
                                        for line in self.log(p).splitlines()))

    def peers(self, process):
        """Whom a process was connected to, and who was gone for which reason: lists of names, and
        of pairs."""
        log = self.log(process)
        name = r"(\S+ \(incarnation \w+\))"
        return (re.findall(f"connected to {name}: ", log),
                re.findall(f"info: {name} is gone: (.*)", log))

    def until_rail(self, processes, issuer, rail, words):
        """As `until_said`, of the rail that `issuer` calls so: its other end has a name too."""
        for process in processes:
            mine, its = (own_nics(self.case, one.rank) for one in (process, issuer))
            name = mine[its.index(rail)] if mine else rail
            self.until_said([process], *(word.format(name) for word in words))

    def lose(self, rail):
        """The link of a rail goes down, at both ends."""
        if self.case["nics"]:
            port = Path("/sys/class/infiniband") / rail
            netdev = (port / "parent").read_text().strip()  # Soft-RoCE says it there
            subprocess.run(["ip", "link", "set", netdev, "down"], check=True)
        else:
            self.set(f"{rail}.port1.state=down")

    def set(self, *assignments):
        """Changes links in all processes (tests/fakeverbs/README.md)."""
        control = self.folder / "bus" / "control"
        (control.parent / "made").write_text("\n".join(assignments) + "\n")
        (control.parent / "made").rename(control)

    def figures(self, issuers, field=""):
        """A figure of each rail, of all issuers together; number and bytes of the transfers that
        were posted. The figure is the bytes carried, unless `field` names another."""
        rails, posted, bytes_ = {}, 0, 0
        for process in issuers:
            path = self.folder / f"figures-{process.rank.host}"
            if not path.exists():
                continue
            one = json.loads(path.read_text())
            for rail in one["rails"]:
                name = rail["name"].partition(":")[0]
                rails[name] = rails.get(name, 0) + rail[field or self.field]
            posted += one["transfers"]["posted"]
            bytes_ += one["transfers"]["bytes"]
        return rails, posted, bytes_

    def settled(self, issuers, transfers):
        """Bytes that each rail carried when so many transfers were posted and have ended."""
        def look():
            rails, posted, bytes_ = self.figures(issuers)
            return rails if posted == transfers and sum(rails.values()) >= bytes_ else None

        return until(f"{transfers} transfers in the figures, and their bytes", look, lambda: [
            (process.rank.host, *self.figures([process])) for process in issuers])

    def grown(self, issuers, before, field="", but=()):
        """Waits until the figure of a rail is above `before`, one that is not in `but`; by how much
        each."""
        def look():
            rails = self.figures(issuers, field)[0]
            more = {name: rails[name] - before[name] for name in rails if name not in but}
            return more if any(more.values()) else None

        return until("a rail that carries the request", look)
