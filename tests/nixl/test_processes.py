"""Agents in two processes, and eight in one. The passive side never loads the other's metadata."""

import itertools
import uuid

import numpy as np
import pytest

from rig import ERRORS, LOST, bytes_of, moved, nixl, same, scatter, wait

MIB = 1 << 20


@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_two_processes(rng, side, child, op):
    lengths = rng.integers(1, 30_000, 300)
    to, to_size = scatter(rng, lengths)
    at, at_size = scatter(rng, lengths)
    sizes = (to_size, at_size) if op == "READ" else (at_size, to_size)
    me, peer = side(sizes[0]), child(sizes[1])
    me.mem[:] = bytes_of(rng, me.mem.size)
    theirs, mine = bytes_of(rng, sizes[1]), me.mem.copy()
    peer.call("fill", theirs)
    me.knows(peer.metadata)
    here, there = (to, at) if op == "READ" else (at, to)
    handle = me.xfer(op, me.blocks(here, lengths), me.blocks(there, lengths, peer.addr),
                     peer.name, b"all there")
    for _ in range(2):  # and again
        me.run(handle)
        peer.call("expect", [(me.name, b"all there")])
    after = peer.call("mem")
    if op == "READ":
        same(me.mem, moved(mine, to, theirs, at, lengths))
        same(after, theirs)
    else:
        same(after, moved(theirs, to, mine, at, lengths))
        same(me.mem, mine)
    me.agent.send_notif(peer.name, b"HB:\0")
    peer.call("expect", [(me.name, b"HB:\0")])
    peer.quit()


def test_both_directions_at_once(rng, side, child):
    n = 8 * MIB
    me, peer = side(2 * n), child(2 * n)
    mine, theirs = bytes_of(rng, n), bytes_of(rng, n)
    me.mem[:n] = mine
    peer.call("fill", np.concatenate([theirs, np.zeros(n, np.uint8)]))
    me.knows(peer.metadata)
    peer.call("knows", me.agent.get_agent_metadata())
    push = me.xfer("WRITE", me.blocks([0], [n]), me.blocks([n], [n], peer.addr), peer.name)
    pull = me.xfer("READ", me.blocks([n], [n]), me.blocks([0], [n], peer.addr), peer.name)
    me.post(push, b"pushed")
    me.post(pull, b"pulled")
    me.finish(push)
    me.finish(pull)
    same(me.mem, np.concatenate([mine, theirs]))
    peer.call("expect", [(me.name, b"pushed"), (me.name, b"pulled")])
    same(peer.call("mem"), np.concatenate([theirs, mine]))
    peer.quit()


def test_eight_agents_in_one_process(rng, side):
    size, n = 10_007, 8
    sides = [side(2 * n * size) for _ in range(n)]
    for one in sides:
        one.mem[: n * size] = bytes_of(rng, n * size)
    for one, other in itertools.permutations(sides, 2):
        one.knows(other)
    handles = []
    for (i, one), (k, other) in itertools.permutations(enumerate(sides), 2):
        # Part k of one's first half goes to part i of the other's second half.
        handle = one.xfer("WRITE", one.blocks([k * size], [size]),
                          one.blocks([(n + i) * size], [size], other.mem.ctypes.data), other.name)
        one.post(handle, b"%d to %d" % (i, k))
        handles.append((one, handle))
    for one, handle in handles:
        one.finish(handle, *sides)
    for k, one in enumerate(sides):
        one.expect([(other.name, b"%d to %d" % (i, k))
                    for i, other in enumerate(sides) if i != k], *sides)
        for i, other in enumerate(sides):
            if i != k:
                same(one.mem[(n + i) * size : (n + i + 1) * size],
                     other.mem[k * size : (k + 1) * size])


def disconnects(me, handle):
    """Posts until the loss of the peer shows; anything but success or that error is wrong."""

    def seen():
        try:
            if me.agent.transfer(handle) != "DONE":
                wait("an end", lambda: me.agent.check_xfer_state(handle) != "PROC")
        except LOST:
            return True
        return False

    wait("nixlRemoteDisconnectError", seen)


@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_peer_killed(rng, side, child, op):
    me, peer = side(MIB), child(MIB)
    me.knows(peer.metadata)
    remote = me.blocks([0], [MIB], peer.addr)
    handle = me.xfer(op, me.blocks([0], [MIB]), remote, peer.name)
    me.run(handle, notif=b"once")
    peer.call("expect", [(me.name, b"once")])
    peer.kill()
    disconnects(me, handle)
    for _ in range(3):  # it stays so, and nothing hangs
        with pytest.raises(ERRORS):
            if me.agent.transfer(handle) == "PROC":
                wait("an end", lambda: me.agent.check_xfer_state(handle) != "PROC")
    me.release(handle)
    # The others go on.
    other = side(MIB)
    me.knows(other)
    other.mem[:] = bytes_of(rng, MIB)
    again = me.xfer("READ", me.blocks([0], [MIB]), me.blocks([0], [MIB], other.mem.ctypes.data),
                    other.name)
    me.run(again, other)
    same(me.mem, other.mem)


@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_peer_killed_in_flight(side, child, op):
    n = 128 * MIB
    me, peer = side(n), child(n)
    me.knows(peer.metadata)
    handle = me.xfer(op, me.blocks([0], [n]), me.blocks([0], [n], peer.addr), peer.name)
    me.run(handle)  # pages are there and the peer is connected
    me.post(handle)
    peer.kill()
    try:
        wait("an end", lambda: me.agent.check_xfer_state(handle) != "PROC")
    except nixl.nixlRemoteDisconnectError:
        pass
    disconnects(me, handle)
    me.release(handle)


def test_restart_under_the_same_name(rng, side, child):
    name = "restarting-" + str(uuid.uuid4())
    me, old = side(MIB), child(MIB, name=name)
    me.knows(old.metadata)
    handle = me.xfer("READ", me.blocks([0], [MIB]), me.blocks([0], [MIB], old.addr), name)
    me.run(handle)
    old.kill()
    disconnects(me, handle)
    me.release(handle)
    try:
        me.agent.remove_remote_agent(name)
    except nixl.nixlNotFoundError:
        pass  # agents before 1.5 did it themselves
    new = child(MIB, name=name)
    data = bytes_of(rng, MIB)
    new.call("fill", data)
    me.knows(new.metadata)
    handle = me.xfer("READ", me.blocks([0], [MIB]), me.blocks([0], [MIB], new.addr), name, b"hello")
    me.run(handle)
    same(me.mem, data)
    new.call("expect", [(me.name, b"hello")])
    new.quit()


def test_peer_that_left_in_good_order(side, child):
    me, peer = side(4096), child(4096)
    me.knows(peer.metadata)
    handle = me.xfer("READ", me.blocks([0], [4096]), me.blocks([0], [4096], peer.addr), peer.name)
    me.run(handle)
    peer.quit()
    disconnects(me, handle)
