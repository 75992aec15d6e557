"""Two NIXL agents in one process, as two hosts: usage: nixl_worker.py BACKEND [KEY=VALUE ...]

Parameters whose key begins with `peer:` are the second agent's alone.
"""

import sys

import worker  # first: it takes standard output away from the libraries

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config


class Pair:
    def __init__(self, backend, params):
        mine = {k: v for k, v in params.items() if not k.startswith("peer:")}
        theirs = mine | {k[5:]: v for k, v in params.items() if k.startswith("peer:")}
        self.pages, self.agents = [], []
        for name, chosen in (("mine", mine), ("theirs", theirs)):
            # One thread does all the work, so that nothing else is counted or waited for.
            agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
            agent.create_backend(backend, chosen)
            pages, base = worker.memory()
            agent.register_memory([(base, len(pages), 0, "")], "DRAM")
            self.pages.append((pages, base))
            self.agents.append(agent)
        self.agent, self.other = self.agents
        self.agent.add_remote_agent(self.other.get_agent_metadata())
        self.mark = worker.marker()
        self.lists = {}

    def prepared(self, count):
        """Tables of both sides and index lists into them, made once for each length."""
        if count not in self.lists:
            made = []
            for name, (_, base) in zip(("", "theirs"), self.pages):
                rows = np.zeros((count, 3), np.uint64)
                rows[:, 0] = base + np.arange(count, dtype=np.uint64) * worker.STRIDE
                rows[:, 1] = worker.LEN
                descs = self.agent.get_xfer_descs(rows, "DRAM")
                made.append(self.agent.prep_xfer_dlist(name, descs))
                made.append(np.array(worker.order(count, len(made) + 1), np.int32))
            self.lists[count] = made
            self.connect(op="WRITE", lists=made)
        return self.lists[count]

    def make(self, op, lists):
        mine, here, theirs, there = lists
        return self.agent.make_prepped_xfer(op, mine, here, theirs, there, b"")

    def connect(self, op, lists):
        """The first transfer also connects, for which the other side must run."""
        handle = self.make(op, lists)
        state = self.agent.transfer(handle)
        while state == "PROC":
            self.other.get_new_notifs()
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)

    def once(self, op, lists, kept):
        agent, mark = self.agent, self.mark
        times = [worker.now(mark)]
        handle = kept or self.make(op, lists)
        times.append(worker.now(mark))
        state = agent.transfer(handle)
        times.append(worker.now(mark))
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        times.append(worker.now(mark))
        if state != "DONE":
            raise RuntimeError(f"a transfer ended in state {state}, not DONE")
        if not kept:
            agent.release_xfer_handle(handle)
        times.append(worker.now(mark))
        return times

    def answer(self, descs, rounds, op, again):
        lists = self.prepared(descs)
        kept = self.make(op, lists) if again else None
        result = worker.rounds(rounds, lambda: self.once(op, lists, kept))
        if kept:
            self.agent.release_xfer_handle(kept)
        return result


if __name__ == "__main__":
    worker.serve(Pair(sys.argv[1], dict(arg.split("=", 1) for arg in sys.argv[2:])).answer)
