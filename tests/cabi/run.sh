#!/bin/sh
# Builds and runs the C and C++ programs against a built libkvrail, shared and static, with every
# warning an error, and compares the library's exports and SONAME with what is in git.
#
#     tests/cabi/run.sh [LIBRARY_DIR [OUTPUT_DIR]]
#
# LIBRARY_DIR: holds libkvrail.so and libkvrail.a; default ${CARGO_TARGET_DIR:-target}/release.
# CC and CXX choose the compilers.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
lib=$(cd "${1:-$target/release}" && pwd)
out=${2:-$target/cabi}
cc=${CC:-cc} cxx=${CXX:-c++}
strict="-O1 -g -Wall -Wextra -Werror -pedantic -I$root/include"
# What `rustc --print native-static-libs` says for the static library.
system="-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc"
mkdir -p "$out"

fail() {
    echo "tests/cabi/run.sh: $*" >&2
    exit 1
}
for file in libkvrail.so libkvrail.a; do
    [ -f "$lib/$file" ] || fail "$lib/$file is missing; run: cargo build --release -p kvrail-ffi"
done

echo "== exports and SONAME"
nm -D --defined-only "$lib/libkvrail.so" | awk '{ print $NF }' | LC_ALL=C sort >"$out/symbols.txt"
diff -u "$root/ffi/symbols.txt" "$out/symbols.txt" ||
    fail "the exports differ from ffi/symbols.txt; run: cargo xtask header && cargo xtask symbols"
readelf -d "$lib/libkvrail.so" | grep -q 'soname: \[libkvrail\.so\.0\]' ||
    fail "libkvrail.so has not the SONAME libkvrail.so.0; see ffi/build.rs"

while read -r name; do
    grep -q "$name(" "$root/tests/cabi/arguments.c" || fail "arguments.c never calls $name"
done <"$root/ffi/symbols.txt"

echo "== the headers alone"
printf '#include "kvrail.h"\n#include "kvrail.h"\nextern int none;\n' >"$out/header.c"
printf '#include "kvrail.hpp"\n#include "kvrail.hpp"\n' >"$out/header.cpp"
for std in c99 c11 c17; do $cc -std=$std $strict -fsyntax-only "$out/header.c"; done
for std in c++11 c++17 c++20; do $cxx -std=$std $strict -fsyntax-only -x c++ "$out/header.c"; done
for std in c++17 c++20; do $cxx -std=$std $strict -fsyntax-only "$out/header.cpp"; done

# The programs find the shared library under the name that an installation gives it.
ln -sf "$lib/libkvrail.so" "$out/libkvrail.so.0"
ln -sf "$lib/libkvrail.so" "$out/libkvrail.so"

# both NAME COMPILER SOURCE: builds it against both kinds of library and runs both.
both() {
    name=$1 source=$3
    echo "== $name"
    $2 $strict "$root/$source" -L"$out" -lkvrail -Wl,-rpath,"$out" -o "$out/$name-shared"
    $2 $strict "$root/$source" "$lib/libkvrail.a" $system -o "$out/$name-static"
    readelf -d "$out/$name-shared" | grep -q 'NEEDED.*\[libkvrail\.so\.0\]' ||
        fail "$name-shared does not ask for libkvrail.so.0"
    for kind in shared static; do
        timeout 120 "$out/$name-$kind" || fail "$name-$kind ended with status $?"
    done
}
both arguments-c11 "$cc -std=c11" tests/cabi/arguments.c
both threads-c11 "$cc -std=c11 -pthread" tests/cabi/threads.c
both wrapper-c++17 "$cxx -std=c++17" tests/cabi/wrapper.cpp
both pair-c99 "$cc -std=c99" examples/c/pair.c
both pair-c11 "$cc -std=c11" examples/c/pair.c
both pair-c++17 "$cxx -std=c++17" examples/cpp/pair.cpp
both pair-c++20 "$cxx -std=c++20" examples/cpp/pair.cpp

# Device memory, over the fake libibverbs: two NICs whose dma-bufs are memfds.
if echo '#include <infiniband/verbs.h>' | ${CC:-gcc} -fsyntax-only -x c - 2>/dev/null; then
    fake=$out/fakeverbs
    bash "$root/tests/fakeverbs/build.sh" "$fake"
    bus=$(mktemp -d) # its path must be short
    trap 'rm -rf "$bus"' EXIT
    export FAKEVERBS_DEVICES=2 FAKEVERBS_BUS="$bus" KVRAIL_IBVERBS="$fake/libfakeverbs.so"
    "$fake/fakeverbs-tree" "$fake/tree"
    KVRAIL_SYSROOT="$fake/tree" both devmem-c11 "$cc -std=c11 -pthread" tests/cabi/devmem.c
elif [ "${STRICT:-}" = 1 ]; then
    fail "STRICT=1 and no infiniband/verbs.h (Debian: libibverbs-dev)"
else
    echo "SKIPPED: devmem.c, no infiniband/verbs.h (Debian: libibverbs-dev)" >&2
fi
echo "== tests/cabi: OK"
