"""Two NIXL agents with backend RBLN move data while the link of a rail comes and goes each second.

usage: nixl_flap.py --here DEVICES --there DEVICES --flapper FILE [--seconds S] [--seed N]
(suite `nixlflap` of the lab runs it)
One link is down at a time, so every transfer must end well, with every byte in place and its
notification once. Afterwards both rails carry again.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from nixl_pair import Pair, layout, sent, verdict

# Name, how many blocks, and the shortest and the longest of them in bytes.
CASES = [
    ("300 odd blocks", 300, 1, 30_000),
    ("20,000 blocks", 20_000, 1, 200),
    ("8 blocks of 1 MiB", 8, 1 << 20, 1 << 20),
]
# Longest wait for a rail to come back after its link did (a back-off's longest pause and a proof).
HANG_S = 30


class Flapper:
    """What the suite's shell does: while FILE.on exists it takes one link after the other down for
    half a second, each second, and counts in FILE.count; at rest it makes FILE.off."""

    def __init__(self, file):
        self.on, self.off, self.count = (Path(f"{file}.{what}") for what in ("on", "off", "count"))

    def start(self):
        self.off.unlink(missing_ok=True)
        self.on.touch()

    def end(self):
        self.on.unlink(missing_ok=True)
        end = time.monotonic() + HANG_S
        while not self.off.exists():
            assert time.monotonic() < end, "the links are not at rest"
            time.sleep(0.05)
        return int(self.count.read_text())


def storm(pair, layouts, flapper, seconds, rng):
    """Transfers of both kinds under flaps; how many there were."""
    end, moves = time.monotonic() + seconds, 0
    flapper.start()
    try:
        while time.monotonic() < end or moves < 6:
            for blocks, _ in layouts:
                for op in ("READ", "WRITE"):
                    pair.move(op, blocks, rng, strict=False)
                    moves += 1
    finally:
        flaps = flapper.end()
    assert flaps > 2, f"only {flaps} flaps"
    return f"{moves} transfers, {flaps} flaps"


def both_again(pair, blocks, rng, devices):
    """Transfers until each rail has carried its part of one."""
    end = time.monotonic() + HANG_S
    while True:
        before = [sent(device) for device in devices]
        pair.move("WRITE", blocks, rng)
        total = int(blocks[0].sum())
        shares = [sent(device) - was for device, was in zip(devices, before)]
        if all(share > total // 4 for share in shares):
            return "bytes by rail: " + ", ".join(map(str, shares))
        assert time.monotonic() < end, f"the rails carried {shares} bytes of {total}"
        time.sleep(0.2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--here", required=True, help="devices of the agent that initiates")
    parser.add_argument("--there", required=True, help="devices of its peer")
    parser.add_argument("--flapper", required=True, help="file by which the suite is told to flap")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=None, help="repeat a run that failed")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else int(time.time())
    print(f"seed: --seed {seed}", flush=True)
    rng = np.random.default_rng(seed)
    layouts = [layout(case, rng) for case in CASES]
    made, devices = [], args.here.split(",")
    good = verdict("two agents with backend RBLN",
                   lambda: made.append(Pair(args, max(size for _, size in layouts))))
    if made:
        pair, large = made[0], layouts[-1][0]
        good &= verdict("both rails carry", lambda: both_again(pair, large, rng, devices))
        flapper = Flapper(args.flapper)
        good &= verdict("links flap: every transfer is done and exact",
                        lambda: storm(pair, layouts, flapper, args.seconds, rng))
        good &= verdict("both rails carry again", lambda: both_again(pair, large, rng, devices))
        good &= verdict("both agents end in good order", pair.close)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
