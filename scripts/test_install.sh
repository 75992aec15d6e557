#!/bin/bash
# Installs into an empty folder, then builds and runs a program against it, shared and static, with
# what pkg-config says.
set -eu
cd "$(dirname "$0")/.."
prefix=$PWD/build/install-test
rm -rf "$prefix"
env -u BINDIR -u LIBDIR -u INCLUDEDIR -u PLUGINDIR -u DESTDIR -u NOBUILD \
    make --no-print-directory install PREFIX="$prefix"
lib=$prefix/lib
fail() { echo "install: $1" >&2; exit 1; }

for file in include/kvrail.h include/kvrail.hpp lib/libkvrail.so lib/libkvrail.a \
    bin/kvrail lib/pkgconfig/kvrail.pc lib/kvrail/plugins/libplugin_RBLN.so; do
    [ -s "$prefix/$file" ] || fail "$file is missing"
done
soname=$(readelf -d "$lib/libkvrail.so" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')
[ -e "$lib/$soname" ] || fail "SONAME $soname names no installed file"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)

cat > "$prefix/t.c" <<'C'
#include <kvrail.h>
#include <stdio.h>
int main(void) {
    printf("%s\n", kvr_version());
    return kvr_abi_version() == 0;
}
C
export PKG_CONFIG_PATH=$lib/pkgconfig
read -ra shared < <(pkg-config --cflags --libs kvrail)
read -ra static < <(pkg-config --static --cflags --libs kvrail | sed 's/-lkvrail/-l:libkvrail.a/')
cc "$prefix/t.c" -o "$prefix/shared" "${shared[@]}"
cc "$prefix/t.c" -o "$prefix/static" "${static[@]}"
said=$(LD_LIBRARY_PATH=$lib "$prefix/shared")
[[ $said == *"$version"* ]] || fail "the shared program says version '$said', not $version"
said=$("$prefix/static")
[[ $said == *"$version"* ]] || fail "the static program says version '$said', not $version"
! readelf -d "$prefix/static" | grep -q libkvrail || fail "the static program needs libkvrail.so"
[ "$(pkg-config --modversion kvrail)" = "$version" ] || fail "kvrail.pc has another version"
[ "$("$prefix/bin/kvrail" --version)" = "kvrail $version" ] || fail "bin/kvrail has another version"
# It looks at this host: with a rail or without, never another status.
status=0
"$prefix/bin/kvrail" nics > "$prefix/nics.txt" 2>&1 || status=$?
[ "$status" -le 1 ] || fail "kvrail nics ended with $status: $(cat "$prefix/nics.txt")"
! readelf -d "$prefix/bin/kvrail" | grep -q -e libkvrail -e libibverbs ||
    fail "bin/kvrail needs a library that may be missing"
echo "install: shared and static programs and the command run, version $version"
