"""Signals as an exception that carries the exit status."""

import signal

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked us to stop; `code` is the exit status a shell expects for it."""

    def __init__(self, signum):
        super().__init__(signal.Signals(signum).name)
        self.code = 128 + signum


def _raise(signum, _frame):
    # The first one ends us, within a bound; more of them must not stop that.
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(signum)


def install():
    for signum in ENDING:
        signal.signal(signum, _raise)
