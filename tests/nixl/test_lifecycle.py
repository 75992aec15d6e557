"""Orders of set-up and removal, repeated set-up, threads; a process ends with status 0."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rig import Side, bytes_of, nixl, same, wait

MIB = 1 << 20


def pair(side, n):
    me, peer = side(n), side(n)
    me.knows(peer)
    whole = me.blocks([0], [n]), me.blocks([0], [n], peer.mem.ctypes.data)
    return me, peer, whole


def test_peer_removed_in_flight(side):
    """NIXL unloads the metadata, disconnects, and only then releases the requests."""
    n = 64 * MIB
    me, peer, whole = pair(side, n)
    handles = [me.xfer(op, *whole, peer.name) for op in ("READ", "WRITE", "READ")]
    for handle in handles:
        me.post(handle)
    me.agent.remove_remote_agent(me.peers.pop())
    for handle in handles:
        with pytest.raises(nixl.nixlNotFoundError):
            me.agent.check_xfer_state(handle)
    for handle in handles:
        me.release(handle)
    me.mem[:] = 7  # nobody reads or writes it now
    me.knows(peer)
    peer.mem[:] = 9
    me.run(me.xfer("READ", *whole, peer.name), peer)
    assert (me.mem == 9).all()


def test_metadata_of_more_regions(rng, side):
    me, peer, _ = pair(side, 4096)
    more = bytes_of(rng, 10_000)
    reg = peer.register(more)
    me.knows(peer)  # loads what is new
    to, at = me.blocks([0], [4096]), me.blocks([500], [4096], more.ctypes.data)
    me.run(me.xfer("READ", to, at, peer.name), peer)
    same(me.mem, more[500:4596])
    peer.agent.deregister_memory(reg)


def test_same_metadata_again(side):
    me, peer, whole = pair(side, 4096)
    for _ in range(3):
        me.knows(peer)
    me.run(me.xfer("READ", *whole, peer.name), peer)
    me.agent.remove_remote_agent(me.peers.pop())
    me.knows(peer)
    me.run(me.xfer("READ", *whole, peer.name), peer)


def test_make_connection(side):
    me, peer, whole = pair(side, 4096)
    me.agent.make_connection(peer.name)
    me.agent.make_connection(peer.name)
    me.run(me.xfer("WRITE", *whole, peer.name), peer)


@pytest.mark.parametrize("sync", ["NONE", "STRICT", "RW"])
def test_threads(rng, sync):
    """Four threads post and poll their own requests, one takes notifications, all at once."""
    from nixl._api import nixl_thread_sync_t

    mode = getattr(nixl_thread_sync_t, f"NIXL_THREAD_SYNC_{sync}")
    n, rounds, lanes = 3000, 150, 4
    me, peer = Side(lanes * n, sync_mode=mode), Side(lanes * n, sync_mode=mode)
    me.knows(peer)
    me.mem[:] = bytes_of(rng, me.mem.size)
    failed = []

    def work(lane):
        try:
            for i in range(rounds):
                handle = me.agent.initialize_xfer(
                    "WRITE", me.blocks([lane * n], [n]),
                    me.blocks([lane * n], [n], peer.mem.ctypes.data), peer.name)
                me.post(handle, b"%d %d" % (lane, i))
                me.finish(handle)
                me.agent.release_xfer_handle(handle)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(lanes)]
    for thread in threads:
        thread.start()
    wait("notifications", lambda: failed or len(peer.poll()) == lanes * rounds)
    for thread in threads:
        thread.join()
    assert not failed
    peer.expect([(me.name, b"%d %d" % (lane, i)) for lane in range(lanes) for i in range(rounds)])
    same(peer.mem, me.mem)
    me.close()
    peer.close()


def test_nothing_is_left_of_an_engine():
    """Threads and files of an engine go with it; NIXL never unmaps the plugin."""

    def counts():
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def round():
        me, peer = Side(4096), Side(4096)
        me.knows(peer)
        me.run(me.xfer("WRITE", me.blocks([0], [64]), me.blocks([0], [64], peer.mem.ctypes.data),
                       peer.name), peer, notif=b"x")
        peer.expect([(me.name, b"x")])
        me.close()
        peer.close()

    round()
    before = counts()
    for _ in range(10):
        round()
    wait("the counts of before", lambda: counts() <= before and counts()[1] <= before[1])


# What a process leaves undone when it ends; the exit status tells a crash in a destructor.
ENDINGS = {
    "in good order": "me.release(h); me.close(); peer.close()",
    "nothing released": "",
    "initiator first": "me.handles.clear(); del h; me.agent = None; peer.agent = None",
    "target first": "peer.agent = None; me.handles.clear(); del h; me.agent = None",
    "peer removed, handle kept": "me.agent.remove_remote_agent(peer.name); keep = h",
    "deregistered, handle kept": "me.agent.deregister_memory(me.reg); keep = h",
    "deregistered, then peer removed":
        "peer.agent.deregister_memory(peer.reg); me.agent.remove_remote_agent(peer.name)",
    "sys.exit": "import sys; sys.exit(0)",
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("state", ["done", "in flight"])
@pytest.mark.parametrize("thread", [True, False], ids=["thread", "polled"])
def test_exit(plugin_dir, thread, ending, state):
    n = 64 if state == "done" else 64 * MIB
    code = f"""
import ctypes
from rig import *
me, peer = Side({n}, thread={thread}), Side({n}, thread={thread})
for one in (me, peer):  # the interpreter may not free memory that is still in use
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one.mem))
me.knows(peer)
h = me.xfer("WRITE", me.blocks([0], [{n}]), me.blocks([0], [{n}], peer.mem.ctypes.data), peer.name)
{'me.run(h, peer, notif=b"x")' if state == "done" else 'me.post(h, b"x")'}
print("here", flush=True)
{ENDINGS[ending]}
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, timeout=60,
                         capture_output=True, text=True,
                         env={**os.environ, "NIXL_PLUGIN_DIR": str(plugin_dir)})
    assert "here" in ran.stdout and ran.returncode == 0, (ran.returncode, ran.stderr)
