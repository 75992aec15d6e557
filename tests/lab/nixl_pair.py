"""Two NIXL agents with backend RBLN in two processes, each with devices of its own.

usage: nixl_pair.py --here DEVICES --there DEVICES [--memory host|udmabuf|heap]
Pull and push, a few large blocks, many odd ones, 70,000 small ones; every byte of both sides is
compared, also those that must not change, and the bytes must have crossed the rails. With dma-bufs
each side's memory is a part of one. Suites `nixl` and `nixldmabuf` of the lab run it.
"""

import argparse
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np

from child import Child
from dmabuf import HeapSide, UdmabufSide
from rig import Side, bytes_of, moved, same, scatter

SIDES = {"host": Side, "udmabuf": UdmabufSide, "heap": HeapSide}

# Name, how many blocks, and the shortest and the longest of them in bytes.
CASES = [
    ("one byte", 1, 1, 1),
    ("4 blocks of 2 MiB", 4, 2 << 20, 2 << 20),
    ("300 odd blocks", 300, 1, 30_000),
    ("70,000 blocks", 70_000, 1, 200),
]


def sent(devices):
    """Bytes that the network interfaces below these devices have sent."""
    total = 0
    for device in devices.split(","):
        port = Path("/sys/class/infiniband") / device / "ports/1"
        netdev = (port / "gid_attrs/ndevs/0").read_text().strip()
        total += int((Path("/sys/class/net") / netdev / "statistics/tx_bytes").read_text())
    return total


class Pair:
    """The two agents; each has one registered buffer, large enough for every case."""

    def __init__(self, args, nbytes, memory="host"):
        self.args, self.memory = args, memory
        kind = SIDES[memory]
        # A spawned child starts with the environment of this moment.
        os.environ["KVRAIL_NICS"] = args.there
        self.peer = Child(nbytes, thread=True, kind=kind)
        os.environ["KVRAIL_NICS"] = args.here
        self.me = kind(nbytes, thread=True)
        self.me.knows(self.peer.metadata)

    def move(self, op, case, rng, strict=True):
        """One transfer; returns how it went, or fails. `strict`: also when fewer bytes crossed."""
        me, peer, (lengths, to, at) = self.me, self.peer, case
        me.mem[:] = bytes_of(rng, me.mem.size)
        theirs, mine = bytes_of(rng, me.mem.size), me.mem.copy()
        peer.call("fill", theirs)
        here, there = (to, at) if op == "READ" else (at, to)
        handle = me.xfer(op, me.blocks(here, lengths), me.blocks(there, lengths, peer.addr),
                         peer.name, b"all there")
        source = self.args.there if op == "READ" else self.args.here
        before, begin = sent(source), time.perf_counter()
        me.run(handle)
        took = time.perf_counter() - begin
        crossed = sent(source) - before
        peer.call("expect", [(me.name, b"all there")])
        after = peer.call("mem")
        if op == "READ":
            same(me.mem, moved(mine, to, theirs, at, lengths))
            same(after, theirs)
        else:
            same(after, moved(theirs, to, mine, at, lengths))
            same(me.mem, mine)
        me.release(handle)
        total = int(lengths.sum())
        assert crossed >= total or not strict, \
            f"{crossed} bytes crossed the rails, of {total} that were moved"
        return f"{total} bytes in {took * 1e3:.1f} ms"

    def close(self):
        """Both end; the child's exit status tells whether it did so in good order."""
        if self.memory != "host":
            self.me.edges()
            self.peer.call("edges")
        self.peer.quit()
        self.me.close()


def layout(case, rng):
    """Lengths of a case's blocks, and where they go to and come from; the bytes needed too."""
    _, count, low, high = case
    lengths = rng.integers(low, high + 1, count)
    (to, to_size), (at, at_size) = scatter(rng, lengths), scatter(rng, lengths)
    return (lengths, to, at), max(to_size, at_size)


def verdict(what, step):
    """Prints one verdict; False when the step failed."""
    try:
        said = step()
    except Exception as e:
        traceback.print_exc()
        lines = str(e).strip().splitlines() or [repr(e)]
        print(f"lab: FAIL - {what}: {lines[-1][:200]}", flush=True)
        return False
    print(f"lab: ok - {what}{f': {said}' if isinstance(said, str) else ''}", flush=True)
    return True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--here", required=True, help="devices of the agent that initiates")
    parser.add_argument("--there", required=True, help="devices of its peer")
    parser.add_argument("--memory", choices=SIDES, default="host")
    parser.add_argument("--seed", type=int, default=None, help="repeat a run that failed")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else int(time.time())
    print(f"seed: --seed {seed}", flush=True)
    rng = np.random.default_rng(seed)
    layouts = [layout(case, rng) for case in CASES]
    made = []
    good = verdict("two agents with backend RBLN",
                   lambda: made.append(Pair(args, max(size for _, size in layouts), args.memory)))
    for case, (blocks, _) in zip(CASES, layouts):
        for op, name in (("READ", "pull"), ("WRITE", "push")):
            if made:
                good &= verdict(f"{name}, {case[0]}",
                                lambda op=op, blocks=blocks: made[0].move(op, blocks, rng))
    if made:
        good &= verdict("both agents end in good order", made[0].close)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
