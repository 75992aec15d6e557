"""Data: every byte of both buffers is compared, so a block at a wrong place is seen too."""

import numpy as np
import pytest

from rig import bytes_of, moved, same, scatter

MIB = 1 << 20


def exchange(rng, side, op, lengths, prepped=False, **kwargs):
    """One transfer of scattered blocks; both buffers are compared whole."""
    lengths = np.asarray(lengths)
    to, to_size = scatter(rng, lengths)
    at, at_size = scatter(rng, lengths)
    sizes = (to_size, at_size) if op == "READ" else (at_size, to_size)
    me, peer = side(sizes[0], **kwargs), side(sizes[1], **kwargs)
    me.mem[:] = bytes_of(rng, me.mem.size)
    peer.mem[:] = bytes_of(rng, peer.mem.size)
    me.knows(peer)
    mine, theirs = me.mem.copy(), peer.mem.copy()
    here, there = (to, at) if op == "READ" else (at, to)
    local, remote = me.blocks(here, lengths), me.blocks(there, lengths, peer.mem.ctypes.data)
    if prepped:
        index = np.arange(len(lengths), dtype=np.int32)
        lists = (me.agent.prep_xfer_dlist("NIXL_INIT_AGENT", local),
                 me.agent.prep_xfer_dlist(peer.name, remote))
        handle = me.agent.make_prepped_xfer(op, lists[0], index, lists[1], index, b"moved")
        me.handles.append(handle)
    else:
        handle = me.xfer(op, local, remote, peer.name, b"moved")
    me.run(handle, peer)
    peer.expect([(me.name, b"moved")], me)
    if op == "READ":
        same(me.mem, moved(mine, to, theirs, at, lengths))
        same(peer.mem, theirs)
    else:
        same(peer.mem, moved(theirs, to, mine, at, lengths))
        same(me.mem, mine)


@pytest.mark.parametrize("op", ["READ", "WRITE"])
@pytest.mark.parametrize("count", [1, 7, 1000, 70_000])
def test_descriptor_counts(rng, side, op, count):
    exchange(rng, side, op, rng.integers(1, 400, count), prepped=True)


@pytest.mark.parametrize("op", ["READ", "WRITE"])
@pytest.mark.parametrize("lengths", [
    [1],
    [1, 1, 1, 1, 1, 1, 1],
    [3, 4097, 12_345, 1, 65_535],
    [65_536],                             # as much as is copied inside post
    [65_537],
    [4 * MIB],                            # a slice
    [4 * MIB + 1],
    [1, 9 * MIB + 13, 7, 4 * MIB - 1, 4 * MIB],
], ids=lambda lengths: "+".join(map(str, lengths)))
def test_lengths(rng, side, op, lengths):
    exchange(rng, side, op, lengths)


@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_every_rail_takes_part(rng, side, op):
    exchange(rng, side, op, rng.integers(1, 90_000, 500),
             params={"rails": "4", "stripe_width": "0"})


def test_repost(rng, side):
    me, peer = side(5 * MIB), side(5 * MIB)
    me.knows(peer)
    whole = me.blocks([0], [me.mem.size]), me.blocks([0], [me.mem.size], peer.mem.ctypes.data)
    handle = me.xfer("WRITE", *whole, peer.name)
    for round in range(5):
        me.mem[:] = bytes_of(rng, me.mem.size)
        me.run(handle, peer, notif=b"round %d" % round)
        peer.expect([(me.name, b"round %d" % round)], me)
        same(peer.mem, me.mem)
    # NIXL's agent keeps the last message and hands it over again.
    me.run(handle, peer)
    peer.expect([(me.name, b"round 4")], me)


def test_to_itself(rng, side):
    me = side(3 * MIB)
    me.mem[:MIB] = bytes_of(rng, MIB)
    want = me.mem.copy()
    want[2 * MIB:] = want[:MIB]
    me.run(me.xfer("WRITE", me.blocks([0], [MIB]), me.blocks([2 * MIB], [MIB]), me.name, b"x\0"))
    me.expect([(me.name, b"x\0")])
    same(me.mem, want)


def test_many_at_once_both_ways(rng, side):
    n, size = 48, 100_003
    a, b = side(2 * n * size), side(2 * n * size)
    for one, other in ((a, b), (b, a)):
        one.mem[: n * size] = bytes_of(rng, n * size)
        one.knows(other)
    first = {one.name: one.mem[: n * size].copy() for one in (a, b)}
    order = rng.permutation(n)
    for one, other, op in ((a, b, "WRITE"), (b, a, "WRITE")):
        for i in range(n):
            handle = one.xfer(op, one.blocks([i * size], [size]),
                              one.blocks([(n + order[i]) * size], [size], other.mem.ctypes.data),
                              other.name, b"%d" % i)
            one.post(handle)
    for one, other in ((a, b), (b, a)):
        for handle in one.handles:
            one.finish(handle, other)
    for one, other in ((a, b), (b, a)):
        one.expect([(other.name, b"%d" % i) for i in range(n)], other)
        same(one.mem[: n * size], first[one.name])
        for i in range(n):
            at = (n + order[i]) * size
            same(one.mem[at : at + size], first[other.name][i * size : (i + 1) * size])
