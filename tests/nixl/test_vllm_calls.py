"""The calls of vLLM's pull worker, in its order: the decode side knows the prefill side only."""

import uuid

import numpy as np

from rig import agent_of, bytes_of, same, wait


def test_pull(rng):
    blocks, size = 64, 16_384
    producer, consumer = (
        agent_of(str(uuid.uuid4()), capture_telemetry=True) for _ in range(2)
    )
    assert "RBLN" in producer.get_plugin_list()
    assert producer.get_plugin_mem_types("RBLN") == ["DRAM_SEG", "VRAM_SEG"]
    assert {"stripe_width", "rails"} <= producer.get_plugin_params("RBLN").keys()

    src, dst = bytes_of(rng, blocks * size), np.zeros(blocks * size, np.uint8)
    regs = []
    for agent, mem in ((producer, src), (consumer, dst)):
        descs = agent.get_reg_descs([(mem.ctypes.data, mem.nbytes, 0, "")], "DRAM")
        agent.register_memory(descs, backends=["RBLN"])
        regs.append(descs)
    remote = consumer.add_remote_agent(producer.get_agent_metadata()).decode()
    assert remote == producer.name

    def table(agent, peer, mem):
        rows = np.array([[mem.ctypes.data + i * size, size, 0] for i in range(blocks)], np.uint64)
        return agent.prep_xfer_dlist(peer, agent.get_xfer_descs(rows, "DRAM"))

    local, there = table(consumer, "NIXL_INIT_AGENT", dst), table(consumer, remote, src)
    want = dst.copy()
    handles = []
    for request in range(4):
        mine = np.arange(request * 16, request * 16 + 16, dtype=np.int32)
        theirs = rng.permutation(blocks)[:16].astype(np.int32)
        for m, t in zip(mine, theirs):
            want[m * size : (m + 1) * size] = src[t * size : (t + 1) * size]
        handle = consumer.make_prepped_xfer(
            "READ", local, mine, there, theirs, notif_msg=b"req%d:1" % request)
        handles.append(handle)
        assert consumer.transfer(handle) in ("PROC", "DONE")
    for handle in handles:
        wait("read", lambda: consumer.check_xfer_state(handle) == "DONE")
        told = consumer.get_xfer_telemetry(handle)
        assert told.totalBytes == 16 * size and told.descCount >= 1
        assert consumer.query_xfer_backend(handle) == "RBLN"
    same(dst, want)

    got = []

    def messages(n):
        got.extend(producer.get_new_notifs().get(consumer.name, []))
        return len(got) >= n

    wait("notifications", lambda: messages(4))
    assert sorted(got) == [b"req%d:1" % i for i in range(4)]
    for handle in handles:
        consumer.release_xfer_handle(handle)
    consumer.send_notif(remote, notif_msg=b"HB:x")
    wait("heartbeat", lambda: messages(5))
    assert got[4] == b"HB:x"

    consumer.release_dlist_handle(local)
    consumer.release_dlist_handle(there)
    consumer.remove_remote_agent(remote)
    consumer.deregister_memory(regs[1])
    producer.deregister_memory(regs[0])
