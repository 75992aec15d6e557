"""One of the two processes of the bench: does what the parent commands, one command at a time."""

import base64
import ctypes
import errno
import gc
import os
import sys
import time

import numpy as np

from kvrail_demo.pattern import DATA, Pattern
from kvrail_demo.wire import ChildLink
from shapes import BUFFER, SHAPES

PAGE = 4096
WAIT_S = 600


class Peer:
    """Two buffers: `out` is read from, `into` is written to, by either side."""

    def __init__(self, role, link):
        self.link = link
        self.agents, self.handles, self.peers = {}, {}, {}
        pattern = Pattern(1, PAGE)
        self.out = np.empty((BUFFER // PAGE, PAGE // 8), np.uint64)
        self.into = np.zeros_like(self.out)
        # Both sides send the same bytes, so that either can tell what must have come.
        pattern.fill(self.out, DATA, 0)
        self.bare = None

    def open(self, backend, params):
        from nixl._api import nixl_agent, nixl_agent_config

        agent = nixl_agent(f"{backend}-{os.getpid()}", nixl_agent_config(backends=[]))
        agent.create_backend(backend, params)
        descs = agent.get_reg_descs(
            [(buffer.ctypes.data, buffer.nbytes, 0, "") for buffer in (self.out, self.into)],
            "DRAM",
        )
        agent.register_memory(descs, backends=[backend])
        self.agents[backend] = agent, descs
        return {"metadata": base64.b64encode(agent.get_agent_metadata()).decode()}

    def where(self):
        return {
            "out": self.out.ctypes.data, "into": self.into.ctypes.data, "pid": os.getpid(),
        }

    def peer(self, backend, metadata, **where):
        agent, _ = self.agents[backend]
        where["remote"] = agent.add_remote_agent(base64.b64decode(metadata))
        self.peers[backend] = where
        return {}

    def handle(self, backend, op, label):
        key = backend, op, label
        if key not in self.handles:
            agent, _ = self.agents[backend]
            peer, shape = self.peers[backend], SHAPES[label]
            here, there = (self.into, peer["out"]) if op == "READ" else (self.out, peer["into"])
            lists = []
            for base in (here.ctypes.data, there):
                rows = np.zeros((shape.count, 3), np.uint64)
                rows[:, 0] = base + np.arange(shape.count, dtype=np.uint64) * shape.stride
                rows[:, 1] = shape.size
                lists.append(agent.get_xfer_descs(rows, "DRAM"))
            self.handles[key] = agent.initialize_xfer(op, *lists, peer["remote"])
        return self.handles[key]

    def once(self, agent, handle):
        """Post to done, in seconds."""
        begin = time.perf_counter_ns()
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        took = time.perf_counter_ns() - begin
        if state != "DONE":
            raise RuntimeError(f"the transfer ended in state {state}")
        return took / 1e9

    def measure(self, backend, op, shape, budget):
        """Two unmeasured transfers, then as many as fit in `budget` seconds; their median."""
        agent, _ = self.agents[backend]
        handle = self.handle(backend, op, shape)
        self.once(agent, handle)
        count = rounds(budget, self.once(agent, handle))
        return {"seconds": float(np.median([self.once(agent, handle) for _ in range(count)]))}

    def bare_copy(self, library, pid, op, shape, there, budget):
        if self.bare is None:
            self.bare = ctypes.CDLL(library).kvrail_bare_copy
            self.bare.argtypes = [ctypes.c_int] + [ctypes.c_uint64] * 3 + [ctypes.c_int]
        here = self.into if op == "READ" else self.out
        size = SHAPES[shape].bytes

        def copy():
            begin = time.perf_counter_ns()
            code = self.bare(pid, here.ctypes.data, there, size, op == "WRITE")
            if code:
                raise RuntimeError(f"the bare call failed: {errno.errorcode.get(code, code)}")
            return (time.perf_counter_ns() - begin) / 1e9

        copy()
        return {"seconds": float(np.median([copy() for _ in range(rounds(budget, copy()))]))}

    def clear(self):
        self.into[:] = 0
        return {}

    def check(self, shape):
        """`into` holds the shape's bytes of `out`, and zeros between them."""
        shape = SHAPES[shape]
        got, sent = self.into.view(np.uint8).reshape(-1), self.out.view(np.uint8).reshape(-1)
        span = shape.count * shape.stride
        got_rows = got[:span].reshape(shape.count, shape.stride)
        sent_rows = sent[:span].reshape(shape.count, shape.stride)
        bad = (got_rows[:, : shape.size] != sent_rows[:, : shape.size]).any(axis=1)
        if bad.any():
            raise RuntimeError(f"descriptor {int(np.flatnonzero(bad)[0])} has wrong bytes")
        if got_rows[:, shape.size :].any() or got[span:].any():
            raise RuntimeError("bytes were written between or after the descriptors")
        return {}

    def close(self, backend):
        agent, descs = self.agents.pop(backend)
        for key in [key for key in self.handles if key[0] == backend]:
            agent.release_xfer_handle(self.handles.pop(key))
        if backend in self.peers:
            agent.remove_remote_agent(self.peers.pop(backend)["remote"])
        agent.deregister_memory(descs, backends=[backend])
        del agent
        gc.collect()
        return {}


def rounds(budget, seconds):
    return min(20000, max(3, round(budget / max(seconds, 1e-9))))


def main():
    link = ChildLink(int(sys.argv[2]), int(sys.argv[3]))
    peer = Peer(sys.argv[1], link)
    code = 0
    try:
        while (message := link.next(WAIT_S))["command"] != "bye":
            command = message.pop("command")
            link.send("done", phase=command, **getattr(peer, command)(**message))
        link.send("gone")
    except Exception as error:
        link.send("error", message=f"{type(error).__name__}: {error}")
        code = 1
    sys.stderr.flush()
    os._exit(code)  # UCX of this wheel crashes while the process exits


if __name__ == "__main__":
    main()
