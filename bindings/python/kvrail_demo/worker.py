"""One of the two processes: a NIXL agent that makes the calls vLLM's connectors make.

pull: decode loads prefill's metadata and READs; prefill loads nothing and frees on notification.
push: decode registers itself by a notification that carries its metadata and block table, prefill
      loads that and WRITEs; decode looks at its blocks when the notification has come.
"""

import base64
import gc
import json
import os
import sys
import time
import uuid

import numpy as np

from kvrail_demo.geometry import Plan
from kvrail_demo.pattern import CANARY, DATA, FREED, Pattern
from kvrail_demo.wire import ChildLink

PUSH_REG = b"PUSH_REG:"
PUSH_PART = 32 << 10  # a notification carries at most 64 KiB
REPORT_S = 0.1
PIECE = 64 << 20  # bytes filled or compared between two reports


class Worker:
    def __init__(self, link, role, start):
        self.link, self.role = link, role
        self.backend, self.params = start["backend"], start["params"]
        self.direction, self.request = start["direction"], start["request"]
        self.hold, self.spoil = start["hold"], start["spoil"]
        self.plan = Plan(**start["plan"])
        self.blocks = self.plan.blocks(role)
        self.pattern = Pattern(start["seed"], self.plan.block_bytes)
        rng = np.random.default_rng([start["seed"], role == "decode"])
        self.table = rng.permutation(self.blocks)[: self.plan.used]
        self.unused = np.setdiff1d(np.arange(self.blocks), self.table)
        self.layers = range(self.plan.layers)

    # ---- set-up ------------------------------------------------------------------------------

    def set_up(self):
        from nixl._api import nixl_agent, nixl_agent_config

        self.busy("agent")
        name = f"{self.role}-{uuid.uuid4()}"
        self.agent = nixl_agent(name, nixl_agent_config(backends=[], capture_telemetry=True))
        if self.backend not in self.agent.plugin_list:
            raise RuntimeError(
                f"NIXL found no plugin {self.backend} (it found: "
                f"{', '.join(sorted(self.agent.plugin_list))}); NIXL_PLUGIN_DIR is "
                f"{os.environ.get('NIXL_PLUGIN_DIR', 'not set')}"
            )
        self.busy("backend")
        self.agent.create_backend(self.backend, self.params)
        self.fill()
        self.busy("register")
        descs = self.agent.get_reg_descs(
            [(region.ctypes.data, region.nbytes, 0, "") for region in self.regions], "DRAM"
        )
        self.agent.register_memory(descs, backends=[self.backend])
        self.registered = descs

    def fill(self):
        """Every KV block of the sender its own pattern; every block of the receiver a canary."""
        kind = DATA if self.role == "prefill" else CANARY
        self.regions = []
        total = self.plan.layers * self.blocks
        for layer in self.layers:
            region = np.empty((self.blocks, self.pattern.words), np.uint64)
            for piece in self.pieces(self.blocks):
                self.pattern.fill(region, kind, layer, piece)
                self.progress_of_blocks("fill", layer * self.blocks + piece.stop, total)
            self.regions.append(region)

    def about_me(self):
        return {
            "name": self.agent.name,
            "metadata": base64.b64encode(self.agent.get_agent_metadata()).decode(),
            "bases": [region.ctypes.data for region in self.regions],
            "blocks": self.blocks,
            "table": self.table.tolist(),
        }

    # ---- the four parts ----------------------------------------------------------------------

    def pull_decode(self):
        peer = self.link.wait("peer")
        self.source_table = np.array(peer["table"])
        self.initiate("READ", peer)
        return {"check": self.check_received()}

    def pull_prefill(self):
        """Frees the blocks when the notification says so, and fills them at once with something
        else: had the notification come before the data was read, decode would read that."""
        note = self.await_notification()
        for layer in self.layers:
            for piece in self.pieces(len(self.table)):
                self.pattern.fill(self.regions[layer], FREED, layer, self.table[piece])
                self.busy("free")
        return {"notification": note, "check": self.check_sent(self.unused)}

    def push_decode(self):
        peer = self.link.wait("peer")
        self.source_table = np.array(peer["table"])
        remote = self.agent.add_remote_agent(base64.b64decode(peer["metadata"]))
        self.remotes.append(remote)
        body = json.dumps(self.about_me()).encode()
        parts = [body[at : at + PUSH_PART] for at in range(0, len(body), PUSH_PART)]
        for index, part in enumerate(parts):
            head = json.dumps({"request": self.request, "part": index, "parts": len(parts)})
            self.agent.send_notif(remote, PUSH_REG + head.encode() + b"\n" + part)
        note = self.await_notification(self.arrived)
        return {"notification": note, "check": self.check_received()}

    def push_prefill(self):
        peer = self.await_registration()
        self.initiate("WRITE", peer)
        return {"check": self.check_sent(np.arange(self.blocks))}

    # ---- transfer ----------------------------------------------------------------------------

    def descriptors(self, bases, blocks):
        """Every block of every layer: index = layer * blocks + block."""
        size = self.plan.block_bytes
        rows = np.empty((len(bases) * blocks, 3), np.uint64)
        starts = np.array(bases, np.uint64)[:, None]
        rows[:, 0] = (starts + np.arange(blocks, dtype=np.uint64) * np.uint64(size)).reshape(-1)
        rows[:, 1], rows[:, 2] = size, 0
        return self.agent.get_xfer_descs(rows, "DRAM")

    def indices(self, table, blocks):
        return (np.arange(self.plan.layers)[:, None] * blocks + table[None, :]).reshape(-1)

    def initiate(self, operation, peer):
        agent = self.agent
        self.busy("prepare")
        remote = agent.add_remote_agent(base64.b64decode(peer["metadata"]))
        self.remotes.append(remote)
        here = agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", self.descriptors(self.bases(), self.blocks)
        )
        self.dlists.append(here)
        self.busy("prepare")
        there = agent.prep_xfer_dlist(remote, self.descriptors(peer["bases"], peer["blocks"]))
        self.dlists.append(there)
        self.busy("prepare")
        mine, theirs = self.table, np.array(peer["table"])
        if self.spoil:
            if (self.spoil == "source") == (operation == "READ"):
                theirs = self.spoiled(theirs, peer["blocks"])
            else:
                mine = self.spoiled(mine, self.blocks)
        handle = agent.make_prepped_xfer(
            operation,
            here,
            self.indices(mine, self.blocks),
            there,
            self.indices(theirs, peer["blocks"]),
            notif_msg=f"{self.request}:1".encode(),
        )
        self.handles.append(handle)
        self.wait_before_post()
        self.progress("move", 0, self.plan.bytes)
        begin = time.perf_counter_ns()
        state = agent.transfer(handle)
        posted = time.perf_counter_ns()

        def ended():
            nonlocal state
            state = agent.check_xfer_state(handle)
            return state != "PROC"

        self.until(ended, state != "PROC")
        end = time.perf_counter_ns()
        if state != "DONE":
            raise RuntimeError(f"the transfer ended in state {state}")
        self.progress("move", self.plan.bytes, self.plan.bytes)
        telemetry = agent.get_xfer_telemetry(handle)
        if telemetry.totalBytes != self.plan.bytes:
            raise RuntimeError(
                f"NIXL counts {telemetry.totalBytes} bytes moved, the plan has {self.plan.bytes}"
            )
        self.moved = {
            "merged": telemetry.descCount,
            "seconds": (end - begin) / 1e9,
            "post_us": (posted - begin) / 1e3,
        }

    def wait_before_post(self):
        end = time.monotonic() + self.hold
        while (left := end - time.monotonic()) > 0:
            self.progress("hold", 1000 * (self.hold - left), 1000 * self.hold)
            time.sleep(min(left, REPORT_S))

    def bases(self):
        return [region.ctypes.data for region in self.regions]

    def spoiled(self, table, blocks):
        """The same table with one wrong block: one that exists but is not the request's."""
        wrong = table.copy()
        wrong[-1] = np.setdiff1d(np.arange(blocks), table)[0]
        return wrong

    def until(self, done, already, moving=None):
        """Polls as an engine's step would, and tells the parent how far the data is. Only what
        moved is told: when nothing moves on either side, the parent ends us."""
        if already:
            return
        if moving is None and self.role == "decode":
            moving = self.arrived
        report, told = 0.0, 0
        while not done():
            if moving is not None and time.monotonic() - report > REPORT_S:
                if (now := moving()) != told:
                    self.progress_of_blocks("move", now, self.plan.descriptors)
                report, told = time.monotonic(), now
            time.sleep(0.0002)

    def arrived(self):
        """How many of our blocks no longer begin with their canary."""
        count = 0
        for layer, region in enumerate(self.regions):
            untouched = self.pattern.first_words(CANARY, layer, self.table)
            count += int(np.count_nonzero(region[self.table, 0] != untouched))
        return count

    # ---- notifications -----------------------------------------------------------------------

    def take(self):
        for sender, messages in self.agent.get_new_notifs().items():
            self.notes.extend((sender, message) for message in messages)
        return len(self.notes)

    def await_notification(self, moving=None):
        self.busy("wait for the notification")
        self.until(self.take, self.take(), moving)
        sender, message = self.notes.pop(0)
        text = message.decode(errors="replace")
        if text != f"{self.request}:1":
            raise RuntimeError(f"notification '{text}' from {sender} is not '{self.request}:1'")
        note = {"from": sender, "text": text}
        self.link.send("notification", role=self.role, **note)
        return note

    def await_registration(self):
        parts, wanted = {}, 1
        while len(parts) < wanted:
            self.busy("wait for decode's registration")
            self.until(self.take, self.take())
            sender, message = self.notes.pop(0)
            head, _, body = message[len(PUSH_REG) :].partition(b"\n")
            if not message.startswith(PUSH_REG):
                raise RuntimeError(f"{sender} sent {message[:40]!r} instead of a registration")
            head = json.loads(head)
            parts[head["part"]], wanted = body, head["parts"]
        return json.loads(b"".join(parts[index] for index in range(wanted)))

    # ---- checks ------------------------------------------------------------------------------

    def check_received(self):
        """Every byte of the request's blocks, and every byte of the blocks beside them."""
        wrong, done, total = [], 0, self.plan.layers * self.blocks
        for layer, region in enumerate(self.regions):
            for table, kind, origin in (
                (self.table, DATA, self.source_table), (self.unused, CANARY, self.unused),
            ):
                for piece in self.pieces(len(table)):
                    args = (kind, layer, origin[piece])
                    wrong += self.pattern.compare(region, table[piece], *args)
                    done += piece.stop - piece.start
                    self.progress_of_blocks("check", done, total)
        spare = self.plan.layers * len(self.unused)
        size = self.plan.block_bytes
        return {"compared": (total - spare) * size, "untouched": spare * size, "wrong": wrong}

    def check_sent(self, blocks):
        """The sender's own blocks are as they were."""
        wrong = []
        for layer, region in enumerate(self.regions):
            for piece in self.pieces(len(blocks)):
                part = blocks[piece]
                wrong += self.pattern.compare(region, part, DATA, layer, part)
                self.busy("check")
        size = self.plan.layers * len(blocks) * self.plan.block_bytes
        return {"compared": 0, "untouched": size, "wrong": wrong}

    def pieces(self, blocks):
        """Slices of so many blocks, each so short that the parent hears of us in between."""
        step = max(1, PIECE // self.plan.block_bytes)
        return (slice(at, min(at + step, blocks)) for at in range(0, blocks, step))

    # ---- frame -------------------------------------------------------------------------------

    def progress(self, phase, done, total):
        self.link.send("progress", phase=phase, done=int(done), total=int(total))

    def progress_of_blocks(self, phase, done, total):
        self.progress(phase, done * self.plan.block_bytes, total * self.plan.block_bytes)

    def busy(self, phase):
        """A sign of life in what the bar does not show."""
        self.link.send("busy", phase=phase)

    def run(self):
        self.remotes, self.dlists, self.handles, self.notes = [], [], [], []
        self.moved = None
        self.set_up()
        self.link.send("hello", **self.about_me())
        result = getattr(self, f"{self.direction}_{self.role}")()
        result["check"]["wrong"] = shorten(result["check"]["wrong"])
        self.link.send("result", moved=self.moved, **result)
        self.link.wait("bye")
        self.take()
        if self.notes:
            raise RuntimeError(f"a notification came twice, or from nowhere: {self.notes[0]}")
        self.tear_down()
        self.link.send("gone")

    def tear_down(self):
        for handle in self.handles:
            self.agent.release_xfer_handle(handle)
        for dlist in self.dlists:
            self.agent.release_dlist_handle(dlist)
        for remote in self.remotes:
            self.agent.remove_remote_agent(remote)
        self.agent.deregister_memory(self.registered, backends=[self.backend])
        self.handles.clear()
        self.dlists.clear()
        self.agent = None  # ends the engine, which writes its last figures
        gc.collect()


def shorten(texts, most=4):
    return texts[:most] + [f"and {len(texts) - most} more blocks"] * (len(texts) > most)


def main():
    link = ChildLink(int(sys.argv[2]), int(sys.argv[3]))
    start = link.wait("start")
    try:
        Worker(link, sys.argv[1], start).run()
        code = 0
    except Exception as error:  # whatever NIXL or numpy raise becomes one line for the parent
        link.send("error", message=f"{type(error).__name__}: {error}")
        code = 1
    sys.stderr.flush()
    if start["backend"] == "UCX" or code:
        os._exit(code)  # UCX of this wheel crashes while the process exits
    sys.exit(code)


if __name__ == "__main__":
    main()
