"""What registrations cost: 1,265 calls (the layers and pools of a large model's cache), and one
call for as many ranges, over 1 and 4 null NICs that take so many microseconds a registration."""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rig as rigs  # noqa: E402


def main():
    parser = argparse.ArgumentParser(prog="bench-register", description=__doc__)
    parser.add_argument("--count", type=int, default=1_265, help="ranges")
    parser.add_argument("--us", default="0,200", help="what a NIC takes to register, microseconds")
    args = parser.parse_args()
    rigs.need("bench-register", "gcc")
    with tempfile.TemporaryDirectory(prefix="null-", ignore_cleanup_errors=True) as folder:
        rig = rigs.Rig(folder, programs=["null-register"])
        program = rig.examples / "null-register"
        print(f"{args.count} ranges of 1 MiB: milliseconds of all, registrations at the NICs, most"
              " at one time")
        print(f"{'NIC takes':>10}{'rails':>7}  {'how':10}{'register':>10}{'deregister':>12}"
              f"{'MRs':>7}{'at once':>9}")
        for us in args.us.split(","):
            for rails in (1, 4):
                for how in ("separate", "apart", "touching"):
                    knobs = f"{rig.env['FAKEVERBS_SET']};*.reg_us={us}"
                    seen = rig.json([program, f"rails={rails}", f"how={how}",
                                     f"count={args.count}"], FAKEVERBS_SET=knobs)
                    print(f"{us + ' us':>10}{rails:>7}  {how:10}"
                          f"{seen['register_ns'] / 1e6:>10.1f}{seen['deregister_ns'] / 1e6:>12.1f}"
                          f"{seen['mrs']:>7}{seen['at_once']:>9}")


if __name__ == "__main__":
    main()
