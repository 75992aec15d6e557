"""`python -m kvrail_demo`. Signals come first, so that not even an import shows a traceback."""

import _signal  # `signal` itself takes long enough to import for a Ctrl-C to hit it
import os
import sys


def _too_early(signum, _frame):
    os._exit(128 + signum)


for _signum in (_signal.SIGHUP, _signal.SIGTERM, _signal.SIGINT):
    _signal.signal(_signum, _too_early)


def run():
    from kvrail_demo import signals
    from kvrail_demo.cli import main

    # All is imported and nothing is started: from here on there is something to end well.
    signals.install()
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
