#!/usr/bin/env python3
"""Makes torch of PyPI importable without NVIDIA's libraries, on a machine without a GPU.

usage: torch_stubs.py SITE_PACKAGES   a folder with torch, installed with --no-deps

That torch links 2.7 GB of libraries. Each one that is missing becomes an empty library, and one
more defines all their functions, every one of which says that there is no device.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

SYSTEM = re.compile(r"^(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|ld-linux-\S+)\.so")
# Never a name of libstdc++, pthread or Python: those must stay with their owners.
OF_CUDA = re.compile(r"(cu[a-zA-Z]|nv|nccl|__cuda)")
OTHER_VERSIONS = re.compile(r"(GLIBC|GCC|CXXABI|GLIBCXX|GOMP|OMP)_")
TEXTS = {"cudaGetErrorString", "cudaGetErrorName", "cudnnGetErrorString", "ncclGetErrorString",
         "cublasGetStatusString", "cusparseGetErrorString", "nvrtcGetErrorString",
         "ncclGetLastError"}
NO_DEVICE = 100  # cudaErrorNoDevice
ALL = "libtorchcudastub.so"


def output(*argv):
    return subprocess.run([str(a) for a in argv], check=True, capture_output=True, text=True).stdout


def missing_libraries(libraries):
    have = {path.name for path in libraries}
    needed = set()
    for path in libraries:
        needed |= set(re.findall(r"NEEDED\).*\[(.*)\]", output("readelf", "-d", path)))
    return sorted(name for name in needed - have if not SYSTEM.match(name))


def missing_functions(libraries):
    undefined, defined = set(), set()
    for path in libraries:
        for line in output("nm", "-D", path).splitlines():
            *_, kind, full = line.split()
            name, _, version = full.partition("@")
            if kind not in "Uw":
                defined.add(name)
            elif kind == "U" and not OTHER_VERSIONS.match(version.lstrip("@")):
                undefined.add(name)
    return sorted(name for name in undefined - defined if OF_CUDA.match(name))


def source(functions):
    for name in functions:
        if name in TEXTS:
            yield f'const char *{name}(void) {{ return "no CUDA (stand-in)"; }}\n'
        else:
            yield f"long {name}(void) {{ return {NO_DEVICE}; }}\n"


def without_cuda(version):
    """torch's version.py, as a build for CPU has it."""
    text = re.sub(r"(?m)^__version__ = '([^'+]*)[^']*'", r"__version__ = '\1+cpu'", version)
    return re.sub(r"(?m)^cuda: .*", "cuda: Optional[str] = None", text)


def main(site):
    torch = Path(site) / "torch"
    lib = torch / "lib"
    libraries = sorted(lib.glob("lib*.so*"))
    if not libraries:
        sys.exit(f"torch_stubs.py: {lib} holds no library; install torch there first")
    empty, functions = missing_libraries(libraries), missing_functions(libraries)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "all.c").write_text("".join(source(functions)))
        (work / "empty.c").write_text("int kvrail_stand_in;\n")
        output("gcc", "-w", "-fno-builtin", "-shared", "-fPIC", "-O1", "-o", lib / ALL,
               f"-Wl,-soname,{ALL}", work / "all.c")
        for name in empty:
            output("gcc", "-shared", "-fPIC", "-o", lib / name, f"-Wl,-soname,{name}",
                   "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", work / "empty.c", lib / ALL)
    version = torch / "version.py"
    text = without_cuda(version.read_text())
    version.unlink()  # pip may have hard-linked it
    version.write_text(text)
    print(f"kvrail: {len(functions)} functions of {len(empty)} CUDA libraries have stand-ins")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(sys.argv[1])
    except subprocess.CalledProcessError as e:
        sys.exit(f"torch_stubs.py: {' '.join(e.cmd[:3])}: {e.stderr.strip()}")
