"""What the threads of the process do between post and done, beside moving data: allocations, locks
and system calls, of which there are to be none, over the null NIC. The control thread, which looks
around a few times a second whether anything moves or not, is told apart.

`between.c` is preloaded and counts calls of the allocator and of pthread's locks; strace shows the
system calls of all threads between its marks. Rust's own locks make no call while nobody waits:
those that the posting thread takes are counted by callgrind, in the code that `Mutex` and `RwLock`
were compiled to. A lock inside the null NIC stands for what a device does, and is told apart.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import counts  # noqa: E402
import rig as rigs  # noqa: E402

# What is run, and for how many rounds.
WORKS = [(op, kind, descs, threads) for op in ("write", "read") for kind in ("fresh", "again")
         for descs, threads in ((1, 0), (10_000, 0), (10_000, 1))]
ROUNDS = 50
# Progress threads may have fallen asleep before the first transfer, which then wakes them.
WARM = 1
LOCK = re.compile(r"sys::sync::(mutex|rwlock|condvar)|sync::poison::(mutex|rwlock)"
                  r"|sync::reentrant_lock")
CALL = re.compile(r"^\d+<([^>]*)> +(?:<\.\.\. )?(\w+)(.*)$")
CONTROL = "kvrail-ctl"


def command(rig, op, kind, descs, threads, rounds=ROUNDS):
    return [rig.work, f"op={op}", f"kind={kind}", f"groups=1:1024:{descs}", f"descs={descs}",
            f"threads={threads}", f"rounds={rounds}"]


def system_calls(path):
    """Those that began between the marks, by name and thread; and how many spans there were."""
    seen, spans, inside = Counter(), 0, False
    for line in path.read_text(errors="replace").splitlines():
        found = CALL.match(line)
        if not found:
            continue
        thread, name, rest = found.groups()
        if name == "write" and '"between ' in rest:
            inside = "between post" in rest
            spans += inside
        elif inside and " resumed>" not in rest:
            # A call that a thread was waiting in all the time has begun before.
            seen[name, thread] += 1
    return seen, spans


def traced(rig, library, work):
    """What the preloaded library and strace say of one run."""
    trace, out = rig.folder / "strace.out", rig.folder / "between.json"
    out.unlink(missing_ok=True)
    preload = ["-E", f"LD_PRELOAD={library}", "-E", f"BETWEEN_OUT={out}",
               "-E", f"BETWEEN_WARM={WARM if work[3] else 0}"]
    rounds = ROUNDS + (WARM if work[3] else 0)
    rigs.run(["strace", "-f", "-qq", "--decode-pids=comm", "-o", trace, *preload,
              *command(rig, *work, rounds)], rig.env)
    calls, spans = system_calls(trace)
    seen = json.loads(out.read_text())
    if spans != ROUNDS or seen["spans"] != ROUNDS:
        sys.exit(f"between: {spans} and {seen['spans']} spans were seen, not {ROUNDS}")
    return seen, calls


def own_locks(rig, work, phases="po*"):
    """Instructions of Rust's locks that phases ran in one round; posting and polling, unless
    said."""
    op, kind, descs, threads = work
    seen, _ = rig.difference(lambda n: command(rig, op, kind, descs, threads, n), 4,
                             f"*phase_{phases}*")
    found = Counter()
    objects = Counter()
    for (binary, address), cost in seen.places.items():
        if cost and str(rig.examples) in binary:
            objects[address] += cost
    chains = counts.frames(str(rig.work), list(objects))
    for address, cost in objects.items():
        for name, _, _ in chains.get(address, []):
            if LOCK.search(name):
                found[name] += cost / 4
                break
    return found


def main():
    parser = argparse.ArgumentParser(prog="bench-between", description=__doc__)
    parser.parse_args()
    rigs.need("bench-between", "gcc", "strace", "valgrind", "addr2line", part=True)
    passed, notes = 0, []
    with tempfile.TemporaryDirectory(prefix="null-", ignore_cleanup_errors=True) as folder:
        rig = rigs.Rig(folder)
        library = rig.folder / "libbetween.so"
        rigs.run(["gcc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC",
                  rigs.HERE / "between.c", "-o", library, "-ldl", "-pthread"], rig.env)
        for work in WORKS:
            op, kind, descs, threads = work
            seen, calls = traced(rig, library, work)
            own = {key: n for key, n in calls.items() if key[1] != CONTROL}
            control = sum(calls.values()) - sum(own.values()) + seen["control"]
            text = ", ".join(f"{n} {name} of {who}" for (name, who), n in sorted(own.items()))
            who = "progress threads that spin" if threads else "no progress thread"
            line = (f"{op}, {kind}, {descs} descriptors, {who}: {ROUNDS} transfers, "
                    f"{seen['allocations']} calls of the allocator, {seen['locks']} of locks "
                    f"({seen['nic_locks']} of the null NIC's), system calls: {text or 'none'}; "
                    f"{control} of any kind by the control threads")
            # The null NIC has locks: a run without any was not seen at all.
            fine = seen["allocations"] == seen["locks"] == 0 and not own and seen["nic_locks"] > 0
            print(line)
            passed += fine
            notes += [] if fine else [line]
        if not own_locks(rig, WORKS[0], "prepare"):
            notes.append("preparing takes a lock that was not seen: LOCK fits no name of this std")
        for work in WORKS[:2]:
            locks = own_locks(rig, work)
            line = (f"{work[0]}, {work[1]}, {work[2]} descriptors: instructions of Rust's locks a "
                    f"transfer: {dict(locks) or 'none'}")
            print(line)
            passed += not locks
            notes += [line] if locks else []
    for note in notes:
        print(f"  {note}")
    print(f"{passed} passed, {len(notes)} failed, 0 skipped")
    return 1 if notes else 0


if __name__ == "__main__":
    sys.exit(main())
