"""What vllm-rbln sees when it imports the package."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import nixl_rbln

PACKAGE = Path(nixl_rbln.__file__).parent


def test_import_is_light():
    """No torch, numpy or NIXL, and no shared library: the import decides a fall-back."""
    code = (
        "import sys; import ctypes, mmap, logging; before = set(sys.modules)\n"
        "maps = lambda: {l.split()[-1] for l in open('/proc/self/maps') if '.so' in l}\n"
        "import dataclasses, pathlib, typing, weakref, importlib, time; libs = maps()\n"
        "import nixl_rbln\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "print(sorted(new & {'torch', 'numpy', 'nixl', 'nixl_cu12', 'msgspec', 'vllm'}))\n"
        "print(sorted(maps() - libs))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "NIXL_RBLN_PROVIDER": "nonsense",
           "FAKE_AREAS": "x", "KVRAIL_STRIPE_WIDTH": "x", "RBLN_VISIBLE_DEVICES": "x"}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["[]", "[]"] and ran.stderr == ""


def test_signatures():
    parameters = inspect.signature(nixl_rbln.register_kv_regions).parameters
    assert list(parameters) == [
        "agent", "regions", "device_id", "mem", "rbln_ctx_ptr", "stripe_width"]
    assert parameters["mem"].default == "VRAM"
    for name in ("mem", "rbln_ctx_ptr", "stripe_width"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    parameters = inspect.signature(nixl_rbln.ensure_rbln_backend).parameters
    assert list(parameters)[:2] == ["agent", "device_id"] and parameters["device_id"].default == 0
    assert parameters["stripe_width"].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["stripe_width"].default is None


def test_typed_and_versioned():
    assert (PACKAGE / "py.typed").exists()
    assert nixl_rbln.__version__ == "0.12.0.post1"
    for path in PACKAGE.glob("*.py"):
        assert "from __future__ import annotations" in path.read_text(), path
    for name in nixl_rbln.__all__:
        assert getattr(nixl_rbln, name).__doc__, name
