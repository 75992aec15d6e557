"""What the workers in Python share: the bench asks for rounds, one line of JSON at a time.

A worker runs in the venv of its engine. It answers the medians of its phases in nanoseconds; with
MARKS (a library) in its environment it calls a mark before, between and after the phases of each
round, so that callgrind counts them apart.
"""

import ctypes
import json
import mmap
import os
import random
import sys
import time

# A library that prints must not disturb the answers; engines are imported after this.
OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

LEN = 1024
STRIDE = 2 * LEN
LARGEST = 100_000


def memory():
    """Zeroed pages for the largest list, and their address. No byte of them is ever touched."""
    pages = mmap.mmap(-1, LARGEST * STRIDE)
    return pages, ctypes.addressof(ctypes.c_char.from_buffer(pages))


def order(count, seed):
    """Blocks in random order: nothing can be merged."""
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    return numbers


def no_mark():
    pass


def marker():
    library = os.environ.get("MARKS")
    return ctypes.CDLL(library).nullnic_mark if library else no_mark


def rounds(count, once):
    """`once` does a round and returns the times before, between and after its phases."""
    samples = []
    for _ in range(count):
        times = once()
        samples.append([after - before for before, after in zip(times, times[1:])])
    totals = sorted(sum(sample) for sample in samples)
    phases = [sorted(column)[count // 2] for column in zip(*samples)]
    return {"ns": phases, "total_ns": totals[count // 2]}


def now(mark):
    mark()
    return time.perf_counter_ns()


def serve(answer):
    """Says that it is ready, then answers each line of standard input."""
    print(json.dumps({"ready": True}), file=OUT, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=OUT, flush=True)
    # The UCX of NIXL's wheel crashes in its destructors; there is nothing left to do.
    os._exit(0)
