"""One rank of an engine: a worker of the published connector, over tensors in host memory."""

import logging
import os
import sys
import threading
import time
import types
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import layout
from wires import HANG

HERE = Path(__file__).resolve().parent
LAYER = "model.layers.{}.self_attn.attn"
LINES = {  # what the connector logs, by the name that results have for it
    "registered": ("RBLN NIXL (D2D): registered ",),
    "planned": ("remote descriptor(s) for engine", "Transfer plan:", "RBLN NIXL: head-matched "),
    "absent": ("RBLN NIXL: nixl-rbln not available",),
    "chunked": ("of them a chunk range of",),
    "windowed": ("a window range of",),
}


@dataclass(frozen=True)
class Rank:
    """Which worker of which engine. `life` counts the processes that had this place; `host` is a
    number for each process."""

    engine: str
    port: int
    produces: bool
    consumer: int = 0
    tp: int = 0
    tp_size: int = 1
    pp: int = 0
    pp_size: int = 1
    life: int = 0
    host: int = 0


class Lines:
    """Which of the connector's lines were logged in this process."""

    def __init__(self):
        self.seen = set()
        made = logging.getLogRecordFactory()

        def record(*args, **kwargs):
            one = made(*args, **kwargs)
            try:
                text = one.getMessage()
            except Exception:  # a line with wrong arguments is not ours
                return one
            self.seen |= {n for n, wanted in LINES.items() if any(w in text for w in wanted)}
            return one

        logging.setLogRecordFactory(record)


def install_torch_rbln():
    """What of torch-rbln the connector touches: events and streams."""
    import torch

    if "torch.rbln" in sys.modules:
        return

    class Event:
        def __init__(self, *args, **kwargs):
            pass

        def record(self, *args):
            pass

        def synchronize(self):
            pass

        def query(self):
            return True

    made = types.ModuleType("torch.rbln")
    made.Event, made.Stream = Event, object
    made.current_stream = made.synchronize = lambda *args: None
    made.device_count = lambda: 1
    made.is_available = lambda: True
    made.current_device = lambda: 0
    sys.modules["torch.rbln"] = torch.rbln = made
    torch.utils.rename_privateuse1_backend("rbln")


def warm(chosen):
    """Imports what takes most of the time; the processes of all cases are forked after it."""
    install_torch_rbln()
    import torch
    import nixl_cu12._api  # noqa: F401
    import vllm.engine.arg_utils  # noqa: F401
    import vllm_rbln.v1.attention.backends.flash_attention  # noqa: F401
    from vllm_rbln.distributed.kv_transfer.kv_connector.v1.rbln_nixl import (  # noqa: F401
        base_scheduler, pull_worker, push_worker)

    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
    from vllm.model_executor.models import registry
    from vllm_rbln.distributed.kv_transfer.kv_connector.v1.rbln_transfer_topology import (
        RblnTransferTopology)

    # What vllm-rbln's own patches put there when an engine starts; host bounce needs it.
    base_worker.TransferTopology = RblnTransferTopology
    torch.set_num_threads(1)  # threads of a pool would not survive a fork
    # The first configuration has vLLM look at a model's code: in a process of its own, which has
    # none of the stand-ins.
    registry._run_in_subprocess = lambda look: look()
    for case in {case["mla"]: case for case in chosen}.values():
        config_of(case, Rank("warm", 0, True))


def config_of(case, rank):
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    connector = {"pull": "RblnNixlPullConnector", "push": "RblnNixlPushConnector"}
    extra = dict(case["extra"])
    if not rank.produces:
        extra.pop("link_down_exit_s", None)
    if case["heartbeat"]:  # one extends a lease by two thirds of this
        extra["kv_lease_duration"] = 10 * int(case["lease"])
    if not (case["beside"] or case["absent"] or case["backend"] == "UCX"):
        extra["backends"] = ["RBLN"]
    config = EngineArgs(
        # mla: a configuration that makes use_mla true, with an architecture that was looked at.
        model=str(HERE / ("mla" if case["mla"] else "model")), skip_tokenizer_init=True,
        block_size=layout.TOKENS, max_model_len=32 * layout.TOKENS,
        max_num_batched_tokens=case["step"], max_num_seqs=4, dtype="bfloat16",
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector[case["direction"]],
            kv_role="kv_producer" if rank.produces and case["links"] == "exit" else "kv_both",
            kv_buffer_device=case["buffer"], engine_id=rank.engine,
            kv_connector_extra_config=extra),
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    config.cache_config.num_gpu_blocks = layout.blocks(case)
    config.parallel_config.tensor_parallel_size = rank.tp_size
    config.parallel_config.pipeline_parallel_size = rank.pp_size
    return config


def cache_config(case, rank, names, windows):
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MLAAttentionSpec,
        SlidingWindowSpec)

    common = {"block_size": layout.TOKENS, "num_kv_heads": len(layout.heads_of(case, rank)),
              "head_size": 4 * layout.model(case)[2], "dtype": torch.bfloat16}
    specs = [(names, (MLAAttentionSpec if case["mla"] else FullAttentionSpec)(**common))]
    if windows:
        specs.append((windows, SlidingWindowSpec(**common, sliding_window=case["window"])))
    page = specs[0][1].page_size_bytes
    layer = page * layout.blocks(case)
    # One tensor for all layers of a group: several at offset 0 would be read as aliases.
    tensors = [KVCacheTensor(size=layer * len(group), layers=group, layer_stride=layer,
                             block_stride=page) for group, _ in specs]
    return KVCacheConfig(
        num_blocks=layout.blocks(case), kv_cache_tensors=tensors,
        kv_cache_groups=[KVCacheGroupSpec(layer_names=group, kv_cache_spec=spec)
                         for group, spec in specs])


def over_ucx():
    """From now on the adapter registers with UCX: the same run without our plugin."""
    from nixl_rbln import _regions

    def ensure(agent, *args, **kwargs):
        agent.backends["RBLN"] = agent.backends["UCX"]

    _regions.ensure_rbln_backend, _regions.BACKEND = ensure, "UCX"
    sys.modules["nixl_rbln"].ensure_rbln_backend = ensure


def copy_blocks(source, target, source_ids, target_ids, direction):
    """The copy between device and host that vLLM has the runner supply."""
    import torch

    for name, tensor in source.items():
        to = target[name].as_subclass(torch.Tensor)
        to[target_ids] = tensor.as_subclass(torch.Tensor)[source_ids]


class Side:
    """A worker, its cache and, where asked for, its handshake listener. End it with `close`."""

    def __init__(self, case, rank):
        self.case, self.rank, self.stop = case, rank, threading.Event()
        self.lines = Lines()
        mine = "" if rank.produces or not case["d_areas"] else "d_"
        self.areas, self.slices = case[mine + "areas"], case[mine + "slices"]
        if case["buffer"] == "cpu":
            self.areas = self.slices = 1
        os.environ["NIXL_RBLN_AREAS"] = str(self.areas)
        os.environ["NIXL_RBLN_SLICES"] = str(self.slices)
        os.environ["RBLN_USE_CUSTOM_KERNEL"] = "1" if case["split"] else "0"
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(rank.port)
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
        if case["absent"]:
            sys.modules["nixl_rbln"] = None  # what Python has for a module that is not there
        elif case["backend"] == "UCX":
            import nixl_rbln  # noqa: F401

            over_ucx()
        self.config = config_of(case, rank)
        self.make_worker()
        if case["backend"] == "UCX":
            self.worker.nixl_memory_type = "DRAM"  # UCX without CUDA refuses VRAM
        # What was asked of NIXL, refused by it, and done; most transfers under way at one time.
        self.counts = {"transfer": 0, "send_notif": 0, "refused": 0, "done": 0, "broken": 0,
                       "most": 0}
        self.count_calls()

    def make_worker(self):
        from vllm.config import set_current_vllm_config
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
        from vllm_rbln.distributed.kv_transfer.kv_connector.v1.rbln_nixl import (
            base_scheduler, pull_worker, push_worker, registration)

        rank, case = self.rank, self.case
        base_worker.get_tensor_model_parallel_rank = lambda: rank.tp
        base_worker.get_tensor_model_parallel_world_size = lambda: rank.tp_size
        stage = SimpleNamespace(rank_in_group=rank.pp)
        registration.get_pp_group = push_worker.get_pp_group = lambda: stage
        self.context = set_current_vllm_config(self.config)
        self.context.__enter__()
        each = case["layers"] // rank.pp_size
        self.layers = list(range(rank.pp * each, (rank.pp + 1) * each))
        self.tensors = self.make_tensors()
        windows = self.make_windows() if case["window"] else []
        self.scheduler = base_scheduler.RblnNixlSchedulerBase
        worker = {"pull": pull_worker.RblnNixlPullConnectorWorker,
                  "push": push_worker.RblnNixlPushConnectorWorker}[case["direction"]]
        names = [LAYER.format(layer) for layer in self.layers]
        self.worker = worker(self.config, rank.engine, cache_config(case, rank, names, windows))

    def backend(self):
        from vllm_rbln.v1.attention import backends

        return (backends.RBLNFlashAttnMLABackend if self.case["mla"] else
                backends.RBLNFlashAttentionBackend)

    def shape_of(self, blocks, tokens):
        return self.backend().get_kv_cache_shape(
            num_blocks=blocks, block_size=tokens,
            num_kv_heads=len(layout.heads_of(self.case, self.rank)),
            head_size=4 * layout.model(self.case)[2])

    def bind(self, name, tensor):
        self.config.compilation_config.static_forward_context[name] = SimpleNamespace(
            kv_cache=tensor)

    def make_tensors(self):
        import torch

        class OnDevice(torch.Tensor):
            @staticmethod
            def get_device():
                return 0

        shape = self.shape_of(layout.blocks(self.case), layout.TOKENS)
        made = {}
        for layer in self.layers:
            tensor = torch.zeros(shape, dtype=torch.bfloat16)
            if self.case["buffer"] != "cpu":
                tensor = tensor.as_subclass(OnDevice)
            made[LAYER.format(layer)] = tensor
            self.bind(LAYER.format(layer), tensor)
        return made

    def make_windows(self):
        """Layers with a sliding window: other names of the same memory, in blocks of the kernel."""
        import torch

        kernel = self.case["kernel"] or self.case["window"]
        shape = self.shape_of(layout.blocks(self.case) * layout.TOKENS // kernel, kernel)
        names = []
        for layer in self.layers:
            name = LAYER.format(self.case["layers"] + layer)
            tensor = self.tensors[LAYER.format(layer)]
            self.tensors[name] = tensor
            self.bind(name, tensor.as_subclass(torch.Tensor).view(shape))
            names.append(name)
        return names

    def count_calls(self):
        """Counts what the connector asks of NIXL, and what became of the transfers."""
        agent, counts = self.worker.nixl_wrapper, self.counts
        for name in ("transfer", "send_notif"):
            def call(*args, _real=getattr(agent, name), _name=name, **kwargs):
                try:
                    said = _real(*args, **kwargs)
                except Exception:
                    counts["refused"] += 1
                    raise
                counts[_name] += 1
                going = counts["transfer"] - counts["done"] - counts["broken"]
                counts["most"] = max(counts["most"], going)
                return said
            setattr(agent, name, call)
        state = agent.check_xfer_state

        def check(*args, **kwargs):
            try:
                said = state(*args, **kwargs)
            except Exception:
                counts["broken"] += 1
                raise
            counts["done"] += said == "DONE"
            counts["broken"] += said not in ("DONE", "PROC")
            return said

        agent.check_xfer_state = check

    def cache(self, at):
        """The cache of this rank's layer number `at`, as `layout.local` orders it."""
        import torch

        tensor = self.tensors[LAYER.format(self.layers[at])]
        flat = tensor.as_subclass(torch.Tensor).view(torch.int16).reshape(-1).view(torch.int64)
        return flat.view(layout.local_shape(self))

    def pattern(self, at, life, tokens=None):
        whole = layout.pattern(self.case, self.rank, self.layers[at], life, tokens)
        return layout.local(self, whole)

    def fill(self, tokens=None):
        """Writes the cache; with `tokens`, only what a prefill of so many has computed."""
        for at in range(len(self.layers)):
            self.cache(at).copy_(self.pattern(at, self.rank.life, tokens))

    def compute(self, held, before):
        """Writes what a prefill adds when it goes from `before` to `held` tokens."""
        if before == 0:
            self.whole = [self.pattern(at, self.rank.life) for at in range(len(self.layers))]
        for at, whole in enumerate(self.whole):
            for number, block in enumerate(layout.block_lists(self.case)[0][0]):
                first, last = (min(max(tokens - number * layout.TOKENS, 0), layout.TOKENS)
                               for tokens in (before, held))
                rows = (slice(None), slice(None), block, slice(None), slice(None),
                        slice(first, last))
                self.cache(at)[rows] = whole[rows]

    def register(self):
        started = time.perf_counter()
        if self.case["buffer"] == "cpu":
            self.worker.initialize_host_xfer_buffer(self.tensors)
            self.worker.set_host_xfer_buffer_ops(copy_blocks)
        self.worker.register_kv_caches(self.tensors)
        self.worker.finalize_kv_cache_registration()
        return time.perf_counter() - started

    def payload(self):
        import msgspec

        return msgspec.msgpack.Encoder().encode(self.worker.xfer_handshake_metadata)

    def serve(self, payloads):
        """Answers handshakes for all ranks of the engine, as vLLM's scheduler process does."""
        ready = threading.Event()
        self.thread = threading.Thread(
            target=self.scheduler._nixl_handshake_listener,
            args=(payloads, ready, self.stop, "127.0.0.1", self.rank.port), daemon=True)
        self.thread.start()
        assert ready.wait(HANG), "the handshake listener did not start"

    def metadata(self):
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

        made = NixlConnectorMetadata()
        made.scheduler_clock = time.perf_counter()
        if self.case["direction"] == "push":
            from vllm_rbln.distributed.kv_transfer.kv_connector.v1.rbln_nixl.metadata import (
                RblnNixlConnectorMetadata)

            made = RblnNixlConnectorMetadata.promote(made)
        return made

    def step(self, metadata=None):
        """One engine step, in the order of the connector's own calls."""
        metadata = metadata or self.metadata()
        if self.case["direction"] == "push":
            self.worker.release_early_offers()
        self.worker.start_load_kv(metadata)
        if self.case["buffer"] == "cpu" and metadata.reqs_to_save:
            self.worker.save_kv_to_host(metadata)
        if self.case["direction"] == "push":
            self.worker.start_early_push(metadata)
        return self.worker.get_transfer_results()

    def close(self):
        self.stop.set()
        self.worker.shutdown()
