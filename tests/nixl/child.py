"""A Side in another process, driven over a pipe. It never loads anybody's metadata unless told."""

import multiprocessing
import os
import signal
import traceback

from rig import HANG, Side


def _serve(pipe, kind, args, kwargs):
    try:
        side = kind(*args, **kwargs)
        pipe.send((True, (side.name, side.agent.get_agent_metadata(), side.addr)))
        while True:
            # With a progress thread the passive side makes no call at all unless asked to.
            while not pipe.poll(0.001):
                if not kwargs["thread"]:
                    side.poll()
            what, rest = pipe.recv()
            if what == "quit":
                side.close()
                pipe.send((True, None))
                return
            if what == "fill":
                side.mem[:] = rest[0]
                result = None
            elif what == "mem":
                result = side.mem
            else:
                result = getattr(side, what)(*rest)
            pipe.send((True, result))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


class Child:
    def __init__(self, *args, kind=Side, **kwargs):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, kind, args, kwargs))
        self.process.start()
        theirs.close()
        self.name, self.metadata, self.addr = self._answer("start")

    def _answer(self, what):
        assert self.pipe.poll(HANG), f"child: no answer to {what} after {HANG:.0f} s"
        good, value = self.pipe.recv()
        assert good, f"child, {what}:\n{value}"
        return value

    def call(self, what, *rest):
        self.pipe.send((what, rest))
        return self._answer(what)

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def quit(self):
        """Ends it in good order; the exit status tells a crash at exit."""
        self.call("quit")
        self.process.join(HANG)
        assert self.process.exitcode == 0, f"child ended with {self.process.exitcode}"
