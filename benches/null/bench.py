"""Instructions of a descriptor over the null NIC, counted by callgrind.

Each figure is the difference of two runs of different length, divided by the additional
descriptors; only what the initiator's thread does from prepare to release is counted, the null
NIC's own instructions with it. Nanoseconds are medians of the same program without valgrind.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cases  # noqa: E402
import counts  # noqa: E402
import gate  # noqa: E402
import rig as rigs  # noqa: E402
from rig import RAILS, REPOSITORY, Rig  # noqa: E402

COLUMNS = ("prepare", "post", "poll", "release", "sum", "null NIC", "ns", "ratio", "WRs",
           "WRs/bell", "WRs/signal", "alloc", "syscalls")


def parse():
    parser = argparse.ArgumentParser(prog="bench-null", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--cases", help="parts of the names of cases, parted by commas; default: all")
    add("--list", action="store_true", help="the cases, and what they carry")
    add("--profile", type=int, default=0, metavar="N", help="also the N dearest functions")
    add("--lines", type=int, default=0, metavar="N", help="also the N dearest lines")
    add("--json", metavar="FILE", help="write all figures there; - is standard output")
    add("--rounds", type=int, default=0, help="of the timed runs; default: by the case's length")
    add("--gate", action="store_true",
        help=f"compare counts with {gate.BUDGET.relative_to(REPOSITORY)}; 1 when one is over")
    add("--set-budget", type=float, metavar="PERCENT",
        help="write the counts and so many percent into the budget")
    args = parser.parse_args()
    args.gating = args.gate or args.set_budget is not None
    if args.set_budget is not None and args.cases:
        parser.error("--set-budget writes all cases anew: leave --cases out")
    known = [c for c in cases.ALL if not args.gating or c.name in cases.GATE]
    wanted = args.cases.split(",") if args.cases else [""]
    args.cases = [c for c in known if any(part in c.name for part in wanted)]
    if not args.cases:
        parser.error(f"--cases fits none of: {', '.join(c.name for c in known)}")
    return args


def null_part(lines):
    """What was spent inside the null NIC."""
    return sum(c for (path, *_), c in lines.items() if path.startswith("tests/fakeverbs"))


def count(rig, case):
    """The counts of one case, and what callgrind saw by line."""
    rounds = max(1, min(200, 20_000 // case.total))
    base = [rig.work, *case.arguments()]
    seen, printed = rig.difference(lambda n: [*base, f"rounds={n}"], rounds, "*phase_*")
    if printed["descriptors"] != case.total:
        sys.exit(f"bench-null: {case.name} carried {printed['descriptors']} descriptors, not "
                 f"{case.total}")
    all_descs = case.total * rounds
    each = {p: seen.phases[p, "Ir"] / all_descs for p in counts.PHASES}
    names = ("malloc", "calloc", "realloc", "posix_memalign", "aligned_alloc")
    lines = counts.by_source(seen, REPOSITORY)
    return dict(
        case=case.name, op=case.op, kind=case.kind, order=case.order, groups=case.groups,
        descriptors=case.total, requests=case.requests, regions=case.regions, bytes=case.bytes,
        instructions=dict(each, sum=sum(each.values())),
        null_nic=null_part(lines) / all_descs,
        work_requests=printed["work_requests"],
        bells=seen.calls("fv_post_send") / rounds,
        signals=seen.calls("fv_cq_put") / rounds,
        cq_polls=seen.calls("fv_poll_cq") / rounds,
        allocations=seen.calls(*names) / rounds,
        system_calls={p: seen.phases[p, "sysCount"] / rounds for p in counts.PHASES},
    ), lines


def measure(rig, case, args):
    figures, lines = count(rig, case)
    rounds = args.rounds or max(3, min(2_000, 1_000_000 // case.total))
    timed = rig.json([rig.work, *case.arguments(), f"rounds={rounds}"])
    alike = min(case.descs, 100_000)
    raw_rounds = args.rounds or max(20, min(2_000, 1_000_000 // alike))
    raw = rig.json([rig.raw, alike, 64, 0, raw_rounds, case.op])
    ns = dict(zip(counts.PHASES, (ns / case.total for ns in timed["ns"])))
    figures |= dict(ns=dict(ns, sum=sum(ns.values())), raw_ns=raw["ns"],
                    rail_bytes=timed["rail_bytes"])
    figures["ratio"] = figures["ns"]["sum"] / raw["ns"]
    functions = Counter()
    for (path, function, _), cost in lines.items():
        functions[path, function] += cost
    per = case.total * max(1, min(200, 20_000 // case.total))
    figures["functions"] = [(*key, c / per) for key, c in functions.most_common(60)]
    figures["lines"] = [(*key, c / per) for key, c in lines.most_common(args.lines)]
    return figures


def raw_loop(rig, op, chain, signal_all):
    """Instructions of the hand-written loop, the null NIC's included."""
    base = [rig.raw, 10_000, chain, signal_all]
    seen, _ = rig.difference(lambda n: [*base, n, op], 4, "round_of")
    ns = rig.json([*base, 200, op])["ns"]
    null = null_part(counts.by_source(seen, REPOSITORY))
    return dict(op=op, chain=chain, signal_all=signal_all, ns=ns,
                instructions=seen.total["Ir"] / 40_000, null_nic=null / 40_000)


def row(f):
    per = f["instructions"]
    wrs = f["work_requests"]
    cells = [f"{per[p]:.1f}" for p in (*counts.PHASES, "sum")]
    cells += [f"{f['null_nic']:.1f}", f"{f['ns']['sum']:.1f}", f"{f['ratio']:.1f}", f"{wrs}"]
    cells += [f"{wrs / f[what]:.1f}" if f[what] else "-" for what in ("bells", "signals")]
    cells += [f"{f['allocations']:.0f}", f"{sum(f['system_calls'].values()):.0f}"]
    return cells


def show(raws, results, args):
    print("raw loop, chain and what is signalled: instructions (null NIC's), ns a descriptor")
    for r in raws:
        what = "all signalled" if r["signal_all"] else "last signalled"
        print(f"  {r['op']:5} chain {r['chain']:3} {what:14} {r['instructions']:7.1f} "
              f"({r['null_nic']:.1f}) {r['ns']:8.2f}")
    print("\ninstructions a descriptor by phase; ns and ratio to the raw loop's; work requests,"
          " allocations and system calls a round")
    print(f"{'case':20}{'descs':>9}{'bytes':>7}" + "".join(f"{c:>11}" for c in COLUMNS))
    for f in results:
        length = f["bytes"] // f["descriptors"]
        print(f"{f['case']:20}{f['descriptors']:>9}{length:>7}"
              + "".join(f"{c:>11}" for c in row(f)))
    for f in results if args.profile else ():
        print(f"\n{f['case']}: instructions a descriptor by function, as it is written")
        for path, name, cost in f["functions"][:args.profile]:
            print(f"{cost:8.2f}  {path}:{name}")
    for f in results if args.lines else ():
        print(f"\n{f['case']}: instructions a descriptor by line")
        for path, name, line, cost in f["lines"]:
            print(f"{cost:8.2f}  {path}:{line} {name}")


def main():
    args = parse()
    if args.list:
        for c in args.cases:
            print(f"{c.name:20}{c.op:6}{c.kind:6}{c.order:11}{c.total:>9} descriptors "
                  f"{c.bytes:>14} bytes {c.regions:>5} regions")
        return 0
    rigs.need("bench-null", "valgrind", "addr2line", "gcc", part=args.gating)
    with tempfile.TemporaryDirectory(prefix="null-", ignore_cleanup_errors=True) as folder:
        rig = Rig(folder)
        if args.gating:
            seen = [count(rig, case)[0] for case in args.cases]
        else:
            raws = [raw_loop(rig, op, 64, 0) for op in ("write", "read")]
            raws += [raw_loop(rig, "write", 64, 1), raw_loop(rig, "write", 1, 1)]
            results = [measure(rig, case, args) for case in args.cases]
    if args.gating:
        if args.set_budget is not None:
            return gate.store(seen, args.set_budget)
        return gate.judge(seen)
    if args.json and rigs.report(args.json, rails=RAILS, raw=raws, cases=results):
        return 0
    show(raws, results, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
