"""`make bench-local`: backend RBLN beside UCX of the same wheel, and the bare system call.

One pair of processes measures both, with the same buffers, in turns whose order is drawn at
random. By default a backend's agents live for its own turn only, because the progress thread of
UCX keeps a core busy in each process as long as its agent lives; --together keeps them alive.
"""

import argparse
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [str(HERE), str(REPOSITORY / "bindings" / "python")]

from kvrail_demo import signals  # noqa: E402
from kvrail_demo.children import Child, ChildFailed, Children  # noqa: E402
from shapes import BARE_SHAPE, SHAPES, misses, summarise, table  # noqa: E402

WAIT_S = 120


def parse():
    parser = argparse.ArgumentParser(prog="bench-local", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--op", choices=("read", "write", "both"), default="read", help="default: %(default)s")
    add("--pairs", type=int, default=9, help="alternating pairs; default: %(default)s")
    add("--budget", type=float, default=0.1, help="seconds a sample; default: %(default)s")
    add("--shapes", help=f"numbers of the shapes, 1 to {len(SHAPES)}, as in 1,3; default: all")
    add("--together", action="store_true", help="keep the agents of both backends alive")
    add("--param", action="append", default=[], metavar="KEY=VALUE", help="for backend RBLN")
    add("--backends", default="RBLN,UCX", help="default: %(default)s")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add("--check", action="store_true", help="exit 1 when a goal of the project is missed")
    args = parser.parse_args()
    args.backends = args.backends.split(",")
    if not set(args.backends) <= {"RBLN", "UCX"}:
        parser.error(f"--backends is {','.join(args.backends)}, known are RBLN and UCX")
    labels = list(SHAPES)
    try:
        numbers = [int(part) for part in (args.shapes or "1,2,3,4").split(",")]
        args.shapes = [dict(enumerate(labels, 1))[number] for number in numbers]
        args.param = dict(part.split("=", 1) for part in args.param)
    except (ValueError, KeyError) as error:
        parser.error(
            f"--shapes (numbers from 1 to {len(labels)}) or --param (KEY=VALUE) cannot be read: "
            f"{error}"
        )
    if args.pairs < 1 or args.budget <= 0:
        parser.error(f"--pairs is {args.pairs} and --budget {args.budget}: both must be positive")
    return args


def plugin_dir(folder, backends):
    """A directory with links to the wheel's plugins and to ours: NIXL knows one directory only.
    Plugins found through a link need their own libraries by name (LD_LIBRARY_PATH)."""
    spec = importlib.util.find_spec("nixl_cu12")
    if spec is None:
        sys.exit(f"bench-local: {sys.executable} has no nixl_cu12: run `make bench-local`")
    site = Path(spec.origin).parents[1]
    libraries = site / ".nixl_cu12.mesonpy.libs"
    links = Path(folder, "plugins")
    links.mkdir()
    for plugin in (libraries / "plugins").glob("libplugin_UCX.so"):
        (links / plugin.name).symlink_to(plugin)
    if "RBLN" in backends:
        built = Path(os.environ.get("NIXL_PLUGIN_DIR") or REPOSITORY / "build" / "plugins")
        ours = built / "libplugin_RBLN.so"
        if not ours.is_file():
            sys.exit(f"bench-local: {ours} does not exist: run `make demo`, which builds it")
        (links / ours.name).symlink_to(ours.resolve())
    paths = [str(HERE), str(REPOSITORY / "bindings" / "python"), os.environ.get("PYTHONPATH")]
    search = [str(site / "nixl_cu12.libs"), str(libraries), os.environ.get("LD_LIBRARY_PATH")]
    return dict(
        os.environ, NIXL_PLUGIN_DIR=str(links), UCX_PROTO_INFO="y",
        PYTHONPATH=os.pathsep.join(filter(None, paths)),
        LD_LIBRARY_PATH=os.pathsep.join(filter(None, search)),
    )


def compile_bare(folder):
    library = Path(folder, "bare.so")
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(HERE / "bare.c")]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or error
        print(f"bench-local: no bare call in the table: {' '.join(command)}: {detail}",
              file=sys.stderr)
        return None
    return str(library)


def ucx_paths(child):
    """What UCX itself says it uses for one-sided copies, out of its own protocol tables."""
    found, take = set(), False
    try:
        text = child.log.read_text(errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        if "ucp_get" in line or "ucp_put" in line:
            take = True
        elif take and (row := re.search(r"\| +[\d.]+\.\.\S+ +\|[^|]+\| *([^|]+?) *\|", line)):
            found.add(row.group(1))
        elif take and not re.search(r"\||\+-", line) or "active message" in line:
            take = False
    return sorted(found)


class Bench:
    def __init__(self, args, children, bare):
        self.args, self.children, self.bare = args, children, bare
        self.initiator, self.target = (children.all[role] for role in ("initiator", "target"))
        self.events = children.events(WAIT_S)
        self.verified, self.samples = set(), {}
        self.ops = {"both": ("READ", "WRITE")}.get(args.op, (args.op.upper(),))

    def ask(self, child, command, **fields):
        child.command(command, **fields)
        for sender, event in self.events:
            if sender is child and event["event"] == "done":
                return event
        raise ChildFailed(f"{child.role} ended before it answered '{command}'")

    def open(self, backend):
        params = self.args.param if backend == "RBLN" else {}
        opened = self.ask(self.target, "open", backend=backend, params=params)
        self.ask(self.initiator, "open", backend=backend, params=params)
        self.ask(self.initiator, "peer", backend=backend, metadata=opened["metadata"],
                 **self.where)

    def close(self, backend):
        self.ask(self.initiator, "close", backend=backend)
        self.ask(self.target, "close", backend=backend)

    def turn(self, who):
        """All ops and shapes of one backend, or of the bare call."""
        if who != "bare" and not self.args.together:
            self.open(who)
        for op in self.ops:
            for label in self.args.shapes:
                if who == "bare" and label != BARE_SHAPE:
                    continue
                receiver = self.initiator if op == "READ" else self.target
                first = (who, op, label) not in self.verified
                if first:
                    self.ask(receiver, "clear")
                seconds = self.measure(who, op, label)
                if first:
                    self.ask(receiver, "check", shape=label)
                    self.verified.add((who, op, label))
                self.samples.setdefault((op, label, who), []).append(seconds)
        if who != "bare" and not self.args.together:
            self.close(who)

    def measure(self, who, op, label):
        budget = self.args.budget
        if who != "bare":
            answer = self.ask(self.initiator, "measure", backend=who, op=op, shape=label,
                              budget=budget)
        else:
            there = self.where["out" if op == "READ" else "into"]
            answer = self.ask(self.initiator, "bare_copy", library=self.bare, op=op, shape=label,
                              pid=self.where["pid"], there=there, budget=budget)
        return answer["seconds"]

    def run(self):
        where = self.ask(self.target, "where")
        self.where = {key: where[key] for key in ("out", "into", "pid")}
        if self.args.together:
            for backend in self.args.backends:
                self.open(backend)
        turns = [*self.args.backends, *(["bare"] if self.bare else [])]
        for pair in range(self.args.pairs):
            random.shuffle(turns)
            for who in turns:
                self.turn(who)
            print(f"pair {pair + 1} of {self.args.pairs} done ({', '.join(turns)})",
                  file=sys.stderr, flush=True)
        for child in (self.initiator, self.target):
            child.command("bye")
        for _ in self.events:
            pass
        self.children.exit_codes()


def main():
    signals.install()
    args = parse()
    try:
        with tempfile.TemporaryDirectory(prefix="kvrail-bench-") as folder:
            env = plugin_dir(folder, args.backends)
            bare = compile_bare(folder) if BARE_SHAPE in args.shapes else None
            make = lambda role, logs: Child(role, logs, module="peer", env=env)  # noqa: E731
            with Children(("initiator", "target"), make) as children:
                bench = Bench(args, children, bare)
                bench.run()
                paths = ucx_paths(bench.initiator)
    except ChildFailed as error:
        print(f"bench-local: {error}", file=sys.stderr)
        return 1
    except signals.Interrupted as stop:
        print(f"bench-local: stopped by {stop}", file=sys.stderr)
        return stop.code
    rows = summarise(bench.samples)
    missed = misses(rows, same_call=any("cma" in path for path in paths))
    if args.json:
        print(json.dumps({"pairs": args.pairs, "together": args.together, "ucx_paths": paths,
                          "cores": os.cpu_count(), "rows": rows, "misses": missed}))
    else:
        print(table(rows))
        print(f"\n{args.pairs} pairs, medians; UCX one-sided path: {', '.join(paths) or 'unknown'}"
              f" (cma = process_vm_readv/writev); {os.cpu_count()} cores")
        for text in missed:
            print(f"short of the goal: {text}")
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
