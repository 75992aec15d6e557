"""Two NIXL agents with backend RBLN in two processes, each with devices of its own.

usage: nixl_pair.py --here DEVICES --there DEVICES     (suite `nixl` of the lab runs it)
Pull and push, a few large blocks, many odd ones, 70,000 small ones; every byte of both sides is
compared, also those that must not change, and the bytes must have crossed the rails.
"""

import argparse
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np

from child import Child
from rig import Side, bytes_of, moved, same, scatter

# Name, how many blocks, and the shortest and the longest of them in bytes.
CASES = [
    ("one byte", 1, 1, 1),
    ("8 blocks of 2 MiB", 8, 2 << 20, 2 << 20),
    ("300 odd blocks", 300, 1, 30_000),
    ("70,000 blocks", 70_000, 1, 600),
]


def sent(devices):
    """Bytes that the network interfaces below these devices have sent."""
    total = 0
    for device in devices.split(","):
        port = Path("/sys/class/infiniband") / device / "ports/1"
        netdev = (port / "gid_attrs/ndevs/0").read_text().strip()
        total += int((Path("/sys/class/net") / netdev / "statistics/tx_bytes").read_text())
    return total


def run(args, op, case, rng):
    _, count, low, high = case
    lengths = rng.integers(low, high + 1, count)
    to, to_size = scatter(rng, lengths)
    at, at_size = scatter(rng, lengths)
    sizes = (to_size, at_size) if op == "READ" else (at_size, to_size)
    # A spawned child starts with the environment of this moment.
    os.environ["KVRAIL_NICS"] = args.there
    peer = Child(sizes[1], thread=True)
    os.environ["KVRAIL_NICS"] = args.here
    me = Side(sizes[0], thread=True)
    try:
        me.mem[:] = bytes_of(rng, me.mem.size)
        theirs, mine = bytes_of(rng, sizes[1]), me.mem.copy()
        peer.call("fill", theirs)
        me.knows(peer.metadata)
        here, there = (to, at) if op == "READ" else (at, to)
        handle = me.xfer(op, me.blocks(here, lengths), me.blocks(there, lengths, peer.addr),
                         peer.name, b"all there")
        source = args.there if op == "READ" else args.here
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
        total = int(lengths.sum())
        assert crossed >= total, f"{crossed} bytes crossed the rails, of {total} that were moved"
        peer.quit()
        return f"{total} bytes in {took * 1e3:.1f} ms"
    finally:
        me.close()
        if peer.process.is_alive():
            peer.kill()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--here", required=True, help="devices of the agent that initiates")
    parser.add_argument("--there", required=True, help="devices of its peer")
    parser.add_argument("--seed", type=int, default=None, help="repeat a run that failed")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else int(time.time())
    print(f"seed: --seed {seed}")
    failed = 0
    for number, (op, case) in enumerate((op, case) for case in CASES for op in ("READ", "WRITE")):
        what = f"{'pull' if op == 'READ' else 'push'}, {case[0]}"
        try:
            said = run(args, op, case, np.random.default_rng([seed, number]))
            print(f"lab: ok - {what}: {said}", flush=True)
        except Exception as e:
            traceback.print_exc()
            print(f"lab: FAIL - {what}: {e!r}", flush=True)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
