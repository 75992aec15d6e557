#!/usr/bin/env python3
"""Runs every check of the project and says what passed, failed or was skipped.

usage: scripts/test.py [PART ...]     no part: all; `list` shows them
environment: STRICT=1   a part that this machine cannot run is a failure (.ci/run sets it)
             VERBOSE=1  show each part's output while it runs
All parts run, also after a failure. Exit code 0 only when nothing failed.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kvtest import fuzz, loom, runner, script  # noqa: E402
from kvtest.runner import Part  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
VENV_PYTHON = str(ROOT / "build/venv/bin/python")
CARGO = os.environ.get("CARGO", "cargo")


def cargo_test(*args):
    return lambda part: runner.cargo(part, [CARGO, "test", *args])


def tests_of(feature, but=()):
    """The test programs that do nothing without a feature: the others ran already."""
    gate = f'feature = "{feature}"'
    names = [p.stem for p in sorted((ROOT / "tests").glob("*.rs")) if gate in p.read_text()]
    names = [name for name in names if name not in but]
    return [word for name in names for word in ("--test", name)]


def command(*args):
    return lambda part: runner.command(part, list(args))


def make(target):
    return ["make", "--no-print-directory", target]


def after(target, *args):
    """One command that needs something built; the build is no check of its own."""

    def run(part):
        built = runner.command(part, make(target))
        return built if built.failed else runner.command(part, list(args))

    return run


def counted_after(target, *args):
    """The same for a command that counts its own checks."""

    def run(part):
        built = runner.command(part, make(target))
        return built if built.failed else script.counted(*args)(part)

    return run


def pytest(folder, *before):
    """A pytest suite; `before` are commands that make what it needs beside plugin and venv."""

    def run(part):
        for step in (make("plugin"), ["scripts/venv.sh", "demo"], ["scripts/venv.sh", "test"],
                     *before):
            ready = runner.command(part, step)
            if ready.failed:
                return ready
        return runner.pytest(part, VENV_PYTHON, folder)

    return run


# Name, what it checks, longest time in seconds, how it runs, and what it needs: paths that must be
# in the repository (else it fails) and a check of the machine (else it is skipped with the reason).
PARTS = [
    Part("driver", "this driver tells red from green", 120,
         command(sys.executable, "scripts/kvtest/selftest.py"), ["scripts/kvtest/selftest.py"]),
    Part("cargo", "unit, property, oracle and two-process tests, tidy, doc tests", 1500,
         cargo_test("--workspace"), ["Cargo.toml"]),
    Part("features", "the same crate with every feature: sim driver and its scenarios", 1200,
         cargo_test("-p", "kvrail", "--all-features", "--lib", *tests_of("sim", but=["fleet_sim"])),
         ["src/nic/sim"]),
    Part("fleet", "whole fleets on the simulator, a million descriptors with every fault", 1200,
         cargo_test("-p", "kvrail", "--profile", "fleet", "--features", "sim",
                    "--test", "fleet_sim"), ["tests/fleet_sim.rs"]),
    Part("core", "the no_std core without src/host", 600,
         cargo_test("-p", "kvrail", "--no-default-features", "--lib"), ["src/lib.rs"]),
    Part("loom", "models of every atomic protocol", 1800, loom.models, []),
    Part("mutants", "each model fails when its ordering is weakened", 1800, loom.mutants,
         [loom.TABLE]),
    Part("drift", "generated header and exported symbols are those in git", 900,
         command(CARGO, "xtask", "check"), ["xtask/src/main.rs", "include/kvrail.h"]),
    Part("cabi", "header compiles as C99 to C++20; layouts agree; examples run", 900,
         after("lib", "tests/cabi/run.sh"), ["tests/cabi/run.sh"]),
    Part("example", "the Rust example, two engines and every byte compared", 900,
         command(CARGO, "run", "--quiet", "--release", "--example", "pair"), ["examples/pair.rs"]),
    Part("plugin", "the NIXL plugin builds", 900,
         command(*make("plugin")), ["bindings/nixl/build.sh"]),
    Part("install", "make install: pkg-config, SONAME, static and shared programs", 600,
         command("scripts/test_install.sh"), ["scripts/install.sh"], runner.has("pkg-config")),
    Part("nixl", "the plugin under the real NIXL agents", 2400,
         pytest("tests/nixl"), ["tests/nixl"], runner.wheels_run),
    Part("rbln", "nixl_rbln: fakes, real agents, and the wheel beside UCX", 1200,
         pytest("tests/rbln"), ["tests/rbln"], runner.wheels_run),
    Part("drive", "the published connector of vllm-rbln moves caches through the plugin", 1800,
         counted_after("plugin", "scripts/drive.sh"),
         ["scripts/drive.sh", "tests/rbln/drive/drive.py"], runner.wheels_run),
    Part("vllm", "stock vLLM as a prefill and decode pair, by READ and by WRITE", 2400,
         pytest("tests/vllm", ["scripts/vllm-venv.sh"]), ["tests/vllm"], runner.wheels_run),
    Part("demo", "the demo end to end, its options and its errors", 1200,
         pytest("tests/demo"), ["tests/demo"], runner.wheels_run),
    Part("lab", "suites over the real libibverbs, inside a kernel with Soft-RoCE", 2400,
         script.counted("scripts/lab.sh"), ["scripts/lab.sh", "tests/lab"]),
    Part("fakeverbs", "the fake libibverbs itself, plain and under the sanitizers", 900,
         script.counted("tests/fakeverbs/run.sh", "plain", "address", "thread"),
         ["tests/fakeverbs"], runner.has("gcc")),
    Part("valgrind", "the verbs driver, the C ABI and the fake libibverbs under valgrind", 1800,
         script.counted("scripts/valgrind.sh"), ["scripts/valgrind.sh"]),
    Part("failover", "instructions that the loss of a rail costs", 600,
         script.counted("scripts/failover.sh"), ["scripts/failover.sh"], runner.has("gcc")),
    Part("bench", "`make bench` in small: kvrail and the loop in C over one null NIC", 600,
         script.counted(sys.executable, "benches/peers/bench.py", "--quick",
                        "--json", "build/test-logs/bench.json", "--svg",
                        "build/test-logs/bench.svg"), ["benches/peers/bench.py"],
         runner.has("valgrind")),
    Part("budget", "instructions of a descriptor over the null NIC, beside the budget", 1200,
         script.counted(sys.executable, "benches/null/bench.py", "--gate"),
         ["benches/budget.json", "benches/null/bench.py"]),
    Part("between", "no allocation, lock or system call between post and done", 1200,
         script.counted(sys.executable, "benches/null/between.py"), ["benches/null/between.c"]),
    Part("nixl-cost", "our instructions of a descriptor through NIXL, beside the budget", 1200,
         script.counted(sys.executable, "benches/nixl/bench.py", "--gate"),
         ["benches/budget.json", "benches/nixl/bench.py"], runner.wheels_run),
    Part("sanitize", "tests and the C ABI under the compiler's address and thread sanitizers", 1800,
         script.counted("scripts/sanitize.sh"), ["scripts/sanitize.sh"]),
    Part("fuzz", "each fuzz target with a number of inputs, from its seeds", 1800, fuzz.smoke,
         ["fuzz/Cargo.toml"]),
]


def choose(names):
    """The parts named, in the table's order; None and a message when a name is unknown."""
    known = [part.name for part in PARTS]
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"test.py: unknown part {', '.join(unknown)}; known: {' '.join(known)}",
              file=sys.stderr)
        return None
    return [part for part in PARTS if not names or part.name in names]


def main(argv):
    os.chdir(ROOT)
    if argv == ["list"]:
        for part in PARTS:
            print(f"  {part.name:<10} {part.about}")
        return 0
    if argv in (["-h"], ["--help"]):
        print(__doc__.strip())
        return 0
    parts = choose(argv)
    if parts is None:
        return 2
    # A time limit outside: what was started has groups of its own, which are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # A `make -j` above has a job server that parts cannot reach.
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):
        os.environ.pop(name, None)
    started = time.monotonic()
    results = runner.run_all(parts, strict=os.environ.get("STRICT") == "1",
                             verbose=os.environ.get("VERBOSE") == "1")
    return runner.report(results, time.monotonic() - started)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
