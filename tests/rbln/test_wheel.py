"""The wheel nixl-rbln in an environment of its own, beside the published nixl-cu12."""

import base64
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from test_wheels import wheel as fetched

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "bindings" / "rbln" / "wheel.py"
OTHER = ".nixl_cu13.mesonpy.libs/plugins/libplugin_RBLN.so"  # `nixl` may take this one
PLUGIN = ".nixl_cu12.mesonpy.libs/plugins/libplugin_RBLN.so"
EXAMPLE = ROOT / "examples" / "nixl_pair.py"

# The plugin alone, as README's "Next to UCX" puts it there.
LINKED = """
import os, sys
from nixl_{cuda}._api import nixl_agent, nixl_agent_config
agent = nixl_agent("both", nixl_agent_config(backends=["UCX", "RBLN"]))
print("backends", *agent.backends)
sys.stdout.flush()
os._exit(0)
"""

# Both backends are made by the agent itself, as vLLM's default and the adapter do it.
BOTH = """
import os, sys
from nixl_{cuda}._api import nixl_agent, nixl_agent_config
import nixl_{cuda}, nixl_rbln
agent = nixl_agent("both", nixl_agent_config(backends=["UCX"]))
assert {"UCX", "RBLN"} <= set(agent.get_plugin_list()), agent.get_plugin_list()
nixl_rbln.ensure_rbln_backend(agent)
assert list(agent.backends) == ["UCX", "RBLN"], agent.backends
from nixl_rbln import _abi
path = _abi.load(agent).path
print("plugin", path)
print("package", nixl_rbln.__file__)
sys.stdout.flush()
# With two copies of libnl in the process, UCX ends it by a signal at exit; that is not ours
# (bindings/nixl/README.md).
os._exit(0)
"""


def pip(*args):
    """A virtual environment may have none of its own (scripts/venv.sh): then that outside it."""
    inside = importlib.util.find_spec("pip") is not None
    python = sys.executable if inside else sys._base_executable
    ran = subprocess.run([python, "-m", "pip", "--disable-pip-version-check", *args],
                         capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    plugin = Path(os.environ["NIXL_PLUGIN_DIR"]) / "libplugin_RBLN.so"

    def build(name):
        out = tmp_path_factory.mktemp(name)
        said = subprocess.run([sys.executable, BUILD, "--plugin", plugin, "--out", out],
                              check=True, capture_output=True, text=True).stdout
        return Path(said.strip())

    return build("one"), build("two")


def test_contents(built):
    path = built[0]
    assert path.name == f"nixl_rbln-0.12.0.post1-py3-none-linux_{os.uname().machine}.whl"
    assert path.read_bytes() == built[1].read_bytes()
    with zipfile.ZipFile(path) as packed:
        names = packed.namelist()
        info = "nixl_rbln-0.12.0.post1.dist-info"
        assert {PLUGIN, OTHER} <= {*names} and "nixl_rbln/py.typed" in names
        assert packed.read(PLUGIN) == packed.read(OTHER)
        assert f"{info}/licenses/LICENSE" in names and len(names) == len(set(names))
        sources = (BUILD.parent / "nixl_rbln").glob("*.py")
        assert {f"nixl_rbln/{source.name}" for source in sources} <= {*names}
        listed = {}
        for line in packed.read(f"{info}/RECORD").decode().splitlines():
            name, digest, size = line.rsplit(",", 2)
            listed[name] = (digest, size)
        assert set(listed) == set(names)
        for name in names:
            if name.endswith("/RECORD"):
                continue
            data = packed.read(name)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert listed[name] == (f"sha256={digest}", str(len(data))), name
        metadata = packed.read(f"{info}/METADATA").decode()
        assert "Name: nixl-rbln\nVersion: 0.12.0.post1\n" in metadata
        # What vLLM imports; it brings nixl-cu12 and nixl-cu13 of its own version.
        assert re.findall("^Requires-Dist: (.*)", metadata, re.M) == ["nixl<2,>=1.0.1"]


def test_version_fits_what_vllm_rbln_asks_for(built):
    packaging = pytest.importorskip("packaging.specifiers")
    version = built[0].name.split("-")[1]
    assert version in packaging.SpecifierSet(">=0.12.0,<0.12.1")


def test_wrong_plugin(tmp_path):
    for data, words in ((None, "is not there; run `make plugin`"), (b"text", "is no ELF file")):
        plugin = tmp_path / "plugin.so"
        if data is not None:
            plugin.write_bytes(data)
        ran = subprocess.run([sys.executable, BUILD, "--plugin", plugin, "--out", tmp_path / "o"],
                             capture_output=True, text=True)
        assert ran.returncode == 1 and words in ran.stderr and not list(tmp_path.glob("o/*"))


@pytest.mark.parametrize("cuda, version", [
    ("cu12", "1.0.1"), ("cu12", "1.5.1"),
    ("cu13", "1.5.1"),  # which `nixl` takes where torch has no CUDA
])
def test_installed_beside_ucx(built, cache, plugin_dir, tmp_path, cuda, version):
    fetched(cache, version, cuda)
    nixl = next(cache.glob(f"nixl_{cuda}-{version}-*.whl"))
    plugins = f".nixl_{cuda}.mesonpy.libs/plugins"
    plugin = f"{plugins}/libplugin_RBLN.so"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    python = tmp_path / "v/bin/python"
    site = Path(subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['platlib'])"],
        check=True, capture_output=True, text=True).stdout.strip())
    install = ("--python", python, "install", "--no-deps", "--no-index", "--quiet")
    pip(*install, nixl, built[0])
    assert (site / PLUGIN).exists() and (site / OTHER).exists()
    others = sorted(p.name for p in (site / plugins).iterdir())
    # numpy comes from the environment of the tests, searched last. After pip, which would look
    # there too.
    (site / "outer.pth").write_text(sysconfig.get_paths()["platlib"] + "\n")
    # Up to 1.3.2 NIXL imports torch, of which nothing is used here.
    (site / "torch.py").write_text("class Tensor: pass\nclass dtype: pass\n")

    env = {k: v for k, v in os.environ.items() if k not in ("NIXL_PLUGIN_DIR", "PYTHONPATH")}

    def run(*args):
        ran = subprocess.run([python, *args], env=env, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    said = run("-c", BOTH.replace("{cuda}", cuda))
    assert f"plugin {site / plugin}\n" in said
    assert f"package {site}/nixl_rbln/__init__.py\n" in said
    # `nixl` comes from the environment of the tests and takes what is nearer, so this one.
    assert f"{site}/nixl_{cuda}/" in run("-c", "import nixl; print(nixl._pkg.__file__)")
    assert "nixl_pair.py: OK, 32 blocks of 4097 bytes read and 32 written" in run(EXAMPLE)

    pip("--python", python, "uninstall", "--yes", "nixl-rbln")
    left = sorted(p.name for p in (site / plugins).iterdir())
    assert left == [name for name in others if name != "libplugin_RBLN.so"] and left
    assert not (site / PLUGIN).exists() and not (site / OTHER).exists()
    assert not (site / "nixl_rbln").exists() and not list(site.glob("nixl_rbln*"))

    # README's commands, where its `make plugin` was run. They must not see the outer packages.
    outer = (site / "outer.pth").rename(tmp_path / "outer.pth")
    (tmp_path / "build").mkdir()
    (tmp_path / "build/plugins").symlink_to(plugin_dir)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.search(r"\*\*Next to UCX\.\*\*.*?```sh\n(.*?)```", readme, re.S).group(1)
    subprocess.run(["sh", "-e", "-c", commands], cwd=tmp_path, check=True,
                   env={**env, "PATH": f"{python.parent}:{env['PATH']}"})
    assert (site / plugin).is_symlink()
    outer.rename(site / "outer.pth")
    assert "backends UCX RBLN\n" in run("-c", LINKED.replace("{cuda}", cuda))
