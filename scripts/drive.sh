#!/bin/sh
# Runs the drive of the published connector of vllm-rbln over build/plugins: tests/rbln/drive.
# usage: scripts/drive.sh [ARGUMENT of drive.py ...]    none: the cases of CI
# environment: KVRAIL_TRANSPORT      default local
#              KVRAIL_DRIVE_LOG=FILE  the connector's log; default build/drive/drive.log
#              and what scripts/vllm-venv.sh takes
set -eu
cd "$(dirname "$0")/.."
die() { printf 'kvrail: %s\n' "$@" >&2; exit 1; }

[ -f build/plugins/libplugin_RBLN.so ] || die "no build/plugins/libplugin_RBLN.so" \
    "build it: make plugin"
made=$(scripts/vllm-venv.sh)
venv=$(printf '%s\n' "$made" | sed -n 's/^VENV=//p')
wheel=$(printf '%s\n' "$made" | sed -n 's/^RBLN_WHEEL=//p')
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
# NIXL looks in one folder only: ours beside UCX, which finds its libraries a folder up.
folder=$PWD/build/drive
rm -rf "$folder/nixl" "$folder/vllm" && mkdir -p "$folder/nixl/plugins"
ln -s "$site"/nixl_cu12.libs/*.so* "$site/nixl_cu12.libs/ucx" "$folder/nixl"
ln -s "$site/nixl_cu12.libs/nixl/libplugin_UCX.so" "$PWD/build/plugins/libplugin_RBLN.so" \
    "$folder/nixl/plugins"
# The cases over verbs use NICs without hardware; without compiler or headers they are skipped.
built=$folder/fakeverbs/bench  # the last thing that is built
if [ -e "$built" ] && [ -z "$(find tests/fakeverbs -newer "$built")" ] ||
    fakes=$(tests/fakeverbs/build.sh "$folder/fakeverbs" 2>&1); then
    export KVRAIL_FAKEVERBS="$folder/fakeverbs"
elif [ "${STRICT:-}" = 1 ]; then
    die "no fake libibverbs, which STRICT=1 asks for: $fakes"
else
    printf 'kvrail: no fake libibverbs: %s\n' "$fakes" >&2
fi
log=${KVRAIL_DRIVE_LOG:-$folder/drive.log}
drive=$PWD/tests/rbln/drive
status=0
# vLLM keeps what it knows of a model in the user's home; no run here may need that it is there.
NIXL_PLUGIN_DIR="$folder/nixl/plugins" VLLM_CACHE_ROOT="$folder/vllm" \
    KVRAIL_TRANSPORT="${KVRAIL_TRANSPORT:-local}" \
    PYTHONPATH="$PWD/bindings/rbln:$PWD/scripts:$drive:$wheel" PYTHONDONTWRITEBYTECODE=1 \
    "$venv/bin/python" "$drive/drive.py" "$@" 2> "$log" || status=$?
[ $status -eq 0 ] || { echo "kvrail: the last lines of $log:"; tail -n 5 "$log"; } >&2
exit $status
