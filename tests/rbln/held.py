"""What this process holds, for tests that see whether something grows."""

import ctypes
import gc
import os
import sys


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost")]


def files():
    """Open ones."""
    return len(os.listdir("/proc/self/fd"))


def in_use():
    """Bytes that malloc has given out, objects of Python, and open files."""
    gc.collect()
    info = ctypes.CDLL(None).mallinfo2
    info.restype = _Mallinfo
    return info().uordblks, sys.getallocatedblocks(), files()


def resident():
    """Bytes of this process in memory, which count what allocators keep for themselves too."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
