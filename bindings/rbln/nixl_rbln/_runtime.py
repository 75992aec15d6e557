"""The translator for real RBLN memory: asks the runtime that the process has loaded already.

The runtime's header is not public, so two functions have to be supplied by somebody who has it:
the device addresses of an entry's areas, and a dma-buf for an area. Either in Python, by `provide`,
from a module that NIXL_RBLN_HOOK names; or in C, from a library that NIXL_RBLN_HOOK names by its
path (bindings/rbln/README.md has both in ten lines).
"""

from __future__ import annotations

import ctypes
import importlib
import os
from typing import Callable, Iterable, Optional

from ._errors import RblnError
from ._places import Area, Entry, Placement

HOOK = "NIXL_RBLN_HOOK"
MOST_AREAS = 64
PAGE = os.sysconf("SC_PAGE_SIZE")
# Where device memory is known to be exported. The names are public, their arguments are not.
SYMBOLS = ("rblnExportMemoryByDva", "rblnExportMemoryByDvaNoCbForRCCL", "rblnImportBoMemory")

# (context or 0, key, bytes of the entry) -> (device address, slice id) of each area; slices are
# numbered from 0, in order, and replicas are adjacent
AreasOf = Callable[[int, int, int], Iterable["tuple[int, int]"]]
# (context, device address of an area, its bytes) -> a new file descriptor, which becomes ours
DmabufOf = Callable[[int, int, int], int]

_given: Optional[tuple[AreasOf, Optional[DmabufOf]]] = None


def provide(areas: AreasOf, dmabuf: Optional[DmabufOf] = None) -> None:
    """Supplies the functions that know the device's memory; the last call counts.

    areas(ctx, key, nbytes): pairs (device address, slice id), one an area. Slices are numbered from
    0, in order, and replicas are adjacent. ctx is 0 where the caller of this package gave none.
    dmabuf(ctx, address, nbytes): a new fd of a dma-buf of the area; it is closed here, once.
    Without dmabuf the addresses go to the NIC as they are (a peer-memory module resolves them).
    What they raise goes to the caller of register_kv_regions.
    """
    global _given
    for name, function in (("areas", areas), ("dmabuf", dmabuf)):
        if not callable(function) and (function is not None or name == "areas"):
            raise RblnError(f"provide: {name}={function!r}: allowed is a function")
    _given = (areas, dmabuf)


def provided() -> bool:
    """Whether anybody supplied the functions, or named who will."""
    return _given is not None or bool(os.environ.get(HOOK))


def _of_library(path: str) -> tuple[AreasOf, Optional[DmabufOf]]:
    try:
        lib = ctypes.CDLL(path)
        find = lib.nixl_rbln_areas
    except (OSError, AttributeError) as error:
        raise RblnError(f"{HOOK}={path}: {error}; it must export nixl_rbln_areas") from error
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32

    def areas(ctx: int, key: int, nbytes: int) -> list[tuple[int, int]]:
        addr, piece = (u64 * MOST_AREAS)(), (u32 * MOST_AREAS)()
        count = find(u64(ctx), u64(key), u64(nbytes), u32(MOST_AREAS), addr, piece)
        if not 0 < count <= MOST_AREAS:
            raise RblnError(
                f"nixl_rbln_areas of {path} answered {count} for the entry at {key:#x} of "
                f"{nbytes} bytes; allowed are 1 to {MOST_AREAS} areas"
            )
        return [(addr[at], piece[at]) for at in range(count)]

    export = getattr(lib, "nixl_rbln_dmabuf", None)
    if export is None:
        return areas, None
    return areas, lambda ctx, addr, nbytes: int(export(u64(ctx), u64(addr), u64(nbytes)))


def _functions() -> tuple[AreasOf, Optional[DmabufOf]]:
    hook = os.environ.get(HOOK, "").strip()
    if _given is None and hook:
        if "/" in hook:
            return _of_library(hook)
        try:
            importlib.import_module(hook)
        except ImportError as error:
            raise RblnError(f"{HOOK}={hook}: {error}; allowed is a module that can be imported, "
                            "or the path of a library, with a slash in it") from error
        except Exception as error:
            raise RblnError(f"{HOOK}={hook}: importing the module failed: {error!r}") from error
        if _given is None:
            raise RblnError(f"{HOOK}={hook}: the module did not call nixl_rbln.provide(...)")
    if _given is not None:
        return _given
    process = ctypes.CDLL(None)
    seen = [f"{name} ({'found' if hasattr(process, name) else 'not found'})" for name in SYMBOLS]
    raise RblnError(
        "the address of RBLN device memory is not known here: looked in this process for "
        f"{', '.join(seen)}; their arguments are not public. Supply two functions with "
        f"nixl_rbln.provide(...), or name a module or library with {HOOK}"
    )


def _close(fds: Iterable[Optional[int]]) -> None:
    for fd in fds:
        if fd is not None:
            try:
                os.close(fd)
            except OSError:
                pass  # one that somebody else closed: nothing is left to do


def _pairs(areas: AreasOf, ctx: int, entry: Entry) -> list[tuple[int, int]]:
    got = areas(ctx, entry.key, entry.nbytes)
    try:
        return [(int(addr.__index__()), int(piece.__index__())) for addr, piece in got]
    except (AttributeError, TypeError, ValueError):
        raise RblnError(
            f"the provider's areas answered {got!r:.200} for the entry at {entry.key:#x}: allowed "
            "are pairs of whole numbers (device address, slice id)"
        ) from None


def _exported(dmabuf: DmabufOf, ctx: int, addr: int, nbytes: int) -> int:
    if addr % PAGE:
        raise RblnError(
            f"the area at {addr:#x} does not begin at a page ({PAGE} bytes), as its dma-buf does; "
            "the provider must give the beginning of the allocation"
        )
    fd = dmabuf(ctx, addr, nbytes)
    what = f"the dma-buf of the area at {addr:#x}, {nbytes} bytes: "
    if isinstance(fd, bool) or not isinstance(fd, int) or fd < 0:
        raise RblnError(f"{what}the provider answered {fd!r}; allowed is a file descriptor. "
                        "The runtime exports only whole allocations that are on the device")
    try:
        os.fstat(fd)
    except OSError as error:
        raise RblnError(f"{what}fd {fd} is not open: {error}; it must stay open") from error
    return fd


class Runtime:
    """RBLN device memory, by the functions that were supplied."""

    name = "rbln"

    def __init__(self) -> None:
        self._areas, self._dmabuf = _functions()

    def place(self, entry: Entry, device_id: int, ctx: Optional[int]) -> Placement:
        pairs = _pairs(self._areas, ctx or 0, entry)
        slices = len({piece for _, piece in pairs})
        if not pairs or entry.nbytes % slices != 0:
            raise RblnError(
                f"the entry at {entry.key:#x} has {entry.nbytes} bytes, which {slices} slices "
                f"in {len(pairs)} areas do not divide"
            )
        length = entry.nbytes // slices
        areas: list[Area] = []
        try:
            for addr, piece in pairs:
                if self._dmabuf is None:
                    areas.append(Area(addr, length, piece, "kvrail:mem=device"))
                    continue
                fd = _exported(self._dmabuf, ctx or 0, addr, length)
                if any(area.fd == fd for area in areas):
                    raise RblnError(f"the provider gave fd {fd} for two areas: allowed is a new "
                                    "one for each, as each is closed")
                areas.append(Area(addr, length, piece, f"kvrail:mem=dmabuf;fd={fd}", fd))
        except BaseException:
            _close(area.fd for area in areas)
            raise
        return Placement(tuple(areas), slices)


def close_all(places: Iterable[Placement]) -> None:
    """Closes the dma-bufs of placements, once: their registrations hold references of their own."""
    for place in places:
        _close(area.fd for area in place.areas)
