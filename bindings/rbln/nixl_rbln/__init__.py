"""Registers the KV cache of vLLM on Rebellions NPUs with NIXL's backend RBLN.

The call surface is that which vllm-rbln 0.12 imports: `register_kv_regions` for device to device,
`ensure_rbln_backend` for the bounce through host memory. Importing it loads no library, opens no
file and asks no device. Threads: calls about one agent must not overlap; the connector makes them
on its main thread. Every refusal is an `RblnError`.
"""

from __future__ import annotations

from ._backend import ensure_rbln_backend
from ._errors import RblnError
from ._places import Area, Placement, emulation
from ._regions import KvRegions, register_kv_regions
from ._runtime import provide

__version__ = "0.12.0.post1"
__all__ = [
    "Area",
    "KvRegions",
    "Placement",
    "RblnError",
    "emulation",
    "ensure_rbln_backend",
    "provide",
    "register_kv_regions",
]
