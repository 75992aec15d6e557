"""Drives one wheel through its libnixl_capi.so, without Python bindings (old ones import torch).

usage: capi_drive.py DIR_WITH_LIBNIXL_CAPI SEED
Prints "kvrail drive: ok" at the end; anything else is a failure.
"""

import ctypes
import random
import sys
import time
from ctypes import byref, c_bool, c_char_p, c_int, c_size_t, c_uint64, c_void_p

OK, IN_PROGRESS = 0, 1
DRAM, READ, WRITE = 0, 0, 1
HANG = 60.0


class Nixl:
    """Calls nixl_capi_<name>; a negative status is an error."""

    def __init__(self, folder):
        self.lib = ctypes.CDLL(f"{folder}/libnixl_capi.so")

    def __getattr__(self, name):
        function = getattr(self.lib, "nixl_capi_" + name)

        def call(*args):
            status = function(*args)
            if status not in (OK, IN_PROGRESS):
                raise RuntimeError(f"nixl_capi_{name}: {status}")
            return status

        return call

    def new(self, name, *args):
        """For functions whose last argument is where a handle goes."""
        out = c_void_p()
        getattr(self, name)(*args, byref(out))
        return out


class Agent:
    def __init__(self, nixl, name, nbytes):
        self.nixl, self.name = nixl, name.encode()
        self.mem = ctypes.create_string_buffer(nbytes)
        self.agent = nixl.new("create_agent", self.name)
        params = c_void_p()
        mems = c_void_p()
        nixl.get_plugin_params(self.agent, b"RBLN", byref(mems), byref(params))
        self.backend = nixl.new("create_backend", self.agent, b"RBLN", params)
        self.args = nixl.new("create_opt_args")
        nixl.opt_args_add_backend(self.args, self.backend)
        self.reg = nixl.new("create_reg_dlist", c_int(DRAM))
        nixl.reg_dlist_add_desc(self.reg, c_size_t(ctypes.addressof(self.mem)), c_size_t(nbytes),
                                c_uint64(0), b"", c_size_t(0))
        nixl.register_mem(self.agent, self.reg, self.args)
        self.inbox = []

    def metadata(self):
        data, size = c_void_p(), c_size_t()
        self.nixl.get_local_md(self.agent, byref(data), byref(size))
        return ctypes.string_at(data, size.value)

    def knows(self, blob):
        name = c_char_p()
        self.nixl.load_remote_md(self.agent, blob, c_size_t(len(blob)), byref(name))
        return name.value

    def blocks(self, offsets, size, base):
        out = self.nixl.new("create_xfer_dlist", c_int(DRAM))
        for offset in offsets:
            self.nixl.xfer_dlist_add_desc(out, c_size_t(base + offset), c_size_t(size), c_uint64(0))
        return out

    def notify_args(self, message):
        args = self.nixl.new("create_opt_args")
        if message is not None:
            self.nixl.opt_args_set_notif_msg(args, message, c_size_t(len(message)))
            self.nixl.opt_args_set_has_notif(args, c_bool(True))
        return args

    def run(self, request, message):
        status = self.nixl.post_xfer_req(self.agent, request, self.notify_args(message))
        end = time.monotonic() + HANG
        while status == IN_PROGRESS:
            assert time.monotonic() < end, "transfer hangs"
            status = self.nixl.get_xfer_status(self.agent, request)
        assert status == OK

    def expect(self, sender, want):
        got, end = [], time.monotonic() + HANG
        while len(got) < len(want):
            assert time.monotonic() < end, f"notifications: {got}, not {want}"
            table = self.nixl.new("create_notif_map")
            self.nixl.get_notifs(self.agent, table, None)
            count = c_size_t()
            self.nixl.notif_map_size(table, byref(count))
            if count.value:
                self.nixl.notif_map_get_notifs_size(table, sender, byref(count))
            for i in range(count.value):
                data, size = c_void_p(), c_size_t()
                self.nixl.notif_map_get_notif(table, sender, c_size_t(i), byref(data), byref(size))
                got.append(ctypes.string_at(data, size.value) if size.value else b"")
            self.nixl.destroy_notif_map(table)
        assert got == want, (got, want)


def main(folder, seed):
    rng = random.Random(seed)
    nixl = Nixl(folder)
    n, size = 40, 5003
    me, peer = Agent(nixl, "me", n * size), Agent(nixl, "peer", n * size)
    assert me.knows(peer.metadata()) == b"peer"
    mine, theirs = (ctypes.addressof(x.mem) for x in (me, peer))
    for op in (WRITE, READ):
        source, target = (me, peer) if op == WRITE else (peer, me)
        source.mem.raw, target.mem.raw = rng.randbytes(n * size), bytes(n * size)
        here, there = (rng.sample(range(n), 7) for _ in range(2))
        request = c_void_p()
        nixl.create_xfer_req(
            me.agent, c_int(op), me.blocks([i * size for i in here], size, mine),
            me.blocks([i * size for i in there], size, theirs), b"peer", byref(request),
            me.notify_args(None))
        for message in (b"first\0 %d" % op, b""):  # the second time a repost, with an empty message
            me.run(request, message)
            peer.expect(b"me", [message])
        want = bytearray(n * size)
        pairs = zip(here, there) if op == READ else zip(there, here)
        for to, at in pairs:
            want[to * size : (to + 1) * size] = source.mem.raw[at * size : (at + 1) * size]
        assert target.mem.raw == bytes(want), "bytes differ"
        nixl.release_xfer_req(me.agent, request)
    nixl.gen_notif(me.agent, b"peer", b"alone\0", c_size_t(6), None)
    peer.expect(b"me", [b"alone\0"])
    nixl.invalidate_remote_md(me.agent, b"peer")
    for side in (me, peer):
        nixl.deregister_mem(side.agent, side.reg, side.args)
        nixl.destroy_agent(side.agent)
    print("kvrail drive: ok")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
