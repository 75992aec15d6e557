"""Registers the KV entries of a worker and says where their blocks are."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from typing import Any, Iterable, NamedTuple, Optional, Sequence

from . import _abi
from ._backend import BACKEND, ensure_rbln_backend, whole
from ._errors import RblnError, log
from ._places import HOST, Area, Entry, Placement, Translator, choose

_STATE = "_nixl_rbln"
_END = 1 << 64


@dataclass(frozen=True)
class KvRegions:
    """Where the blocks are. The lists have one item for each (region, area), areas innermost:
    index = region * n_shards + area. Replicas of a slice are neighbours.

    base_addrs: NIXL address of block 0. block_lens: bytes of a block in one area, and the distance
    to the next block. slice_ids: which piece the area holds. reg_handle: for deregister_memory.
    """

    base_addrs: list[int]
    block_lens: list[int]
    slice_ids: list[int]
    n_shards: int
    slices: int
    reg_handle: Any


class _Region(NamedTuple):
    """Blocks of `block_len` bytes from `offset` of an entry on."""

    entry: Entry
    offset: int
    block_len: int


@dataclass
class _Record:
    """One registration. Keeps the areas' memory until NIXL has let go of it."""

    handle: Any
    places: dict[tuple[int, int], Placement]


def _records(agent: Any) -> list[_Record]:
    return getattr(agent, _STATE, [])


def registered(agent: Any) -> list[Placement]:
    """What is registered on `agent` now, in order."""
    return [place for record in _records(agent) for place in record.places.values()]


def _keep(agent: Any, record: _Record) -> None:
    """Hangs the record on the agent, whose end it must outlive, and has deregister_memory drop it.

    The connector deregisters by NIXL's own method, so that is where the end is seen.
    """
    if hasattr(agent, _STATE):
        getattr(agent, _STATE).append(record)
        return
    setattr(agent, _STATE, [record])
    before = vars(agent).get("deregister_memory")  # somebody's wrapper
    # A strong reference would make a cycle, and the agent would end whenever garbage is collected.
    weak = weakref.ref(agent)

    def deregister_memory(dereg_list: Any, *args: Any, **kwargs: Any) -> Any:
        me: Any = weak()
        call = before or type(me).deregister_memory.__get__(me)
        result = call(dereg_list, *args, **kwargs)
        records = getattr(me, _STATE)
        records[:] = [one for one in records if one.handle is not dereg_list]
        return result

    agent.deregister_memory = deregister_memory


def _entry(tensor: Any, index: int, device_id: int) -> Entry:
    try:
        if not tensor.is_contiguous():
            raise RblnError(
                f"region {index}: the entry of shape {tuple(tensor.shape)} with strides "
                f"{tuple(tensor.stride())} is not contiguous; register the whole layer tensor"
            )
        key, nbytes = int(tensor.data_ptr()), int(tensor.numel()) * int(tensor.element_size())
        device = int(tensor.get_device()) if hasattr(tensor, "get_device") else -1
    except (AttributeError, TypeError, ValueError) as error:
        raise RblnError(
            f"region {index}: a {type(tensor).__name__} is no tensor: {error}"
        ) from error
    if nbytes == 0:
        raise RblnError(f"region {index}: the entry at {key:#x} is empty (0 bytes)")
    if device >= 0 and device != device_id:  # -1: host memory
        raise RblnError(
            f"region {index}: the entry at {key:#x} is on device {device}, but device_id is "
            f"{device_id}; one registration is for one device"
        )
    return Entry(tensor, key, nbytes)


def _region(item: Any, index: int, device_id: int) -> _Region:
    try:
        tensor, offset, block_len = item
    except (TypeError, ValueError):
        raise RblnError(
            f"region {index} is {item!r:.200}: allowed is (entry tensor, byte offset, block bytes)"
        ) from None
    entry = _entry(tensor, index, device_id)
    offset = whole(f"region {index}: offset", offset)
    block_len = whole(f"region {index}: full_block_len", block_len, 1)
    if offset + block_len > entry.nbytes:
        raise RblnError(
            f"region {index}: offset {offset} with a block of {block_len} bytes is outside its "
            f"entry at {entry.key:#x}, which has {entry.nbytes} bytes"
        )
    return _Region(entry, offset, block_len)


def _apart(spans: Iterable[tuple[int, int]], what: str) -> None:
    """Refuses spans (address, bytes) that share a byte."""
    last: Optional[tuple[int, int]] = None
    for addr, nbytes in sorted(spans):
        if last is not None and addr < last[0] + last[1]:
            raise RblnError(
                f"overlapping {what}: {last[0]:#x} with {last[1]} bytes and {addr:#x} with "
                f"{nbytes} bytes share memory; each byte may be registered once"
            )
        last = (addr, nbytes)


def _entries(agent: Any, regions: Sequence[_Region]) -> dict[tuple[int, int], Entry]:
    """Each entry once, in order of first use: K and V of one entry share it."""
    found: dict[tuple[int, int], Entry] = {}
    for region in regions:
        found.setdefault((region.entry.key, region.entry.nbytes), region.entry)
    old = [span for record in _records(agent) for span in record.places]
    for key, nbytes in found:
        if (key, nbytes) in old:
            raise RblnError(
                f"the entry at {key:#x} with {nbytes} bytes is registered already on agent "
                f"`{getattr(agent, 'name', '?')}`; call deregister_memory first"
            )
    _apart([*found, *old], "entries")
    return found


def _check_place(place: Placement, entry: Entry, who: str) -> None:
    areas, slices = len(place.areas), place.slices
    said = f"provider {who}, the entry at {entry.key:#x}: "
    if areas == 0 or slices <= 0 or areas % slices != 0:
        raise RblnError(f"{said}{slices} slices do not divide {areas} areas")
    ids = [area.slice_id for area in place.areas]
    wanted = [at // (areas // slices) for at in range(areas)]
    if ids != wanted:
        raise RblnError(f"{said}slice ids are {ids}; slices are numbered from 0, in order, and "
                        f"replicas are adjacent: {wanted}")
    for area in place.areas:
        if area.length * slices != entry.nbytes:
            raise RblnError(
                f"{said}the area at {area.addr:#x} has {area.length} bytes; {slices} slices of "
                f"{entry.nbytes} bytes have {entry.nbytes / slices:g} each"
            )
        if not 0 <= area.addr < _END - area.length:
            raise RblnError(f"{said}address {area.addr:#x} is outside 64 bits")


def _place_all(
    entries: dict[tuple[int, int], Entry], translator: Translator, device_id: int,
    ctx: Optional[int], places: dict[tuple[int, int], Placement],
) -> tuple[int, int]:
    """Fills `places`, which the caller releases after an error too. Returns areas and slices."""
    shape: Optional[tuple[int, int]] = None
    for span, entry in entries.items():
        place = places[span] = translator.place(entry, device_id, ctx)
        _check_place(place, entry, translator.name)
        now = (len(place.areas), place.slices)
        if shape is not None and now != shape:
            raise RblnError(
                f"the entry at {entry.key:#x} has {now[0]} areas and {now[1]} slices, others have "
                f"{shape[0]} and {shape[1]}; all entries of a worker must agree"
            )
        shape = now
    assert shape is not None  # register_kv_regions refuses an empty list
    return shape


def _divided(value: int, slices: int, what: str, index: int, areas: int) -> int:
    if value % slices != 0:
        raise RblnError(
            f"region {index}: {what} {value} is not divided by {slices} slices ({areas} areas)"
        )
    return value // slices


def _addresses(
    regions: Sequence[_Region], places: dict[tuple[int, int], Placement], slices: int
) -> tuple[list[int], list[int], list[int]]:
    base_addrs: list[int] = []
    block_lens: list[int] = []
    slice_ids: list[int] = []
    for index, region in enumerate(regions):
        areas: tuple[Area, ...] = places[(region.entry.key, region.entry.nbytes)].areas
        offset = _divided(region.offset, slices, "offset", index, len(areas))
        length = _divided(region.block_len, slices, "full_block_len", index, len(areas))
        for area in areas:
            base_addrs.append(int(area.addr + offset))
            block_lens.append(int(length))
            slice_ids.append(int(area.slice_id))
    return base_addrs, block_lens, slice_ids


def _register(agent: Any, areas: Sequence[Area], device_id: int, mem: str) -> Any:
    descs = [(area.addr, area.length, device_id, area.meta) for area in areas]
    abi = _abi.load(agent)
    abi.forget()
    try:
        listed = agent.get_reg_descs(descs, mem)
        return agent.register_memory(listed, backends=[BACKEND])
    except Exception as error:
        total = sum(area.length for area in areas)
        raise RblnError(
            f"NIXL could not register {len(areas)} areas with {total} bytes as {mem} of device "
            f"{device_id}: {error}; the plugin's words: {abi.last_error() or 'see standard error'}"
        ) from error


def register_kv_regions(
    agent: Any,
    regions: Iterable["tuple[Any, int, int]"],
    device_id: int,
    *,
    mem: str = "VRAM",
    rbln_ctx_ptr: Optional[int] = None,
    stripe_width: Optional[int] = None,
) -> KvRegions:
    """Registers KV entries with backend RBLN, one NIXL registration for each entry and area.

    regions: (entry tensor, byte offset in the entry, bytes of a whole block), in the order of the
    lists of the result. K and V of one entry share its registrations. All or nothing.
    mem: NIXL's memory type, VRAM or DRAM. The other arguments are those of `ensure_rbln_backend`.
    The memory stays the caller's, until `agent.deregister_memory(result.reg_handle)`.

    Raises RblnError, as `ensure_rbln_backend` does, and for an offset outside its entry, a length
    that the slices do not divide, a tensor that is not contiguous or on another device, overlapping
    entries, an entry that is registered already, and what the provider refuses.
    """
    from ._runtime import close_all

    started = time.perf_counter()
    device_id = whole("device_id", device_id)
    if mem not in ("VRAM", "DRAM"):
        raise RblnError(f"mem={mem!r}: allowed are VRAM and DRAM")
    try:
        items = list(regions)
    except TypeError:
        raise RblnError(f"regions={regions!r:.200}: allowed is a list of regions") from None
    parsed = [_region(item, index, device_id) for index, item in enumerate(items)]
    if not parsed:
        raise RblnError("regions is empty: there is no KV cache to register")
    entries = _entries(agent, parsed)
    ensure_rbln_backend(
        agent, device_id, stripe_width=stripe_width, rbln_ctx_ptr=rbln_ctx_ptr)
    translator = choose(parsed[0].entry.tensor)
    places: dict[tuple[int, int], Placement] = {}
    try:
        n_shards, slices = _place_all(entries, translator, device_id, rbln_ctx_ptr, places)
        lists = _addresses(parsed, places, slices)
        areas = [area for place in places.values() for area in place.areas]
        if mem == "DRAM" and any(area.meta != HOST for area in areas):
            raise RblnError(
                f"mem=DRAM, but provider {translator.name} says that the entry is on a device: "
                "pass mem=VRAM, or bounce in host memory (kv_buffer_device=cpu)"
            )
        old = [(a.addr, a.length) for place in registered(agent) for a in place.areas]
        _apart([*old, *((area.addr, area.length) for area in areas)], "areas")
        handle = _register(agent, areas, device_id, mem)
    finally:
        close_all(places.values())
    _keep(agent, _Record(handle, places))
    log.info(
        "registered %d MRs for %d regions of %d entries: %d areas, %d slices, %d bytes, "
        "provider %s, %s of device %d, %.0f ms",
        len(areas), len(parsed), len(entries), n_shards, slices,
        sum(area.length for area in areas), translator.name, mem, device_id,
        1e3 * (time.perf_counter() - started),
    )
    return KvRegions(*lists, n_shards, slices, handle)
