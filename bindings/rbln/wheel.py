#!/usr/bin/env python3
"""Packs the wheel nixl-rbln: the Python package and the plugin that NIXL loads.

usage: bindings/rbln/wheel.py [--plugin FILE] [--out DIR]    prints the wheel's path

The plugin goes into the folder of plugins of the wheels nixl-cu12 and nixl-cu13, beside UCX: NIXL
finds it there without NIXL_PLUGIN_DIR. (`nixl` brings both, and takes cu13 where torch has no
CUDA.)
It is a file of this wheel (RECORD), so uninstalling removes it. The same input gives the same
bytes.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLUGINS = tuple(f".nixl_{cuda}.mesonpy.libs/plugins" for cuda in ("cu12", "cu13"))
MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine of an ELF file

METADATA = """\
Metadata-Version: 2.4
Name: nixl-rbln
Version: {version}
Summary: KV cache of Rebellions NPUs over RDMA: adapter and NIXL plugin RBLN
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.10
Requires-Dist: nixl<2,>=1.0.1
"""
WHEEL = """\
Wheel-Version: 1.0
Generator: kvrail wheel.py
Root-Is-Purelib: false
Tag: {tag}
"""


def version() -> str:
    text = (HERE / "nixl_rbln" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if not found:
        raise SystemExit("wheel.py: nixl_rbln/__init__.py has no __version__")
    return found.group(1)


def tag_of(plugin: bytes, path: Path) -> str:
    machine = int.from_bytes(plugin[18:20], "little")
    if plugin[:4] != b"\x7fELF" or machine not in MACHINES:
        raise SystemExit(f"wheel.py: {path} is no ELF file for {' or '.join(MACHINES.values())}")
    return f"py3-none-linux_{MACHINES[machine]}"


def contents(plugin_path: Path) -> tuple[str, dict[str, bytes]]:
    """The wheel's name, and its files without RECORD."""
    plugin = plugin_path.read_bytes()
    tag, full = tag_of(plugin, plugin_path), version()
    info = f"nixl_rbln-{full}.dist-info"
    files = {
        f"nixl_rbln/{path.name}": path.read_bytes()
        for path in sorted((HERE / "nixl_rbln").iterdir()) if path.suffix in (".py", ".typed")
    }
    for folder in PLUGINS:
        files[f"{folder}/libplugin_RBLN.so"] = plugin
    files[f"{info}/METADATA"] = METADATA.format(version=full).encode()
    files[f"{info}/WHEEL"] = WHEEL.format(tag=tag).encode()
    files[f"{info}/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    return f"nixl_rbln-{full}-{tag}.whl", files


def record(files: dict[str, bytes], info: str) -> bytes:
    lines = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    return "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()


def pack(plugin: Path, out: Path) -> Path:
    name, files = contents(plugin)
    info = f"nixl_rbln-{version()}.dist-info"
    files[f"{info}/RECORD"] = record(files, info)
    out.mkdir(parents=True, exist_ok=True)
    new = out / f".{name}.new"
    with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as packed:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = (0o755 if path.endswith(".so") else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            packed.writestr(entry, data)
    new.replace(out / name)
    return out / name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plugin", type=Path, default=ROOT / "build/plugins/libplugin_RBLN.so")
    parser.add_argument("--out", type=Path, default=ROOT / "build/wheels")
    args = parser.parse_args()
    if not args.plugin.is_file():
        print(f"wheel.py: {args.plugin} is not there; run `make plugin`", file=sys.stderr)
        return 1
    print(pack(args.plugin, args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
