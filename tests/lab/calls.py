"""System calls of kvrail's threads in steady state, from the output of `strace -f` on mover.c.

usage: calls.py FILE     (suite `quiet` of the lab runs it)
Steady state is between mover's answer "ok rails=..." and its next answer. Verdicts: no call that
allocates or locks; the posting thread makes none but those of its own loop; the progress thread's
are doorbells of Soft-RoCE and what belongs to a sleep, each kind bounded by the number of sleeps.
"""

import re
import sys
from collections import Counter

LINE = re.compile(r"(\d+) +(\w+)\((.*)")
FORBIDDEN = {"brk", "mmap", "munmap", "mremap", "madvise", "mprotect", "futex"}
# 128 MiB in blocks of 64 KiB.
BLOCKS = 2048


def kind(name, args):
    """A call by what it is for."""
    if name == "write":
        # A doorbell of Soft-RoCE is a command of 32 bytes to the device; 8 bytes are an eventfd.
        return "doorbell" if re.search(r", 32(\)| <)", args) else "ring"
    if name == "ioctl":
        return "arm"
    return name


def phases(lines):
    """Calls of each steady phase, and the names of threads."""
    names, found, now = {}, [], None
    for line in lines:
        m = LINE.match(line)
        if not m:
            continue  # the second half of a call that another thread interrupted
        tid, name, args = int(m[1]), m[2], m[3].strip()
        if name == "prctl" and "PR_SET_NAME" in args and (n := re.search(r'"([\w-]+)"', args)):
            names[tid] = n[1]
        if name == "write" and '"ok ' in args:
            if now is not None and "status=" in args:
                found.append(now)
                now = None
            elif "rails=" in args and "status=" not in args:
                now = []
        elif now is not None:
            now.append((tid, kind(name, args)))
    return found, names


def verdict(good, what):
    print(f"lab: {'ok' if good else 'FAIL'} - {what}", flush=True)
    return good


def judge(what, calls, names):
    """Verdicts on one phase."""
    poll = Counter(k for tid, k in calls if names.get(tid) == "kvrail-poll")
    main = Counter(k for tid, k in calls if tid not in names)
    others = Counter(k for _, k in calls)
    print(f"{what}: progress thread {dict(poll)}; posting thread {dict(main)}")
    bad = {k: n for k, n in others.items() if k in FORBIDDEN}
    good = verdict(not bad, f"{what}: nothing allocates, maps or locks {bad or ''}")
    # Its own: the clock and the naps of mover.c, its answer, and rings of the progress and the
    # control thread for each of two posts, if they sleep.
    own = {"clock_gettime", "clock_nanosleep", "read"}
    strange = {k: n for k, n in main.items() if k not in own}
    strange["ring"] = strange.get("ring", 0) - 4
    good &= verdict(all(n <= 0 for n in strange.values()),
                    f"{what}: the posting thread makes no call but to wake a sleeper: {dict(main)}")
    sleeps = poll["poll"]
    # The clock is asked when a poll finds nothing: while it spins (50 us), before it sleeps.
    allowed = {"doorbell": BLOCKS, "poll": BLOCKS, "clock_gettime": 20 * (sleeps + 4),
               "arm": 4 * (sleeps + 4), "read": 6 * sleeps, "ring": 0, "sched_yield": sleeps + 4}
    over = {k: n for k, n in poll.items() if n > allowed.get(k, 0)}
    return good & verdict(not over, f"{what}: progress thread, {BLOCKS} blocks: {dict(poll)}"
                          + (f"; too many: {over}" if over else ""))


def main():
    with open(sys.argv[1], encoding="utf-8", errors="replace") as file:
        found, names = phases(file)
    # In the middle one the reads are new.
    good = verdict(len(found) == 3, f"{len(found)} phases in the trace")
    for what, calls in zip(("write", "read"), found[::2]):
        good &= judge(what, calls, names)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
