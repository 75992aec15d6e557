#!/bin/bash
# Builds the fake libibverbs and its tools. Needs gcc and Debian's libibverbs-dev (headers only).
# usage: build.sh OUT [address|thread]   a sanitizer for all of it
#   OUT/libfakeverbs.so   for KVRAIL_IBVERBS      OUT/libibverbs.so.1   the same, by its SONAME
#   OUT/fakeverbs-tree    writes a sysfs tree     OUT/check, OUT/bench  see run.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd)
san=()
case ${2:-} in
address) san=(-fsanitize=address,undefined -fno-sanitize-recover=undefined) ;;
thread) san=(-fsanitize=thread) ;;
esac
cc=${CC:-gcc}
flags=(-std=c11 -O2 -g -Wall -Wextra -Werror -fPIC -fvisibility=hidden -pthread "${san[@]}")
lib=()
for f in bus complete config copy cq device engine event fault gids initiator misc modify object \
    post qp responder wet; do
    lib+=("$here/$f.c")
done
"$cc" "${flags[@]}" -shared -Wl,-soname,libibverbs.so.1 -Wl,--version-script="$here/v.map" \
    "${lib[@]}" -o "$out/libfakeverbs.so"
ln -sfn libfakeverbs.so "$out/libibverbs.so.1"
"$cc" "${flags[@]}" -fvisibility=default "$here"/check/*.c -o "$out/check" \
    -L"$out" -l:libfakeverbs.so -Wl,-rpath,"$out"
# The tool needs no version script, only the library's code.
"$cc" "${flags[@]}" "$here/tree.c" "${lib[@]}" -o "$out/fakeverbs-tree"
"$cc" "${flags[@]}" "$here/bench.c" -o "$out/bench" -L"$out" -l:libfakeverbs.so \
    -Wl,-rpath,"$out"
