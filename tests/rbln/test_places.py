"""The providers: host, emulated areas with replicas of their own, and the one for the device."""

import ctypes
import os
import shutil
import subprocess
import sys

import pytest
from fakes import FakeTensor

import nixl_rbln
from nixl_rbln import RblnError, register_kv_regions


class HostTensor(FakeTensor):
    """An entry with real memory."""

    def __init__(self, data, **kwargs):
        self.memory = (ctypes.c_char * len(data)).from_buffer_copy(data)
        super().__init__(ctypes.addressof(self.memory), len(data), **kwargs)


def refused(agent, *regions, **kwargs):
    with pytest.raises(RblnError) as caught:
        register_kv_regions(agent, regions, 0, **kwargs)
    assert agent.registered == []
    return str(caught.value)


def set_areas(monkeypatch, areas, slices=None, names=("NIXL_RBLN_AREAS", "NIXL_RBLN_SLICES")):
    monkeypatch.setenv(names[0], str(areas))
    if slices is not None:
        monkeypatch.setenv(names[1], str(slices))


def test_host_is_one_area(agent):
    tensor = HostTensor(bytes(4096))
    got = register_kv_regions(agent, [(tensor, 0, 512), (tensor, 2048, 512)], 0)
    assert got.base_addrs == [tensor.key, tensor.key + 2048] and got.block_lens == [512, 512]
    assert (got.n_shards, got.slices, got.slice_ids) == (1, 1, [0, 0])
    assert agent.registered[0][0].descs == [(tensor.key, 4096, 0, "kvrail:mem=host")]


@pytest.mark.parametrize("names", [("NIXL_RBLN_AREAS", "NIXL_RBLN_SLICES"),
                                   ("FAKE_AREAS", "FAKE_SLICES")])
def test_replicas_have_memory_of_their_own(agent, monkeypatch, names):
    set_areas(monkeypatch, 4, 2, names)
    data = bytes(range(256)) * 16
    tensor = HostTensor(data)
    got = register_kv_regions(agent, [(tensor, 0, 512), (tensor, 2048, 512)], 0)
    descs = agent.registered[0][0].descs
    assert [d[1:] for d in descs] == [(2048, 0, "kvrail:mem=host")] * 4
    spans = sorted((d[0], d[0] + d[1]) for d in descs)
    assert all(one[1] <= two[0] for one, two in zip(spans, spans[1:]))
    # The first replica of a slice is the entry itself, slice by slice; all hold its bytes.
    assert [descs[0][0], descs[2][0]] == [tensor.key, tensor.key + 2048]
    held = [ctypes.string_at(d[0], d[1]) for d in descs]
    assert held == [data[:2048], data[:2048], data[2048:], data[2048:]]
    assert got.base_addrs == [d[0] + off for off in (0, 1024) for d in descs]
    assert got.block_lens == [256] * 8 and got.slice_ids == [0, 0, 1, 1] * 2

    (entry,) = nixl_rbln.emulation(agent)
    assert entry.differing() == [] and entry.tensor is tensor
    ctypes.memset(descs[1][0] + 2047, 0x55, 1)
    assert entry.differing() == [1]
    tensor.memory[2048] = b"\x77"
    assert entry.differing() == [1, 3]
    entry.refresh()
    assert entry.differing() == []
    assert ctypes.string_at(descs[3][0], 1) == b"\x77"
    assert ctypes.string_at(descs[1][0], 2048) == data[:2048]
    agent.deregister_memory(got.reg_handle)
    assert nixl_rbln.emulation(agent) == []


def test_memory_of_replicas_goes_with_the_registration(agent, monkeypatch):
    """A hundred cycles of 8 MiB: the process does not grow by them."""
    set_areas(monkeypatch, 2, 1)
    tensor = HostTensor(bytes(8 << 20))

    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def cycle():
        got = register_kv_regions(agent, [(tensor, 0, 4096)], 0)
        agent.registered.clear()
        agent.deregister_memory(got.reg_handle)
        agent.deregistered.clear()

    cycle()
    before = resident()
    for _ in range(100):
        cycle()
    assert resident() - before < 64 << 20


def test_slices_default_to_areas(agent, monkeypatch):
    set_areas(monkeypatch, 4)
    got = register_kv_regions(agent, [(HostTensor(bytes(4096)), 0, 512)], 0)
    assert got.slices == 4 and got.slice_ids == [0, 1, 2, 3]


@pytest.mark.parametrize("areas, slices, words", [
    ("4", "3", "NIXL_RBLN_SLICES=3 does not divide NIXL_RBLN_AREAS=4"),
    ("4", "8", "NIXL_RBLN_SLICES=8 does not divide NIXL_RBLN_AREAS=4"),
    ("0", None, "NIXL_RBLN_AREAS=0: allowed is a whole number from 1 to 64"),
    ("65", None, "NIXL_RBLN_AREAS=65: allowed"),
    ("two", None, "NIXL_RBLN_AREAS=two: allowed"),
    ("4", "-1", "NIXL_RBLN_SLICES=-1: allowed"),
])
def test_bad_areas(agent, monkeypatch, areas, slices, words):
    set_areas(monkeypatch, areas, slices)
    assert words in refused(agent, (HostTensor(bytes(4096)), 0, 512))


def test_entry_not_divided(agent, monkeypatch):
    set_areas(monkeypatch, 8)
    assert "has 4100 bytes, which 8 slices do not divide" in refused(
        agent, (HostTensor(bytes(4100)), 0, 512))


@pytest.mark.parametrize("name", ["host", "emulated"])
def test_host_memory_only(agent, monkeypatch, name):
    monkeypatch.setenv("NIXL_RBLN_PROVIDER", name)
    said = refused(agent, (FakeTensor(0x1000, 64, kind="rbln"), 0, 64))
    assert f"provider {name} needs host memory" in said and "device `rbln`" in said


def test_unknown_provider(agent, monkeypatch):
    monkeypatch.setenv("NIXL_RBLN_PROVIDER", "cuda")
    said = refused(agent, (FakeTensor(0x1000, 64), 0, 64))
    assert "NIXL_RBLN_PROVIDER=cuda: allowed are auto, host, emulated, rbln" in said


def test_device_without_functions_names_the_symbols(agent):
    said = refused(agent, (FakeTensor(0x1000, 64, kind="rbln"), 0, 64))
    for name in ("rblnExportMemoryByDva (not found)", "rblnExportMemoryByDvaNoCbForRCCL",
                 "nixl_rbln.provide(", "NIXL_RBLN_HOOK"):
        assert name in said


def dva(ctx, key, nbytes):
    """A card of four areas, two slices."""
    assert (ctx, nbytes) == (99, 4096)
    return [((at + 1) << 32 | key, at // 2) for at in range(4)]


def device_entry():
    return FakeTensor(0x1000, 4096, kind="rbln")


def test_addresses_that_the_nic_resolves(agent):
    nixl_rbln.provide(dva)
    got = register_kv_regions(agent, [(device_entry(), 0, 512)], 0, rbln_ctx_ptr=99)
    assert agent.registered[0][0].descs == [
        ((at + 1) << 32 | 0x1000, 2048, 0, "kvrail:mem=device") for at in range(4)]
    assert got.slice_ids == [0, 0, 1, 1] and got.block_lens == [256] * 4


def opened(made):
    """Exports /dev/null and notes each fd."""

    def export(ctx, addr, nbytes):
        assert (ctx, nbytes) == (99, 2048)
        made.append(os.open("/dev/null", os.O_RDONLY))
        return made[-1]

    return export


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_dmabufs_are_closed_once(agent, monkeypatch):
    made, closed, close = [], [], os.close
    nixl_rbln.provide(dva, opened(made))
    register = agent.register_memory

    def while_open(listed, backends):
        assert all(is_open(fd) for fd in made)
        return register(listed, backends)

    agent.register_memory = while_open
    monkeypatch.setattr("nixl_rbln._runtime.os.close",
                        lambda fd: (closed.append(fd), close(fd)))
    register_kv_regions(agent, [(device_entry(), 0, 512)], 0, rbln_ctx_ptr=99)
    assert len(made) == 4 and closed == made
    assert [d[3] for d in agent.registered[0][0].descs] == [
        f"kvrail:mem=dmabuf;fd={fd}" for fd in made]


def test_dmabufs_are_closed_after_errors(agent):
    made = []
    nixl_rbln.provide(dva, opened(made))
    nixl_rbln.ensure_rbln_backend(agent, rbln_ctx_ptr=99)
    agent.fail = ValueError("no")
    assert "no" in refused(agent, (device_entry(), 0, 512), rbln_ctx_ptr=99)
    agent.fail = None
    assert "not divided" in refused(agent, (device_entry(), 0, 511), rbln_ctx_ptr=99)
    assert len(made) == 8 and not any(is_open(fd) for fd in made)


@pytest.mark.parametrize("answer, words", [
    (-2, "answered -2; allowed is a file descriptor"),
    (None, "answered None"),
    (True, "answered True"),
    (1 << 20, "fd 1048576 is not open"),
])
def test_bad_dmabuf(agent, answer, words):
    made = []
    good = opened(made)
    # The third area's export goes wrong; the first two fds must not stay behind.
    nixl_rbln.provide(dva, lambda *a: good(*a) if len(made) < 2 else answer)
    said = refused(agent, (device_entry(), 0, 512), rbln_ctx_ptr=99)
    assert words in said and "area at 0x300001000, 2048 bytes" in said
    assert len(made) == 2 and not any(is_open(fd) for fd in made)


def test_hook_module(agent, monkeypatch, tmp_path):
    (tmp_path / "my_rbln_hook.py").write_text(
        "import nixl_rbln\n"
        "nixl_rbln.provide(lambda ctx, key, nbytes: [(key | 1 << 32, 0), (key | 2 << 32, 1)])\n")
    (tmp_path / "my_lazy_hook.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("NIXL_RBLN_HOOK", "my_lazy_hook")
    assert "did not call nixl_rbln.provide" in refused(agent, (device_entry(), 0, 512))
    monkeypatch.setenv("NIXL_RBLN_HOOK", "my_missing_hook")
    assert "NIXL_RBLN_HOOK=my_missing_hook: No module" in refused(agent, (device_entry(), 0, 512))
    monkeypatch.setenv("NIXL_RBLN_HOOK", "my_rbln_hook")
    got = register_kv_regions(agent, [(device_entry(), 0, 512)], 0)
    assert got.base_addrs == [0x100001000, 0x200001000]
    sys.modules.pop("my_rbln_hook")


HOOK_C = """
#include <fcntl.h>
#include <stdint.h>
int32_t nixl_rbln_areas(uint64_t ctx, uint64_t key, uint64_t nbytes, uint32_t max,
                        uint64_t *addr, uint32_t *slice) {
    if (ctx != 99 || nbytes != 4096 || max != 64) return -1;
    for (uint32_t i = 0; i < 4; i++) { addr[i] = (i + 1ull) << 32 | key; slice[i] = i / 2; }
    return 4;
}
int32_t nixl_rbln_dmabuf(uint64_t ctx, uint64_t addr, uint64_t nbytes) {
    return ctx == 99 && addr >> 32 && nbytes == 2048 ? open("/dev/null", O_RDONLY) : -1;
}
"""


def test_hook_library(agent, monkeypatch, tmp_path):
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler")
    (tmp_path / "hook.c").write_text(HOOK_C)
    library = tmp_path / "hook.so"
    subprocess.run([compiler, "-shared", "-fPIC", tmp_path / "hook.c", "-o", library], check=True)
    monkeypatch.setenv("NIXL_RBLN_HOOK", str(library))
    before = len(os.listdir("/proc/self/fd"))
    register_kv_regions(agent, [(device_entry(), 0, 512)], 0, rbln_ctx_ptr=99)
    assert len(os.listdir("/proc/self/fd")) == before
    descs = agent.registered[0][0].descs
    assert [d[:2] for d in descs] == [((at + 1) << 32 | 0x1000, 2048) for at in range(4)]
    assert all(d[3].startswith("kvrail:mem=dmabuf;fd=") for d in descs)
    agent.registered.clear()
    agent.deregister_memory(agent._nixl_rbln[0].handle)
    said = refused(agent, (device_entry(), 0, 512), rbln_ctx_ptr=98)
    assert "answered -1 for the entry at 0x1000 of 4096 bytes" in said
    monkeypatch.setenv("NIXL_RBLN_HOOK", str(tmp_path / "missing.so"))
    assert "it must export nixl_rbln_areas" in refused(agent, (device_entry(), 0, 512))


@pytest.mark.parametrize("answer", [None, [1, 2], [("0x1000", 0)], 5, [(1.5, 0)]])
def test_answers_that_are_no_areas(agent, answer):
    nixl_rbln.provide(lambda ctx, key, nbytes: answer)
    with pytest.raises(RblnError, match="allowed are pairs of whole numbers"):
        register_kv_regions(agent, [(device_entry(), 0, 512)], 0)


def test_providers_that_are_no_functions():
    with pytest.raises(RblnError, match="areas=None: allowed is a function"):
        nixl_rbln.provide(None)
    with pytest.raises(RblnError, match="dmabuf=7: allowed is a function"):
        nixl_rbln.provide(dva, 7)


def test_a_hook_that_breaks(agent, monkeypatch, tmp_path):
    (tmp_path / "broken_hook.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("NIXL_RBLN_HOOK", "broken_hook")
    with pytest.raises(RblnError, match="NIXL_RBLN_HOOK=broken_hook: .*ZeroDivisionError"):
        register_kv_regions(agent, [(device_entry(), 0, 512)], 0)


def test_an_area_that_is_no_whole_allocation(agent):
    asked = []
    nixl_rbln.provide(lambda ctx, key, n: [(0x1010, 0)], lambda *args: asked.append(args))
    with pytest.raises(RblnError, match="0x1010 does not begin at a page"):
        register_kv_regions(agent, [(device_entry(), 0, 512)], 0)
    assert asked == []


def test_slices_are_numbered_in_order(agent):
    nixl_rbln.provide(lambda ctx, key, nbytes: [(0x1000, 1), (0x100000, 0)])
    with pytest.raises(RblnError, match="numbered from 0, in order.*adjacent: .0, 1."):
        register_kv_regions(agent, [(device_entry(), 0, 512)], 0)


def test_device_memory_is_no_dram(agent):
    nixl_rbln.provide(lambda ctx, key, nbytes: [(0x1000, 0)])
    with pytest.raises(RblnError, match="mem=DRAM, but provider rbln .* pass mem=VRAM"):
        register_kv_regions(agent, [(device_entry(), 0, 512)], 0, mem="DRAM")
    assert agent.registered == []


def test_slices_without_areas(agent, monkeypatch):
    monkeypatch.setenv("NIXL_RBLN_SLICES", "2")
    with pytest.raises(RblnError, match="NIXL_RBLN_SLICES=2 without NIXL_RBLN_AREAS: set both"):
        register_kv_regions(agent, [(HostTensor(bytes(4096)), 0, 512)], 0)


def test_regions_that_are_no_list(agent):
    with pytest.raises(RblnError, match="regions=None: allowed is a list"):
        register_kv_regions(agent, None, 0)
