"""Provider rbln up to the NIC: two agents over the fake libibverbs, where memfds serve as the
dma-bufs of a card's areas. The plugin takes each file descriptor and nixl_rbln closes it once."""

import ctypes
import mmap
import os
import subprocess
import uuid
from pathlib import Path

import pytest
from fakes import TWINS, FakeTensor
from held import files
from rig import wait

import nixl_rbln
from nixl._api import nixl_agent, nixl_agent_config
from nixl_rbln import RblnError, register_kv_regions

FAKE_CUDA = Path(__file__).resolve().parents[1] / "fakecuda" / "run.sh"
NICS = (0, TWINS)
BLOCKS, BLOCK, AREAS, SLICES = 6, 16384, 4, 2
PIECE = 2 * BLOCKS * BLOCK // SLICES  # bytes of an area: its slice of K and of V


class Card:
    """Device memory: an entry's areas, each behind a dma-buf, which only this test can map."""

    def __init__(self):
        self.memory, self.made, self.size = {}, [], PIECE

    def areas(self, ctx, key, nbytes):
        assert (ctx, nbytes) == (99, 2 * BLOCKS * BLOCK)
        return [((at + 1) << 40 | key, at * SLICES // AREAS) for at in range(AREAS)]

    def dmabuf(self, ctx, addr, nbytes):
        fd = os.memfd_create("area")
        os.ftruncate(fd, self.size)
        self.memory[addr] = mmap.mmap(fd, self.size)
        self.made.append(fd)
        return fd


class Worker:
    def __init__(self, monkeypatch, nic, seed):
        monkeypatch.setenv("KVRAIL_NICS", f"fake{nic}")
        self.card, self.entry = Card(), FakeTensor((nic + 1) << 20, 2 * BLOCKS * BLOCK, kind="rbln")
        nixl_rbln.provide(self.card.areas, self.card.dmabuf)
        self.agent = nixl_agent(str(uuid.uuid4()), nixl_agent_config(backends=[]))
        nixl_rbln.ensure_rbln_backend(self.agent, 0, rbln_ctx_ptr=99)
        self.xfer = self.register()
        for at, memory in enumerate(self.card.memory.values()):
            memory[:] = os.urandom(PIECE) if seed else bytes([at + 1]) * PIECE

    def register(self):
        parts = [(self.entry, part * BLOCKS * BLOCK, BLOCK) for part in range(2)]
        return register_kv_regions(self.agent, parts, 0, rbln_ctx_ptr=99)

    def descs(self, blocks):
        rows = [(base + block * length, length, 0)
                for base, length in zip(self.xfer.base_addrs, self.xfer.block_lens)
                for block in blocks]
        return self.agent.get_xfer_descs(rows, "VRAM")

    def held(self):
        return [bytes(memory) for memory in self.card.memory.values()]


def test_dmabufs_reach_the_nic_and_are_closed_once(over_fake, monkeypatch):
    closed, close = [], os.close
    monkeypatch.setattr("nixl_rbln._runtime.os.close", lambda fd: (closed.append(fd), close(fd)))
    prefill = Worker(monkeypatch, NICS[0], seed=True)
    assert len(prefill.card.made) == AREAS and closed == prefill.card.made
    decode = Worker(monkeypatch, NICS[1], seed=False)
    assert closed == prefill.card.made + decode.card.made

    theirs, ours = [4, 1, 3], [0, 5, 2]
    was, source = decode.held(), prefill.held()
    name = decode.agent.add_remote_agent(prefill.agent.get_agent_metadata())
    handle = decode.agent.initialize_xfer(
        "READ", decode.descs(ours), prefill.descs(theirs), name, b"done")
    decode.agent.transfer(handle)
    wait("READ", lambda: decode.agent.check_xfer_state(handle) == "DONE")
    piece = BLOCK // SLICES
    for at in range(AREAS):
        want = bytearray(was[at])
        for part in range(2):
            for here, there in zip(ours, theirs):
                to, of = ((part * BLOCKS + block) * piece for block in (here, there))
                want[to:to + piece] = source[at][of:of + piece]
        assert decode.held()[at] == want, at
    assert prefill.held() == source
    decode.agent.release_xfer_handle(handle)

    # Again and again: nothing stays open. A test's own mappings of memfds hold no descriptor less.
    decode.agent.deregister_memory(decode.xfer.reg_handle)
    before = None
    for _ in range(20):
        decode.card.memory.clear()
        decode.xfer = decode.register()
        decode.agent.deregister_memory(decode.xfer.reg_handle)
        before = before or files()
        assert files() == before

    # A buffer that is shorter than its area: a sentence, and each descriptor closed once.
    decode.card.size, closed[:], decode.card.made = PIECE - 4096, [], []
    decode.card.memory.clear()
    with pytest.raises(RblnError) as caught:
        decode.register()
    said = str(caught.value)
    assert f"it has {PIECE - 4096} bytes, and offset 0x0 and {PIECE} bytes end at {PIECE}" in said
    assert f"on fake{NICS[1]}:1" in said and closed == decode.card.made and len(closed) == AREAS
    prefill.agent.deregister_memory(prefill.xfer.reg_handle)


BYTES = 1 << 20


@pytest.fixture(scope="module")
def cuda(tmp_path_factory):
    """A CUDA driver without a GPU, loaded by this process as PyTorch would load the real one."""
    out = tmp_path_factory.mktemp("fakecuda")
    subprocess.run(["sh", FAKE_CUDA, out, out], check=True,
                   env={**os.environ, "BUILD": "1"})
    library = ctypes.CDLL(str(out / "libfakecuda.so"))
    library.fakecuda_alloc.argtypes, library.fakecuda_alloc.restype = (
        [ctypes.c_int, ctypes.c_uint64], ctypes.c_uint64)
    library.fakecuda_host.argtypes, library.fakecuda_host.restype = (
        [ctypes.c_uint64], ctypes.c_void_p)
    library.fakecuda_get.restype = ctypes.c_int64
    return library


class Gpu:
    """An agent and CUDA memory, registered as stock vLLM does: VRAM, and no more words."""

    def __init__(self, cuda, monkeypatch, nic, **params):
        monkeypatch.setenv("KVRAIL_NICS", f"fake{nic}")
        self.agent = nixl_agent(str(uuid.uuid4()), nixl_agent_config(backends=[]))
        self.agent.create_backend("RBLN", params)
        self.at = cuda.fakecuda_alloc(0, BYTES)
        self.cuda = cuda

    def register(self, at=None, meta=""):
        descs = self.agent.get_reg_descs([(at or self.at, BYTES, 0, meta)], "VRAM")
        return self.agent.register_memory(descs)

    def descs(self, offsets):
        return self.agent.get_xfer_descs([(self.at + o, 1000, 0) for o in offsets], "VRAM")

    def write(self, data):
        ctypes.memmove(self.cuda.fakecuda_host(self.at), data, BYTES)

    def held(self):
        return ctypes.string_at(self.cuda.fakecuda_host(self.at), BYTES)


def test_vram_is_cudas_where_its_driver_is_loaded(over_fake, cuda, monkeypatch, capfd):
    monkeypatch.setenv("KVRAIL_LIBCUDA", cuda._name)
    near, far = (Gpu(cuda, monkeypatch, nic) for nic in NICS)
    regs = [side.register() for side in (near, far)]
    assert cuda.fakecuda_get(b"exports") == 2
    source = os.urandom(BYTES)
    near.write(bytes(BYTES))
    far.write(source)
    name = near.agent.add_remote_agent(far.agent.get_agent_metadata())
    here, there = [5, 40000, BYTES - 1000], [70001, 0, 4090]
    handle = near.agent.initialize_xfer("READ", near.descs(here), far.descs(there), name, b"")
    near.agent.transfer(handle)
    wait("READ", lambda: near.agent.check_xfer_state(handle) == "DONE")
    want = bytearray(BYTES)
    for to, of in zip(here, there):
        want[to:to + 1000] = source[of:of + 1000]
    assert near.held() == want and far.held() == source
    near.agent.release_xfer_handle(handle)

    near.agent.deregister_memory(regs[0])
    before = files()
    for _ in range(20):
        near.agent.deregister_memory(near.register(meta="kvrail:mem=cuda"))
        assert files() == before

    # An address that is nobody's: both ways are told. With the parameter there is one.
    capfd.readouterr()
    nowhere = 1 << 45
    with pytest.raises(Exception):
        near.register(nowhere)
    said = capfd.readouterr().err
    assert "as CUDA memory: " in said and "no CUDA memory of this process" in said
    assert "ibv_reg_mr" in said or "peer-memory" in said
    exports = cuda.fakecuda_get(b"exports")
    for devmem, words in (("cuda", "no CUDA memory of this process"), ("none", "peer-memory")):
        side = Gpu(cuda, monkeypatch, 0, devmem=devmem)
        with pytest.raises(Exception):
            side.register(nowhere)
        assert words in capfd.readouterr().err
        with pytest.raises(Exception):
            side.register(meta="kvrail:mem=gpu")
        assert "known: host, device, dmabuf, cuda" in capfd.readouterr().err
    assert cuda.fakecuda_get(b"exports") == exports
    far.agent.deregister_memory(regs[1])
