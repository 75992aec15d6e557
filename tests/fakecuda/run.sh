#!/bin/sh
# Builds the fake libcuda and runs the CUDA provider over it.
#
#     tests/fakecuda/run.sh [LIBRARY_DIR [OUTPUT_DIR [VERBS_DIR]]]
#
# LIBRARY_DIR: holds libkvrail.so; default ${CARGO_TARGET_DIR:-target}/release.
# OUTPUT_DIR/libfakecuda.so is what KVRAIL_LIBCUDA may name; libfakecuda-old.so is a driver before
# CUDA 11.7. VERBS_DIR: where the fake NICs are, or are built; default OUTPUT_DIR/verbs.
# CC chooses the compiler; BUILD=1: only builds the fake libcuda.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
lib=${1:-$target/release}
out=${2:-$target/fakecuda}
cc=${CC:-cc}
strict="-std=c11 -O1 -g -Wall -Wextra -Werror -pthread -I$root/include"
mkdir -p "$out"
out=$(cd "$out" && pwd)
verbs=${3:-$out/verbs}

fake="$strict -fPIC -shared -fvisibility=hidden $here/fakecuda.c"
$cc $fake -o "$out/libfakecuda.so"
$cc $fake -DFAKECUDA_OLD -o "$out/libfakecuda-old.so"
[ "${BUILD:-0}" = 0 ] || exit 0

ln -sf "$(cd "$lib" && pwd)/libkvrail.so" "$out/libkvrail.so.0"
$cc $strict "$here/provider.c" "$out/libkvrail.so.0" -ldl -Wl,-rpath,"$out" -o "$out/provider"

# Against hangs only.
over() {
    library=$1
    shift
    KVRAIL_LIBCUDA=$library timeout 120 "$@" || {
        echo "tests/fakecuda/run.sh: $* ended with status $?" >&2
        exit 1
    }
}
over "$out/libfakecuda.so" "$out/provider"
over "$out/libfakecuda-old.so" "$out/provider" old
over "$out/libnone.so" "$out/provider" none

# Through the engine, where the fake NICs can be built.
if printf '#include <infiniband/verbs.h>\n' | $cc -fsyntax-only -x c - 2>/dev/null; then
    # As the tests of the verbs driver do: built anew where a source is newer.
    [ -z "$(find "$root/tests/fakeverbs" -newer "$verbs/bench" 2>&1)" ] ||
        bash "$root/tests/fakeverbs/build.sh" "$verbs"
    $cc $strict "$here/engine.c" "$out/libkvrail.so.0" -ldl -Wl,-rpath,"$out" -o "$out/engine"
    # The fake's bus takes short paths only.
    folder=$(mktemp -d /tmp/fakecuda.XXXXXX)
    trap 'rm -rf "$folder"' EXIT
    mkdir "$folder/bus"
    export FAKEVERBS_DEVICES=4 FAKEVERBS_HOST=1 FAKEVERBS_BUS="$folder/bus"
    export FAKEVERBS_SET="fake2.port1.ip=10.1.0.2;fake3.port1.ip=10.1.1.2"
    export KVRAIL_IBVERBS="$verbs/libfakeverbs.so" KVRAIL_SYSROOT="$folder/tree"
    "$verbs/fakeverbs-tree" "$folder/tree"
    over "$out/libfakecuda.so" "$out/engine"
elif [ "${STRICT:-0}" = 1 ]; then
    echo "tests/fakecuda/run.sh: STRICT=1 and no infiniband/verbs.h (Debian: libibverbs-dev)" >&2
    exit 1
else
    echo "SKIPPED: no infiniband/verbs.h (Debian: libibverbs-dev)" >&2
fi
echo "== tests/fakecuda: OK"
