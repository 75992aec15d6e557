"""`python -m kvrail_demo`. Signals become an exit code first, so that no import shows a traceback."""

import sys

from kvrail_demo import signals


def run():
    try:
        signals.install()
        from kvrail_demo.cli import main

        return main(sys.argv[1:])
    except signals.Interrupted as stop:
        return stop.code


if __name__ == "__main__":
    sys.exit(run())
