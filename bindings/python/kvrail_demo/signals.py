"""Signals are noted when they come and told where the demo can act on them.

A handler that raises would raise wherever Python happens to be: in a destructor, or in some calls
of C, such an exception is printed and dropped, and the signal with it."""

import signal

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_noted = []


class Interrupted(BaseException):
    """A signal asked us to stop; `code` is the exit status a shell expects for it."""

    def __init__(self, signum):
        super().__init__(signal.Signals(signum).name)
        self.code = 128 + signum


def _note(signum, _frame):
    # The first one ends us, within a bound; more of them must not stop that, nor when Python is
    # on its way out and has put the default handlers back.
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    _noted.append(signum)


def install():
    for signum in ENDING:
        signal.signal(signum, _note)


def check():
    """Raises Interrupted for the first signal that came. To be called at least every 0.1 s."""
    if _noted:
        raise Interrupted(_noted[0])
