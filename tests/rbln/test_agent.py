"""Through the real plugin in real NIXL agents: a cache of emulated areas, block by block."""

import ctypes
import uuid

import numpy as np
import pytest
from fakes import FakeTensor
from held import in_use
from rig import wait

import nixl_rbln
from nixl._api import nixl_agent, nixl_agent_config
from nixl_rbln import RblnError, register_kv_regions

BLOCKS, BLOCK = 6, 4096  # blocks of a part (K or V), bytes of a whole block


class Entry(FakeTensor):
    """A layer's K and V, each BLOCKS blocks, in memory of this process."""

    def __init__(self, seed):
        self.memory = np.zeros(2 * BLOCKS * BLOCK, np.uint8)
        if seed is not None:
            self.memory[:] = np.random.default_rng(seed).integers(0, 256, self.memory.size)
        super().__init__(self.memory.ctypes.data, self.memory.nbytes)


class Worker:
    """One side, as the connector of vllm-rbln makes its calls."""

    def __init__(self, seed, backends=()):
        self.agent = nixl_agent(str(uuid.uuid4()), nixl_agent_config(backends=list(backends)))
        self.entries = [Entry(None if seed is None else (seed, layer)) for layer in range(2)]
        regions = [(entry, part * BLOCKS * BLOCK, BLOCK)
                   for entry in self.entries for part in range(2)]
        self.xfer = register_kv_regions(self.agent, regions, 0, rbln_ctx_ptr=4096)

    def descs(self, blocks):
        rows = [(base + block * length, length, 0)
                for base, length in zip(self.xfer.base_addrs, self.xfer.block_lens)
                for block in blocks]
        return self.agent.get_xfer_descs(rows, "VRAM")

    def area(self, index, block):
        at = self.xfer.base_addrs[index] + block * self.xfer.block_lens[index]
        return ctypes.string_at(at, self.xfer.block_lens[index])


@pytest.mark.parametrize("areas, slices", [(1, 1), (4, 4), (4, 2), (2, 1)])
@pytest.mark.parametrize("backends", [[], ["RBLN"]])
def test_read(monkeypatch, areas, slices, backends):
    """Every area of the asked blocks arrives, replicas too, and nothing else changes."""
    monkeypatch.setenv("NIXL_RBLN_AREAS", str(areas))
    monkeypatch.setenv("NIXL_RBLN_SLICES", str(slices))
    prefill, decode = Worker(1, backends), Worker(None, backends)
    assert len(decode.xfer.base_addrs) == 4 * areas
    theirs, ours = [4, 1, 3], [0, 5, 2]
    name = decode.agent.add_remote_agent(prefill.agent.get_agent_metadata())
    handle = decode.agent.initialize_xfer(
        "READ", decode.descs(ours), prefill.descs(theirs), name, b"done")
    decode.agent.transfer(handle)
    wait("READ", lambda: decode.agent.check_xfer_state(handle) == "DONE")
    wait("notification", prefill.agent.get_new_notifs)
    for index in range(4 * areas):
        for block in range(BLOCKS):
            want = bytes(decode.xfer.block_lens[0])
            if block in ours:
                want = prefill.area(index, theirs[ours.index(block)])
            assert decode.area(index, block) == want, (index, block)
    for entry in nixl_rbln.emulation(decode.agent):
        assert entry.differing() == []
    decode.agent.release_xfer_handle(handle)
    for worker in (decode, prefill):
        worker.agent.deregister_memory(worker.xfer.reg_handle)
    assert nixl_rbln.emulation(decode.agent) == []


def test_two_registrations_at_once_and_again(monkeypatch):
    monkeypatch.setenv("NIXL_RBLN_AREAS", "2")
    worker = Worker(3)
    with pytest.raises(RblnError, match="is registered already on agent"):
        register_kv_regions(worker.agent, [(worker.entries[0], 0, BLOCK)], 0)
    for _ in range(20):
        worker.agent.deregister_memory(worker.xfer.reg_handle)
        worker.xfer = register_kv_regions(worker.agent, [(worker.entries[0], 0, BLOCK)], 0)


def test_ten_thousand_registrations_leave_nothing(monkeypatch):
    """Eight MRs of two entries each time: what stays is below what one object a time would be."""
    monkeypatch.setenv("NIXL_RBLN_AREAS", "4")
    worker = Worker(5)

    def cycle():
        worker.agent.deregister_memory(worker.xfer.reg_handle)
        regions = [(entry, 0, BLOCK) for entry in worker.entries]
        worker.xfer = register_kv_regions(worker.agent, regions, 0, rbln_ctx_ptr=4096)

    for _ in range(500):
        cycle()
    before = in_use()
    for _ in range(10_000):
        cycle()
    grown = [after - was for was, after in zip(before, in_use())]
    assert grown[0] < 160_000 and grown[1] < 5_000 and grown[2] == 0, grown
    assert len(nixl_rbln.emulation(worker.agent)) == 2


def test_host_bounce():
    """ensure_rbln_backend, then NIXL's own registration by the backend's name."""
    agent = nixl_agent(str(uuid.uuid4()), nixl_agent_config(backends=[]))
    nixl_rbln.ensure_rbln_backend(agent, 0)
    nixl_rbln.ensure_rbln_backend(agent, 0)
    memory = np.zeros(1 << 16, np.uint8)
    listed = agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    agent.deregister_memory(agent.register_memory(listed, backends=["RBLN"]))


def test_what_nixl_swallows(monkeypatch, sysroot):
    monkeypatch.delenv("KVRAIL_TRANSPORT")
    agent = nixl_agent(str(uuid.uuid4()), nixl_agent_config(backends=[]))
    with pytest.raises(RblnError, match="no usable data-plane RoCE NIC on numa=1\n"):
        nixl_rbln.ensure_rbln_backend(agent, 1)
    with pytest.raises(RblnError, match="`4096` is not allowed; allowed: 1 .*or 0"):
        nixl_rbln.ensure_rbln_backend(agent, 1, stripe_width=4096)
    assert "RBLN" not in agent.backends


def test_device_memory_is_refused_with_a_sentence(monkeypatch):
    """Transport local copies host memory only; tests/rbln/test_device.py has the NICs."""
    agent = nixl_agent(str(uuid.uuid4()), nixl_agent_config(backends=[]))
    nixl_rbln.provide(lambda ctx, key, nbytes: [(key, 0)])
    with pytest.raises(RblnError, match="1 areas with 49152 bytes as VRAM of device 0") as caught:
        register_kv_regions(agent, [(Entry(1), 0, BLOCK)], 0)
    assert "the plugin's words: " in str(caught.value)
    assert "device memory with transport local" in str(caught.value)
    assert "see standard error" not in str(caught.value)
