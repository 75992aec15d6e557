"""Messages: arbitrary bytes, the sender's name, exactly once, and never before the data."""

import pytest

from rig import bytes_of, nixl, same, wait

SIZES = [1, 2, 1000, 8191, 65_535, 65_536]


def pair(side, nbytes=4096):
    me, peer = side(nbytes), side(nbytes)
    me.knows(peer)
    return me, peer


def one_block(me, peer, op, n=4096):
    return me.xfer(op, me.blocks([0], [n]), me.blocks([0], [n], peer.mem.ctypes.data), peer.name)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_with_data(rng, side, op, size):
    me, peer = pair(side)
    (peer if op == "READ" else me).mem[:] = bytes_of(rng, 4096)
    message = bytes_of(rng, size).tobytes()
    me.run(one_block(me, peer, op), peer, notif=message)
    peer.expect([(me.name, message)], me)
    same(me.mem, peer.mem)


@pytest.mark.parametrize("size", [0, *SIZES])
def test_alone(rng, side, size):
    me, peer = pair(side)
    message = bytes_of(rng, size).tobytes()
    me.agent.send_notif(peer.name, message)
    peer.expect([(me.name, message)], me)


@pytest.mark.parametrize("message", [b"\0", b"\0\0\0", b"a\0b", b"\0tail", b"head\0"])
def test_nul_bytes(side, message):
    me, peer = pair(side)
    me.agent.send_notif(peer.name, message)
    me.run(one_block(me, peer, "WRITE"), peer, notif=message)
    peer.expect([(me.name, message)] * 2, me)


def test_too_long_is_refused(side, capfd):
    me, peer = pair(side)
    with pytest.raises(nixl.nixlInvalidParamError):
        me.agent.send_notif(peer.name, b"x" * 65_537)
    said = capfd.readouterr().err
    assert "65537" in said and "65536" in said
    handle = one_block(me, peer, "WRITE")
    with pytest.raises(nixl.nixlInvalidParamError):
        me.agent.transfer(handle, b"x" * 65_537)
    me.agent.send_notif(peer.name, b"next")
    me.run(handle, peer, notif=b"still works")
    peer.expect([(me.name, b"next"), (me.name, b"still works")], me)


def test_none_without_a_message(side):
    me, peer = pair(side)
    me.run(one_block(me, peer, "WRITE"), peer)
    me.agent.send_notif(peer.name, b"after")
    peer.expect([(me.name, b"after")], me)


def test_only_after_the_data(rng, side):
    """The target compares at the moment the message is there, without asking the sender."""
    n = 24 << 20
    me, peer = pair(side, n)
    handle = one_block(me, peer, "WRITE", n)
    for round in range(3):
        me.mem[:] = bytes_of(rng, n)
        me.post(handle, b"%d" % round)

        def arrived():
            me.agent.check_xfer_state(handle)
            return peer.poll()

        wait("notification", arrived)
        same(peer.mem, me.mem)
        me.finish(handle, peer)
        peer.expect([(me.name, b"%d" % round)], me)


def test_read_message_after_the_last_read(rng, side):
    """A producer frees its blocks on the message: nothing may be read after it."""
    n = 24 << 20
    me, peer = pair(side, n)
    handle = one_block(me, peer, "READ", n)
    peer.mem[:] = bytes_of(rng, n)
    want = peer.mem.copy()
    me.post(handle, b"free")

    def arrived():
        me.agent.check_xfer_state(handle)
        return peer.poll()

    wait("notification", arrived)
    peer.mem[:] = 0
    me.finish(handle, peer)
    same(me.mem, want)


def test_burst_arrives_exactly_once(side):
    me, peer = pair(side)
    want = [(me.name, b"%d:" % i + b"z" * (i % 700)) for i in range(2000)]
    for i, (_, message) in enumerate(want):
        me.agent.send_notif(peer.name, message)
        if i % 50 == 0:
            peer.poll()
    peer.expect(want, me)


def test_to_itself(side):
    me = side(64)
    me.agent.send_notif(me.name, b"note\0")
    me.expect([(me.name, b"note\0")])


def test_senders_are_told_apart(side):
    target = side(64)
    senders = [side(64) for _ in range(3)]
    for one in senders:
        one.knows(target)
        one.agent.send_notif(target.name, b"from " + one.name.encode())
    target.expect([(one.name, b"from " + one.name.encode()) for one in senders], *senders)
