"""Every NIXL release that the plugin says it works with, and one that it refuses.

Wheels are kept in $KVRAIL_TEST_CACHE (default ~/.cache/kvrail-tests). What cannot be fetched is
skipped, with the last line of pip as the reason; to run offline, put the wheels there.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
GOOD = ["1.0.1", "1.3.2", "1.4.1", "1.5.0", "1.5.1"]
OLD = "0.10.1"


def wheel(cache, version, cuda="cu12"):
    """The folder that the wheel is unpacked in."""
    folder = cache / f"nixl-{cuda}-{version}"
    if not (folder / "complete").exists():
        cache.mkdir(parents=True, exist_ok=True)
        if not list(cache.glob(f"nixl_{cuda}-{version}-*.whl")):
            got = subprocess.run(
                [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
                 "--quiet", "--dest", cache, f"nixl-{cuda}=={version}"],
                capture_output=True, text=True)
            if got.returncode != 0:
                last = (got.stderr.strip() or "no output").splitlines()[-1]
                pytest.skip(f"WHEEL nixl-{cuda} {version} NOT TESTED, cannot be fetched: {last}")
        with zipfile.ZipFile(next(cache.glob(f"nixl_{cuda}-{version}-*.whl"))) as packed:
            packed.extractall(folder)
        (folder / "complete").touch()
    return folder


def drive(folder, plugin_dir, seed):
    return subprocess.run(
        [sys.executable, HERE / "capi_drive.py", folder / ".nixl_cu12.mesonpy.libs", str(seed)],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "NIXL_PLUGIN_DIR": str(plugin_dir)})


@pytest.mark.parametrize("version", GOOD)
def test_c_api(plugin_dir, cache, request, version):
    ran = drive(wheel(cache, version), plugin_dir, request.config.kvrail_seed)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "kvrail drive: ok" in ran.stdout


def test_older_is_refused_with_the_reason(plugin_dir, cache):
    ran = drive(wheel(cache, OLD), plugin_dir, 1)
    assert ran.returncode == 1 and "ok" not in ran.stdout
    lines = [line for line in ran.stderr.splitlines() if line.startswith("kvrail: ")]
    assert lines
    for line in lines:
        assert "NIXL before 1.0" in line and "libnixl.so" in line and "needs 1.0.1 to 1.5.x" in line


@pytest.mark.parametrize("version", GOOD[:-1])
def test_python_api(plugin_dir, cache, tmp_path, request, version):
    """What differs between agents (lost peers, stale lists, locks) through each Python module."""
    folder = wheel(cache, version)
    # Up to 1.3.2 it imports torch, of which these tests use nothing.
    (tmp_path / "torch.py").write_text("class Tensor: pass\nclass dtype: pass\n")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
         f"--plugin-dir={plugin_dir}", f"--seed={request.config.kvrail_seed}",
         "test_vllm_calls.py", "test_processes.py", "test_bad_input.py", "-k", "not polled"],
        cwd=HERE, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": f"{folder}:{tmp_path}"})
    assert ran.returncode == 0, ran.stdout[-6000:]
    assert " passed" in ran.stdout
