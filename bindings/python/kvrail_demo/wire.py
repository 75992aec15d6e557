"""The side channel: one JSON object a line over pipes, as vLLM's own handshake runs beside NIXL."""

import json
import os
import queue
import threading


def send(fd, message):
    data = memoryview(json.dumps(message).encode() + b"\n")
    while data:
        data = data[os.write(fd, data) :]


class Lines:
    """Cuts what a pipe delivers into messages."""

    def __init__(self, fd):
        self.fd = fd
        self.tail = b""

    def read(self):
        """The messages that one read brings, or None at the end of the pipe."""
        data = os.read(self.fd, 1 << 16)
        if not data:
            return None
        *whole, self.tail = (self.tail + data).split(b"\n")
        return [json.loads(line) for line in whole]


class ChildLink:
    """A worker's end. When the parent's end closes, the parent is gone and so are we."""

    def __init__(self, read_fd, write_fd):
        self.write_fd = write_fd
        self.lock = threading.Lock()
        self.inbox = queue.Queue()
        threading.Thread(target=self._pump, args=(Lines(read_fd),), daemon=True).start()

    def _pump(self, lines):
        while (messages := lines.read()) is not None:
            for message in messages:
                self.inbox.put(message)
        os._exit(3)

    def send(self, event, **fields):
        with self.lock:
            send(self.write_fd, {"event": event, **fields})

    def next(self, timeout=None):
        try:
            return self.inbox.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no command from the parent within {timeout} s") from None

    def wait(self, command):
        """Waits as long as there is a parent: only it knows what the other worker does."""
        message = self.next()
        if message["command"] != command:
            raise RuntimeError(f"the parent sent '{message['command']}' instead of '{command}'")
        return message
