"""Tests of libplugin_RBLN.so inside real NIXL agents.

Run: pytest tests/nixl [--plugin-dir DIR] [--seed N]
Needs pytest, numpy and the wheels nixl and nixl-cu12 (1.4.1 to 1.5.1, installed with --no-deps);
test_wheels.py fetches the others itself.
"""

import os
import random
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Taken out of the environment: kvrail warns about a KVRAIL_ variable that it does not know.
PLUGIN_DIR = os.environ.pop("KVRAIL_PLUGIN_DIR", str(ROOT / "build" / "plugins"))
INCLUDE = Path(os.environ.pop("KVRAIL_INCLUDE", ROOT / "include"))
CACHE = Path(os.environ.pop("KVRAIL_TEST_CACHE", "~/.cache/kvrail-tests")).expanduser()


def pytest_addoption(parser):
    parser.addoption(
        "--plugin-dir",
        default=PLUGIN_DIR,
        help="directory of libplugin_RBLN.so (or KVRAIL_PLUGIN_DIR); default build/plugins",
    )
    parser.addoption("--seed", type=int, default=None, help="repeat a run that failed")


def pytest_configure(config):
    plugin_dir = Path(config.getoption("--plugin-dir")).resolve()
    if not (plugin_dir / "libplugin_RBLN.so").exists():
        raise pytest.UsageError(
            f"{plugin_dir}/libplugin_RBLN.so is not there; run bindings/nixl/build.sh"
        )
    # Before the first agent: NIXL's plugin manager reads it once. Children inherit it.
    os.environ["NIXL_PLUGIN_DIR"] = str(plugin_dir)
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    seed = config.getoption("--seed")
    config.kvrail_seed = random.randrange(1 << 32) if seed is None else seed


def pytest_report_header(config):
    return f"plugin: {os.environ['NIXL_PLUGIN_DIR']}  seed: --seed {config.kvrail_seed}"


@pytest.fixture
def plugin_dir():
    return Path(os.environ["NIXL_PLUGIN_DIR"])


@pytest.fixture
def include():
    """Where kvrail.h is (KVRAIL_INCLUDE, default include)."""
    return INCLUDE


@pytest.fixture
def cache():
    """Where fetched wheels are kept (KVRAIL_TEST_CACHE, default ~/.cache/kvrail-tests)."""
    return CACHE


@pytest.fixture
def rng(request):
    """Random numbers of this test alone; repeatable with the seed that the header shows."""
    import numpy as np

    return np.random.default_rng([request.config.kvrail_seed, *request.node.name.encode()])


@pytest.fixture(params=[True, False], ids=["thread", "polled"])
def thread(request):
    """NIXL's enable_prog_thread: with False only the agents' own calls make progress."""
    return request.param


@pytest.fixture
def side(thread):
    """Makes agents, each with its memory registered, and takes them down again."""
    from rig import Side

    made = []

    def make(nbytes, **kwargs):
        kwargs.setdefault("thread", thread)
        made.append(Side(nbytes, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def child(thread):
    """Makes agents in processes of their own; what a test leaves running is killed."""
    from child import Child

    made = []

    def make(nbytes, **kwargs):
        kwargs.setdefault("thread", thread)
        made.append(Child(nbytes, **kwargs))
        return made[-1]

    yield make
    for one in made:
        if one.process.is_alive():
            one.kill()
