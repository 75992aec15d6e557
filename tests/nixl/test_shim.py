"""The plugin file itself, and the shim against a scripted C ABI (shim_test.cpp)."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "bindings" / "nixl"


def said(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


SOURCES = [Path(__file__).with_name("shim_test.cpp"), SHIM / "engine.cpp", SHIM / "plugin.cpp"]
COMPILE = [os.environ.get("CXX", "g++"), "-Wall", "-Wextra", "-Werror", "-pedantic",
           f"-I{SHIM}"]


def test_shim(tmp_path, include):
    program = tmp_path / "shim_test"
    subprocess.run([*COMPILE, "-std=c++17", f"-I{include}", "-g", "-fsanitize=address,undefined",
                    *SOURCES, "-ldl", "-o", program], check=True)
    ran = subprocess.run([program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_meta(tmp_path, include):
    program = tmp_path / "meta_test"
    subprocess.run([*COMPILE, "-std=c++17", f"-I{include}", "-g", "-fsanitize=address,undefined",
                    Path(__file__).with_name("meta_test.cpp"), "-o", program], check=True)
    ran = subprocess.run([program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_one_name_of_cudas_driver():
    """Whether it is loaded is asked by the name under which the provider would load it."""
    shim = (SHIM / "engine.cpp").read_text()
    driver = (ROOT / "ffi/src/cuda/driver.rs").read_text()
    names = re.search(r'getenv\("(\w+)"\).*?: "([^"]+)"', shim, re.S).groups()
    assert names == (re.search(r'VARIABLE: &str = "(\w+)"', driver).group(1),
                     re.search(r'LIBRARY: &CStr = c"([^"]+)"', driver).group(1))


def test_compiles_as_cpp20(include):
    subprocess.run([*COMPILE, "-std=c++20", f"-I{include}", "-fsyntax-only", *SOURCES],
                   check=True)


def test_exports(plugin_dir):
    """NIXL's two entry points, and of the C ABI what nixl_rbln calls."""
    names = said("nm", "-D", "--defined-only", plugin_dir / "libplugin_RBLN.so").split()[2::3]
    assert sorted(names) == [
        "kvr_abi_version", "kvr_config_env", "kvr_config_init", "kvr_config_set",
        "kvr_engine_create", "kvr_engine_destroy", "kvr_engine_info_get", "kvr_last_error",
        "kvr_rail_info_get", "nixl_plugin_fini", "nixl_plugin_init"]


def test_calls_its_own_engine(plugin_dir):
    """Never the kvr_ functions of a libkvrail.so in the same process: no call by name is left."""
    used = said("readelf", "-rW", plugin_dir / "libplugin_RBLN.so")
    assert "JUMP_SLO" in used or "GLOB_DAT" in used
    assert "kvr_" not in used


def test_needs_nothing_of_nixl(plugin_dir):
    plugin = plugin_dir / "libplugin_RBLN.so"
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", said("readelf", "-d", plugin)))
    assert needed <= {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6",
                      "ld-linux-x86-64.so.2"}
    # C++ names that are left to others are the standard library's.
    undefined = said("nm", "-DC", "--undefined-only", plugin)
    assert "nixl" not in undefined.lower() and "kvr_" not in undefined


def test_plugin_info_before_creation(plugin_dir):
    """NIXL runs init and fini for the parameters, and init again for the backend."""
    from rig import agent_of

    agent = agent_of()
    for _ in range(3):
        assert agent.get_plugin_params("RBLN")
        agent_of()
