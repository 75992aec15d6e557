#!/bin/sh
# Builds libplugin_RBLN.so: one file that needs only libstdc++, libgcc_s, libc and libm.
# usage: bindings/nixl/build.sh [--out DIR] [--kvrail-lib DIR] [--include DIR]
#   --out         where the plugin goes; default build/plugins
#   --kvrail-lib  where libkvrail.a is; default: build it with cargo
#   --include     where kvrail.h is; default include
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=$root/build/plugins lib='' include=$root/include
while [ $# -gt 0 ]; do
    if [ $# -lt 2 ]; then echo "build.sh: $1 needs a directory" >&2; exit 2; fi
    case $1 in
    --out) out=$2 ;;
    --kvrail-lib) lib=$2 ;;
    --include) include=$2 ;;
    *) echo "build.sh: unknown option $1; known: --out --kvrail-lib --include" >&2; exit 2 ;;
    esac
    shift 2
done
if [ -z "$lib" ]; then
    (cd "$root" && cargo build --release -p kvrail-ffi)
    lib=${CARGO_TARGET_DIR:-$root/target}/release
fi
for need in "$lib/libkvrail.a" "$include/kvrail.h"; do
    if [ ! -f "$need" ]; then echo "build.sh: $need is not there" >&2; exit 1; fi
done
mkdir -p "$out"
# Nothing to do when the plugin is newer than all that it is made of.
plugin=$out/libplugin_RBLN.so
if [ -f "$plugin" ] && [ -z "$(find "$here" "$lib/libkvrail.a" "$include/kvrail.h" \
    -type f -newer "$plugin")" ]; then
    echo "$plugin"
    exit 0
fi
# For nixl_rbln; the plugin itself does not call all of them. -Bsymbolic-functions: never those of
# a libkvrail.so that the process has loaded too.
wanted=$(sed -n 's/^ *\(kvr_[a-z_]*\);$/-Wl,-u,\1/p' "$here/exports.map")
# Linked under another name and then renamed: an agent may have the old file mapped.
# -fno-gnu-unique: a unique symbol of libstdc++'s headers would be exported past the version script.
${CXX:-g++} -std=c++17 -O2 -fPIC -shared -fvisibility=hidden -fno-gnu-unique \
    -ffunction-sections -fdata-sections -Wall -Wextra -Werror -pedantic \
    -I"$include" "$here/plugin.cpp" "$here/engine.cpp" -o "$out/.libplugin_RBLN.so.new" \
    -Wl,-z,defs -Wl,--version-script="$here/exports.map" -Wl,-Bsymbolic-functions $wanted \
    -Wl,--gc-sections -Wl,--as-needed "$lib/libkvrail.a" -lpthread -ldl -lm
mv "$out/.libplugin_RBLN.so.new" "$plugin"
echo "$plugin"
