#!/bin/bash
# Builds the null NIC. Needs gcc and Debian's libibverbs-dev (headers only).
# usage: build.sh OUT
#   OUT/libibverbs.so.1   the library       OUT/rawloop   the loop in C over it
#   OUT/libmarks.so, OUT/libremap.so, OUT/libmallocs.so   see their sources
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd)
cc=${CC:-gcc}
flags=(-std=gnu11 -O2 -g -Wall -Wextra -Werror -fPIC -pthread)
"$cc" "${flags[@]}" -fvisibility=hidden -shared -Wl,-soname,libibverbs.so.1 \
    -Wl,--version-script="$here/v.map" "$here"/{device,object,post}.c -o "$out/libibverbs.so.1"
names=(remap mallocs)
# Without valgrind there are no instruction counts and no marks.
[ ! -f /usr/include/valgrind/callgrind.h ] || names+=(marks)
for name in "${names[@]}"; do
    "$cc" "${flags[@]}" -fno-builtin -shared "$here/$name.c" -o "$out/lib$name.so" -ldl
done
"$cc" "${flags[@]}" "$here/../../null/rawloop.c" -o "$out/rawloop" -L"$out" -l:libibverbs.so.1 \
    -Wl,-rpath,"$out"
