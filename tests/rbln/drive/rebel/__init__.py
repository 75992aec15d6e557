"""Stand-in for the closed package `rebel`: the names that the connector of vllm-rbln imports.

Only `context_of` and `kv_cache.aligned_tensor` do anything; what a compiler or profiler would do is
never reached by a drive.
"""

import sys
import types
from types import SimpleNamespace

__version__ = "0.12.0+standin"
_PAGE = 4096


class _Anything:
    """Any attribute, call and index; as a decorator it returns what it decorates."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else _Anything()

    def __getitem__(self, key):
        return self

    def __mro_entries__(self, bases):
        return (object,)


def _module(name, **known):
    made = types.ModuleType(f"rebel.{name}")
    made.__path__ = []

    def anything(attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Anything()

    made.__getattr__ = anything
    vars(made).update(known)
    sys.modules[made.__name__] = made
    parent, _, last = made.__name__.rpartition(".")
    setattr(sys.modules[parent], last, made)


def context_of(tensor):
    return SimpleNamespace(rbln_ctx_ptr=0)


def get_npu_name(*args, **kwargs):
    return "RBLN-CR03"


def manual_seed(*args, **kwargs):
    pass


class CompileContext(_Anything):
    def __init__(self, *args, **kwargs):
        pass


def _aligned_tensor(count):
    import torch

    raw = torch.empty(2 * count + _PAGE, dtype=torch.uint8)
    at = -raw.data_ptr() % _PAGE
    return raw[at:at + 2 * count].view(torch.float16)


_module("kv_cache", aligned_tensor=_aligned_tensor)
_module("compile_context", CompileContext=CompileContext)
_module("core")
_module("core.torch_compile", rbln_backend=lambda graph, *args, **kwargs: graph)
for _name in (
    "flags", "profiler", "core.mega_cache", "ops", "ops.torch_custom_ops",
    "ops.torch_custom_ops.attn", "triton", "triton.language", "triton.language.extra",
    "triton.language.extra.rbln", "triton.language.extra.rbln.libdevice",
):
    _module(_name)
