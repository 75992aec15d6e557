"""Where the bytes of a KV entry are: its areas, one for each piece (chiplet) of the device.

`data_ptr()` of an entry is a key, not always an address. A translator turns an entry into a
`Placement`. NIXL_RBLN_PROVIDER names one: host, emulated, rbln, or auto (the default). That is rbln
for a tensor on such a device, or when somebody called `provide` or set NIXL_RBLN_HOOK; emulated
when NIXL_RBLN_AREAS is set; else host.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Protocol

from ._errors import RblnError

VARIABLE = "NIXL_RBLN_PROVIDER"
HOST = "kvrail:mem=host"  # NIXL's metaInfo of an area that is host memory


@dataclass(frozen=True)
class Area:
    """One piece of an entry: `length` bytes at `addr`, of which NIXL hears.

    `slice_id` says which piece: areas of the same number are replicas. `meta` says what is behind
    the address. `fd` is a dma-buf or None; whoever gets the placement closes it.
    """

    addr: int
    length: int
    slice_id: int
    meta: str
    fd: Optional[int] = None


@dataclass(frozen=True)
class Placement:
    """All areas of one entry, replicas side by side. `keep` owns their memory, if anything must."""

    areas: tuple[Area, ...]
    slices: int
    keep: Any = None


@dataclass(frozen=True)
class Entry:
    """What a translator is told: the tensor, its key and its bytes."""

    tensor: Any
    key: int
    nbytes: int


class Translator(Protocol):
    """Turns entries into placements. Not thread-safe; raises RblnError."""

    name: str

    def place(self, entry: Entry, device_id: int, ctx: Optional[int]) -> Placement: ...


def _on_host(entry: Entry, who: str) -> None:
    kind = device_type(entry.tensor)
    if kind != "cpu":
        raise RblnError(
            f"provider {who} needs host memory, but the entry at {entry.key:#x} is on device "
            f"`{kind}`; set {VARIABLE}=rbln, if it is RBLN memory"
        )


def device_type(tensor: Any) -> str:
    """`cpu`, `rbln`, ...; `cpu` for what does not say."""
    return str(getattr(getattr(tensor, "device", None), "type", "cpu"))


class Host:
    """The entry is host memory, in one piece."""

    name = "host"

    def place(self, entry: Entry, device_id: int, ctx: Optional[int]) -> Placement:
        _on_host(entry, self.name)
        return Placement((Area(entry.key, entry.nbytes, 0, HOST),), 1)


class _Memory:
    """Pages of our own, zero at first; freed with the last reference."""

    def __init__(self, nbytes: int) -> None:
        self._pages = mmap.mmap(-1, nbytes)
        self._bytes = (ctypes.c_char * nbytes).from_buffer(self._pages)
        self.addr = ctypes.addressof(self._bytes)


def _bytes_of(area: Area) -> memoryview:
    return memoryview((ctypes.c_char * area.length).from_address(area.addr)).cast("B")


@dataclass
class Emulation:
    """The emulated areas of one entry.

    Slice s is bytes [s * nbytes / slices, (s + 1) * nbytes / slices) of the entry. Its first
    replica is that memory itself; each other one has pages of its own, as on the device.
    """

    tensor: Any
    areas: tuple[Area, ...] = ()
    memory: list[_Memory] = field(default_factory=list)

    def _pairs(self) -> list[tuple[int, Area, Area]]:
        first: dict[int, Area] = {}
        return [(at, first.setdefault(area.slice_id, area), area)
                for at, area in enumerate(self.areas)]

    def refresh(self) -> None:
        """Copies each slice into its other replicas, as a device that computed it would have."""
        for _, source, area in self._pairs():
            if area is not source:
                ctypes.memmove(area.addr, source.addr, area.length)

    def differing(self) -> list[int]:
        """Indices of areas whose bytes are not those of their slice's first replica."""
        return [at for at, source, area in self._pairs()
                if area is not source and _bytes_of(area) != _bytes_of(source)]


class Emulated:
    """`areas` pieces and `slices` different ones among them, over host memory."""

    name = "emulated"

    def __init__(self, areas: int, slices: int) -> None:
        self.areas, self.slices = areas, slices
        if areas % slices != 0:
            raise RblnError(
                f"NIXL_RBLN_SLICES={slices} does not divide NIXL_RBLN_AREAS={areas}: "
                "each slice has the same number of replicas"
            )

    def place(self, entry: Entry, device_id: int, ctx: Optional[int]) -> Placement:
        _on_host(entry, self.name)
        if entry.nbytes % self.slices != 0:
            raise RblnError(
                f"the entry at {entry.key:#x} has {entry.nbytes} bytes, which {self.slices} "
                "slices do not divide"
            )
        length, replicas = entry.nbytes // self.slices, self.areas // self.slices
        own, areas = Emulation(entry.tensor), []
        for at in range(self.areas):
            slice_id, replica = divmod(at, replicas)
            addr = entry.key + slice_id * length
            if replica:
                own.memory.append(_Memory(length))
                addr = own.memory[-1].addr
            areas.append(Area(addr, length, slice_id, HOST))
        own.areas = tuple(areas)
        own.refresh()
        return Placement(own.areas, self.slices, own)


def _count(names: tuple[str, ...], fallback: int) -> int:
    for name in names:
        text = os.environ.get(name, "").strip()
        if text:
            if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 64:
                raise RblnError(f"{name}={text}: allowed is a whole number from 1 to 64")
            return int(text)
    return fallback


# The second name is that of the driver of the published connector in this repository.
_AREAS, _SLICES = ("NIXL_RBLN_AREAS", "FAKE_AREAS"), ("NIXL_RBLN_SLICES", "FAKE_SLICES")


def _emulated() -> Translator:
    areas = _count(_AREAS, 4)
    return Emulated(areas, _count(_SLICES, areas))


def _rbln() -> Translator:
    from ._runtime import Runtime

    return Runtime()


_KNOWN: dict[str, Callable[[], Translator]] = {"host": Host, "emulated": _emulated, "rbln": _rbln}


def choose(tensor: Any) -> Translator:
    """The translator for entries such as `tensor`."""
    from . import _runtime

    name = os.environ.get(VARIABLE, "").strip() or "auto"
    if name == "auto":
        if device_type(tensor) == "rbln" or _runtime.provided():
            name = "rbln"
        else:
            name = "emulated" if any(os.environ.get(n) for n in _AREAS) else "host"
            alone = [n for n in _SLICES if os.environ.get(n)]
            if name == "host" and alone:
                raise RblnError(f"{alone[0]}={os.environ[alone[0]]} without {_AREAS[0]}: set both")
    if name not in _KNOWN:
        raise RblnError(f"{VARIABLE}={name}: allowed are auto, {', '.join(_KNOWN)}")
    return _KNOWN[name]()


def emulation(agent: Any) -> list[Emulation]:
    """The emulated entries registered on `agent`, in order of registration. For tests."""
    from ._regions import registered

    return [place.keep for place in registered(agent) if isinstance(place.keep, Emulation)]
