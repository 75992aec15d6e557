"""What the tests share: an agent with its memory, waits with a hang bound, block lists."""

import time
import uuid
from importlib.metadata import version

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config
from nixl_cu12 import _bindings as nixl

HANG = 60.0  # seconds: only tells a hang from work on a slow machine, never a speed
RELEASE = tuple(int(part) for part in version("nixl-cu12").split(".")[:2])
ERRORS = tuple(
    getattr(nixl, name)
    for name in dir(nixl)
    if name.startswith("nixl") and name.endswith("Error")
)
# Agents before 1.5 forget a peer when a backend says that it is lost.
LOST = (nixl.nixlRemoteDisconnectError, *([nixl.nixlNotFoundError] if RELEASE < (1, 5) else []))


def wait(what, ready):
    """The first true value of ready(), or a failure that says what never came."""
    end = time.monotonic() + HANG
    while not (value := ready()):
        assert time.monotonic() < end, f"{what}: not after {HANG:.0f} s"
        time.sleep(0.0002)
    return value


def agent_of(name=None, thread=True, params=None, **config):
    """An agent whose only backend is RBLN, made with params or, if None, as vLLM makes it."""
    backends = ["RBLN"] if params is None else []
    agent = nixl_agent(
        name or str(uuid.uuid4()),
        nixl_agent_config(enable_prog_thread=thread, backends=backends, **config),
    )
    if params is not None:
        agent.create_backend("RBLN", params)
    return agent


class Side:
    """One agent and one registered buffer; a subclass may have another kind of memory."""

    kind = "DRAM"
    meta = ""

    def __init__(self, nbytes, name=None, thread=True, params=None, **config):
        self.agent = agent_of(name, thread, params, **config)
        self.name = self.agent.name
        self.mem, self.addr = self.buffer(nbytes)
        descs = [(self.addr, nbytes, 0, self.meta)]
        self.reg = self.agent.get_reg_descs(descs, self.kind)
        self.agent.register_memory(self.reg)
        self.inbox = []  # (sender, message), in the order of arrival
        self.handles = []
        self.peers = []

    def buffer(self, nbytes):
        """Memory as numpy has it, and its address in descriptors."""
        mem = np.zeros(nbytes, np.uint8)
        return mem, mem.ctypes.data

    def register(self, mem, kind="DRAM"):
        descs = self.agent.get_reg_descs([(mem.ctypes.data, mem.nbytes, 0, "")], kind)
        self.agent.register_memory(descs)
        return descs

    def knows(self, other):
        """Loads the metadata of a Side, or the metadata given."""
        blob = other.agent.get_agent_metadata() if isinstance(other, Side) else other
        name = self.agent.add_remote_agent(blob).decode()
        if name not in self.peers:
            self.peers.append(name)
        return name

    def blocks(self, offsets, lengths, base=None):
        base = self.addr if base is None else base
        rows = [(base + int(o), int(n), 0) for o, n in zip(offsets, lengths)]
        return self.agent.get_xfer_descs(rows, self.kind)

    def xfer(self, op, local, remote, peer, notif=b""):
        handle = self.agent.initialize_xfer(op, local, remote, peer, notif)
        self.handles.append(handle)
        return handle

    def poll(self):
        for sender, messages in self.agent.get_new_notifs().items():
            self.inbox += [(sender, message) for message in messages]
        return self.inbox

    def post(self, handle, notif=b""):
        state = self.agent.transfer(handle, notif)
        assert state in ("DONE", "PROC"), state
        return state

    def finish(self, handle, *others):
        """Waits for DONE; others are polled too, as their applications would do."""

        def done():
            for other in others:
                other.poll()
            state = self.agent.check_xfer_state(handle)
            assert state in ("DONE", "PROC"), state
            return state == "DONE"

        wait("transfer", done)

    def run(self, handle, *others, notif=b""):
        if self.post(handle, notif) != "DONE":
            self.finish(handle, *others)

    def expect(self, messages, *others):
        """Waits for exactly these (sender, message) pairs, in any order."""

        def all_there():
            for other in others:
                other.poll()
            return len(self.poll()) >= len(messages)

        wait(f"{len(messages)} notifications", all_there)
        self.poll()
        assert sorted(self.inbox) == sorted(messages)
        self.inbox = []

    def release(self, handle):
        self.handles.remove(handle)
        try:
            self.agent.release_xfer_handle(handle)
        except nixl.nixlRepostActiveError:
            self.agent.release_xfer_handle(handle)

    def close(self):
        if self.agent is None:
            return
        for handle in list(self.handles):
            self.release(handle)
        for peer in self.peers:
            try:
                self.agent.remove_remote_agent(peer)
            except ERRORS:
                pass  # agents before 1.5 drop a dead peer themselves
        if self.reg is not None:
            self.agent.deregister_memory(self.reg)
        self.agent = None


def scatter(rng, lengths, gap=1):
    """Offsets that place the lengths in random order with gaps, and the bytes needed."""
    offsets = np.zeros(len(lengths), np.int64)
    at = int(rng.integers(0, 64))
    for i in rng.permutation(len(lengths)):
        offsets[i] = at
        at += int(lengths[i]) + gap
    return offsets, at


def bytes_of(rng, n):
    return rng.integers(0, 256, n, dtype=np.uint8)


def moved(before, to, source, at, lengths):
    """What memory must look like after source blocks at `at` arrived at `to`: nothing else."""
    after = before.copy()
    for t, a, n in zip(to, at, lengths):
        after[t : t + n] = source[a : a + n]
    return after


def same(got, want):
    """Every byte; says where the first difference is."""
    assert got.shape == want.shape
    wrong = np.flatnonzero(got != want)  # once: data that is late may still be arriving
    assert not len(wrong), f"{len(wrong)} bytes differ, the first at {wrong[0]}"
