"""As many MRs as models have, on up to four NICs: counted by the fake libibverbs itself, each
reached by a peer, none left. Prints a line for each number of rails; the times decide nothing.

Alone: PYTEST_ADDOPTS="-k scale" VERBOSE=1 make test PARTS=rbln
"""

import ctypes
import gc
import mmap
import os
import time
import uuid

import pytest
from fakes import TWINS, FakeTensor
from held import in_use, resident
from rig import wait

import nixl_rbln
from nixl._api import nixl_agent, nixl_agent_config
from nixl_rbln import register_kv_regions

BLOCKS, PIECE = 2, 4096  # blocks of a part (K or V), bytes of a block in one area
AREA = 2 * BLOCKS * PIECE
CYCLES = int(os.environ.get("KVRAIL_TEST_CYCLES", "2000"))  # before `clean` takes it away


class Nics:
    """What the fake has alive and has counted."""

    def __init__(self, path):
        self._get = ctypes.CDLL(path).fakeverbs_get
        self._get.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64)]

    def get(self, name):
        value = ctypes.c_uint64()
        assert self._get(name.encode(), ctypes.byref(value)) == 0, name
        return value.value

    def live(self):
        return {kind: self.get(f"live.{kind}") for kind in "qp mr cq channel td pd ctx".split()}

    def mrs(self):
        """Of each NIC: MRs that are alive, and the calls that made one."""
        names = [f"fake{nic}." for nic in range(2 * TWINS)]
        return [tuple(self.get(name + counter) for counter in (
            "live.mr", "calls.reg_dmabuf_mr", "calls.reg_mr")) for name in names]


@pytest.fixture
def nics(over_fake, fake):
    return Nics(fake["KVRAIL_IBVERBS"])


_mmap, _munmap = (getattr(ctypes.CDLL(None, use_errno=True), name) for name in ("mmap", "munmap"))
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Card:
    """Entries whose areas are memfds. Python's own mmap would keep a descriptor of each open."""

    def __init__(self, areas):
        self.count, self.memory = areas, {}

    def areas(self, ctx, key, nbytes):
        return [((at + 1) << 40 | key, at) for at in range(self.count)]

    def dmabuf(self, ctx, addr, nbytes):
        fd = os.memfd_create("area")
        os.ftruncate(fd, nbytes)
        self.forget(addr)
        self.memory[addr] = _mmap(
            None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        return fd

    def forget(self, addr):
        if addr in self.memory:
            assert _munmap(self.memory.pop(addr), AREA) == 0

    def empty(self):
        for addr in list(self.memory):
            self.forget(addr)


class Worker:
    """An agent over some NICs and its cache, of which nothing is registered yet."""

    def __init__(self, monkeypatch, nics, entries, areas):
        monkeypatch.setenv("KVRAIL_NICS", ",".join(f"fake{nic}" for nic in nics))
        self.card = Card(areas)
        self.entries = [FakeTensor((at + 1) << 20, areas * AREA, kind="rbln")
                        for at in range(entries)]
        self.agent = nixl_agent(str(uuid.uuid4()), nixl_agent_config(backends=[]))
        nixl_rbln.ensure_rbln_backend(self.agent, 0, stripe_width=0)

    def register(self):
        nixl_rbln.provide(self.card.areas, self.card.dmabuf)
        parts = [(entry, part * entry.nbytes // 2, entry.nbytes // 2 // BLOCKS)
                 for entry in self.entries for part in range(2)]
        self.xfer = register_kv_regions(self.agent, parts, 0, stripe_width=0)

    def deregister(self):
        self.agent.deregister_memory(self.xfer.reg_handle)

    def blocks(self):
        """Every block of every area, which is all of its memory."""
        rows = [(base + block * PIECE, PIECE, 0)
                for base in self.xfer.base_addrs for block in range(BLOCKS)]
        return self.agent.get_xfer_descs(rows, "VRAM")

    def held(self):
        return {addr: ctypes.string_at(at, AREA) for addr, at in self.card.memory.items()}


def milliseconds(call):
    started = time.perf_counter()
    result = call()
    return result, 1e3 * (time.perf_counter() - started)


def measured(nics, monkeypatch, entries, areas, rails):
    """Registers, lets a peer read all, deregisters. Bytes of metadata of all MRs, and a line."""
    gc.collect()  # agents of before, whose NICs would be counted
    near, far = range(rails), range(TWINS, TWINS + rails)
    source, sink = (Worker(monkeypatch, side, entries, areas) for side in (near, far))
    mrs, before, bare = entries * areas, nics.mrs(), len(source.agent.get_agent_metadata())
    _, registered = milliseconds(source.register)
    assert len(source.xfer.base_addrs) == 2 * mrs

    def more():
        return [tuple(now - was for now, was in zip(*pair)) for pair in zip(nics.mrs(), before)]

    # One for each entry and area on each NIC of the agent, and none elsewhere.
    assert more() == [(mrs, mrs, 0) if nic in near else (0, 0, 0) for nic in range(2 * TWINS)]
    metadata = source.agent.get_agent_metadata()

    sink.register()
    for at, memory in enumerate(source.card.memory.values()):
        ctypes.memmove(memory, at.to_bytes(8, "little") * (AREA // 8), AREA)
    name, added = milliseconds(lambda: sink.agent.add_remote_agent(metadata))
    handle = sink.agent.initialize_xfer("READ", sink.blocks(), source.blocks(), name, b"")
    sink.agent.transfer(handle)
    wait("READ", lambda: sink.agent.check_xfer_state(handle) == "DONE")
    assert sink.held() == source.held()
    sink.agent.release_xfer_handle(handle)

    # The connection has an MR of its own, which stays with it.
    before = nics.mrs()
    _, ended = milliseconds(source.deregister)
    assert more() == [(-mrs, 0, 0) if nic in near else (0, 0, 0) for nic in range(2 * TWINS)]
    sink.deregister()
    for side in (source, sink):
        side.card.empty()
    own = len(metadata) - bare
    return own, (f"{mrs} MRs ({entries} entries, {areas} areas), {rails} rail(s): registered in "
                 f"{registered:.1f} ms; metadata {len(metadata)} bytes, {own / mrs:g} an MR, known "
                 f"to a peer in {added:.1f} ms; deregistered in {ended:.1f} ms")


@pytest.mark.parametrize("entries, areas", [(28, 4), (80, 8)])
def test_one_mr_for_each_entry_and_area(nics, monkeypatch, capsys, entries, areas):
    sizes = {}
    for rails in (1, 2, TWINS):
        sizes[rails], line = measured(nics, monkeypatch, entries, areas, rails)
        with capsys.disabled():
            print(f"\n{line}", end="", flush=True)
    # A further rail adds its key and nothing else.
    for rails, size in sizes.items():
        assert size - sizes[1] == 4 * (rails - 1) * entries * areas, sizes


def test_cycles_leave_nothing(nics, monkeypatch, capsys):
    """KVRAIL_TEST_CYCLES times; what stays is below what one object a time would be."""
    gc.collect()
    worker = Worker(monkeypatch, range(2), 1, 2)
    bare, before = nics.mrs(), nics.live()
    part = max(CYCLES // 10, 100)

    def run():
        for _ in range(part):
            worker.register()
            worker.deregister()
        worker.card.empty()
        assert nics.live() == before
        return (*in_use(), resident())

    looks = [run() for _ in range(12)][1:]  # the first is to warm up
    # What an allocator or a table does once is in one of ten, a leak in each: the middle counts.
    grown = [sorted(now - was for was, now in zip(one, one[1:]))[5] for one in zip(*looks)]
    with capsys.disabled():
        print(f"\n{10 * part} cycles of 2 MRs on 2 rails; in each {part}: {grown[0]} bytes of "
              f"malloc, {grown[1]} objects, {grown[2]} files, {grown[3]} bytes in memory more",
              end="", flush=True)
    assert grown[0] < 16 * part and grown[1] < part // 2 and grown[3] < 1024 * part, looks
    assert len({one[2] for one in looks}) == 1, looks
    made = [(2 * 12 * part, 0) if nic < 2 else (0, 0) for nic in range(2 * TWINS)]
    assert [(dmabuf - was, host - old) for (_, dmabuf, host), (_, was, old) in zip(
        nics.mrs(), bare)] == made
