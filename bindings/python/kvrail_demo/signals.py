"""Signals as an exception that carries the exit status."""

import signal


class Interrupted(BaseException):
    """A signal asked us to stop; `code` is the exit status a shell expects for it."""

    def __init__(self, signum):
        super().__init__(signal.Signals(signum).name)
        self.code = 128 + signum


def _raise(signum, _frame):
    raise Interrupted(signum)


def install():
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _raise)
