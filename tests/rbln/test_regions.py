"""register_kv_regions: order, lengths, sharing of registrations, and every refusal."""

import logging

import pytest
from fakes import FakeAgent, FakeTensor

import nixl_rbln
from nixl_rbln import Area, Placement, RblnError, register_kv_regions


class Device:
    """A translator of a device: area c of an entry at key k is at (c + 1) << 40 | k."""

    name = "test"

    def __init__(self, areas, slices):
        self.areas, self.slices = areas, slices

    def place(self, entry, device_id, ctx):
        replicas = self.areas // self.slices
        return Placement(tuple(
            Area((at + 1) << 40 | entry.key, entry.nbytes // self.slices, at // replicas, "m")
            for at in range(self.areas)), self.slices)


@pytest.fixture
def device(monkeypatch):
    def use(areas, slices, make=Device):
        monkeypatch.setattr("nixl_rbln._regions.choose", lambda tensor: make(areas, slices))

    return use


def refused(agent, regions, device_id=0, **kwargs):
    with pytest.raises(RblnError) as caught:
        register_kv_regions(agent, regions, device_id, **kwargs)
    assert agent.registered == []
    return str(caught.value)


def entry(number=0, nbytes=4096, **kwargs):
    return FakeTensor(0x10000 * (number + 1), nbytes, **kwargs)


@pytest.mark.parametrize("areas, slices", [(1, 1), (2, 2), (2, 1), (4, 4), (4, 2), (8, 2), (8, 8)])
def test_split_layout(agent, device, areas, slices):
    """Two regions an entry: K at 0, V in the middle; one registration for each entry and area."""
    device(areas, slices)
    regions = [(entry(layer), part * 2048, 512) for layer in range(3) for part in range(2)]
    got = register_kv_regions(agent, regions, 0)
    want_addrs, want_ids = [], []
    for layer in range(3):
        for part in range(2):
            for area in range(areas):
                base = (area + 1) << 40 | 0x10000 * (layer + 1)
                want_addrs.append(base + part * 2048 // slices)
                want_ids.append(area // (areas // slices))
    assert got.base_addrs == want_addrs and got.slice_ids == want_ids
    assert got.block_lens == [512 // slices] * (6 * areas)
    assert (got.n_shards, got.slices) == (areas, slices)
    for values in (got.base_addrs, got.block_lens, got.slice_ids):
        assert type(values) is list and all(type(x) is int for x in values)
    (listed, backends), = agent.registered
    assert backends == ["RBLN"] and listed.mem == "VRAM" and got.reg_handle is listed
    assert listed.descs == [
        ((area + 1) << 40 | 0x10000 * (layer + 1), 4096 // slices, 0, "m")
        for layer in range(3) for area in range(areas)]


def test_packed_layout_and_log(agent, device, caplog):
    caplog.set_level(logging.INFO, "nixl_rbln")
    device(4, 2)
    got = register_kv_regions(agent, [(entry(0), 0, 1024), (entry(1), 0, 1024)], 0)
    assert len(got.base_addrs) == 8 and got.block_lens == [512] * 8
    assert "registered 8 MRs for 2 regions of 2 entries" in caplog.text
    assert "4 areas, 2 slices, 16384 bytes" in caplog.text


def test_blocks_of_different_length(agent, device):
    device(2, 2)
    got = register_kv_regions(agent, [(entry(0), 0, 1024), (entry(1), 0, 512)], 0)
    assert got.block_lens == [512, 512, 256, 256]


def test_creates_the_backend_with_what_it_was_told(agent, device):
    device(1, 1)
    register_kv_regions(agent, [(entry(), 0, 64)], 0, rbln_ctx_ptr=77, stripe_width=1)
    assert agent.created[0][1]["rbln_ctx_ptr"] == "77"
    assert agent.created[0][1]["stripe_width"] == "1"


def test_backend_that_was_there(device):
    device(1, 1)
    agent = FakeAgent(["RBLN"])
    register_kv_regions(agent, [(entry(), 0, 64)], 0, rbln_ctx_ptr=77)
    assert agent.created == [] and len(agent.registered) == 1


def test_dram(agent, device):
    device(1, 1, fixed(Area(0x10000, 4096, 0, "kvrail:mem=host"), slices=1))
    register_kv_regions(agent, [(entry(), 0, 64)], 0, mem="DRAM")
    assert agent.registered[0][0].mem == "DRAM"


class Number:
    """An integer of another library."""

    def __index__(self):
        return 64


def test_foreign_integers_become_plain(agent, device):
    device(1, 1)
    got = register_kv_regions(agent, [(entry(), 0, Number())], 0)
    assert got.block_lens == [64] and type(got.block_lens[0]) is int


@pytest.mark.parametrize("regions, words", [
    ([], "regions is empty"),
    ([(entry(), 0)], "allowed is (entry tensor, byte offset, block bytes)"),
    ([("text", 0, 64)], "a str is no tensor"),
    ([(entry(contiguous=False), 0, 64)], "with strides (2,) is not contiguous"),
    ([(entry(nbytes=0), 0, 64)], "is empty (0 bytes)"),
    ([(entry(), 4096, 64)], "offset 4096 with a block of 64 bytes is outside its entry"),
    ([(entry(), 4033, 64)], "offset 4033 with a block of 64 bytes is outside"),
    ([(entry(), -2, 64)], "region 0: offset=-2: allowed is 0 or more"),
    ([(entry(), 0, 0)], "full_block_len=0: allowed is 1 or more"),
    ([(entry(), 0, 64.0)], "full_block_len=64.0 is a float"),
    ([(entry(device=3), 0, 64)], "is on device 3, but device_id is 0"),
    ([(entry(0), 0, 64), (FakeTensor(0x10800, 4096), 0, 64)], "overlapping entries: 0x10000"),
    ([(entry(0), 0, 64), (FakeTensor(0x10000, 2048), 0, 64)], "overlapping entries: 0x10000"),
    ([(entry(0), 0, 64), (FakeTensor(0x10400, 64), 0, 64)], "overlapping entries"),
])
def test_refusals(agent, regions, words):
    assert words in refused(agent, regions)
    assert agent.created == []


def test_neighbours_do_not_overlap(agent, device):
    device(1, 1)
    register_kv_regions(agent, [(FakeTensor(0x10000, 64), 0, 64),
                                (FakeTensor(0x10040, 64), 0, 64)], 0)


def test_mem_and_device(agent):
    assert "mem='FILE': allowed are VRAM and DRAM" in refused(agent, [(entry(), 0, 64)], mem="FILE")
    assert "device_id=-1" in refused(agent, [(entry(), 0, 64)], -1)
    assert "`3`" in refused(agent, [(entry(), 0, 64)], stripe_width=3)
    assert agent.created == []


@pytest.mark.parametrize("offset, length, words", [
    (0, 100, "full_block_len 100 is not divided by 8 slices (8 areas)"),
    (100, 64, "offset 100 is not divided by 8 slices (8 areas)"),
])
def test_not_divided(agent, device, offset, length, words):
    device(8, 8)
    assert words in refused(agent, [(entry(), offset, length)])


def fixed(*areas, slices=1):
    class Fixed(Device):
        def place(self, entry, device_id, ctx):
            return Placement(tuple(areas), slices)

    return Fixed


@pytest.mark.parametrize("make, words", [
    (fixed(), "1 slices do not divide 0 areas"),
    (fixed(*[Area(at << 20, 2048, 0, "") for at in range(3)], slices=2),
     "2 slices do not divide 3"),
    (fixed(Area(0, 2048, 1, ""), Area(1 << 20, 2048, 0, ""), slices=2),
     "replicas are adjacent"),
    (fixed(Area(0, 4096, 0, ""), Area(1 << 20, 2048, 1, ""), slices=2), "2048 each"),
    (fixed(Area(2**64 - 4096, 4096, 0, "")), "outside 64 bits"),
    (fixed(Area(0, 2048, 0, ""), Area(1024, 2048, 1, ""), slices=2), "overlapping areas: 0x0"),
])
def test_refusals_of_placements(agent, device, make, words):
    device(1, 1, lambda areas, slices: make(areas, slices))
    assert words in refused(agent, [(entry(), 0, 64)])


def test_entries_must_agree(agent, device):
    class Uneven(Device):
        def place(self, entry, device_id, ctx):
            self.areas *= 2
            return super().place(entry, device_id, ctx)

    device(1, 1, Uneven)
    said = refused(agent, [(entry(0), 0, 64), (entry(1), 0, 64)])
    assert "has 4 areas and 1 slices, others have 2 and 1" in said


def test_registered_twice(agent, device):
    device(2, 1)
    one = register_kv_regions(agent, [(entry(0), 0, 64)], 0)
    with pytest.raises(RblnError, match="0x10000 with 4096 bytes is registered already on agent"):
        register_kv_regions(agent, [(entry(0), 0, 64)], 0)
    with pytest.raises(RblnError, match="overlapping entries"):
        register_kv_regions(agent, [(FakeTensor(0x10100, 4096), 0, 64)], 0)
    two = register_kv_regions(agent, [(entry(1), 0, 64)], 0)
    agent.deregister_memory(one.reg_handle)
    assert agent.deregistered == [one.reg_handle]
    assert [record.handle for record in agent._nixl_rbln] == [two.reg_handle]
    again = register_kv_regions(agent, [(entry(0), 0, 64)], 0)
    for got in (two, again):
        agent.deregister_memory(got.reg_handle)
    assert agent._nixl_rbln == [] and len(agent.created) == 1


def test_failed_deregistration_keeps_the_memory(agent, device):
    device(1, 1)
    got = register_kv_regions(agent, [(entry(0), 0, 64)], 0)
    agent.fail = ValueError("busy")
    with pytest.raises(ValueError):
        agent.deregister_memory(got.reg_handle)
    assert len(agent._nixl_rbln) == 1


def test_wrapper_of_somebody_is_called(agent, device):
    device(1, 1)
    seen = []
    agent.deregister_memory = lambda listed: seen.append(listed)
    got = register_kv_regions(agent, [(entry(0), 0, 64)], 0)
    agent.deregister_memory(got.reg_handle)
    assert seen == [got.reg_handle] and agent._nixl_rbln == []


def test_agent_ends_without_the_collector(device):
    import gc
    import weakref

    device(1, 1)
    agent = FakeAgent()
    register_kv_regions(agent, [(entry(0), 0, 64)], 0)
    weak = weakref.ref(agent)
    gc.disable()
    try:
        del agent
        assert weak() is None
    finally:
        gc.enable()


def test_failed_registration_leaves_nothing(agent, device):
    device(2, 2)
    nixl_rbln.ensure_rbln_backend(agent)
    agent.fail = ValueError("NIXL_ERR_BACKEND")
    said = refused(agent, [(entry(0), 0, 64)])
    assert "2 areas with 4096 bytes as VRAM of device 0: NIXL_ERR_BACKEND" in said
    assert "see standard error" in said
    agent.fail = None
    register_kv_regions(agent, [(entry(0), 0, 64)], 0)
