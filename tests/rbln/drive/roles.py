"""What the processes of a drive do: a rank that produces a cache, a rank that asks for one.

Each is told what to do over a pipe and answers every order once.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import layout
import wires
from side import HANG, Side

PR_SET_PDEATHSIG = 1
BEATS = 5  # heartbeats before the request, where a case wants them


def ids(consumer, turn, at=0):
    """A request's id at the producer and at the consumer: alike but for 8 last digits."""
    base = f"cmpl-{consumer}{turn:03d}-{at}-"
    return base + "aaaaaaaa", base + "bbbbbbbb"


def links_of(side, folder):
    """Has the connector look for network links in `folder`; returns what sets their state."""
    from vllm_rbln.distributed.kv_transfer.kv_connector.v1.rbln_nixl import state

    link = Path(folder) / f"{side.rank.engine}-{side.rank.tp}-{side.rank.pp}" / "eth0"
    (link / "device").mkdir(parents=True)
    state._SYS_CLASS_NET = link.parent

    def put(word):
        (link / "operstate").write_text(word + "\n")
        state._link_poll = (-1.0 - state._LINK_POLL_S, False)  # no second of an old answer

    put("up")
    return put


def swap_two_areas():
    """From now on the adapter names the first areas of slices 0 and 1 in the wrong order."""
    import nixl_rbln

    right = nixl_rbln.register_kv_regions

    def wrong(*args, **kwargs):
        got = right(*args, **kwargs)
        other = got.n_shards // got.slices
        addrs = got.base_addrs
        addrs[0], addrs[other] = addrs[other], addrs[0]
        return got

    nixl_rbln.register_kv_regions = wrong


def clear_a_replica(side):
    import nixl_rbln

    entry = nixl_rbln.emulation(side.worker.nixl_wrapper)[0]
    firsts = {}
    spare = [a for a in entry.areas if firsts.setdefault(a.slice_id, a) is not a]
    ctypes.memset(spare[0].addr, 0, spare[0].length)


def refresh_replicas(side):
    """A prefill writes every replica of a slice; ours writes the first."""
    import nixl_rbln

    for entry in nixl_rbln.emulation(side.worker.nixl_wrapper):
        entry.refresh()


class Producer:
    def __init__(self, side):
        self.side, self.sent, self.beats, self.lease = side, set(), 0, {}
        worker, case = side.worker, side.case
        beat = worker._handle_heartbeat

        def heartbeat(payload):
            self.beats += 1
            beat(payload)
            for request, ends in worker._reqs_to_send.items():
                self.lease[request] = max(self.lease.get(request, 0.0), ends)

        worker._handle_heartbeat = heartbeat
        self.requests = []

    def begin(self, turn):
        """Hands the requests over: all at once, or while their prefill goes on."""
        side, case = self.side, self.side.case
        places = [(consumer, at) for consumer in range(case["consumers"])
                  for at in range(case["requests"])]
        self.requests = [ids(consumer, turn, at)[0] for consumer, at in places]
        if case["stream"]:
            self.prefill()
        metadata = side.metadata()
        self.ends = time.perf_counter() + case["lease"]
        for place, request in zip(places, self.requests):
            blocks = layout.block_lists(case, *place)[0]
            metadata.reqs_in_batch.add(request)
            metadata.reqs_to_send[request] = self.ends
            if case["direction"] == "push":
                metadata.push_finished_blocks[request] = blocks
                if side.worker._shape.sends_token_count:
                    metadata.valid_tokens[request] = case["tokens"]
        if case["buffer"] == "cpu":  # the copy to the host ends a step before the hand-over
            save = side.metadata()
            for place, request in zip(places, self.requests):
                save.add_new_req_to_save(request, layout.block_lists(case, *place)[0], {})
            self.take(side.step(save))
        self.take(side.step(metadata))

    def prefill(self):
        """Computes the cache step by step, and offers what is there after each."""
        side, case = self.side, self.side.case
        request, blocks = self.requests[0], layout.block_lists(case)[0]
        side.fill(0)
        refresh_replicas(side)
        until = time.perf_counter() + HANG
        # Else all offers would wait for the consumer, and go out as one.
        while not side.worker._pending_d_registrations and time.perf_counter() < until:
            self.take(side.step())
            time.sleep(0.002)
        first = side.metadata()
        first.reqs_in_batch.add(request)
        self.take(side.step(first))
        before = 0
        for held in range(case["step"], case["tokens"], case["step"]):
            side.compute(held, before)
            before = held
            refresh_replicas(side)
            metadata = side.metadata()
            offered = -(-held // layout.TOKENS)
            rest = tuple([] for _ in blocks[1:])
            metadata.add_new_req_to_save(request, (blocks[0][:offered], *rest), {})
            metadata.push_stream_total[request] = layout.count(case)
            metadata.push_stream_tokens[request] = held
            self.take(side.step(metadata))
            self.take(side.step())
            time.sleep(0.01)
        side.compute(case["tokens"], before)
        refresh_replicas(side)

    def take(self, results):
        self.sent |= set(results.finished_sending or ())

    def finish(self):
        """Steps until all requests are reported as sent, or their leases are made to end.

        vLLM 0.30.0 reports a whole push when its lease ends only; there it is enough that NIXL
        called the writes done, and that a few steps saw it.
        """
        side, wanted, more = self.side, set(self.requests), 5
        whole = side.case["direction"] == "push" and not side.case["stream"]
        until = time.perf_counter() + HANG / 4
        while not wanted <= self.sent and more and time.perf_counter() < until:
            self.take(side.step())
            time.sleep(0.005)
            if whole and side.counts["done"] >= side.counts["transfer"]:
                more -= 1
        early = wanted <= self.sent
        leases = side.worker._reqs_to_send
        for request in list(leases):
            leases[request] = 0.0
        self.take(side.step())
        tokens = side.case["tokens"] if side.case["stream"] else None
        # Beyond what a lease is longer for the time between this call and the worker's.
        extended = min(self.lease.values(), default=0.0) > self.ends + side.case["lease"]
        return {"sent": early, "expired": wanted <= self.sent and not early, "beats": self.beats,
                "extended": extended, "changed": layout.changed(side, tokens),
                "writes": side.counts["transfer"], "written": side.counts["done"],
                "unsent": sorted(wanted - self.sent)}


def producer(case, rank, pipe):
    side = Side(case, rank)
    put = links_of(side, case["folder"]) if case["links"] else None
    if not case["stream"]:
        side.fill()
    registered = side.register()
    if case["spoil"] == "replica":
        clear_a_replica(side)
    pipe.send({"payload": side.payload(), "register_s": registered, **described(side)})
    me = Producer(side)
    started = False
    while True:
        while not pipe.poll(0.003):
            if started:
                me.take(side.step())
        order, *words = pipe.recv()
        if order == "serve":
            side.serve(*words)
        elif order == "begin":
            me.begin(*words)
            started = True
        elif order == "links":
            put(*words)
        elif order == "counts":
            if started:
                me.take(side.step())  # what NIXL says now
            pipe.send({"beats": me.beats, **side.counts})
            continue
        elif order == "knob":
            pipe.send(knob(*words))
            continue
        elif order == "exit":  # link_down_exit_s: the step that ends the engine
            pipe.send({"exit": ended(side)})
            continue
        elif order == "end":
            pipe.send({**me.finish(), "lines": sorted(side.lines.seen)})
            side.close()
            return
        pipe.send({})


def ended(side):
    """What the connector raises when its links stay down; empty if it never does."""
    until = time.perf_counter() + HANG
    while time.perf_counter() < until:
        try:
            side.step()
        except RuntimeError as error:
            return str(error)
        time.sleep(0.05)
    return ""


def described(side):
    worker = side.worker
    return {"regions": worker.num_regions,
            "parts": 1 if side.case["buffer"] == "cpu" or side.case["mla"] else
            2 // worker._kv_per_block, "backends": sorted(worker.nixl_wrapper.backends)}


class Consumer:
    def __init__(self, side):
        self.side, self.peer, self.turn, self.started = side, ("", 0), 0, 0.0
        self.open, self.received, self.failed = [], [], []  # requests by number, as they ended
        self.beats = side.case["heartbeat"]

    def asks(self, numbers):
        """The metadata of these requests of this rank."""
        side, case = self.side, self.side.case
        peer, port = self.peer
        pull = case["direction"] == "pull"
        metadata, registrations = side.metadata(), {}
        for at in numbers:
            theirs, ours = layout.block_lists(case, side.rank.consumer, at)
            sent, asked = ids(side.rank.consumer, self.turn, at)
            if case["spoil"] == "order":
                theirs = (theirs[0][::-1], *theirs[1:])
            metadata.add_new_req_to_recv(asked, ours, {
                "remote_block_ids": theirs if pull else (), "remote_engine_id": peer,
                "remote_request_id": sent, "remote_host": "127.0.0.1", "remote_port": port,
                "tp_size": case["p_tp"], "remote_num_tokens": case["tokens"],
                "pp_size": case["p_pp"]}, awaiting_kvs=True)
            registrations[asked] = {
                "request_id": asked, "decode_engine_id": side.worker.engine_id,
                "decode_host": "127.0.0.1", "decode_port": side.rank.port,
                "decode_tp_size": case["d_tp"], "local_block_ids": ours,
                "remote_engine_id": peer, "remote_host": "127.0.0.1", "remote_port": port,
                "remote_tp_size": case["p_tp"], "remote_pp_size": case["p_pp"]}
        if not pull:
            metadata.push_registrations = registrations
        return metadata

    def with_heartbeat(self, metadata):
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import HeartbeatInfo

        case, (peer, port) = self.side.case, self.peer
        metadata.heartbeat_by_engine = {peer: HeartbeatInfo(
            req_ids={ids(self.side.rank.consumer, self.turn, at)[0]
                     for at in range(case["requests"])},
            host="127.0.0.1", port=port, tp_size=case["p_tp"], pp_size=case["p_pp"])}
        return metadata

    def at(self, peer, port, turn):
        """Which producer, and which of its requests, is meant from now on."""
        self.peer, self.turn = (peer, port), turn

    def beat(self, peer, port, turn):
        """Heartbeats of a request that waits, until some have gone out."""
        side = self.side
        self.at(peer, port, turn)
        wanted, until = side.counts["send_notif"] + BEATS, time.perf_counter() + HANG
        while side.counts["send_notif"] < wanted and time.perf_counter() < until:
            self.take(side.step(self.with_heartbeat(side.metadata())))
            time.sleep(0.002)

    def ask(self, peer, port, turn, numbers=None):
        """Starts requests, in one step: all of them unless `numbers` are named."""
        numbers = range(self.side.case["requests"]) if numbers is None else numbers
        if 0 in numbers:
            self.open, self.received, self.failed = [], [], []
            self.started = time.perf_counter()
        self.at(peer, port, turn)
        self.open.extend(numbers)
        self.take(self.side.step(self.asks(numbers)))

    def take(self, results):
        """Keeps which requests ended with a step."""
        # What failed is called finished as well.
        for ended, kept in ((results.failed_recving, self.failed),
                            (results.finished_recving, self.received)):
            for at in [at for at in self.open
                       if ids(self.side.rank.consumer, self.turn, at)[1] in set(ended or ())]:
                self.open.remove(at)
                kept.append(at)

    def step(self):
        metadata = self.side.metadata()
        # Also what tells a dead producer in a push.
        if self.open and self.beats:
            metadata = self.with_heartbeat(metadata)
        self.take(self.side.step(metadata))

    def state(self):
        return {"open": self.open, "received": self.received, "failed": self.failed,
                "seconds": round(time.perf_counter() - self.started, 3), **self.side.counts}

    def wait(self):
        """Steps until every request has ended."""
        until = time.perf_counter() + HANG
        while self.open:
            if time.perf_counter() > until:
                raise TimeoutError(f"{len(self.open)} requests did not end in {HANG:.0f} s")
            self.step()
            time.sleep(0.002)
        return self.state()

    def look(self, life):
        found = layout.compare(self.side, life)
        if self.side.case["buffer"] == "cpu":
            return {**found, "replicas": 0, "entries": len(self.side.layers)}
        import nixl_rbln

        emulated = nixl_rbln.emulation(self.side.worker.nixl_wrapper)
        replicas = sum(len(entry.differing()) for entry in emulated)
        return {**found, "replicas": replicas, "entries": len(emulated)}


def consumer(case, rank, pipe):
    if case["spoil"] == "area":
        swap_two_areas()
    side = Side(case, rank)
    registered = side.register()
    pipe.send({"payload": side.payload(), "register_s": registered, **described(side)})
    me = Consumer(side)
    while True:
        # A consumer steps also when it waits: a heartbeat of its own engine would.
        while not pipe.poll(0.01):
            me.step()
        order, *words = pipe.recv()
        if order == "serve":
            side.serve(*words)
            pipe.send({})
        elif order == "beat":
            me.beat(*words)
            pipe.send({})
        elif order == "ask":
            me.ask(*words)
            pipe.send({})
        elif order == "wait":
            pipe.send(me.wait())
        elif order == "knob":
            pipe.send(knob(*words))
        elif order == "heartbeats":
            me.beats = True
            pipe.send({})
        elif order == "steps":
            for _ in range(*words):
                me.step()
                time.sleep(0.005)
            pipe.send(me.state())
        elif order == "counts":
            me.step()  # what NIXL says now
            pipe.send(me.state())
        elif order == "look":
            pipe.send(me.look(*words))
        elif order == "end":
            pipe.send({"lines": sorted(side.lines.seen), "reads": side.counts["transfer"]})
            side.close()
            return


def knob(name):
    """A numeric knob of this process's fake libibverbs, which the plugin has loaded."""
    value = ctypes.c_uint64()
    wrong = ctypes.CDLL(os.environ["KVRAIL_IBVERBS"]).fakeverbs_get(
        name.encode(), ctypes.byref(value))
    if wrong:
        raise OSError(wrong, f"fakeverbs_get {name}")
    return {"value": value.value}


def fake_nics(case, host):
    """Has this process find NICs of the fake libibverbs (tests/fakeverbs), as a host of its own."""
    folder, built = Path(case["folder"]), os.environ["KVRAIL_FAKEVERBS"]
    tree = str(folder / f"host-{host}")
    os.environ.update({
        "KVRAIL_IBVERBS": f"{built}/libfakeverbs.so", "KVRAIL_SYSROOT": tree,
        "FAKEVERBS_BUS": str(folder / "bus"), "FAKEVERBS_DEVICES": str(case["rails"]),
        "FAKEVERBS_HOST": str(host)})
    subprocess.run([f"{built}/fakeverbs-tree", tree], check=True)


def child(case, rank, pipe):
    """The whole life of a forked process. An error is an answer."""
    # It has the drive's own ends of earlier pipes too, so no end of file tells it of the drive's.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(2, 1)  # vLLM logs to standard output, which is for the results
    code = 0
    try:
        os.environ.update(wires.environment(case, rank))
        if case["rails"]:
            fake_nics(case, rank.host)
        (producer if rank.produces else consumer)(case, rank, pipe)
    except EOFError:
        pass  # the drive has ended
    except BaseException:
        code = 1
        pipe.send({"error": traceback.format_exc()})
    sys.stderr.flush()
    # UCX's libraries end a process of this environment with a crash in their destructors.
    os._exit(code)


