"""Starts engines of vLLM in processes of their own, and talks to them."""

import json
import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path

from kvtest.ports import free_port

HERE = Path(__file__).parent
HANG_S = 300  # only ends what would never end
LEASE_S = 2 * HANG_S  # so no lease ends, however busy the machine is
LENGTHS = [37, 130, 500, 200, 64, 300, 777, 128]
ALL = range(len(LENGTHS))
TOKENS = 32
# What vLLM takes for a request that another engine goes on with.
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
           "remote_block_ids": None, "remote_host": None, "remote_port": None}
# Of the tiny model: keys and values, layers, heads, numbers in a head, bytes in a number.
BYTES_PER_TOKEN = 2 * 4 * 2 * 64 * 2
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
               "DO_NOT_TRACK": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
               "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONUNBUFFERED": "1"}


def prompt(number):
    rng = random.Random(100 + number)
    return [rng.randrange(256) for _ in range(LENGTHS[number])]


def to_prefill(name, number, backwards=False):
    """`backwards`: keys and values of another prompt, as long."""
    tokens = prompt(number)
    return {"id": name, "prompt": tokens[::-1] if backwards else tokens, "max_tokens": 1,
            "kv": PREFILL}


def to_decode(name, number, kv):
    return {"id": name, "prompt": prompt(number), "max_tokens": TOKENS, "kv": kv}


def equal(answers, alone, numbers):
    """How many answers are the tokens of an engine by itself."""
    assert all(len(a["tokens"]) == TOKENS for a in answers)
    return sum(a["tokens"] == alone[n] for a, n in zip(answers, numbers, strict=True))


def bytes_of(state, numbers=ALL):
    """Bytes of the blocks of prompts, at an engine with this state."""
    tokens = state["block_tokens"]
    return sum(-(-LENGTHS[n] // tokens) for n in numbers) * tokens * BYTES_PER_TOKEN


class Hang(AssertionError):
    pass


class Roles:
    """The process that engines are forked from; it imports vLLM once for all of them."""

    def __init__(self, python, folder):
        self.folder = Path(folder)
        self.log = self.folder / "roles.log"
        env = {k: v for k, v in os.environ.items() if not k.startswith(("KVRAIL_", "NIXL_"))}
        for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
            env.pop(name, None)  # compiled once, an import takes a third of the time
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [str(python), str(HERE / "roles.py"), str(self.folder / "model")], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env={**env, **ENVIRONMENT})
        # Other threads would not be there in a forked engine.
        threads = self._answer()["threads"]
        assert threads == 1, f"{threads} threads before the first fork: see {self.log}"

    def _answer(self):
        line = self.process.stdout.readline()
        assert line, f"roles.py ended with {self.process.wait()}: see {self.log}"
        return json.loads(line)

    def ask(self, **message):
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)


class Engine:
    """One engine. `connector` None is an engine by itself, with no connector at all. `served`: see
    roles.py."""

    def __init__(self, roles, name, connector=None, role=None, backend="RBLN", env=None, port=0,
                 served=True):
        self.roles, self.name, self.port = roles, name, port or free_port()
        self.log = roles.folder / f"{name}.log"
        self.answers, self.buffer, self.line = {}, b"", None
        transfer = connector and {
            "kv_connector": connector, "kv_role": role, "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"backends": [backend], "kv_lease_duration": LEASE_S}}
        path = roles.folder / f"{name}.socket"
        path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(1)
        env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
               "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.port), **(env or {})}
        spec = {"name": name, "log": str(self.log), "socket": str(path), "env": env,
                "transfer": transfer, "served": served}
        self.pid = roles.ask(start=spec)["pid"]

    def ready(self):
        """Waits until it takes requests. Engines start at the same time until then."""
        self.listener.settimeout(HANG_S)
        self.line, _ = self.listener.accept()
        self.line.settimeout(5)
        assert self._next("its start")["ready"] == self.pid
        return self

    def _next(self, what):
        until = time.monotonic() + HANG_S
        while b"\n" not in self.buffer:
            try:
                got = self.line.recv(1 << 20)
            except TimeoutError:
                if time.monotonic() > until:
                    raise Hang(f"{self.name}: no answer to {what}: see {self.log}") from None
                continue
            if not got:
                raise AssertionError(f"{self.name} ended during {what}: see {self.log}")
            self.buffer += got
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def send(self, *messages):
        self.line.sendall("".join(json.dumps(m) + "\n" for m in messages).encode())

    def wait(self, name):
        """The answer to one request."""
        while name not in self.answers:
            answer = self._next(f"request {name}")
            self.answers[answer["id"]] = answer
        return self.answers.pop(name)

    def state(self):
        self.send({"ask": "state"})
        while "counters" not in (answer := self._next("its state")):
            self.answers[answer["id"]] = answer
        return answer

    def until(self, what, true):
        """The first state of which `true` holds."""
        end = time.monotonic() + HANG_S
        while not true(state := self.state()):
            if time.monotonic() > end:
                raise Hang(f"{self.name}: never came to: {what}; its state: {state}")
            time.sleep(0.05)
        return state

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        assert self.end() == signal.SIGKILL

    def end(self):
        """Waits for the end of the process; returns its status."""
        if self.line:
            self.line.close()
        self.listener.close()
        pid, self.pid = self.pid, None
        return self.roles.ask(wait=pid)["status"]


class Pair:
    """A prefill and a decode engine. `spoil` changes what prefill tells decode; `backwards` has it
    read every prompt backwards."""

    def __init__(self, roles, name, connector, backend="RBLN", env=None, spoil=None,
                 backwards=False):
        self.roles, self.name, self.made, self.asked = roles, name, 0, 0
        self.how = {"connector": connector, "backend": backend, "env": env}
        self.spoil, self.backwards = spoil, backwards
        self.prefill = self._start("prefill")
        self.decode = self._start("decode")
        self.prefill.ready()
        self.decode.ready()

    def _start(self, role, port=0):
        self.made += 1
        kind = "kv_producer" if role == "prefill" else "kv_consumer"
        return Engine(self.roles, f"{self.name}-{role}-{self.made}", role=kind, port=port,
                      **self.how)

    def kill_and_restart(self, role):
        old = getattr(self, role)
        old.kill()
        # As a supervisor does it: the same address, and nothing else in common.
        setattr(self, role, self._start(role, old.port).ready())

    def serve(self, numbers, spoil=None, backwards=False):
        """The tokens that decode answers to prompts, all of them in flight at once."""
        backwards = backwards or self.backwards
        spoil = spoil or self.spoil or (lambda kv: kv)
        names = []
        for _ in numbers:
            self.asked += 1
            names.append(f"{self.name}-{self.asked}")
        self.prefill.send(*(to_prefill(name, n, backwards) for name, n in zip(names, numbers)))
        told = [spoil(self.prefill.wait(name)["kv"]) for name in names]
        self.decode.send(*(to_decode(name, n, kv) for name, n, kv in zip(names, numbers, told)))
        return [self.decode.wait(name) for name in names]

    def right(self, alone, numbers, seen, what, **how):
        """How many of these prompts, all in flight at once, get the tokens of one engine."""
        got = equal(self.serve(numbers, **how), alone, numbers)
        seen(f"{self.name}, {what}: {got} of {len(numbers)} prompts equal")
        return got

    def right_one_by_one(self, alone, seen):
        got = sum(equal(self.serve([n]), alone, [n]) for n in ALL)
        seen(f"{self.name}, one at a time: {got} of {len(ALL)} prompts equal")
        return got

    def lose(self, role, alone, seen):
        """An engine is killed and comes back: the other one stays, and what is asked next is
        right."""
        stays = self.prefill if role == "decode" else self.decode
        pid = stays.pid
        self.kill_and_restart(role)
        assert self.right(alone, [6, 2], seen, f"{role} killed and back") == 2
        assert stays.pid == pid

    def close(self):
        for engine in (self.prefill, self.decode):
            if engine.pid:
                engine.kill()
