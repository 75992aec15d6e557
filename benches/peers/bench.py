"""`make bench`: kvrail beside its peers and a loop in C, all on one null NIC.

Blocks of 1 KiB in random order that cannot be merged, one region on each side. Nanoseconds are
medians of pairs, each with the loop in C of the same length just before it; instructions are
callgrind's. Exit code: 0 fine, 1 an engine failed, 77 nothing can run here.
"""

import argparse
import datetime
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "scripts")]

import picture  # noqa: E402
import rig as tools  # noqa: E402
import tables  # noqa: E402
from engines import ENGINES, LENGTH, Loop  # noqa: E402

CANNOT = 77
SIZES = (64, 256, 1_000, 10_000, 100_000)
TABLE = 10_000
QUICK = {"engines": "loop,kvrail", "sizes": "1000", "table": 1_000, "pairs": 3}
NODES = 2


def parse():
    # Abbreviated, `--quick` would be taken for itself only by half.
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    add = parser.add_argument
    add("--engines", default=",".join(ENGINES), help="default: %(default)s")
    add("--op", choices=("WRITE", "READ"), default="WRITE", help="default: %(default)s")
    add("--sizes", default=",".join(map(str, SIZES)), help="descriptors; default: %(default)s")
    add("--table", type=int, default=TABLE, metavar="N",
        help="the number of descriptors that the table is about; default: %(default)s")
    add("--pairs", type=int, default=7, help="samples of each figure; default: %(default)s")
    add("--no-callgrind", action="store_true", help="no instructions: much shorter")
    add("--quick", action="store_true", help="kvrail and the loop only")
    add("--json", default="build/bench.json", metavar="FILE", help="default: %(default)s")
    add("--svg", default="build/bench.svg", metavar="FILE", help="default: %(default)s")
    add("--keep", action="store_true",
        help="engines that are not measured now stay in the tables as the JSON file has them")
    add("--docs", action="store_true", help="also renew docs/performance.md and its picture")
    if "--quick" in sys.argv:
        parser.set_defaults(**QUICK)
    args = parser.parse_args()
    args.engines = args.engines.split(",")
    unknown = set(args.engines) - set(ENGINES)
    if unknown:
        parser.error(f"--engines has {', '.join(sorted(unknown))}, known are {', '.join(ENGINES)}")
    try:
        args.sizes = sorted({*map(int, args.sizes.split(",")), args.table})
    except ValueError as error:
        parser.error(f"--sizes takes numbers with commas between them: {error}")
    if not 1 <= args.sizes[0] <= args.sizes[-1] <= 100_000 or args.pairs < 1:
        parser.error(f"--sizes and --table are {args.sizes}, allowed 1 to 100000; "
                     f"--pairs {args.pairs}, from 1")
    missing = [name for name in ENGINES if name not in args.engines]
    if args.docs and missing and not args.keep:
        parser.error(f"--docs without {', '.join(missing)} would drop them from the page: "
                     "add --keep, or leave --engines and --quick out")
    return args


def say(text):
    print(f"bench: {text}", file=sys.stderr, flush=True)


def rounds_of(descs, work=200_000):
    return max(3, min(1_000, work // descs))


def timed(engine, variant, descs, pairs, loop):
    """Pairs of the loop and the engine, one right after the other, so that both see the machine
    as it is at that time."""
    samples = []
    engine.sample(variant, descs, 1)
    for _ in range(pairs):
        base = loop.sample(Loop.variants[0], descs, rounds_of(descs, 1_000_000))
        one = base if variant is Loop.variants[0] else \
            engine.sample(variant, descs, rounds_of(descs))
        samples.append((one["total_ns"] / descs, one["total_ns"] / base["total_ns"], one["ns"]))
    return {
        "ns": statistics.median(ns for ns, _, _ in samples),
        "ratio": statistics.median(ratio for _, ratio, _ in samples),
        "least": min(ns for ns, _, _ in samples),
        "ns_samples": [ns for ns, _, _ in samples],
        "ns_phases": [statistics.median(each) / descs
                      for each in zip(*(phases for _, _, phases in samples))],
    }


def measure(engine, loop, args, count_instructions):
    """The rows of one engine."""
    rows = []
    for number, variant in enumerate(engine.variants):
        line = number == 0 or variant.line
        sizes = args.sizes if line else [args.table]
        say(f"{variant.label}: {', '.join(map(str, sizes))} descriptors")
        points = {n: timed(engine, variant, n, args.pairs, loop) for n in sizes}
        counts = checked(variant, engine.counts(variant, args.table))
        if variant is Loop.variants[0]:
            known(counts, args.table)
        points[args.table]["counts"] = counts
        if count_instructions:
            for n, figures in engine.instructions(variant, sizes).items():
                if figures["sum"] < 1:
                    raise tools.Failed(f"{variant.label}: callgrind counted {figures['sum']:.3f}"
                                       f" instructions for each of {n} descriptors, least is 1:"
                                       " it does not see the function that it is told to count in")
                points[n]["instructions"] = figures
        rows.append({"engine": engine.name, "key": variant.key, "label": variant.label,
                     "line": line, "date": datetime.date.today().isoformat(),
                     "commit": tools.commit(),
                     "points": {str(n): point for n, point in points.items()}})
    return rows


def checked(variant, counts):
    """Whatever an engine says, the NIC must have seen a work request for each descriptor. (In a
    random order a few are neighbours after all; kvrail adds one to each list.)"""
    if not 0.98 <= counts["wrs"] <= 1.2:
        raise tools.Failed(f"{variant.label}: the NIC saw {counts['wrs']:.3f} work requests for"
                           " each descriptor that cannot be merged, allowed are 0.98 to 1.2")
    return counts


def known(counts, descs):
    """Of the loop in C all is known, so it shows that the counters count."""
    lists = -(-descs // 64) / descs
    wanted = {"posts": lists, "wrs": 1, "signalled": lists, "mallocs": 0}
    seen = {key: counts[key] for key in wanted}
    if any(abs(seen[key] - wanted[key]) > 1e-9 for key in wanted):
        raise tools.Failed(f"the counters of the null NIC say {seen} for each descriptor of the"
                           f" loop in C, right is {wanted}: no other count can be trusted")


def measure_all(rig, args):
    """Rows, skips and failures, each with its reason."""
    rows, skipped, failed = [], {}, {}
    has_callgrind = (rig.nic / "libmarks.so").exists() and shutil.which("valgrind") is not None
    if not has_callgrind and not args.no_callgrind:
        skipped["instructions"] = "valgrind is not installed"
    for name in args.engines:
        engine, loop = ENGINES[name](rig, args.op), Loop(rig, args.op)
        try:
            with tools.device_nodes(NODES if name in ("ucx", "ucx-sgl", "mooncake") else 0):
                try:
                    engine.start()
                    rows += measure(engine, loop, args, has_callgrind and not args.no_callgrind)
                finally:
                    engine.stop()
        except tools.Missing as reason:
            skipped[name] = str(reason)
            say(f"SKIPPED {name}: {reason}")
        except tools.Failed as reason:
            failed[name] = str(reason)
            say(f"FAILED {name}: {reason}")
    return rows, skipped, failed


def kept(args):
    """The rows of the last run for engines that are not asked for now. Asked before anything is
    measured, for this may end the run."""
    path = Path(args.json)
    if not args.keep:
        return []
    if not path.is_file():
        sys.exit(f"bench: --keep: there is no {path} of an earlier run: leave --keep out")
    before = json.loads(path.read_text())
    if (before["op"], before["table"]) != (args.op, args.table):
        sys.exit(f"bench: --keep: {path} is about {before['op']} and {before['table']} descriptors,"
                 f" this run about {args.op} and {args.table}")
    return [row for row in before["rows"] if row["engine"] not in args.engines]


def write(args, result):
    for path, text in ((args.json, json.dumps(result, indent=1) + "\n"),
                       (args.svg, picture.draw(result))):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    if args.docs:
        docs = tools.REPOSITORY / "docs"
        tables.renew(docs / "performance.md", result)
        (docs / "performance.svg").write_text(picture.draw(result))


def main():
    args = parse()
    # A time limit outside ends this with SIGTERM, a closed terminal with SIGHUP: nodes and children
    # must go then too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, _: sys.exit(128 + n))
    if not Path("/usr/include/infiniband/verbs.h").exists() or shutil.which("gcc") is None:
        print("  gcc or the headers of libibverbs are not there"
              " (apt-get install gcc libibverbs-dev)\n0 passed, 0 failed, 1 skipped")
        return CANNOT
    load, others = os.getloadavg()[0], kept(args)
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        rows, skipped, failed = measure_all(tools.Rig(folder), args)
    everything = sorted(rows + others, key=lambda row: list(ENGINES).index(row["engine"]))
    result = {
        "machine": tables.machine(), "cores": os.cpu_count(), "load": load, "op": args.op,
        "bytes": LENGTH, "table": args.table, "pairs": args.pairs, "rows": everything,
        "skipped": skipped, "failed": failed,
    }
    if rows:
        print(tables.text(result), flush=True)
        print()
        write(args, result)
    for what, reasons in (("SKIPPED", skipped), ("FAILED", failed)):
        for name, reason in reasons.items():
            print(f"  {what} {name}: {reason.splitlines()[0]}")
    print(f"{len(args.engines) - len(failed) - len(set(skipped) & set(ENGINES))} passed, "
          f"{len(failed)} failed, {len(skipped)} skipped")
    if failed:
        return 1
    return 0 if rows else CANNOT


if __name__ == "__main__":
    sys.exit(main())
