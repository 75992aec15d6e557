"""The parts of the demo and of the bench that need no process: shapes, patterns, figures."""

import json
import os

import numpy as np
import pytest

import shapes
from kvrail_demo import cli, geometry, show, stats
from kvrail_demo.children import KNOWN, Child, Children
from kvrail_demo.pattern import CANARY, DATA, Pattern
from kvrail_demo.wire import Lines, send

GIB = 1 << 30


@pytest.mark.parametrize(
    "model, tp, heads, bytes_per_token",
    [
        ("qwen3-0.6b", 1, 8, 112 << 10),
        ("llama-3.1-8b", 1, 8, 128 << 10),
        ("llama-3.1-70b", 1, 8, 320 << 10),
        ("llama-3.1-70b", 4, 2, 80 << 10),
        ("llama-3.1-70b", 16, 1, 40 << 10),
    ],
)
def test_a_rank_holds_the_models_bytes(model, tp, heads, bytes_per_token):
    plan = geometry.make_plan(model, 160, 16, tp)
    assert plan.kv_heads == heads
    assert plan.bytes == 160 * bytes_per_token
    assert plan.descriptors == plan.layers * 10


def test_a_started_block_moves_whole_and_spare_blocks_exist():
    plan = geometry.make_plan("qwen3-0.6b", 17, 16, 1)
    assert plan.used == 2
    assert plan.prefill_blocks > 2 and plan.decode_blocks > plan.prefill_blocks


@pytest.mark.parametrize("model", geometry.MODELS)
def test_the_default_run_takes_less_than_two_gib(model):
    assert geometry.make_plan(model, None, 16, 1).memory < 2 * GIB


@pytest.mark.parametrize(
    "flags, text",
    [
        ((0, 16, 1), "--tokens is 0"),
        ((16, -1, 1), "--block-size is -1"),
        ((16, 16, 3), "--tp is 3"),
    ],
)
def test_a_bad_flag_is_named_with_its_value(flags, text):
    with pytest.raises(ValueError, match=text):
        geometry.make_plan("qwen3-0.6b", *flags)


def test_what_does_not_fit_is_refused_with_advice_that_fits():
    plan = geometry.make_plan("llama-3.1-70b", 100_000, 16, 1)
    with pytest.raises(geometry.DoesNotFit) as refusal:
        geometry.check_memory(plan, 8 * GIB)
    text = str(refusal.value)
    assert f"{plan.memory / GIB:.2f} GiB" in text and "8.00 GiB" in text
    advised = int(text.split("use --tokens ")[1].split()[0])
    assert advised > 1000
    geometry.check_memory(geometry.make_plan("llama-3.1-70b", advised, 16, 1), 8 * GIB)


def test_available_memory_is_the_smaller_of_machine_and_control_group(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   2048 kB\n")
    assert geometry.available_bytes(tmp_path, tmp_path) == 2048 << 10
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert geometry.available_bytes(tmp_path, tmp_path) == 2048 << 10
    (tmp_path / "memory.max").write_text("1100\n")
    assert geometry.available_bytes(tmp_path, tmp_path) == 1000


@pytest.fixture
def blocks():
    pattern = Pattern(7, 4096)
    region = np.empty((20, 512), np.uint64)
    pattern.fill(region, DATA, 3)
    return pattern, region


def test_every_block_and_word_has_its_own_value(blocks):
    _, region = blocks
    assert len(np.unique(region)) == region.size
    other = np.empty_like(region)
    for seed, kind, layer in ((8, DATA, 3), (7, CANARY, 3), (7, DATA, 4)):
        Pattern(seed, 4096).fill(other, kind, layer)
        assert not np.isin(other, region).any()


def test_compare_accepts_moved_blocks_and_follows_the_table(blocks):
    pattern, region = blocks
    here, there = np.array([5, 0, 9]), np.array([1, 19, 4])
    target = np.zeros_like(region)
    target[here] = region[there]
    assert pattern.compare(target, here, DATA, 3, there) == []
    assert len(pattern.compare(target, here, DATA, 3, there[::-1])) == 2  # 19 is in the middle
    assert len(pattern.compare(target, here, DATA, 2, there)) == 3
    assert len(pattern.compare(target, here, CANARY, 3, there)) == 3


@pytest.mark.parametrize("offset", [0, 1, 2047, 4095])
def test_one_wrong_byte_is_found_and_named(blocks, offset):
    pattern, region = blocks
    region.view(np.uint8)[11, offset] ^= 0x40
    wrong = pattern.compare(region, np.arange(20), DATA, 3, np.arange(20))
    assert len(wrong) == 1
    assert "layer 3 block 11: 1 bytes differ" in wrong[0] and f"offset {offset} " in wrong[0]


def test_a_block_larger_than_the_scratch_is_compared_whole():
    pattern = Pattern(1, 8 << 20)
    region = np.empty((2, 1 << 20), np.uint64)
    pattern.fill(region, DATA, 0)
    region[1, -1] += np.uint64(1)
    assert len(pattern.compare(region, [0, 1], DATA, 0, [0, 1])) == 1


def test_naming_blocks_fills_only_those(blocks):
    pattern, region = blocks
    before = region.copy()
    pattern.fill(region, CANARY, 3, [2, 17])
    changed = np.flatnonzero((region != before).any(axis=1))
    assert changed.tolist() == [2, 17]
    assert pattern.compare(region, [2, 17], CANARY, 3, [2, 17]) == []
    assert (region[[2, 17], 0] == pattern.first_words(CANARY, 3, [2, 17])).all()


def test_figures_of_the_engine_become_shares(tmp_path):
    path = tmp_path / "stats"
    rail = {"bytes_written": 5, "work_requests": 2, "claims": 1}
    figures = {
        "transport": "local",
        "rails": [{"name": "a", "bytes_read": 30, **rail}, {"name": "b", "bytes_read": 10, **rail}],
        "transfers": {"posted": 1, "descriptors": 4, "work_requests": 4, "bytes": 40, "post_ns": 9},
    }
    path.write_text(json.dumps(figures))
    pull = stats.rails(stats.read(path), "pull")
    assert [(rail["name"], rail["share"]) for rail in pull] == [("a", 0.75), ("b", 0.25)]
    assert [rail["bytes"] for rail in stats.rails(figures, "push")] == [5, 5]


def result(rail_bytes):
    """What the parent makes of two good workers and of an engine that counts these bytes."""
    args = cli.parse(["--tokens", "16", "--seed", "1"])
    plan = geometry.make_plan(args.model, args.tokens, args.block_size, args.tp)
    check = {"compared": plan.bytes, "untouched": 8, "wrong": []}
    moved = {"merged": 28, "seconds": 0.5, "post_us": 20.0}
    note = {"from": "decode-x", "text": "cmpl-00000001:1"}
    workers = {
        "prefill": {"check": {**check, "compared": 0}, "notification": note, "moved": None},
        "decode": {"check": check, "moved": moved},
    }
    rest = {"bytes_written": 0, "work_requests": 14, "claims": 2}
    figures = {
        "transport": "local", "transfers": {"work_requests": 28, "post_ns": 1500},
        "rails": [{"name": f"r{at}", "bytes_read": count, **rest}
                  for at, count in enumerate(rail_bytes)],
    }
    return cli.report(args, plan, workers, figures), plan


def test_the_report_shows_each_rail():
    half = 28 * (64 << 10) // 2
    report, plan = result([half, half])
    assert report["ok"] and report["gb_per_s"] == plan.bytes / 0.5e9
    assert report["work_requests"] == 28 and report["engine_post_us"] == 1.5
    text = show.table(report)
    assert "rail r1" in text and " 50.0%" in text and "transport local" in text


def test_rails_that_count_other_bytes_than_the_request_fail_the_run():
    report, plan = result([plan_bytes := 28 * (64 << 10), 8])
    assert not report["ok"]
    assert f"count {plan_bytes + 8} bytes" in report["error"] and str(plan.bytes) in report["error"]


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"rails": []}'])
def test_missing_or_broken_figures_are_no_figures(tmp_path, text):
    path = tmp_path / "stats"
    if text is not None:
        path.write_text(text)
    assert stats.read(path) is None


def test_messages_are_cut_out_of_the_pipe():
    read, write = os.pipe()
    lines = Lines(read)
    send(write, {"a": 1})
    os.write(write, b'{"b": "\\n",')
    assert lines.read() == [{"a": 1}]
    os.write(write, b' "c": 2}\n{"d": 3}\n')
    os.close(write)
    assert lines.read() == [{"b": "\n", "c": 2}, {"d": 3}]
    assert lines.read() is None
    os.close(read)


def test_of_many_warnings_the_first_are_shown(tmp_path):
    log = tmp_path / "decode.log"
    lines = [f"kvrail: {level}: {at}" for at in range(10) for level in ("info", "warn", "error")]
    log.write_text("\n".join(["some library", f"{KNOWN} (and why)", "  more of it", *lines, *lines,
                              "kvrail: warn: a", "  and b"]) + "\n")
    both = Children(("prefill", "decode"), None)
    for role in both.roles:
        both.all[role] = Child.__new__(Child)
        both.all[role].log = tmp_path / f"{role}.log"  # prefill has none
    told = both.warnings(most=12)
    assert told[:3] == ["kvrail: warn: 0", "kvrail: error: 0", "kvrail: warn: 1"]
    assert len(told) == 13 and told[-1].startswith("and 9 more")
    assert both.warnings(most=21)[-1] == "kvrail: warn: a\n  and b"
    assert len(both.warnings(most=21)) == 21


def test_the_bench_takes_the_ratio_in_each_pair_and_then_the_median():
    key = ("READ", "1 x 64 MiB")
    samples = {
        (*key, "RBLN"): [1.0, 2.0, 10.0], (*key, "UCX"): [2.0, 3.0, 10.0],
        (*key, "bare"): [0.5, 1.9, 9.5],
    }
    (row,) = shapes.summarise(samples)
    assert row["ucx_over_rbln"] == [2.0, 1.5, 1.0] and row["ucx_over_rbln_median"] == 1.5
    assert row["bare_over_rbln_median"] == 0.95
    assert shapes.misses([row], same_call=False) == []
    assert "1.500 (1.00..2.00)" in shapes.table([row])


def test_the_bench_names_what_misses_a_goal():
    key = ("READ", "1 x 64 MiB")
    samples = {(*key, "RBLN"): [1.0], (*key, "UCX"): [0.99], (*key, "bare"): [0.85]}
    rows = shapes.summarise(samples)
    assert len(shapes.misses(rows, same_call=True)) == 1
    assert "0.850 of the speed of the bare call" in shapes.misses(rows, same_call=True)[0]
    assert len(shapes.misses(rows, same_call=False)) == 2
    del samples[(*key, "RBLN")]
    assert shapes.misses(shapes.summarise(samples), same_call=True) == []


def test_the_shapes_do_not_merge_and_fit_the_buffer():
    for shape in shapes.SHAPES.values():
        assert shape.count * shape.stride <= shapes.BUFFER
        assert shape.count == 1 or shape.stride > shape.size
