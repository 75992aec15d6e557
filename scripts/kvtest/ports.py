"""TCP ports for servers of tests."""

import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port():
    """A port at which nobody listens now, and which the system gives nobody who asks for any: one
    that it gave to a socket closed since may be another's before its user listens there."""
    first = int(RANGE.read_text().split()[0])
    for port in random.sample(range(1024, first), k=min(100, max(0, first - 1024))):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    with socket.socket() as probe:  # the system keeps none for itself
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
