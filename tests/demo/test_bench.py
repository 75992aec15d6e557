"""bench-local end to end, with samples too short to say anything about speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "benches" / "local" / "bench.py"
BACKENDS = "UCX" if os.environ.get("KVRAIL_DEMO_BACKEND") == "UCX" else "RBLN,UCX"


def run(*flags):
    command = [sys.executable, str(BENCH), "--backends", BACKENDS, "--budget", "0.001", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_bench_measures_every_shape_in_both_directions():
    done = run("--op", "both", "--pairs", "1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rows = {(row["op"], row["shape"]): row for row in report["rows"]}
    assert len(rows) == 8
    for (op, shape), row in rows.items():
        for backend in BACKENDS.split(","):
            assert row["seconds"][backend] > 0, (op, shape)
        assert (row["seconds"]["bare"] is not None) == (shape == "1 x 64 MiB")
        assert len(row["ucx_over_rbln"]) == ("RBLN" in BACKENDS)
    assert report["ucx_paths"]


def test_the_bench_keeps_both_alive_and_prints_a_table():
    done = run("--together", "--pairs", "2", "--shapes", "2,4")
    assert done.returncode == 0, done.stderr
    assert "1,000 x 64 KiB" in done.stdout and "1 x 8 B" in done.stdout
    assert "10,000 x 4 KiB" not in done.stdout
    assert "2 pairs, medians" in done.stdout


def test_the_bench_refuses_flags_that_it_does_not_know():
    shapes = ("--shapes", "9"), ("--shapes", "0")
    for flags in (*shapes, ("--pairs", "0"), ("--param", "rails"), ("--backends", "X")):
        done = run(*flags)
        assert done.returncode == 2 and flags[0] in done.stderr, done.stderr
