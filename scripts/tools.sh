#!/bin/sh
# Says what is missing before a build fails in a less clear way.
# usage: scripts/tools.sh rust|cxx
set -eu
cd "$(dirname "$0")/.."
die() { printf 'kvrail: %s\n' "$@" >&2; exit 1; }

[ "$(uname -s)" = Linux ] || die "kvrail runs on Linux; this is $(uname -s)"

case ${1:-} in
rust)
    cargo=${CARGO:-cargo}
    command -v "$cargo" >/dev/null || die "no $cargo found" \
        "install Rust (https://rustup.rs, or your distribution's cargo) and see that it is in PATH"
    want=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
    # `cargo --version` fails too when rustup has no toolchain; its own message then says so.
    have=$("$cargo" --version | awk '{print $2}')
    oldest=$(printf '%s\n%s\n' "$want" "${have%%-*}" | sort -V | head -n 1)
    [ "$oldest" = "$want" ] || die "cargo $have is too old; $want or newer is needed" \
        "run 'rustup update stable', or install a newer Rust"
    command -v cc >/dev/null || die "no C linker (cc) found, which cargo links with" \
        "install one: apt-get install gcc, or dnf install gcc"
    ;;
cxx)
    cxx=${CXX:-g++}
    # CXX may carry options; its first word is the program.
    command -v "${cxx%% *}" >/dev/null || die "no C++ compiler found (CXX=$cxx)" \
        "install one: apt-get install g++, or dnf install gcc-c++; or set CXX"
    ;;
*)
    die "tools.sh: unknown argument '${1:-}'; known: rust cxx"
    ;;
esac
