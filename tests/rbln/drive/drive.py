#!/usr/bin/env python3
"""Moves KV caches between workers of the published connector of vllm-rbln, without an NPU.

usage: drive.py CASE...    a case is a JSON object; keys and defaults: DEFAULTS in cases.py
       drive.py            the cases of CI: every pair of values, and those of SPECIAL
       drive.py --nightly  all of them
       drive.py [--nightly] --list

Needs vllm 0.30.0 for CPU, nixl-cu12, and on PYTHONPATH nixl_rbln, this folder and vllm_rbln 0.12.0:
`make test-rbln` sees to that. vLLM is imported once, and the processes of all cases are forked
from that. Each case prints one JSON line, the last line is a count. Exit code 0 only when every
case was as expected: with `spoil` the comparison must fail, and nothing else.
"""

import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import cases as table
import layout
import side as sides
import wires
from kvtest.ports import free_port
from roles import child
from wires import Failed

FORK = multiprocessing.get_context("fork")
BEATS = 3  # heartbeats that must have been seen
STEPS = 300  # of an engine whose request the connector has lost: it does not end by itself
SHOWN = ("wrong", "stray", "replicas", "changed", "seconds", "dead_seconds", "register_s", "sent",
         "expired", "beats", "writes", "written", "exit", "lost", "before", "late", "order")


def cpu():
    """Seconds of processor that the ended processes took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Process:
    """A forked rank, and what it said first."""

    def __init__(self, case, rank):
        self.rank = rank
        self.pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(target=child, args=(case, rank, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, *order):
        self.pipe.send(order)

    def answer(self):
        who = f"{self.rank.engine} tp {self.rank.tp} pp {self.rank.pp}"
        if not self.pipe.poll(2 * sides.HANG):
            raise Failed(f"{who} gave no answer in {2 * sides.HANG:.0f} s")
        try:
            said = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join(5)
            raise Failed(f"{who} ended with exit code {self.process.exitcode}") from None
        if "error" in said:
            raise Failed(f"{who}: {said['error']}")
        return said

    def kill(self):
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


class Case:
    """One case under way."""

    def __init__(self, case, number):
        self.case, self.number = case, number
        self.out, self.problems, self.all = {}, [], []
        self.ports = {}

    def need(self, fine, problem):
        if not fine:
            self.problems.append(problem)

    def ranks(self, produces, consumer=0, life=0):
        case = self.case
        engine = f"P{self.number}" if produces else f"D{self.number}-{consumer}"
        port = self.ports.setdefault(engine, free_port())
        tp_size, pp_size = (case["p_tp"], case["p_pp"]) if produces else (case["d_tp"], 1)
        return [sides.Rank(engine, port, produces, consumer, tp, tp_size, pp, pp_size, life)
                for pp in range(pp_size) for tp in range(tp_size)]

    def start(self, ranks):
        made = []
        for rank in ranks:
            made.append(Process(self.case, replace(rank, host=len(self.all) + 1)))
            self.all.append(made[-1])
        return made

    def ready(self, engine):
        """Collects what the ranks of an engine registered; its first rank then serves it."""
        said = [process.answer() for process in engine]
        for process, one in zip(engine, said):
            self.check_registration(process.rank, one)
        self.out["register_s"] = round(max(one["register_s"] for one in said), 3)
        payloads = {(p.rank.pp, p.rank.tp): one["payload"] for p, one in zip(engine, said)}
        self.tell(engine[:1], "serve", payloads)

    def check_registration(self, rank, said):
        case = self.case
        areas = case["areas"] if rank.produces or not case["d_areas"] else case["d_areas"]
        if case["buffer"] == "cpu":
            areas = 1
        parts = 2 if case["split"] and not case["mla"] else 1
        wanted = case["layers"] // rank.pp_size * parts * areas
        self.need(said["parts"] == parts, f"{said['parts']} parts of a layer, not {parts}")
        self.need(said["regions"] == wanted, f"{said['regions']} regions, not {wanted}")
        both = case["beside"] or case["backend"] == "UCX"
        backends = {"UCX"} if case["absent"] else {"RBLN", "UCX"} if both else {"RBLN"}
        self.need(set(said["backends"]) == backends, f"backends are {said['backends']}")

    def tell(self, processes, *order):
        for process in processes:
            process.send(*order)
        return [process.answer() for process in processes]

    def sum(self, said, *names):
        for name in names:
            self.out[name] = sum(one[name] for one in said)

    def issuers(self, producers, consumers):
        """Who READs or WRITEs."""
        return producers if self.case["direction"] == "push" else consumers

    def begin(self, producers, turn):
        for process in producers:
            process.send("begin", turn)
        if not self.case["stream"]:
            for process in producers:
                process.answer()
        return producers[0].rank.engine, producers[0].rank.port, turn

    def move(self, producers, consumers, turn=0, life=0):
        """The requests of each consumer, and the comparison."""
        peer = self.begin(producers, turn)
        if self.case["heartbeat"]:
            self.beat(producers, consumers, peer)
        self.tell(consumers, "ask", *peer)
        self.finish(producers, consumers, life)

    def finish(self, producers, consumers, life=0):
        """The end of all requests, and the comparison."""
        said = self.tell(consumers, "wait")
        if self.case["stream"]:
            for process in producers:
                process.answer()
        fine = all(len(one["received"]) == self.case["requests"] for one in said)
        self.need(fine, "a request was not received")
        self.out["seconds"] = max(one["seconds"] for one in said)
        said = self.tell(consumers, "look", life)
        self.sum(said, "wrong", "stray", "replicas")
        for one in said:
            self.need(one["entries"] == self.case["layers"], f"{one['entries']} entries")

    def beat(self, producers, consumers, peer):
        """Heartbeats of a request that waits; the request itself could overtake them."""
        seen = sum(one["beats"] for one in self.tell(producers, "counts"))
        self.tell(consumers, "beat", *peer)
        wanted, until = seen + BEATS * len(producers), time.perf_counter() + sides.HANG
        while seen < wanted and time.perf_counter() < until:
            time.sleep(0.01)
            seen = sum(one["beats"] for one in self.tell(producers, "counts"))

    def must_fail(self, producers, consumers, turn):
        """A request that cannot be served: it fails, and in bounded time."""
        self.tell(consumers, "ask", producers[0].rank.engine, producers[0].rank.port, turn)
        if self.case["fault"] == "unanswered":
            self.unanswered(consumers)
        said = self.tell(consumers, "wait")
        every = list(range(self.case["requests"]))
        self.need(all(sorted(one["failed"]) == every for one in said),
                  "a request to a dead peer did not fail")
        self.out["dead_seconds"] = took = max(one["seconds"] for one in said)
        most = wires.bound(self.case) + wires.ROOM
        self.need(took <= most, f"a request to a dead peer took {took} s to fail, not {most} s")
        if self.case["kill"] == "stopped":
            least = wires.limits(self.case)["peer_timeout_ms"] / 1000
            self.need(took >= least, f"a silent peer was given up after {took} s, before {least} s")

    def check_death(self, consumers, reason):
        """The log names whom it was connected to, once, and why that one is gone."""
        for process in consumers:
            what = f"a peer that is gone, in the log of process {process.rank.host}"
            met, gone = wires.until(what, lambda: (got := self.wires.peers(process))[1] and got)
            self.need(gone == [(met[0], reason)], f"met {met}, and gone are {gone}, not: {reason}")

    def unanswered(self, consumers):
        """The connector's fault: a registration that cannot be sent is only logged, so the request
        waits, until a heartbeat to the dead producer fails."""
        said = self.tell(consumers, "steps", STEPS)
        self.need(all(one["open"] for one in said), "the request ended: the fault is gone")
        self.tell(consumers, "heartbeats")

    def forgotten(self, producers, consumers):
        """The connector's fault: a WRITE to the consumer that died fails, and the producer does not
        shake hands with the one that came back."""
        self.tell(consumers, "ask", *self.begin(producers, 1))
        wires.until("a WRITE to the dead consumer that fails",
                    lambda: any(one["refused"] + one["broken"]
                                for one in self.tell(producers, "counts")))
        said = self.tell(consumers, "steps", STEPS)
        self.need(all(one["open"] for one in said), "the request ended: the fault is gone")

    def together(self, producers, consumers):
        """Requests that are all under way at one time; over NICs the last one ends first."""
        case, net, many = self.case, self.wires, self.case["requests"]
        issuers = self.issuers(producers, consumers)
        if not case["rails"]:
            self.move(producers, consumers, 1)
            # A step of a pull posts all, then looks; a push has a thread for the one, and another.
            most = max(one["most"] for one in self.tell(issuers, "counts"))
            self.need(most >= many or case["direction"] == "push", f"only {most} at one time")
            return
        self.settled(issuers)
        work, rails = "claims", []  # counted when a rail takes work, not when it is done
        before = net.figures(issuers, work)[0]
        self.speed(issuers, before, wires.CRAWL)
        peer = self.begin(producers, 1)
        for at in range(many):
            self.tell(consumers, "ask", *peer, [at])
            more = net.grown(issuers, before, work, rails)
            rails.append(max(more, key=more.get))
        posted, done = self.transfers(issuers)
        self.need(posted - done >= many, f"{posted - done} of {many} requests are under way")
        self.out["order"] = [many - 1, *range(many - 1)]
        for ended, at in enumerate(self.out["order"], 1):
            self.speed(issuers, [rails[at]], 0)
            got = wires.until(f"request {at} received", lambda: [
                one["received"] for one in self.tell(consumers, "counts")
                if len(one["received"]) >= ended])
            wanted = self.out["order"][:ended]
            self.need(got == [wanted], f"received were {got}, not {wanted}, over {rails}")
        self.finish(producers, consumers)

    def play(self):
        case = self.case
        if case["rails"]:
            (Path(case["folder"]) / "bus").mkdir()
        producers = self.start(self.ranks(True))
        engines = [self.start(self.ranks(False, at)) for at in range(case["consumers"])]
        for engine in (producers, *engines):
            self.ready(engine)
        consumers = [process for engine in engines for process in engine]
        if case["links"] == "exit":
            self.tell(producers, "links", "down")
            said = self.tell(producers, "exit")[0]["exit"]
            self.need("so this KV producer is recycled" in said, f"the step raised {said!r}")
            return
        if case["links"]:
            self.tell(producers, "links", "down")
            self.must_fail(producers, consumers, 9)
            self.tell(producers, "links", "up")
        self.move(producers, consumers)
        if case["requests"] > 1:
            self.together(producers, consumers)
        if case["kill"] in ("producer", "stopped"):
            producers = self.new_producer(producers, consumers)
        elif case["kill"] == "consumer":
            consumers[0].kill()
            consumers = self.start(self.ranks(False, life=1))
            self.ready(consumers)
            if case["fault"] == "forgotten":
                self.forgotten(producers, consumers)
                return
            self.move(producers, consumers, 1)
        elif case["cut"]:
            self.cut(producers, consumers)
        self.end(producers, consumers)

    def new_producer(self, producers, consumers):
        """The producer dies, or falls silent and then dies, and comes back with its engine id."""
        reason = "its connection was closed"
        if self.case["kill"] == "stopped":
            os.kill(producers[0].process.pid, signal.SIGSTOP)
            ms = wires.limits(self.case)["peer_timeout_ms"]
            reason = f"no rail to it for {ms} ms (peer_timeout_ms)"
        else:
            producers[0].kill()
        self.must_fail(producers, consumers, 1)
        if self.case["backend"] == "RBLN":
            self.check_death(consumers, reason)
        producers[0].kill()
        producers = self.start(self.ranks(True, life=1))
        self.ready(producers)
        self.move(producers, consumers, 2, 1)
        return producers

    def speed(self, processes, rails, bytes_a_second):
        """Sets the bandwidth of rails; processes hear of it a little later. 0: no limit."""
        self.wires.set(*(f"{rail}.bandwidth={bytes_a_second}" for rail in rails))
        for rail in rails:
            wires.until(f"bandwidth {bytes_a_second} of {rail} in every process", lambda: all(
                one["value"] == bytes_a_second
                for one in self.tell(processes, "knob", f"{rail}.bandwidth")))

    def transfers(self, issuers):
        """What the connector asked for and saw done, of all issuers."""
        said = self.tell(issuers, "counts")
        return tuple(sum(one[name] for one in said) for name in ("transfer", "done"))

    def settled(self, issuers):
        return self.wires.settled(issuers, self.transfers(issuers)[0])

    def cut(self, producers, consumers):
        """A rail loses its link, between two transfers or during one, and keeps it lost; then the
        request once more."""
        case, net, everybody = self.case, self.wires, [*producers, *consumers]
        issuers = self.issuers(producers, consumers)
        carried = before = self.settled(issuers)
        if case["cut"] == "during":
            self.speed(issuers, before, wires.SLOW)
            self.tell(consumers, "ask", *self.begin(producers, 1))
            carried = net.grown(issuers, before)
        lost = (min if case["spoil"] == "rail" else max)(carried, key=carried.get)
        self.out["lost"], self.out["before"] = lost, carried[lost]
        net.lose(lost)
        net.until_rail(everybody, issuers[0], lost, ["{}:1: its link is down"])
        net.until_rail(everybody, issuers[0], lost, ["rail {}:1 broke; left: "])
        if case["cut"] == "during":
            posted, done = self.transfers(issuers)
            self.need(done < posted, f"{done} of {posted} transfers were done before the cut")
            self.speed(issuers, before, 0)
            self.finish(producers, consumers)
            self.others(issuers, lost, before)
        before = self.settled(issuers)
        self.move(producers, consumers, 2)
        self.out["late"] = self.others(issuers, lost, before)
        if case["cut"] == "mended":
            net.set(f"{lost}.port1.state=active")
            net.until_said(everybody, f"rails {lost}:1 (", ") are back")
            before = self.settled(issuers)
            self.move(producers, consumers, 3)
            self.need(self.settled(issuers)[lost] > before[lost], f"{lost} never carried again")

    def others(self, issuers, lost, before):
        """Bytes went over the other rails; how many the lost one carried."""
        more = {rail: now - before[rail] for rail, now in self.settled(issuers).items()}
        self.need(sum(more.values()) > more[lost], f"nothing went over another rail than {lost}")
        return more[lost]

    def end(self, producers, consumers):
        case = self.case
        said = self.tell(producers, "end")
        gone = self.tell(consumers, "end")
        self.sum(said, "changed", "writes", "written")
        self.out["sent"] = all(one["sent"] for one in said)
        self.out["expired"] = any(one["expired"] for one in said)
        self.out["beats"] = min(one["beats"] for one in said)
        self.need(self.out["changed"] == 0, "a producer's cache was changed")
        # vLLM 0.30.0 reports a push only when its lease ends (see README.md); a stream at once.
        by_lease = case["direction"] == "push" and not case["stream"]
        if by_lease and not case["kill"]:
            done = f"{self.out['written']} of {self.out['writes']} writes were done"
            self.need(self.out["written"] == self.out["writes"] > 0, done)
        self.need(self.out["sent"] or by_lease, f"not reported as sent: {said[0]['unsent']}")
        self.need(not any(one["unsent"] for one in said), "not even the lease ended a request")
        if case["fault"] == "late":
            self.need(self.out["expired"] and not self.out["sent"],
                      "the push was reported before its lease ended: the fault is gone")
        if case["heartbeat"]:
            self.need(self.out["beats"] >= BEATS, f"{self.out['beats']} heartbeats were seen")
            self.need(all(one["extended"] for one in said), "no heartbeat extended the lease")
        if case["stream"]:
            self.need(self.out["writes"] > 2, f"{self.out['writes']} writes are no stream")
        self.check_lines(said, gone)

    def check_lines(self, producers, consumers):
        case = self.case
        issuers = producers if case["direction"] == "push" else consumers
        for one in (*producers, *consumers):
            self.need(("registered" in one["lines"]) == (case["buffer"] == "rbln"),
                      "the line of the registration")
            self.need(("absent" in one["lines"]) == case["absent"], "the line of nixl-rbln")
        wanted = ["planned"]
        if case["extra"].get("chunk_mode") and not case["window"]:
            wanted.append("chunked")
        if case["extra"].get("swa_window_mode"):
            wanted.append("windowed")
        for one in issuers:
            lacks = set(wanted) - set(one["lines"])
            self.need(not lacks, f"no line that says {', '.join(sorted(lacks))}")

    def result(self):
        case, started, before = self.case, time.perf_counter(), cpu()
        with tempfile.TemporaryDirectory() as folder:
            case["folder"] = folder
            self.wires = wires.Wires(case)
            try:
                self.play()
                self.need(not case["error"], "nothing was refused")
            except Failed as failure:
                self.need(case["error"] and case["error"] in str(failure), str(failure))
            finally:
                for process in self.all:
                    process.kill()
        differs = {name: bool(self.out.get(name))
                   for name in ("wrong", "stray", "replicas", "late")}
        # A rail that carried nothing before it was lost proves nothing.
        differs["before"] = self.out.get("before") == 0
        seen = {"order": "wrong", "area": "wrong", "replica": "replicas",
                "rail": "before", "halves": "wrong"}.get(case["spoil"] or case["fault"])
        for name, found in differs.items():
            self.need(found == (name == seen), f"{name} is {self.out.get(name)}")
        if case["fault"] == "halves":
            parts, heads, words = layout.model(case)
            asked = case["layers"] * parts * layout.count(case) * heads * layout.TOKENS * words
            self.need(2 * self.out.get("wrong", 0) == asked, f"not half of {asked} words is wrong")
        shown = {name: self.out[name] for name in SHOWN if name in self.out}
        return {**shown, "took": round(time.perf_counter() - started, 1),
                "cpu": round(cpu() - before, 1), "problems": self.problems}


def main(argv):
    nightly = "--nightly" in argv
    argv = [word for word in argv if word != "--nightly"]
    try:
        listed = argv in ([], ["--list"])
        chosen = table.listed(nightly) if listed else list(map(json.loads, argv))
        full = [table.full(case) for case in chosen]
    except (ValueError, TypeError) as error:
        print(f"drive.py: {error}", file=sys.stderr)
        return 2
    if argv == ["--list"]:
        print("\n".join(json.dumps(case) for case in chosen))
        return 0
    for name in ("VLLM_RBLN_USE_VLLM_MODEL", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.setdefault(name, "1")
    os.environ["OMP_NUM_THREADS"] = "1"
    started = time.perf_counter()
    out = os.fdopen(os.dup(1), "w")  # vLLM logs to standard output
    os.dup2(2, 1)
    sides.warm(full)
    imported = time.perf_counter() - started
    bad, skipped = [], 0
    for number, (case, chose) in enumerate(zip(full, chosen)):
        if case["rails"] and not os.environ.get("KVRAIL_FAKEVERBS"):
            skipped += 1
            continue
        result = Case(case, number).result()
        print(json.dumps({"case": chose, "ok": not result["problems"], **result}), file=out,
              flush=True)
        if result["problems"]:
            bad.append(f"{json.dumps(chose)}: {result['problems'][0].splitlines()[-1][:160]}")
    print(f"import {imported:.0f} s, all {time.perf_counter() - started:.0f} s", file=out)
    for line in bad:
        print(f"  {line}", file=out)
    if skipped:
        print("  SKIPPED: cases over verbs: KVRAIL_FAKEVERBS names no fake libibverbs", file=out)
    print(f"{len(full) - len(bad) - skipped} passed, {len(bad)} failed, {skipped} skipped",
          file=out, flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
