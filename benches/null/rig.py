"""What the benches of this folder build and run in: the null NIC, the programs, the environment."""

import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import counts

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
FAKE = REPOSITORY / "tests" / "fakeverbs"
RAILS = 4
TIMEOUT_S = 1_200


def missing(*programs):
    """Why nothing can be measured here, or None."""
    for program in () if os.environ.get("KVRAIL_BENCH_BUILT") else programs:
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if os.environ.get("KVRAIL_BENCH_BUILT"):
        return None
    test = ["gcc", "-fsyntax-only", "-include", "infiniband/verbs.h", "-x", "c", "/dev/null"]
    if subprocess.run(test, capture_output=True).returncode != 0:
        return "there is no infiniband/verbs.h (Debian: libibverbs-dev)"
    return None


def cannot(why):
    """Ends as a part of `make test` that this machine cannot run."""
    print(f"  SKIPPED: {why}\n0 passed, 0 failed, 1 skipped")
    sys.exit(77)


def need(name, *programs, part=False):
    """Ends the bench `name` where it cannot run; `part`: as a part of `make test`."""
    why = missing(*programs)
    if why and part:
        cannot(why)
    if why:
        sys.exit(f"{name}: {why}")


def report(path, **figures):
    """Writes figures, the machine and the date as JSON; `-` is standard output. True when that is
    taken, so that nothing else may be printed."""
    text = json.dumps(dict(machine=platform.processor() or platform.machine(),
                           date=datetime.date.today().isoformat(), **figures), indent=1)
    if path == "-":
        print(text)
        return True
    Path(path).write_text(text + "\n")
    return False


def run(command, env, timeout=TIMEOUT_S):
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True,
                          timeout=timeout)
    if done.returncode != 0:
        sys.exit(f"bench: {' '.join(map(str, command))} ended with {done.returncode}:\n"
                 f"{done.stdout}{done.stderr}")
    return done.stdout


class Rig:
    """What was built, and the environment to run it in."""

    def __init__(self, folder, programs=("null-work",), rails=RAILS):
        self.folder = Path(folder)
        # What `rig.py OUT` built elsewhere, for a machine without compilers.
        built = os.environ.get("KVRAIL_BENCH_BUILT")
        if built:
            self.examples = Path(built).resolve()
            if not (self.examples / "rawloop").is_file():
                sys.exit(f"KVRAIL_BENCH_BUILT is {built}, and no rawloop is there: it must be a "
                         f"folder that `benches/null/rig.py OUT` made")
            # The raw loop looks for the null NIC by its SONAME.
            for name in ("libfakeverbs.so", "libibverbs.so.1", "fakeverbs-tree", "rawloop"):
                shutil.copy(self.examples / name, self.folder)
        else:
            self.build(programs)
        self.raw = self.folder / "rawloop"
        self.work = self.examples / "null-work"
        self.setting(rails)

    def build(self, programs):
        folder = self.folder
        run(["bash", FAKE / "build.sh", folder], os.environ)
        run([os.environ.get("CC", "gcc"), "-std=c11", "-O2", "-g", "-Wall", "-Wextra", "-Werror",
             HERE / "rawloop.c", "-o", folder / "rawloop", f"-L{folder}", "-l:libfakeverbs.so",
             "-Wl,-rpath,$ORIGIN"], os.environ)
        cargo = os.environ.get("CARGO", "cargo")
        target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
        names = [word for name in programs for word in ("--example", name)]
        subprocess.run([cargo, "build", "--quiet", "--release", "-p", "kvrail", *names],
                       cwd=REPOSITORY, check=True)
        self.examples = target / "release" / "examples"

    def setting(self, rails):
        """Devices, and the environment that leads to them."""
        bus, tree = self.folder / "bus", self.folder / "tree"
        bus.mkdir()
        clean = {k: v for k, v in os.environ.items() if not k.startswith("KVRAIL_")}
        twins = ";".join(f"fake{rails + i}.port1.ip=10.1.{i}.2" for i in range(rails))
        self.env = dict(clean, FAKEVERBS_NULL="1", FAKEVERBS_DEVICES=str(2 * rails),
                        FAKEVERBS_BUS=str(bus), FAKEVERBS_SET=twins, KVRAIL_LOG="error",
                        KVRAIL_SYSROOT=str(tree), LD_BIND_NOW="1",
                        KVRAIL_IBVERBS=str(self.folder / "libfakeverbs.so"))
        run([self.folder / "fakeverbs-tree", tree], self.env)

    def json(self, command, **env):
        return json.loads(run(command, dict(self.env, **env)))

    def counted(self, command, collect, phase_of=counts.phase_of):
        """What callgrind saw inside the functions that `collect` names, and what was printed."""
        out = self.folder / "callgrind.out"
        wrap = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--dump-instr=yes",
                "--compress-strings=no", "--compress-pos=no", "--collect-systime=yes",
                "--fair-sched=try", f"--toggle-collect={collect}"]
        printed = run([*wrap, *command], self.env)
        seen = counts.read(out, phase_of)
        out.unlink()
        return seen, json.loads(printed)

    def difference(self, command, rounds, collect, phase_of=counts.phase_of):
        """What `rounds` rounds more of a command cost, and what the longer run printed."""
        short, _ = self.counted(command(1), collect, phase_of)
        long, printed = self.counted(command(1 + rounds), collect, phase_of)
        return long.minus(short), printed


def main():
    """Builds everything into a folder, for another machine (KVRAIL_BENCH_BUILT)."""
    if len(sys.argv) != 2:
        sys.exit("usage: rig.py OUT   builds what the benches run into a folder")
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    programs = ["null-work", "null-register", "null-threads", "null-idle"]
    rig = Rig(out, programs)
    for name in programs:
        shutil.copy(rig.examples / name, out)
    shutil.rmtree(out / "bus")
    shutil.rmtree(out / "tree")


if __name__ == "__main__":
    main()
