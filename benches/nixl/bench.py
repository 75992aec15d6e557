"""Instructions of a descriptor through NIXL: what is ours and what is the agent's own.

The wheel's agent runs the reference work over the null NIC, with backend RBLN in two agents of one
process. Callgrind counts what the initiator's thread does; ours is what it runs inside the
plugin's methods, the null NIC's part with it. Each figure is the difference of two runs of
different length, divided by the additional descriptors. Nanoseconds are medians without valgrind.
"""

import argparse
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "null")]

import counts  # noqa: E402
import gate  # noqa: E402
import rig  # noqa: E402
from agents import Agents  # noqa: E402
from rig import REPOSITORY  # noqa: E402

SECTION = "nixl"  # of benches/budget.json
METHODS = {"prepXfer": "prepare", "postXfer": "post", "checkXfer": "check",
           "releaseReqH": "release"}
# {phase of work.c: the agent's call in it}
CALLS = {"prepare": "makeXferReq", "post": "postXferReq", "poll": "getXferStatus",
         "release": "releaseXferReq"}
OURS = re.compile(r"\bkvrail::Engine::(\w+)\(")
CHECK = "kvrail::Engine::checkXfer(nixlBackendReqH*) const"  # as callgrind writes it

# name -> (op, descriptors, bytes, regions)
CASES = {
    "W write": ("write", 10_000, 1024, 1),
    "W read": ("read", 10_000, 1024, 1),
    "1 write": ("write", 1, 1024, 1),
    "64 write": ("write", 64, 1024, 1),
    "1000 write": ("write", 1_000, 1024, 1),
    "100000 write": ("write", 100_000, 1024, 1),
    "16 regions": ("write", 10_000, 1024, 16),
    "256 regions": ("write", 10_000, 1024, 256),
    "4096 regions": ("write", 10_000, 1024, 4096),
}
# One call of checkXfer while the progress thread carries: name -> as above. The smallest is too
# large to be carried inside post.
CHECKS = {
    "check of 64": ("write", 64, 2048, 1),
    "check of 100000": ("write", 100_000, 2048, 1),
}
GATE = ("W write", "W read", "1 write", "64 write", "100000 write", "4096 regions", *CHECKS)


def parse():
    parser = argparse.ArgumentParser(prog="bench-nixl", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--cases", help="parts of the names of cases, parted by commas; default: all")
    add("--profile", type=int, default=0, metavar="N", help="also the N dearest functions of ours")
    add("--json", metavar="FILE", help="write all figures there; - is standard output")
    add("--gate", action="store_true",
        help="compare with benches/budget.json; exit code 1 when a figure is over")
    add("--set-budget", type=float, metavar="PERCENT",
        help="write the counts and so many percent more into the budget")
    args = parser.parse_args()
    args.gating = args.gate or args.set_budget is not None
    if args.cases and args.set_budget is not None:
        parser.error("--set-budget is for all cases of the gate; leave --cases out")
    known = GATE if args.gating else [*CASES, *CHECKS]
    wanted = args.cases.split(",") if args.cases else [""]
    args.cases = [name for name in known if any(part in name for part in wanted)]
    if not args.cases:
        parser.error(f"--cases fits none of: {', '.join(known)}")
    return args


def phase_of(function):
    """A phase of work.c, or a method of the plugin."""
    method = OURS.search(function)
    if method:
        return METHODS.get(method.group(1))
    name = function.removeprefix("phase_")
    return CALLS.get(name) if name != function else None


def of_ours(seen):
    """The part of the counts that the plugin and the null NIC ran themselves."""
    out = counts.Counts()
    for (binary, address), cost in seen.places.items():
        if binary.endswith(("/libplugin_RBLN.so", "/libfakeverbs.so")):
            out.places[binary, address] = cost
    return counts.by_source(out, REPOSITORY)


def work(agents, case, thread):
    """A command of work.c's, all but the rounds."""
    return [agents.work, *case, thread]


def measure(agents, name, args):
    op, descs, length, regions = CASES[name]
    rounds = max(2, min(200, 20_000 // descs))
    command = work(agents, CASES[name], 0)
    seen, printed = agents.difference(lambda n: [*command, n], rounds, "phase_*", phase_of)
    if printed["work_requests"] < descs * (1 + rounds):
        sys.exit(f"bench-nixl: {name}: {printed['work_requests']} work requests for "
                 f"{descs * (1 + rounds)} descriptors that cannot be merged")
    if not all(seen.phases[phase, "Ir"] for phase in ("prepare", "post", "release")):
        sys.exit(f"bench-nixl: {name}: callgrind saw no call of the plugin: has it symbols?")
    each = descs * rounds
    ours = {phase: seen.phases[phase, "Ir"] / each for phase in METHODS.values()}
    calls = {call: seen.phases[call, "Ir"] / each for call in CALLS.values()}
    nixl = {call: calls[call] - mine for call, mine in zip(CALLS.values(), ours.values())}
    lines = of_ours(seen)
    functions = Counter()
    for (path, function, _), cost in lines.items():
        functions[path, function] += cost
    whole = sum(ours.values())
    figures = dict(
        case=name, op=op, descriptors=descs, bytes=length, regions=regions,
        ours=dict(ours, sum=whole, after_prepare=whole - ours["prepare"]),
        nixl=dict(nixl, sum=sum(nixl.values())),
        null_nic=sum(c for (path, *_), c in lines.items() if path.startswith("tests/fakeverbs"))
        / each,
        checks=seen.calls(CHECK) / rounds,
        functions=[(*key, cost / each) for key, cost in functions.most_common(60)],
    )
    if not args.gating:
        timed = agents.json([*command, max(20, min(1_000, 500_000 // descs))])
        figures["ns"] = {call: ns / descs for call, ns in zip(CALLS.values(), timed["ns"])}
        figures["ns"]["sum"] = sum(figures["ns"].values())
    return figures


def measure_check(agents, name):
    """What a call of checkXfer and one of postXfer cost while a thread of ours carries."""
    rounds = 4
    # One run, not the difference of two: how often it asks depends on when its threads run.
    seen, _ = agents.counted([*work(agents, CHECKS[name], 1), rounds], "phase_*", phase_of)
    checks = seen.calls(CHECK)
    if checks == 0:
        sys.exit(f"bench-nixl: {name}: callgrind saw no call of checkXfer in {rounds} transfers; "
                 f"is the plugin built without its symbols?")
    return dict(case=name, descriptors=CHECKS[name][1], calls=checks,
                a_check=seen.phases["check", "Ir"] / checks,
                a_post=seen.phases["post", "Ir"] / rounds)


# What the budget may hold a case to: ours a descriptor, and a call of checkXfer.
FIGURES = {
    "ours": lambda f: f.get("ours", {}).get("sum"),
    "ours_after_prepare": lambda f: f.get("ours", {}).get("after_prepare"),
    "a_check": lambda f: f.get("a_check"),
}


def show(results, args):
    print("instructions a descriptor: ours by method, the null NIC's part of it, NIXL's own by "
          "call;\nnanoseconds a descriptor of all of it")
    columns = (*METHODS.values(), "sum", "null NIC", *CALLS.values(), "sum", "ns")
    print(f"{'case':14}" + "".join(f"{c:>15}" for c in columns))
    for f in (f for f in results if "ours" in f):
        cells = [f["ours"][phase] for phase in (*METHODS.values(), "sum")]
        cells += [f["null_nic"], *(f["nixl"][call] for call in (*CALLS.values(), "sum"))]
        cells.append(f["ns"]["sum"])
        print(f"{f['case']:14}" + "".join(f"{value:15.1f}" for value in cells))
    for f in (f for f in results if "ours" not in f):
        print(f"{f['case']}, with the progress thread: {f['a_check']:.1f} instructions a call; "
              f"of postXfer {f['a_post']:.0f}")
    for f in results if args.profile else ():
        for path, name, cost in f.get("functions", ())[:args.profile]:
            print(f"{f['case']:14}{cost:8.2f}  {path}:{name}")


def main():
    args = parse()
    rig.need("bench-nixl", "valgrind", "addr2line", "gcc", "g++", part=args.gating)
    with tempfile.TemporaryDirectory(prefix="nixl-", ignore_cleanup_errors=True) as folder:
        agents = Agents(folder)
        results = [measure_check(agents, name) if name in CHECKS else measure(agents, name, args)
                   for name in args.cases]
    printed = args.json and rig.report(args.json, nixl=agents.version, cases=results)
    if args.set_budget is not None:
        return gate.store(results, args.set_budget, SECTION, FIGURES)
    if args.gate:
        return gate.judge(results, SECTION, FIGURES)
    if not printed:
        show(results, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
