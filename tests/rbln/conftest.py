"""Tests of the Python package nixl_rbln and of its wheel.

Run: pytest tests/rbln [--plugin-dir DIR]
Needs pytest, numpy, the wheels nixl and nixl-cu12 (installed with --no-deps) and the plugin.
"""

import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from fakes import TWINS

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bindings" / "rbln"), str(ROOT / "tests" / "nixl")]
PLUGIN_DIR = os.environ.pop("KVRAIL_PLUGIN_DIR", str(ROOT / "build" / "plugins"))
CACHE = Path(os.environ.pop("KVRAIL_TEST_CACHE", "~/.cache/kvrail-tests")).expanduser()
OWN = ("KVRAIL_", "RBLN_", "NIXL_RBLN_", "FAKE_")


def pytest_addoption(parser):
    parser.addoption("--plugin-dir", default=PLUGIN_DIR,
                     help="directory of libplugin_RBLN.so; default build/plugins")


def pytest_configure(config):
    plugin_dir = Path(config.getoption("--plugin-dir")).resolve()
    if not (plugin_dir / "libplugin_RBLN.so").exists():
        raise pytest.UsageError(f"{plugin_dir}/libplugin_RBLN.so is not there; run make plugin")
    # Before the first agent: NIXL's plugin manager reads it once.
    os.environ["NIXL_PLUGIN_DIR"] = str(plugin_dir)
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")


@pytest.fixture
def plugin_dir():
    return Path(os.environ["NIXL_PLUGIN_DIR"])


@pytest.fixture
def cache():
    """Where fetched wheels are kept (KVRAIL_TEST_CACHE, default ~/.cache/kvrail-tests)."""
    return CACHE


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No variable of the user's; transport local, since a test machine has no RDMA NIC."""
    for name in list(os.environ):
        if name.startswith(OWN):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KVRAIL_TRANSPORT", "local")
    import nixl_rbln._runtime as runtime

    monkeypatch.setattr(runtime, "_given", None)


@pytest.fixture
def agent():
    from fakes import FakeAgent

    return FakeAgent()


@pytest.fixture
def sysroot(tmp_path, monkeypatch):
    """A host with two cards on NUMA nodes 0 and 1, and no NIC."""
    for number in range(2):
        card = tmp_path / f"sys/devices/pci0/card{number}"
        card.mkdir(parents=True)
        (card / "numa_node").write_text(f"{number}\n")
        shown = tmp_path / f"sys/class/rebellions/rbln{number}"
        shown.mkdir(parents=True)
        (shown / "device").symlink_to(card)
    monkeypatch.setenv("KVRAIL_SYSROOT", str(tmp_path))
    return tmp_path


FAKE = ROOT / "tests" / "fakeverbs"


def no_fake():
    """Why the fake libibverbs cannot be built here, or None."""
    compiler = os.environ.get("CC") or "gcc"
    if not shutil.which(compiler):
        return f"no {compiler}"
    seen = subprocess.run([compiler, "-fsyntax-only", "-include", "infiniband/verbs.h", "-x", "c",
                           "/dev/null"], capture_output=True)
    return "no infiniband/verbs.h (Debian: libibverbs-dev)" if seen.returncode else None


@pytest.fixture(scope="session")
def fake(tmp_path_factory):
    """The environment of this process's fake NICs, fake0 to fake7. Of the session, since the fake
    reads it once a process."""
    why = no_fake()
    if why:
        assert os.environ.get("STRICT") != "1", f"STRICT=1 and {why}"
        pytest.skip(why)
    out = tmp_path_factory.mktemp("fakeverbs")
    subprocess.run(["bash", FAKE / "build.sh", out], check=True)
    bus = Path("/dev/shm") / f"kvr-{uuid.uuid4().hex[:12]}"  # its path must be short
    bus.mkdir()
    env = {"FAKEVERBS_DEVICES": str(2 * TWINS), "FAKEVERBS_BUS": str(bus),
           "FAKEVERBS_SET": ";".join(
               f"fake{TWINS + nic}.port1.ip=10.1.{nic}.2" for nic in range(TWINS))}
    subprocess.run([out / "fakeverbs-tree", out / "tree"], check=True, env={**os.environ, **env})
    yield {**env, "KVRAIL_IBVERBS": str(out / "libfakeverbs.so"), "KVRAIL_NUMA_NODE": "0",
           "KVRAIL_SYSROOT": str(out / "tree"), "KVRAIL_TRANSPORT": "verbs",
           "KVRAIL_LISTEN_IP": "127.0.0.1"}
    shutil.rmtree(bus)


@pytest.fixture
def over_fake(fake, monkeypatch):
    """Backends that a test makes are over the fake NICs that its KVRAIL_NICS names."""
    for name, value in fake.items():
        monkeypatch.setenv(name, value)
