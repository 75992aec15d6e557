"""Mooncake's transfer engine: usage: mooncake_worker.py target PORT | initiator PORT PEER ADDRESS

A target prints where it is found and waits for its standard input to end. The two need a process
each. `batch_transfer_sync_write` and `_read` are called with lists of addresses, as its users do.
"""

import sys
import time

import worker  # first: it takes standard output away from the libraries

from mooncake.engine import TransferEngine

DEVICE = "null0"


class Side:
    def __init__(self, port):
        self.engine = TransferEngine()
        code = self.engine.initialize(f"127.0.0.1:{port}", "P2PHANDSHAKE", "rdma", DEVICE)
        if code != 0:
            raise RuntimeError(f"initialize over {DEVICE} returned {code}, not 0")
        self.pages, self.base = worker.memory()
        code = self.engine.register_memory(self.base, len(self.pages))
        if code != 0:
            raise RuntimeError(f"register_memory returned {code}, not 0")


class Target(Side):
    def answer(self):
        return {"peer": f"127.0.0.1:{self.engine.get_rpc_port()}", "base": self.base}


class Initiator(Side):
    def __init__(self, port, peer, base):
        super().__init__(port)
        self.peer, self.there = peer, int(base)
        self.mark = worker.marker()
        self.lists = {}

    def prepared(self, count):
        if count not in self.lists:
            sides = zip((self.base, self.there), (1, 2))
            self.lists[count] = [
                [base + i * worker.STRIDE for i in worker.order(count, seed)]
                for base, seed in sides
            ] + [[worker.LEN] * count]
            self.once("WRITE", self.lists[count])
        return self.lists[count]

    def once(self, op, lists):
        engine = self.engine
        if self.mark is not worker.no_mark:
            return self.marked(op, lists)
        sync = engine.batch_transfer_sync_write if op == "WRITE" else \
            engine.batch_transfer_sync_read
        times = [time.perf_counter_ns()]
        code = sync(self.peer, *lists)
        times.append(time.perf_counter_ns())
        if code != 0:
            raise RuntimeError(f"the transfer returned {code}, not 0")
        return times

    def marked(self, op, lists):
        """Sleeps while the engine's threads work: a call that waits would spin, and valgrind runs
        one thread at a time, so that its spinning would be counted and nothing learnt. The second
        phase sleeps as long without a transfer: what the engine's threads do anyway."""
        engine = self.engine
        start = engine.batch_transfer_async_write if op == "WRITE" else \
            engine.batch_transfer_async_read
        times = [worker.now(self.mark)]
        batch = start(self.peer, *lists)
        rest = 0.3 + len(lists[0]) / 2_000
        time.sleep(rest)
        times.append(worker.now(self.mark))
        time.sleep(rest)
        times.append(worker.now(self.mark))
        code = engine.get_batch_transfer_status([batch])
        if code != 0:
            raise RuntimeError(f"the transfer returned {code}, not 0")
        return times

    def answer(self, descs, rounds, op, again):
        lists = self.prepared(descs)
        return worker.rounds(rounds, lambda: self.once(op, lists))


if __name__ == "__main__":
    side = Target(sys.argv[2]) if sys.argv[1] == "target" else Initiator(*sys.argv[2:])
    worker.serve(side.answer)
