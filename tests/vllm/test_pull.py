"""vLLM's NixlConnector: decode READs from prefill. The tests share one pair, in this order."""

import pytest
from pair import ALL, LENGTHS, bytes_of


@pytest.fixture(scope="module")
def pair(start, rbln_env):
    return start("pull", "NixlConnector", env=rbln_env)


def test_tokens_equal_one_at_a_time(pair, alone, seen):
    assert pair.right_one_by_one(alone, seen) == len(ALL)


def test_every_prompt_token_came_from_prefill(pair):
    state = pair.decode.state()
    counters, asked = state["counters"], sum(LENGTHS)
    assert counters["vllm:prompt_tokens_by_source/external_kv_transfer"] == asked
    assert counters["vllm:prompt_tokens_by_source/local_compute"] == 0
    assert counters["vllm:prompt_tokens_by_source/local_cache_hit"] == 0
    assert counters["vllm:nixl_bytes_transferred"] == bytes_of(state)
    for name in ("transfers", "notifications"):
        assert counters[f"vllm:nixl_num_failed_{name}"] == 0


def test_vllm_prints_its_transfer_metrics(pair, seen):
    lines = [line for line in pair.decode.log.read_text().splitlines()
             if "KV Transfer metrics: " in line]
    seen(lines[0].partition("KV Transfer ")[2] if lines else "no KV Transfer metrics")
    shown = [int(line.partition("Num successful transfers=")[2].partition(",")[0])
             for line in lines]
    assert sum(shown) == len(ALL)


def test_prefill_frees_its_blocks_when_they_were_read(pair):
    state = pair.prefill.until("no request held", lambda state: state["held"] == 0)
    # By the notification of each READ, not by the end of a lease.
    assert state["counters"]["vllm:nixl_num_kv_expired_reqs"] == 0


def test_tokens_equal_with_eight_in_flight(pair, alone, seen):
    assert pair.right(alone, ALL, seen, "all in flight") == len(ALL)
    assert pair.decode.state()["most"] == len(ALL)
    assert pair.prefill.state()["most"] == len(ALL)


def test_wrong_blocks_give_no_equal_answer(pair, alone, spoil, seen):
    assert pair.right(alone, ALL, seen, "blocks spoiled", spoil=spoil) == 0


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_killed_engine_comes_back(pair, alone, role, seen):
    pair.lose(role, alone, seen)
    assert pair.decode.state()["counters"]["vllm:nixl_num_failed_transfers"] == 0
