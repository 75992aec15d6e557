#!/bin/bash
# Prints the path of the lab's kernel; builds it the first time (6 to 8 minutes on two cores).
# usage: build-kernel.sh [--find]      --find: only look; exit 1 when there is none
# It is a user-mode Linux 6.12 with Soft-RoCE, from Debian's package linux-source-6.12 and
# kernel.config. Kept in KVRAIL_LAB_CACHE, default ~/.cache/kvrail-lab, in a folder named after the
# package's version and a hash of the configuration and of this script. A broken build goes on
# where it stopped. KVRAIL_LAB_DMABUF=1: another kernel, with the test-only dma-buf patch; where the
# plain one is missing too, both come out of one source tree, the second in less than a minute.
# Exit status: 0; 1 the build failed; 77 this machine cannot build it (the message says why).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${KVRAIL_LAB_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/kvrail-lab}
package=linux-source-6.12
say() { echo "lab: $*" >&2; }
cannot() { say "$*"; exit 77; }

inputs=("$here/kernel.config" "$here/build-kernel.sh")
key() { cat "$@" | sha256sum | cut -c 1-12; }
plain=$(key "${inputs[@]}")-plain
hash=$plain
if [ "${KVRAIL_LAB_DMABUF:-}" = 1 ]; then
    hash=$(key "${inputs[@]}" "$here/rxe-dmabuf-6.12.py")-dmabuf
fi

candidate() {
    command -v apt-cache > /dev/null || return 0
    LC_ALL=C apt-cache policy $package | sed -n 's/^ *Candidate: //p' | grep -v '(none)' || true
}
# The kernel of this configuration: of Debian's present version, else the newest that is there.
# A new version alone is no reason to build for minutes; removing the folder is.
find_kernel() {
    local version kernel kernels=("$cache"/*-"$hash"/linux)
    # Mostly there is one, and nobody to ask: apt takes a second.
    if [ ${#kernels[@]} = 1 ] && [ -x "${kernels[0]}" ]; then
        echo "${kernels[0]}"
        return
    fi
    version=$(candidate)
    kernel=$cache/$version-$hash/linux
    [ -x "$kernel" ] || kernel=$(ls -t "$cache"/*-"$hash"/linux 2>/dev/null | head -n 1)
    [ -n "$kernel" ] && [ -x "$kernel" ] && echo "$kernel"
}
if find_kernel; then exit 0; fi
[ "${1:-}" != --find ] || exit 1

[ "$(uname -s) $(uname -m)" = "Linux x86_64" ] ||
    cannot "the kernel is built on Linux x86_64; this is $(uname -s) $(uname -m)"
command -v apt-get > /dev/null || cannot "no kernel in $cache, and no apt-get to fetch its source"
missing=()
for tool in gcc make bc xz:xz-utils python3 dpkg; do
    command -v "${tool%:*}" > /dev/null || missing+=("${tool#*:}")
done
[ ${#missing[@]} = 0 ] || cannot "to build the kernel, install: apt-get install ${missing[*]}"

mkdir -p "$cache"
exec 9> "$cache/lock"
if ! flock --nonblock 9; then
    say "another run builds the kernel; waiting for it"
    flock 9
    if find_kernel; then exit 0; fi
fi

if [ "$(id -u)" = 0 ]; then
    apt-get -qq update >&2 || say "apt-get update failed; going on with the lists that are there"
fi
version=$(candidate)
[ -n "$version" ] ||
    cannot "apt knows no $package (Debian 12 and 13 have it; apt-get update needs root)"
free=$(df -Pm "$cache" | awk 'NR == 2 {print $4}')
[ "$free" -ge 2500 ] ||
    cannot "$cache has $free MB free; the build needs 2500 (KVRAIL_LAB_CACHE names another place)"

folder=$cache/$version-$plain
work=$folder/work
log=$folder/build.log
# A tree that another patch changed, or one where the plain kernel is wanted, is of no use.
for done in "$work"/patch-*.done; do
    [ -e "$done" ] || continue
    [ "$done" = "$work/patch-$hash.done" ] && [ -x "$folder/linux" ] || rm -rf "$work"
done
mkdir -p "$work" "$cache/$version-$hash"
say "building $package $version (${hash#*-}); log: $log"
began=$SECONDS

# stage NAME FUNCTION : runs it once, also over broken runs.
stage() {
    [ ! -e "$work/$1.done" ] || return 0
    # A list of commands under `if` would not stop at the first that fails.
    set +e
    (set -e; cd "$work"; "$2") >> "$log" 2>&1
    local rc=$?
    set -e
    if [ $rc != 0 ]; then
        say "the build failed at '$1'; the end of $log:"
        tail -n 15 "$log" >&2
        [ "$1" != fetch ] || exit 77
        exit 1
    fi
    touch "$work/$1.done"
    say "$1: done after $((SECONDS - began)) s"
}

fetch() {
    local names=("$package=$version" flex bison m4 libfl2) name
    # m4 needs this one on some releases.
    name=$(LC_ALL=C apt-cache depends m4 | sed -n 's/^ *Depends: \(libsigsegv[0-9]*\)$/\1/p')
    # shellcheck disable=SC2206
    names+=($name)
    # As root apt downloads as another user, who cannot write here.
    apt-get -qq -o APT::Sandbox::User="$(id -un)" download "${names[@]}"
}
unpack() {
    local deb
    rm -rf root source
    for deb in *.deb; do dpkg -x "$deb" root; done
    mkdir source
    # Half of the source is what no user-mode Linux is made of.
    tar -xf root/usr/src/$package.tar.xz -C source --strip-components=1 \
        --exclude='*/Documentation/*.rst' --exclude='*/drivers/gpu/drm/*/*.[ch]' \
        --exclude='*/sound/*.[ch]' --exclude='*/tools/testing/*' --exclude='*/tools/perf/*' \
        --exclude='*/arch/*/boot/dts/*'
    rm -f ./*.deb root/usr/src/$package.tar.xz
}
tools_in_path() {
    local usr=$work/root/usr
    export PATH=$usr/bin:$PATH BISON_PKGDATADIR=$usr/share/bison M4=$usr/bin/m4
    export LD_LIBRARY_PATH=$usr/lib/x86_64-linux-gnu
    # A `make` above has a job server that is not for this.
    unset MAKEFLAGS MFLAGS MAKELEVEL
}
configure() {
    local line lost=0
    tools_in_path
    make -s -C source ARCH=um O="$work/build" KCONFIG_ALLCONFIG="$here/kernel.config" allnoconfig
    while IFS= read -r line; do
        case $line in '' | '#'*) continue ;; esac
        grep -qxF "$line" build/.config || { echo "not in the kernel: $line"; lost=1; }
    done < "$here/kernel.config"
    [ $lost = 0 ]
}
compile() {
    tools_in_path
    make -s -C source ARCH=um O="$work/build" -j"${LAB_JOBS:-${CARGO_BUILD_JOBS:-$(nproc)}}" linux
}
patch_rxe() { python3 "$here/rxe-dmabuf-6.12.py" source/drivers/infiniband/sw/rxe; }
# finish FOLDER : the kernel is copied away, so that the tree can become another one.
finish() {
    strip -o "$1/linux.new" "$work/build/linux"
    mv "$1/linux.new" "$1/linux"
}
stage fetch fetch
stage unpack unpack
stage configure configure
if [ $hash = $plain ] || [ ! -x "$folder/linux" ]; then
    stage compile compile
    finish "$folder"
fi
if [ $hash != $plain ]; then
    stage "patch-$hash" patch_rxe
    stage "compile-$hash" compile
    finish "$cache/$version-$hash"
fi
rm -rf "$work"
say "kernel built in $((SECONDS - began)) s"
echo "$cache/$version-$hash/linux"
