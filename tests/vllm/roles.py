"""Engines of vLLM, each in a process of its own, forked from one that has imported vLLM already.

usage: roles.py MODEL_FOLDER   runs in the venv of scripts/vllm-venv.sh

Reads JSON lines. {"start": {...}} forks an engine: `name`, `log` (file), `socket` (UNIX socket that
it connects to), `env`, `transfer` (vLLM's kv_transfer_config, or null for none) and `served`; the
answer is {"pid": N}. {"wait": N} waits until that process has ended; the answer is its wait status.
At the end of input the engines end too.

An engine then speaks JSON lines over its socket. {"id", "prompt", "max_tokens", "kv"} is a request,
answered by {"id", "tokens", "kv"} when it is done; {"ask": "state"} is answered at once.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time

import model

CACHE_BYTES = 256 << 20
ENGINE = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 8,
          "seed": 0, "distributed_executor_backend": "uni", "disable_log_stats": False,
          "kv_cache_memory_bytes": CACHE_BYTES, "enable_prefix_caching": False}
PR_SET_PDEATHSIG = 1


class Engine:
    """One engine. With `served` it is stepped as long as vLLM's server steps it, else as long as
    vLLM's offline `LLM.generate` does: until no request waits for tokens."""

    def __init__(self, spec, folder):
        from vllm import LLM

        self.served = spec["served"]

        extra = {"kv_transfer_config": spec["transfer"]} if spec["transfer"] else {}
        self.engine = LLM(folder, **ENGINE, **extra).llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.most = 0  # requests unfinished at the same time

    def add(self, request):
        from vllm import SamplingParams

        kv = request["kv"]
        params = SamplingParams(max_tokens=request["max_tokens"], temperature=0, ignore_eos=True,
                                seed=0, extra_args={"kv_transfer_params": kv} if kv else None)
        self.engine.add_request(request["id"], {"prompt_token_ids": request["prompt"]}, params)
        self.most = max(self.most, self.engine.get_num_unfinished_requests())

    def busy(self):
        more = self.served and self.scheduler.has_requests()
        return more or self.engine.has_unfinished_requests()

    def step(self):
        """One step; the requests that it finished."""
        done = []
        for output in self.engine.step():
            if output.finished:
                one = output.outputs[0]
                done.append({"id": output.request_id, "tokens": list(one.token_ids),
                             "kv": output.kv_transfer_params})
        # vLLM's server yields here too: the steps without a batch wait for a transfer.
        time.sleep(0 if done else 0.001)
        return done

    def state(self):
        self.engine.do_log_stats()
        counters = {}
        for metric in self.engine.get_metrics():
            key = metric.name
            if (source := metric.labels.get("source")) is not None:
                key += f"/{source}"
            counters[key] = getattr(metric, "value", getattr(metric, "sum", None))
        # Blocks of finished requests that vLLM's push worker was not told of yet.
        part = getattr(self.scheduler.connector, "connector_scheduler", None)
        return {"counters": counters, "most": self.most, "held": len(self.scheduler.requests),
                "untold": len(getattr(part, "_newly_finished_push_blocks", ())),
                "unfinished": self.engine.get_num_unfinished_requests(),
                "blocks": self.scheduler.cache_config.num_gpu_blocks,
                "block_tokens": self.scheduler.block_size}


def converse(engine, line):
    """Takes what came over the socket, steps while there is work."""
    buffer = b""
    line.setblocking(False)
    while True:
        select.select([line], [], [], 0 if engine.busy() else None)
        try:
            got = line.recv(1 << 20)
            if not got:
                return
            buffer += got
        except BlockingIOError:
            pass
        *whole, buffer = buffer.split(b"\n")
        answers = []
        for message in map(json.loads, whole):
            if message.get("ask") == "state":
                answers.append(engine.state())
            else:
                engine.add(message)
        if engine.busy():
            answers += engine.step()
        if answers:
            line.setblocking(True)
            line.sendall("".join(json.dumps(a) + "\n" for a in answers).encode())
            line.setblocking(False)


def be(spec, folder):
    """The life of a forked engine; does not return."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(spec["env"])
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(log, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 1
    try:
        line = socket.socket(socket.AF_UNIX)
        line.connect(spec["socket"])
        engine = Engine(spec, folder)
        line.sendall(json.dumps({"ready": os.getpid()}).encode() + b"\n")
        converse(engine, line)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # Without the interpreter's end: a UCX agent beside torch crashes in it, after all work.
        os._exit(code)


def load():
    """Imports what every engine needs, once; but not NIXL, which reads the environment."""
    import vllm.model_executor.models.qwen3  # noqa: F401
    import vllm.v1.engine.llm_engine  # noqa: F401
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM, SamplingParams  # noqa: F401


def main(folder):
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints goes to the log
    if (maker := os.fork()) == 0:
        model.make(folder)
        os._exit(0)
    load()
    if os.waitpid(maker, 0)[1] != 0:
        sys.exit(f"roles.py: no model in {folder}; see above")
    print(json.dumps({"threads": len(os.listdir("/proc/self/task"))}), file=answer)
    for message in map(json.loads, iter(sys.stdin.readline, "")):
        if "start" in message:
            if (pid := os.fork()) == 0:
                be(message["start"], folder)
            print(json.dumps({"pid": pid}), file=answer)
        else:
            print(json.dumps({"status": os.waitpid(message["wait"], 0)[1]}), file=answer)
    os._exit(0)  # the interpreter's end takes seconds with all this imported


if __name__ == "__main__":
    main(sys.argv[1])
