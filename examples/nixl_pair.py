"""Two processes, each with a NIXL agent whose backend is RBLN: decode reads the even blocks of
prefill and writes the odd ones. Every byte of both sides is compared.

    make plugin venv
    NIXL_PLUGIN_DIR=$PWD/build/plugins build/venv/bin/python examples/nixl_pair.py
"""

import multiprocessing
import sys
import time

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

BLOCKS = 64
BLOCK = 4097
MESSAGE = b"all blocks moved"
LIMIT = 30.0  # seconds that any wait may take; it is over much earlier unless something is wrong


def filled(side):
    """Memory of one side: every byte of every block of either side is its own."""
    block, at = np.arange(BLOCKS)[:, None], np.arange(BLOCK)[None, :]
    return (side * 101 + block * 31 + at * 7 + (at >> 8)).astype(np.uint8)


def expect(who, memory, blocks):
    """Compares all of memory with blocks: of which side, and which one, each block must be."""
    for place, (side, block) in enumerate(blocks):
        wrong = np.flatnonzero(memory[place] != filled(side)[block])
        if len(wrong):
            raise RuntimeError(f"{who}: block {place} differs at byte {wrong[0]}")


def wait(what, ready):
    end = time.monotonic() + LIMIT
    while not ready():
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not within {LIMIT:.0f} s")
        time.sleep(0.0001)


def agent_of(name, memory):
    """An agent with its memory registered, which must stay in place until it is deregistered."""
    agent = nixl_agent(name, nixl_agent_config(backends=["RBLN"]))
    if "RBLN" not in agent.backends:  # NIXL only warns
        raise RuntimeError("NIXL finds no plugin RBLN; NIXL_PLUGIN_DIR names its folder")
    registered = agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agent, registered


def descs(agent, base, blocks):
    return agent.get_xfer_descs([(base + block * BLOCK, BLOCK, 0) for block in blocks], "DRAM")


def move(agent, op, local, remote, peer, message=b""):
    """Posts one transfer and waits for its end. A message arrives after the data."""
    handle = agent.initialize_xfer(op, local, remote, peer, message)
    try:
        states = [agent.transfer(handle)]
        if states[0] == "PROC":
            wait(op, lambda: states.append(agent.check_xfer_state(handle)) or states[-1] != "PROC")
        if states[-1] != "DONE":
            raise RuntimeError(f"{op} from or to `{peer}` ended as {states[-1]}, not as DONE")
    finally:
        agent.release_xfer_handle(handle)


def prefill(pipe):
    """Owns blocks, hands out where they are, and waits for the message that all were moved."""
    memory = filled(1)
    agent, registered = agent_of("prefill", memory)
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    seen = {}

    def arrived():
        seen.update(agent.get_new_notifs())
        return seen

    wait("the notification", arrived)
    if seen != {"decode": [MESSAGE]}:
        raise RuntimeError(f"unexpected notifications: {seen}")
    expect("prefill", memory, [(1 + block % 2, block) for block in range(BLOCKS)])
    pipe.poll(LIMIT)  # decode closes its end when it is done
    agent.deregister_memory(registered)


def decode(pipe):
    memory = filled(2)
    agent, registered = agent_of("decode", memory)
    if not pipe.poll(LIMIT):
        raise RuntimeError(f"prefill sent no metadata within {LIMIT:.0f} s")
    metadata, there = pipe.recv()
    peer, here = agent.add_remote_agent(metadata).decode(), memory.ctypes.data
    even, odd = range(0, BLOCKS, 2), range(1, BLOCKS, 2)
    move(agent, "READ", descs(agent, here, reversed(even)), descs(agent, there, even), peer)
    move(agent, "WRITE", descs(agent, here, odd), descs(agent, there, odd), peer, MESSAGE)
    after = [(2, block) for block in range(BLOCKS)]
    for to, source in zip(reversed(even), even):
        after[to] = (1, source)
    expect("decode", memory, after)
    agent.remove_remote_agent(peer)
    agent.deregister_memory(registered)


def main():
    context = multiprocessing.get_context("spawn")  # agents do not outlive a fork
    ours, theirs = context.Pipe()
    child = context.Process(target=prefill, args=(theirs,), daemon=True)
    child.start()
    theirs.close()
    try:
        decode(ours)
    except EOFError:
        pass  # prefill has ended: its own error is on standard error
    ours.close()
    child.join(LIMIT)
    if child.exitcode != 0:
        raise RuntimeError(f"prefill ended with {child.exitcode}")
    print(f"nixl_pair.py: OK, {BLOCKS // 2} blocks of {BLOCK} bytes read and {BLOCKS // 2} written "
          "between two processes, 1 notification")


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        sys.exit(f"nixl_pair.py: {type(error).__name__}: {error}")
