"""Threads that post at the same time, as many as rails, over null NICs.

The table: descriptors of all threads a second, on one engine for all or one for each, against one
thread; it needs a core for each thread and two more. Then, by counting: which read-modify-write
instructions a transfer runs, as callgrind saw them in one posting thread, by whose the word is that
they change. The words of the engine are shared by all threads, and those of a lane by all that poll
it: without a progress thread each check polls the lane of its transfer, and every 16th all of them.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import counts  # noqa: E402
import rig as rigs  # noqa: E402

LOCKED = re.compile(r"^\s*([0-9a-f]+):\s+(?:lock |xchg +[^,]*,[^,]*\(|xchg +[^,]*\()")
# A word's owner, by the functions that were inlined into one another around the instruction.
MESSAGES = re.compile(r"poll_messages|with_net")
FENCE = "nobody"
OWNERS = [
    ("a lane", r"engine/(token|lane|ledger|bits|poll)\.rs|nic/verbs"),
    ("the transfer", r"engine/(slot|cursor|state)\.rs"),
    ("the engine", r"src/"),
]


def fenced(chain, own):
    """A fence locks a line of the thread's own stack."""
    inner = chain[:chain.index(own[0])] if own[0] in chain else []
    return any(f[0].rpartition("::")[2].startswith("fence") for f in inner)


def owner(chain):
    name, path, _ = chain[0]
    if any(MESSAGES.search(f[0]) for f in chain) or "take_each" in name:
        return "the engine"
    return next((whose for whose, files in OWNERS if re.search(files, path)), "other")


def locked(binary):
    """The addresses of instructions that lock their cache line."""
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", str(binary)],
                          capture_output=True, text=True, check=True).stdout
    return {int(m[1], 16) for m in map(LOCKED.match, text.splitlines()) if m}


def count(rig, program, rails, descs):
    """Locked instructions a transfer, by owner, file, function and line."""
    base = [program, "threads=1", f"rails={rails}", f"descs={descs}"]
    rounds = 20
    seen, _ = rig.difference(lambda n: [*base, f"rounds={n}"], rounds, "*phase_post*")
    addresses = locked(program)
    found = Counter()
    chosen = {a: c for (binary, a), c in seen.places.items()
              if binary == str(program) and a in addresses and c}
    chains = counts.frames(str(program), list(chosen))
    for address, cost in chosen.items():
        chain = chains.get(address) or [("?", "?", "?")]
        own = [f for f in chain if str(rigs.REPOSITORY) in f[1]] or chain
        whose = FENCE if fenced(chain, own) else owner(own)
        name, path, line = own[0]
        path = path.removeprefix(f"{rigs.REPOSITORY}/")
        found[whose, f"{path}:{line} {name.rpartition('::')[2]}"] += cost / rounds
    return found


def table(rig, program, threads, descs, ms):
    for width in (1, 0):
        for engines in ("one", "own"):
            if width == 0 and engines == "own":
                continue
            base = None
            for n in threads:
                seen = rig.json([program, f"threads={n}", f"rails={n}", f"engines={engines}",
                                 f"width={width}", f"descs={descs}", f"ms={ms}"])
                rate = seen["descriptors"] / seen["ns"] * 1e3
                base = base or rate
                busy = [w for w in seen["rails"] if w]
                print(f"  {engines + ' engine':12}{'width ' + str(width):9}{n:>3} threads"
                      f"{rate:>9.1f} M/s{rate / base:>7.2f}x   work requests by rail "
                      f"{min(busy, default=0)} to {max(busy, default=0)} on {len(busy)}",
                      flush=True)


def main():
    parser = argparse.ArgumentParser(prog="bench-threads", description=__doc__)
    parser.add_argument("--threads", default="1,2,4,8")
    parser.add_argument("--descs", type=int, default=1_000, help="of a transfer")
    parser.add_argument("--ms", type=int, default=1_000, help="of each measurement")
    parser.add_argument("--no-counts", action="store_true", help="only the table")
    args = parser.parse_args()
    threads = [int(n) for n in args.threads.split(",")]
    rigs.need("bench-threads", "gcc", "valgrind", "objdump", "addr2line")
    with tempfile.TemporaryDirectory(prefix="null-", ignore_cleanup_errors=True) as folder:
        rig = rigs.Rig(folder, programs=["null-threads"], rails=max(threads))
        program = rig.examples / "null-threads"
        print(f"descriptors a second, {args.descs} a transfer, on {os.cpu_count()} cores")
        table(rig, program, threads, args.descs, args.ms)
        if args.no_counts:
            return
        for rails in sorted({1, max(t for t in threads if t <= 4)}):
            found = count(rig, program, rails, args.descs)
            total = Counter()
            for (whose, _), n in found.items():
                total[whose] += n
            text = ", ".join(f"{n:.1f} on words of {whose}" for whose, n in total.most_common())
            print(f"\none thread, {rails} rails, {args.descs} descriptors a transfer: "
                  f"read-modify-write instructions a transfer: {text}")
            for (whose, place), n in found.most_common(40):
                print(f"{n:8.1f}  {whose:13} {place}")


if __name__ == "__main__":
    main()
