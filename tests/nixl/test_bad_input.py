"""Bad input: each gives an error, with the reason on standard error; nothing crashes or hangs."""

import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rig import ERRORS, agent_of, bytes_of, nixl, same, wait

CONNECTION, REGION = b"KVRC", b"KVRR"  # how our blobs begin; u16 major, minor, u32 length follow
MIB = 1 << 20


def pair(side, nbytes=4096, **kwargs):
    me, peer = side(nbytes, **kwargs), side(nbytes, **kwargs)
    me.knows(peer)
    return me, peer


def test_unknown_peer(side):
    me = side(4096)
    block = me.blocks([0], [64])
    with pytest.raises(nixl.nixlNotFoundError):
        me.agent.initialize_xfer("READ", block, block, "nobody")
    with pytest.raises(nixl.nixlNotFoundError):
        me.agent.send_notif("nobody", b"x")
    with pytest.raises(nixl.nixlNotFoundError):
        me.agent.make_connection("nobody")


def test_removed_peer(side):
    me, peer = pair(side)
    block, theirs = me.blocks([0], [64]), me.blocks([0], [64], peer.mem.ctypes.data)
    dlist = me.agent.prep_xfer_dlist(peer.name, theirs)
    mine = me.agent.prep_xfer_dlist("NIXL_INIT_AGENT", block)
    me.agent.remove_remote_agent(me.peers.pop())
    with pytest.raises(nixl.nixlNotFoundError):
        me.agent.initialize_xfer("READ", block, theirs, peer.name)
    with pytest.raises(nixl.nixlNotFoundError):
        me.agent.send_notif(peer.name, b"x")
    # The list was made with handles that are gone now. Agents before 1.5 pass them on to us.
    me.knows(peer)
    with pytest.raises(ERRORS):
        me.agent.make_prepped_xfer("READ", mine, [0], dlist, [0])
    me.run(me.xfer("READ", block, theirs, peer.name), peer)


def patched(metadata, magic, change):
    """The metadata with the first of our blobs of that kind changed."""
    at = metadata.index(magic)
    blob = bytearray(metadata[at : at + struct.unpack_from("<I", metadata, at + 8)[0]])
    change(blob)
    return metadata[:at] + bytes(blob) + metadata[at + len(blob) :]


def foreign(blob):
    blob[:4] = b"ALFA"


def newer(blob):
    struct.pack_into("<H", blob, 4, 2)


def longer(blob):
    struct.pack_into("<I", blob, 8, len(blob) + 1000)


@pytest.mark.parametrize("magic", [CONNECTION, REGION], ids=["connection", "region"])
@pytest.mark.parametrize("change", [foreign, newer, longer])
def test_blobs(rng, side, capfd, magic, change):
    me, peer = side(4096), side(4096)
    good = peer.agent.get_agent_metadata()
    capfd.readouterr()
    with pytest.raises(ERRORS):
        me.agent.add_remote_agent(patched(good, magic, change))
    said = capfd.readouterr().err
    assert "kvrail: " in said
    if change is newer:
        assert re.search(r"version\D+2", said) and "1" in said
    # The refusal leaves nothing behind that hinders the true one.
    peer.mem[:] = bytes_of(rng, 4096)
    me.knows(good)
    me.run(me.xfer("READ", me.blocks([0], [4096]), me.blocks([0], [4096], peer.mem.ctypes.data),
                   peer.name), peer)
    same(me.mem, peer.mem)


def test_newer_minor_version_is_read(side):
    me, peer = side(4096), side(4096)

    def minor(blob):
        struct.pack_into("<H", blob, 6, 7)

    me.knows(patched(peer.agent.get_agent_metadata(), CONNECTION, minor))
    me.run(me.xfer("READ", me.blocks([0], [64]), me.blocks([0], [64], peer.mem.ctypes.data),
                   peer.name), peer)


def test_truncated_metadata(side):
    me, peer = side(4096), side(4096)
    good = peer.agent.get_agent_metadata()
    for end in range(0, len(good) - 1, 3):
        with pytest.raises((*ERRORS, ValueError)):
            me.agent.add_remote_agent(good[:end])
            me.agent.remove_remote_agent(peer.name)  # a cut that NIXL itself lets pass
            raise ValueError


def test_corrupt_metadata(rng, side):
    """Any one byte of our blobs changed: an error or a load, never a crash."""
    me, peer = side(4096), side(4096)
    good = peer.agent.get_agent_metadata()
    for magic in (CONNECTION, REGION):
        start = good.index(magic)
        length = struct.unpack_from("<I", good, start + 8)[0]
        for i in range(length):
            bad = bytearray(good)
            bad[start + i] ^= 1 << int(rng.integers(8))
            try:
                me.agent.add_remote_agent(bytes(bad))
            except ERRORS:
                continue
            me.agent.remove_remote_agent(peer.name)
    me.knows(good)


def test_memory_that_is_not_registered(side):
    me, peer = pair(side)
    there = me.blocks([0], [64], peer.mem.ctypes.data)
    stranger = np.zeros(4096, np.uint8)
    for local, remote in (
        (me.blocks([0], [64], stranger.ctypes.data), there),
        (me.blocks([0], [64]), me.blocks([0], [64], stranger.ctypes.data)),
        (me.blocks([4090], [64]), there),
        (me.blocks([0], [64]), me.blocks([4090], [64], peer.mem.ctypes.data)),
    ):
        with pytest.raises(ERRORS):
            me.agent.initialize_xfer("READ", local, remote, peer.name)


def test_pairs_that_do_not_fit(side, capfd):
    me, peer = pair(side)
    base = peer.mem.ctypes.data
    with pytest.raises(ERRORS):  # NIXL's agent looks at these two
        me.agent.initialize_xfer("READ", me.blocks([0, 99], [9, 9]), me.blocks([0], [9], base),
                                 peer.name)
    with pytest.raises(ERRORS):
        me.agent.initialize_xfer("READ", me.blocks([0], [9]), me.blocks([0], [8], base), peer.name)
    capfd.readouterr()
    with pytest.raises(nixl.nixlInvalidParamError):
        me.agent.initialize_xfer("READ", me.blocks([0, 50], [9, 0]),
                                 me.blocks([0, 50], [9, 0], base), peer.name)
    assert re.search(r"pair 1\b", capfd.readouterr().err)


def test_device_memory_is_refused_with_the_reason(side, capfd):
    me = side(4096)
    with pytest.raises(ERRORS):
        me.register(np.zeros(4096, np.uint8), "VRAM")
    assert "kvrail: registerMem: " in capfd.readouterr().err


@pytest.mark.parametrize("params, named", [
    ({"no_such_thing": "1"}, ["no_such_thing", "stripe_width", "rails", "transport"]),
    ({"stripe_width": "2"}, ["stripe_width", "2", "0", "1"]),
    ({"stripe_width": "-1"}, ["stripe_width", "-1"]),
    ({"rails": "many"}, ["rails", "many"]),
    ({"rails": "0"}, ["rails", "0"]),
    ({"transport": "pigeon"}, ["transport", "pigeon", "local"]),
    ({"name": "other"}, ["name"]),
])
def test_parameters(params, named, capfd):
    with pytest.raises(nixl.nixlBackendError):
        agent_of(params=params)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("kvrail: ")]
    assert len(lines) == 1 and lines[0].startswith("kvrail: backend not created: ")
    for word in named:
        assert word in lines[0]


def test_listed_parameters_can_be_handed_back():
    agent = agent_of(params={})
    listed = agent.get_plugin_params("RBLN")
    assert listed and agent_of(params=listed)


def python(code, plugin_dir, **env):
    """Runs code in a process of its own, for the environment and for the exit status."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, timeout=60, text=True,
        capture_output=True, env={**os.environ, "NIXL_PLUGIN_DIR": str(plugin_dir), **env})


@pytest.mark.parametrize("value, good", [("0", True), ("1", True), ("2", False), ("x", False)])
def test_environment(plugin_dir, value, good):
    ran = python("from rig import *; agent_of()", plugin_dir, KVRAIL_STRIPE_WIDTH=value)
    assert (ran.returncode == 0) == good, ran.stderr
    if not good:
        assert re.search(r"kvrail: backend not created: .*stripe_width", ran.stderr, re.I)


def test_full_capacity_is_named(side, capfd):
    me, peer = pair(side, params={"max_transfers": "4"})
    block, theirs = me.blocks([0], [64]), me.blocks([0], [64], peer.mem.ctypes.data)
    with pytest.raises(nixl.nixlBackendError):
        for _ in range(5):
            me.xfer("READ", block, theirs, peer.name)
    assert "max_transfers" in capfd.readouterr().err
    assert len(me.handles) == 4
    me.release(me.handles[0])
    me.run(me.xfer("READ", block, theirs, peer.name), peer)  # room again


def quiet(mem, seconds=0.2):
    """Nobody writes to mem any more."""
    mem[:] = 0xA5
    time.sleep(seconds)
    assert (mem == 0xA5).all()


def in_flight(side, n=128 * MIB):
    me, peer = pair(side, n)
    peer.mem[:] = 1
    me.mem[:] = 2
    handle = me.xfer("READ", me.blocks([0], [n]), me.blocks([0], [n], peer.mem.ctypes.data),
                     peer.name)
    me.post(handle)
    return me, peer, handle


def test_release_in_flight(side):
    me, peer, handle = in_flight(side)
    me.release(handle)
    quiet(me.mem)
    # And the next transfer is as good as any.
    again = me.xfer("READ", me.blocks([0], [64]), me.blocks([0], [64], peer.mem.ctypes.data),
                    peer.name)
    me.run(again, peer)
    assert (me.mem[:64] == 1).all()


def test_deregister_in_flight(side):
    me, peer, handle = in_flight(side)
    me.agent.deregister_memory(me.reg)
    me.reg = None
    quiet(me.mem)
    try:
        wait("an end", lambda: me.agent.check_xfer_state(handle) != "PROC")
    except ERRORS:
        pass
    me.release(handle)


def test_post_twice_in_flight(side):
    me, peer, handle = in_flight(side)
    if me.agent.check_xfer_state(handle) == "PROC":
        try:
            me.agent.transfer(handle)  # it may have ended meanwhile, then this is a repost
        except nixl.nixlRepostActiveError:
            pass
    me.finish(handle, peer)
    same(me.mem, peer.mem)
