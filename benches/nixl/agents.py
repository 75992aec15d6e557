"""What the bench builds and runs in beside the null NIC: the wheel, the plugin with line numbers,
and the program that drives two agents."""

import os
from pathlib import Path

from rig import REPOSITORY, Rig, run

HERE = Path(__file__).resolve().parent
LIBRARIES = "lib/python*/site-packages/.nixl_cu12.mesonpy.libs"


class Agents(Rig):
    """Two agents of the wheel in a process of work.c's, as often as they are wanted."""

    def __init__(self, folder):
        super().__init__(folder, programs=())
        run([REPOSITORY / "scripts" / "venv.sh", "demo"], os.environ)
        libraries, = (REPOSITORY / "build" / "venv").glob(LIBRARIES)
        wheel, = libraries.parent.glob("nixl_cu12-*.dist-info")
        self.version = wheel.name.removesuffix(".dist-info")
        plugins = self.folder / "plugins"
        # Line numbers change no instruction.
        with_lines = dict(os.environ, CXX=os.environ.get("CXX", "g++") + " -g")
        run([REPOSITORY / "bindings" / "nixl" / "build.sh", "--out", plugins], with_lines)
        self.work = self.folder / "nixl-work"
        run([os.environ.get("CC", "gcc"), "-std=c11", "-O2", "-g", "-Wall", "-Wextra", "-Werror",
             HERE / "work.c", "-o", self.work, f"-L{libraries}", "-l:libnixl_capi.so",
             f"-Wl,-rpath,{libraries}", "-Wl,--allow-shlib-undefined", "-ldl"], os.environ)
        self.env = {k: v for k, v in self.env.items() if not k.startswith("NIXL_")}
        self.env |= dict(NIXL_PLUGIN_DIR=str(plugins), NIXL_LOG_LEVEL="WARN")
