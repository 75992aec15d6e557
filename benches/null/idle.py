"""What an engine costs that has nothing to do, and how long it takes to wake up, over null NICs.

CPU is that of two connected engines of four rails for some seconds. The wake-up is what a transfer
takes longer when the progress thread sleeps than when the thread that waits for it polls, with a
bare eventfd beside it, which nobody who sleeps goes below."""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rig as rigs  # noqa: E402


def wake(rig, program, samples, what, knobs, options):
    """A transfer with the progress thread asleep, and polled by the thread that waits for it."""
    setting = dict(FAKEVERBS_SET=f"{rig.env['FAKEVERBS_SET']}{knobs}",
                   FAKEVERBS_NULL="0" if knobs else "1")
    run = [program, f"samples={samples}", "keepalive_ms=0", "spin_us=0", *options]
    asleep = rig.json([*run, "threads=1"], **setting)
    polled = rig.json([*run, "threads=0"], **setting)
    for i, which in enumerate(("10th percentile", "median")):
        done, base, floor = (s[i] / 1e3 for s in (asleep["done_ns"], polled["done_ns"],
                                                  asleep["floor_ns"]))
        print(f"  {what:44}{which:16}{base:>8.1f}{done:>8.1f}{done - base:>8.1f}{floor:>14.1f}"
              f"{done - base - floor:>10.1f}")


def main():
    parser = argparse.ArgumentParser(prog="bench-idle", description=__doc__)
    parser.add_argument("--seconds", type=int, default=5, help="of idleness")
    parser.add_argument("--samples", type=int, default=500)
    args = parser.parse_args()
    rigs.need("bench-idle", "gcc")
    with tempfile.TemporaryDirectory(prefix="null-", ignore_cleanup_errors=True) as folder:
        rig = rigs.Rig(folder, programs=["null-idle"])
        program = rig.examples / "null-idle"
        print(f"idle for {args.seconds} s, two engines: microseconds of CPU of all threads of a"
              " name, and how often\none was put on a core")
        for keepalive in (0, 1_000):
            seen = rig.json([program, f"idle_s={args.seconds}", f"keepalive_ms={keepalive}"])
            cpu, runs = Counter(), Counter()
            for name, ns, count in seen["threads"]:
                cpu[name] += ns
                runs[name] += count
            text = ", ".join(f"{name} {cpu[name] / 1e3:.0f} us {runs[name]} times" for name in cpu)
            print(f"  keepalive_ms {keepalive}: {text}")
        print("\nfrom post to done, microseconds" + " " * 32
              + "polled  asleep   added  bare eventfd  above it")
        wake(rig, program, args.samples, "null NIC, posted by the progress thread", "", [])
        # The fake's own thread delivers the completion 300 us after the post, when all sleep.
        wake(rig, program, args.samples, "ends by a completion event 300 us later",
             ";*.delay_us=300", ["inline_bytes=65536"])


if __name__ == "__main__":
    main()
