"""examples/nixl_pair.py moves its blocks, and sees a byte that is wrong on either side."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "nixl_pair.py"


def run(path, **env):
    return subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120,
                          env={**os.environ, **env})


def changed(tmp_path, *edits):
    """A copy of the example in which a line begins otherwise."""
    text = EXAMPLE.read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(f"\n    {old}") == 1, old
        text = text.replace(f"\n    {old}", f"\n    {new}")
    path = tmp_path / EXAMPLE.name
    path.write_text(text, encoding="utf-8")
    return path


def test_example():
    ran = run(EXAMPLE)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == (
        "nixl_pair.py: OK, 32 blocks of 4097 bytes read and 32 written between two processes, "
        "1 notification")


FILLED, AFTER = "memory = filled(1)", "after ="
READ, WRITE = 'move(agent, "READ"', 'move(agent, "WRITE"'
SPOIL = "memory[{}] ^= 1\n    "


@pytest.mark.parametrize("words, edits", [
    # Block 2 of prefill is read to block 60 of decode; block 3 of decode is written.
    ("decode: block 60 differs at byte 4096", [(FILLED, FILLED + "; memory[2, 4096] ^= 1")]),
    ("prefill: block 3 differs at byte 0",
     [(line, SPOIL.format("3, 0") + line) for line in (WRITE, AFTER)]),
    # A byte that no transfer has touched, and a transfer that is left out.
    ("decode: block 5 differs at byte 7", [(AFTER, SPOIL.format("5, 7") + AFTER)]),
    ("decode: block 0 differs at byte 0", [(READ, "(lambda *_: None)" + READ[4:])]),
])
def test_what_is_wrong_is_seen(tmp_path, words, edits):
    ran = run(changed(tmp_path, *edits))
    assert ran.returncode == 1 and words in ran.stderr, ran.stdout + ran.stderr
    assert "OK" not in ran.stdout


def test_no_plugin(tmp_path):
    ran = run(EXAMPLE, NIXL_PLUGIN_DIR=str(tmp_path))
    assert ran.returncode == 1 and ran.stderr.splitlines()[-1].startswith("nixl_pair.py: "), ran
