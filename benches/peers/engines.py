"""The engines of the bench: how each is started, timed, counted, and watched by callgrind."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import rig as tools
from kvtest.ports import free_port
from rig import HERE, RAILS, REPOSITORY, Child, Missing

LIMIT_S = 600
LENGTH = 1024


class Variant:
    """One row of the table; the first of an engine, or any with `line`, is also in the picture."""

    def __init__(self, key, label, args, line=False):
        self.key, self.label, self.args, self.line = key, label, args, line


def counted_rounds(descs):
    return max(2, min(40, 20_000 // descs))


class Program:
    """A program that does some rounds and ends: figures are the difference of two runs."""

    def __init__(self, rig, op):
        self.rig, self.op = rig, op

    def start(self):
        pass

    def stop(self):
        pass

    def sample(self, variant, descs, rounds):
        return self.read(tools.run(self.command(variant, descs, rounds), self.env, LIMIT_S))

    def counts(self, variant, descs):
        rounds, seen = counted_rounds(descs), []
        for n in (1, 1 + rounds):
            path = self.rig.file("counters")
            tools.run(self.command(variant, descs, n), self.rig.counting(self.env, path), LIMIT_S)
            seen.append(tools.counters(path))
        return {k: (seen[1][k] - seen[0][k]) / (descs * rounds) for k in seen[0]}

    def instructions(self, variant, sizes):
        return {descs: self.counted(variant, descs) for descs in sizes}

    def counted(self, variant, descs):
        rounds, seen = counted_rounds(descs), []
        for n in (1, 1 + rounds):
            out = self.rig.file("callgrind")
            command = [*tools.callgrind(out, [self.toggle]), *self.command(variant, descs, n)]
            tools.run(command, self.env, LIMIT_S)
            seen.append(tools.total(out))
            out.unlink()
        return {"sum": (seen[1] - seen[0]) / (descs * rounds)}


class Loop(Program):
    """The loop in C, without an engine."""

    name, toggle = "loop", "round_of"
    variants = [
        Variant("loop", "loop in C, lists of 64, last signalled", ("64", "0")),
        Variant("loop-signalled", "loop in C, lists of 64, all signalled", ("64", "1")),
        Variant("loop-single", "loop in C, lists of 1, all signalled", ("1", "1")),
    ]

    def __init__(self, rig, op):
        super().__init__(rig, op)
        self.env = rig.peers

    def command(self, variant, descs, rounds):
        return [self.rig.nic / "rawloop", descs, *variant.args, rounds, self.op.lower()]

    def read(self, out):
        # It has one phase, and prints the median for one descriptor.
        return json.loads(out)

    def sample(self, variant, descs, rounds):
        ns = super().sample(variant, descs, rounds)["ns"] * descs
        return {"ns": [ns], "total_ns": ns}


class Kvrail(Program):
    """Our engine through its Rust API: the reference work of benches/null."""

    name, toggle = "kvrail", "*phase_*"
    variants = [Variant("kvrail", "kvrail", "fresh"),
                Variant("kvrail-again", "kvrail, posted again", "again", line=True)]

    def __init__(self, rig, op):
        super().__init__(rig, op)
        self.env = rig.kvrail
        target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
        self.work = target / "release/examples/null-work"

    def start(self):
        cargo = os.environ.get("CARGO", "cargo")
        subprocess.run([cargo, "build", "--quiet", "--release", "-p", "kvrail", "--example",
                        "null-work"], cwd=REPOSITORY, check=True, timeout=1800)

    def command(self, variant, descs, rounds):
        return [self.work, f"op={self.op.lower()}", f"kind={variant.args}", "order=random",
                f"groups=1:{LENGTH}:{descs}", f"descs={descs}", f"rounds={rounds}"]

    def read(self, out):
        ns = json.loads(out)["ns"]
        return {"ns": ns, "total_ns": sum(ns)}


class Service:
    """A worker that stays: it is asked for rounds, and marks what callgrind counts apart."""

    phases = 4
    largest_counted = 100_000  # descriptors that callgrind is asked to count

    def __init__(self, rig, op):
        self.rig, self.op, self.child = rig, op, None

    def start(self):
        self.prepare()
        self.child = self.spawn(self.env, [])

    def stop(self):
        if self.child is not None:
            self.child.end()
            self.child = None

    def spawn(self, env, prefix):
        return Child([*prefix, *self.command()], env, self.rig.file(f"{self.name}.log"), LIMIT_S)

    def ask(self, child, variant, descs, rounds):
        return child.ask(descs=descs, rounds=rounds, op=self.op, again=variant.args == "again")

    def sample(self, variant, descs, rounds):
        return self.ask(self.child, variant, descs, rounds)

    def counts(self, variant, descs):
        path, rounds, seen = self.rig.file("counters"), counted_rounds(descs), []
        child = self.spawn(self.rig.counting(self.env, path), [])
        try:
            # The first answer connects; the other two differ by `rounds`.
            for n in (1, 1, 1 + rounds):
                self.ask(child, variant, descs, n)
                seen.append(tools.counters(path))
        finally:
            child.end()
        after, before, first = seen[2], seen[1], seen[0]
        return {k: (after[k] - 2 * before[k] + first[k]) / (descs * rounds) for k in after}

    def instructions(self, variant, sizes):
        out = self.rig.file("callgrind")
        env = self.env | {"MARKS": str(self.rig.nic / "libmarks.so")}
        child = self.spawn(env, tools.callgrind(out, self.toggles))
        figures, marks = {}, 0
        try:
            for descs in (n for n in sizes if n <= self.largest_counted):
                self.ask(child, variant, descs, 3)
                files = tools.settled(out, marks + 3 * (self.phases + 1))
                marks = len(files)
                figures[descs] = self.figures(descs, [tools.total(f) for f in files])
        finally:
            child.end()
        return figures

    def figures(self, descs, totals):
        """The last round's: what was counted before its first mark, then its phases."""
        each = [count / descs for count in totals[-self.phases:]]
        return {"phases": each, "sum": sum(each)}


class Nixl(Service):
    """Two NIXL agents in one process; counted is what runs inside the agent's calls."""

    packages = ["nixl==1.5.1", "nixl-cu12==1.5.1", "numpy"]
    toggles = ["nixlAgent::*XferReq*", "nixlAgent::getXferStatus*"]
    backend, params = "UCX", ()

    def prepare(self):
        self.python = tools.venv("nixl", self.packages)

    def command(self):
        return [self.python, HERE / "nixl_worker.py", self.backend, *self.params]


def agents(key, label):
    return [Variant(key, label, "fresh"),
            Variant(f"{key}-again", f"{label}, posted again", "again")]


class Rbln(Nixl):
    name, backend = "rbln", "RBLN"
    variants = agents("rbln", "NIXL, backend RBLN")
    params = ("transport=verbs", "listen_ip=127.0.0.1", "stripe_width=0", "max_peers=8",
              "connect_timeout_ms=60000", "rail_timeout_ms=20000", "peer_timeout_ms=120000",
              "keepalive_ms=0", "progress_thread=0", "peer:progress_thread=1",
              "nics=" + ",".join(f"fake{i}" for i in range(RAILS)),
              "peer:nics=" + ",".join(f"fake{RAILS + i}" for i in range(RAILS)))

    def prepare(self):
        super().prepare()
        plugins = REPOSITORY / "build/plugins"
        if not (plugins / "libplugin_RBLN.so").is_file():
            raise Missing(f"{plugins}/libplugin_RBLN.so is not there: run `make plugin`")
        self.env = self.rig.kvrail | {"NIXL_PLUGIN_DIR": str(plugins), "NIXL_LOG_LEVEL": "WARN"}


class Ucx(Nixl):
    name = "ucx"
    variants = agents("ucx", "NIXL, backend UCX")
    extra = {}

    def prepare(self):
        super().prepare()
        # The wheel's own libibverbs is found by its file's name, whatever was loaded before.
        found = [f for f in self.python.parents[1].glob("lib/*/site-packages/nixl_cu12.libs/*")
                 if f.name.startswith("libibverbs-")]
        if len(found) != 1:
            raise Missing(f"the wheel has {len(found)} libraries libibverbs-*, not 1")
        fresh = found[0].with_name("fresh")
        shutil.copy(self.rig.library, fresh)
        fresh.replace(found[0])
        self.env = self.rig.peers | {"UCX_TLS": "rc_v,ud_v,self,tcp", "UCX_LOG_LEVEL": "fatal",
                                     "NIXL_LOG_LEVEL": "WARN", **self.extra}


class UcxLists(Ucx):
    name, extra = "ucx-sgl", {"NIXL_UCX_SGL_ENABLE": "1"}
    variants = agents("ucx-sgl", "NIXL, backend UCX with SGL")

    def prepare(self):
        if self.op != "WRITE":
            raise Missing("NIXL_UCX_SGL_ENABLE serves WRITE only")
        super().prepare()


class Mooncake(Service):
    """Two processes; counted is the whole initiator, its threads too."""

    name, phases, toggles = "mooncake", 2, []
    worker = HERE / "mooncake_worker.py"
    packages = ["mooncake-transfer-engine-non-cuda==0.3.13.post1"]
    variants = [Variant("mooncake", "Mooncake", "fresh")]
    # Under callgrind the longest list would take minutes of sleep a round.
    largest_counted = 10_000

    def __init__(self, rig, op):
        super().__init__(rig, op)
        self.target = None

    def prepare(self):
        self.python = tools.venv("mooncake", self.packages)
        preload = f"{self.rig.library}:{self.rig.nic / 'libremap.so'}"
        self.env = self.rig.peers | {"LD_PRELOAD": preload, "GODEBUG": "asyncpreemptoff=1"}
        if (os.cpu_count() or 1) < 4:
            # Its two threads and the caller all spin: more than cores, and each waits for a slice.
            self.env["MC_WORKERS_PER_CTX"] = "1"
        log = self.rig.file("target.log")
        self.target = Child([self.python, self.worker, "target", free_port()], self.env, log)
        self.there = self.target.ask()

    def command(self):
        return [self.python, self.worker, "initiator", free_port(), self.there["peer"],
                self.there["base"]]

    def stop(self):
        super().stop()
        if self.target is not None:
            self.target.end()

    def figures(self, descs, totals):
        work, idle = totals[-2:]
        return {"phases": [work / descs, idle / descs], "sum": (work - idle) / descs}


ENGINES = {engine.name: engine for engine in (Loop, Kvrail, Rbln, UcxLists, Ucx, Mooncake)}
