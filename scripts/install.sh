#!/bin/sh
# Installs what was built: command, header, C++ header, libraries, pkg-config file and plugin. `make
# install` calls it with: PREFIX BINDIR LIBDIR INCLUDEDIR PLUGINDIR DESTDIR, BUILT (command,
# libraries), PLUGINS (plugin).
set -eu
cd "$(dirname "$0")/.."
die() { printf 'kvrail: %s\n' "$@" >&2; exit 1; }
dest=${DESTDIR:-}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)

for file in "$BUILT/libkvrail.so" "$BUILT/libkvrail.a" "$BUILT/kvrail" \
    "$PLUGINS/libplugin_RBLN.so"; do
    [ -f "$file" ] || die "$file is not there" "build it first: make lib command plugin"
done
for dir in "$PREFIX" "$BINDIR" "$LIBDIR" "$INCLUDEDIR" "$PLUGINDIR"; do
    case $dir in
    /*) ;;
    *) die "$dir is no absolute path; kvrail.pc would be wrong from any other folder" ;;
    esac
done
# Programs are linked to the name inside the library, so that name must be a link to it.
soname=$(readelf -d "$BUILT/libkvrail.so" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')
[ -n "$soname" ] || die "$BUILT/libkvrail.so has no SONAME" "ffi/build.rs should set one"
real=libkvrail.so.$version
# A SONAME of the full version leaves nothing to link.
install -D -m 0644 include/kvrail.h "$dest$INCLUDEDIR/kvrail.h"
[ ! -f include/kvrail.hpp ] || install -D -m 0644 include/kvrail.hpp "$dest$INCLUDEDIR/kvrail.hpp"
install -D -m 0755 "$BUILT/libkvrail.so" "$dest$LIBDIR/$real"
[ "$soname" = "$real" ] || ln -sf "$real" "$dest$LIBDIR/$soname"
[ "$soname" = libkvrail.so ] || ln -sf "$soname" "$dest$LIBDIR/libkvrail.so"
install -D -m 0644 "$BUILT/libkvrail.a" "$dest$LIBDIR/libkvrail.a"
install -D -m 0755 "$PLUGINS/libplugin_RBLN.so" "$dest$PLUGINDIR/libplugin_RBLN.so"
install -D -m 0755 "$BUILT/kvrail" "$dest$BINDIR/kvrail"
mkdir -p "$dest$LIBDIR/pkgconfig"
sed -e "s|@PREFIX@|$PREFIX|" -e "s|@LIBDIR@|$LIBDIR|" -e "s|@INCLUDEDIR@|$INCLUDEDIR|" \
    -e "s|@PLUGINDIR@|$PLUGINDIR|" -e "s|@VERSION@|$version|" scripts/kvrail.pc.in \
    > "$dest$LIBDIR/pkgconfig/kvrail.pc"
chmod 0644 "$dest$LIBDIR/pkgconfig/kvrail.pc"
echo "kvrail $version installed under $dest$PREFIX"
echo "for NIXL: NIXL_PLUGIN_DIR=$PLUGINDIR (it replaces NIXL's own plugin folder)"
