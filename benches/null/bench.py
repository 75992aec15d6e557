"""Instructions of a descriptor over the null NIC, counted by callgrind.

Each figure is the difference of two runs of different length, divided by the additional
descriptors; only what the initiator's thread does from prepare to release is counted, the null
NIC's own instructions with it. Nanoseconds are medians of the same program without valgrind.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path.insert(0, str(HERE))

import counts  # noqa: E402

RAILS = 4
TIMEOUT_S = 600
FAKE = REPOSITORY / "tests" / "fakeverbs"

# name -> (op, kind, descriptors, bytes, regions, order)
CASES = {
    "W write fresh": ("write", "fresh", 10_000, 1024, 1, "random"),
    "W read fresh": ("read", "fresh", 10_000, 1024, 1, "random"),
    "W write again": ("write", "again", 10_000, 1024, 1, "random"),
    "W read again": ("read", "again", 10_000, 1024, 1, "random"),
    "1 write": ("write", "fresh", 1, 1024, 1, "random"),
    "64 write": ("write", "fresh", 64, 1024, 1, "random"),
    "256 write": ("write", "fresh", 256, 1024, 1, "random"),
    "1000 write": ("write", "fresh", 1_000, 1024, 1, "random"),
    "100000 write": ("write", "fresh", 100_000, 1024, 1, "random"),
    "16 regions": ("write", "fresh", 10_000, 1024, 16, "random"),
    "256 regions": ("write", "fresh", 10_000, 1024, 256, "random"),
    "4096 regions": ("write", "fresh", 10_000, 1024, 4096, "random"),
    "contiguous": ("write", "fresh", 10_000, 1024, 1, "contiguous"),
    "64 B blocks": ("write", "fresh", 10_000, 64, 1, "random"),
    "64 KiB blocks": ("write", "fresh", 10_000, 65_536, 1, "random"),
    "1 MiB blocks": ("write", "fresh", 1_000, 1 << 20, 1, "random"),
}
COLUMNS = ("prepare", "post", "poll", "release", "sum", "ns", "ratio", "WRs/bell", "WRs/signal",
           "alloc", "syscalls")


def parse():
    parser = argparse.ArgumentParser(prog="bench-null", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--cases", help="parts of the names of cases, parted by commas; default: all")
    add("--profile", type=int, default=0, metavar="N", help="also the N dearest functions")
    add("--lines", type=int, default=0, metavar="N", help="also the N dearest lines")
    add("--json", metavar="FILE", help="write all figures there; - is standard output")
    add("--rounds", type=int, default=0, help="of the timed runs; default: by the case's length")
    args = parser.parse_args()
    wanted = args.cases.split(",") if args.cases else [""]
    args.cases = [name for name in CASES if any(part in name for part in wanted)]
    if not args.cases:
        parser.error(f"--cases fits none of: {', '.join(CASES)}")
    return args


def run(command, env):
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        sys.exit(f"bench-null: {' '.join(map(str, command))} ended with {done.returncode}:\n"
                 f"{done.stdout}{done.stderr}")
    return done.stdout


class Rig:
    """What was built, and the environment to run it in."""

    def __init__(self, folder):
        self.folder = Path(folder)
        run(["bash", FAKE / "build.sh", folder], os.environ)
        self.raw = self.folder / "rawloop"
        run([os.environ.get("CC", "gcc"), "-std=c11", "-O2", "-g", "-Wall", "-Wextra", "-Werror",
             HERE / "rawloop.c", "-o", self.raw, f"-L{folder}", "-l:libfakeverbs.so",
             f"-Wl,-rpath,{folder}"], os.environ)
        cargo = os.environ.get("CARGO", "cargo")
        target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
        subprocess.run([cargo, "build", "--quiet", "--release", "-p", "kvrail", "--example",
                        "null-work"], cwd=REPOSITORY, check=True)
        self.work = target / "release" / "examples" / "null-work"
        bus, tree = self.folder / "bus", self.folder / "tree"
        bus.mkdir()
        clean = {k: v for k, v in os.environ.items() if not k.startswith("KVRAIL_")}
        twins = ";".join(f"fake{RAILS + i}.port1.ip=10.1.{i}.2" for i in range(RAILS))
        self.env = dict(clean, FAKEVERBS_NULL="1", FAKEVERBS_DEVICES=str(2 * RAILS),
                        FAKEVERBS_BUS=str(bus), FAKEVERBS_SET=twins, KVRAIL_LOG="error",
                        KVRAIL_SYSROOT=str(tree), LD_BIND_NOW="1",
                        KVRAIL_IBVERBS=str(self.folder / "libfakeverbs.so"))
        run([self.folder / "fakeverbs-tree", tree], self.env)

    def counted(self, command, collect):
        """What callgrind saw inside the functions that `collect` names."""
        out = self.folder / "callgrind.out"
        wrap = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--dump-instr=yes",
                "--compress-strings=no", "--compress-pos=no", "--collect-systime=yes",
                "--fair-sched=try", f"--toggle-collect={collect}"]
        run(wrap + command, self.env)
        seen = counts.read(out)
        out.unlink()
        return seen

    def difference(self, command, rounds, collect):
        """What `rounds` rounds more of a command cost."""
        short = self.counted(command(1), collect)
        return self.counted(command(1 + rounds), collect).minus(short)


def null_part(lines):
    """What was spent inside the null NIC."""
    return sum(c for (path, *_), c in lines.items() if path.startswith("tests/fakeverbs"))


def rounds_of(descs):
    return max(2, min(200, 20_000 // descs))


def measure(rig, name, args):
    op, kind, descs, length, regions, order = CASES[name]
    rounds = rounds_of(descs)
    base = [str(x) for x in (rig.work, op, kind, descs, length, regions, order)]
    seen = rig.difference(lambda n: [*base, str(n)], rounds, "*phase_*")
    all_descs = descs * rounds
    each = {p: seen.phases[p, "Ir"] / all_descs for p in counts.PHASES}
    timed_rounds = args.rounds or max(20, min(2_000, 1_000_000 // descs))
    timed = json.loads(run([*base, str(timed_rounds)], rig.env))
    raw_base = [str(rig.raw), str(descs), "64", "0"]
    raw = json.loads(run([*raw_base, str(timed_rounds), op], rig.env))
    names = ("malloc", "calloc", "realloc", "posix_memalign", "aligned_alloc")
    figures = dict(
        case=name, op=op, kind=kind, descriptors=descs, bytes=length, regions=regions,
        order=order, instructions=dict(each, sum=sum(each.values())),
        ns=dict(zip(counts.PHASES, (ns / descs for ns in timed["ns"]))),
        raw_ns=raw["ns"], rail_bytes=timed["rail_bytes"],
        bells=seen.calls("fv_post_send") / rounds,
        signals=seen.calls("fv_cq_put") / rounds,
        cq_polls=seen.calls("fv_poll_cq") / rounds,
        allocations=seen.calls(*names) / rounds,
        system_calls={p: seen.phases[p, "sysCount"] / rounds for p in counts.PHASES},
    )
    figures["ns"]["sum"] = sum(figures["ns"].values())
    figures["ratio"] = figures["ns"]["sum"] / raw["ns"]
    lines = counts.by_source(seen, REPOSITORY)
    figures["null_nic"] = null_part(lines) / all_descs
    functions = Counter()
    for (path, function, _), cost in lines.items():
        functions[path, function] += cost
    figures["functions"] = [(*key, c / all_descs) for key, c in functions.most_common(60)]
    figures["lines"] = [(*key, c / all_descs) for key, c in lines.most_common(args.lines)]
    return figures


def raw_loop(rig, op, chain, signal_all):
    """Instructions of the hand-written loop, the null NIC's included."""
    base = [str(rig.raw), "10000", str(chain), str(signal_all)]
    seen = rig.difference(lambda n: [*base, str(n), op], 4, "round_of")
    ns = json.loads(run([*base, "200", op], rig.env))["ns"]
    null = null_part(counts.by_source(seen, REPOSITORY))
    return dict(op=op, chain=chain, signal_all=signal_all, ns=ns,
                instructions=seen.total["Ir"] / 40_000, null_nic=null / 40_000)


def row(f):
    per = f["instructions"]
    wrs = f["descriptors"]
    cells = [f"{per[p]:.1f}" for p in (*counts.PHASES, "sum")]
    cells += [f"{f['ns']['sum']:.1f}", f"{f['ratio']:.1f}"]
    cells += [f"{wrs / f['bells']:.1f}", f"{wrs / f['signals']:.1f}"]
    cells += [f"{f['allocations']:.0f}", f"{sum(f['system_calls'].values()):.0f}"]
    return cells


def show(raws, results, args):
    print("raw loop, chain and what is signalled: instructions (null NIC's), ns a descriptor")
    for r in raws:
        what = "all signalled" if r["signal_all"] else "last signalled"
        print(f"  {r['op']:5} chain {r['chain']:3} {what:14} {r['instructions']:7.1f} "
              f"({r['null_nic']:.1f}) {r['ns']:8.2f}")
    print("\ninstructions a descriptor by phase; ns and ratio to the raw loop's; the last two a"
          " transfer")
    print(f"{'case':15}" + "".join(f"{c:>11}" for c in (*COLUMNS, "null NIC")))
    for f in results:
        print(f"{f['case']:15}" + "".join(f"{c:>11}" for c in (*row(f), f"{f['null_nic']:.1f}")))
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
    with tempfile.TemporaryDirectory(prefix="null-", ignore_cleanup_errors=True) as folder:
        rig = Rig(folder)
        raws = [raw_loop(rig, op, 64, 0) for op in ("write", "read")]
        raws += [raw_loop(rig, "write", 64, 1), raw_loop(rig, "write", 1, 1)]
        results = [measure(rig, name, args) for name in args.cases]
    if args.json:
        text = json.dumps(dict(machine=platform.processor() or platform.machine(),
                               date=datetime.date.today().isoformat(), rails=RAILS,
                               raw=raws, cases=results), indent=1)
        if args.json == "-":
            print(text)
            return
        Path(args.json).write_text(text + "\n")
    show(raws, results, args)


if __name__ == "__main__":
    main()
