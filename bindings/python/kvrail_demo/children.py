"""Starts the two workers, listens to both, and ends both whatever happens."""

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvrail_demo import signals
from kvrail_demo.wire import Lines, send

TICK_S = 0.1  # how often the parent looks at its signals
END_S = 5.0  # what a worker gets to end by itself before it is killed
WARNED = ("kvrail: warn: ", "kvrail: error: ")
# Every run on a host without RDMA has this one, and the result names the transport.
KNOWN = "kvrail: warn: transport auto: no RDMA rails, so transport local is used"


class ChildFailed(Exception):
    pass


class Silent(ChildFailed):
    """Neither worker said anything for too long."""


def _ignore_interrupt():
    # Ctrl-C reaches the whole process group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Child:
    """One worker process: a pipe each way, and what it printed in a file."""

    def __init__(self, role, folder, module="kvrail_demo.worker", env=None):
        self.role = role
        self.log = Path(folder, f"{role}.log")
        self.gone = False
        self.phase = "start"
        read_commands, self.commands = os.pipe()
        self.events, write_events = os.pipe()
        # With a log level asked for, the user wants to see the log now.
        shown = any(os.environ.get(name) for name in ("KVRAIL_LOG", "NIXL_LOG_LEVEL"))
        with open(self.log, "wb") as log:
            out = sys.stderr.fileno() if shown else log
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, role, str(read_commands), str(write_events)],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env,
                pass_fds=(read_commands, write_events), preexec_fn=_ignore_interrupt,
            )
        os.close(read_commands)
        os.close(write_events)
        self.lines = Lines(self.events)

    def command(self, command, **fields):
        try:
            send(self.commands, {"command": command, **fields})
        except BrokenPipeError:
            raise ChildFailed(f"{self.role} {self.how_it_ended()}") from None

    def how_it_ended(self):
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return f"closed its pipe but still runs (process {self.process.pid})"
        signals.check()  # what ends all three of us is no failure of this one
        how = f"exited with status {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return f"{how} in phase '{self.phase}'{self.last_words()}"

    def state(self):
        stopped = os.waitid(
            os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        )
        return f"{self.role} in phase '{self.phase}'" + (", stopped by a signal" if stopped else "")

    def last_words(self):
        return "".join(f"\n  | {line}" for line in self.logged()[-12:])

    def logged(self):
        try:
            return self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return []


class Children:
    """Both workers. `with` guarantees that neither outlives the block."""

    def __init__(self, roles, make):
        self.roles, self.make = roles, make
        self.all = {}
        self.selector = selectors.DefaultSelector()

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="kvrail-demo-")
        try:
            for role in self.roles:
                child = self.make(role, self.folder.name)
                self.all[role] = child
                self.selector.register(child.events, selectors.EVENT_READ, child)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc):
        for child in self.all.values():
            os.close(child.commands)  # a worker ends when its parent's end closes
        limit = time.monotonic() + END_S
        for child in self.all.values():
            try:
                child.process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            os.close(child.events)
        self.selector.close()
        self.folder.cleanup()

    def events(self, timeout, tick=None):
        """Yields (child, event) until every worker is gone. Raises ChildFailed when one dies,
        reports an error, or when neither says anything for `timeout` seconds; Interrupted.

        What counts is how long was waited here: time in which all of us were stopped does not."""
        silent = 0.0
        while not all(child.gone for child in self.all.values()):
            ready = self.selector.select(TICK_S)
            silent = 0.0 if ready else silent + TICK_S
            signals.check()
            if tick is not None:
                tick()
            for key, _ in ready:
                child = key.data
                messages = child.lines.read()
                if messages is None:
                    self.selector.unregister(child.events)
                    if not child.gone:
                        raise ChildFailed(f"{child.role} {child.how_it_ended()}")
                for event in messages or ():
                    if event["event"] == "error":
                        raise ChildFailed(self.blame(child, event["message"]))
                    child.phase = event.get("phase", event["event"])
                    child.gone = child.gone or event["event"] == "gone"
                    yield child, event
            if silent >= timeout:
                seen = ", ".join(child.state() for child in self.all.values())
                raise Silent(f"no news from either process for {timeout} s: {seen}")

    def blame(self, child, message):
        """An error may only follow from the other worker's death: then that comes first."""
        time.sleep(0.3)
        others = ""
        for other in self.all.values():
            # Status 1 is a reported error: both may report the same one.
            if other is not child and other.process.poll() not in (None, 0, 1):
                return f"{other.role} {other.how_it_ended()}; then {child.role} said: {message}"
            if other is not child:
                others += f", {other.role} in phase '{other.phase}'"
        return (
            f"{child.role} failed in phase '{child.phase}'{others}: {message}{child.last_words()}"
        )

    def warnings(self, most=12):
        """What kvrail warned of in either worker's log, each once."""
        told, more = [], False
        for line in (line for child in self.all.values() for line in child.logged()):
            if more and line.startswith("  "):  # a warning of several lines
                told[-1] += f"\n{line}"
                continue
            more = line.startswith(WARNED) and not line.startswith(KNOWN)
            if more:
                told.append(line)
        told = list(dict.fromkeys(told))
        rest = [f"and {len(told) - most} more; KVRAIL_LOG=warn shows all"]
        return told[:most] + rest * (len(told) > most)

    def exit_codes(self):
        """Waits for both to end by themselves; a bad end after all the work is still a failure."""
        for child in self.all.values():
            try:
                code = child.process.wait(END_S)
            except subprocess.TimeoutExpired:
                raise ChildFailed(
                    f"{child.role} did not exit within {END_S} s after its work was done"
                ) from None
            if code:
                child.phase = "exit"
                raise ChildFailed(f"{child.role} {child.how_it_ended()}")
