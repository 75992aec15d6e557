#!/bin/bash
# Tests under the compiler's sanitizers: those with the most unsafe code, and the C ABI through C
# programs, under AddressSanitizer; the engine's own threads under ThreadSanitizer.
# usage: scripts/sanitize.sh [address] [thread]      default: both
# Exit status: 0 nothing failed; 1 something did; 77 it cannot run here (the last line says why).
# The stable compiler ships the runtimes; RUSTC_BOOTSTRAP lets it take the flag.
set -u
cd "$(dirname "$0")/.." || exit 1
root=$PWD cargo=${CARGO:-cargo}
target=${CARGO_TARGET_DIR:-target}
target=$(mkdir -p "$target" && cd "$target" && pwd) || exit 1
host=$(rustc -vV | sed -n 's/^host: //p')
libs=$(rustc --print sysroot)/lib/rustlib/$host/lib
# Random cases cost several times as much here; the same tests run many without.
export PROPTEST_CASES=${PROPTEST_CASES:-8} RUST_BACKTRACE=0 RUSTC_BOOTSTRAP=1
# Tests keep memory until they end, so it is no leak: scripts/valgrind.sh looks for those.
export ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1
passed=0 failed=0 skipped=0 notes=()
. scripts/fakes-lib.sh
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

# Finds the flags that make an instrumented program here, or says why there are none.
flags() { # flags address|thread
    local short=${1:0:1}san flag why
    [ "$1" != address ] || short=asan
    if ! ls "$libs"/librustc-*_rt."$short".a > /dev/null 2>&1; then
        why="the toolchain has no runtime of the $1 sanitizer for $host"
    else
        echo 'fn main() {}' > "$work/main.rs"
        # The standard library is not instrumented. Newer compilers want to be told so for threads.
        for flag in "" " -Cunsafe-allow-abi-mismatch=sanitizer"; do
            found="-Zsanitizer=$1$flag"
            # shellcheck disable=SC2086
            rustc $found "$work/main.rs" -o "$work/main" 2> "$work/why" && "$work/main" && return 0
        done
        why="a program with -Zsanitizer=$1 does not build or run: $(head -n 1 "$work/why")"
    fi
    skipped=$((skipped + 1))
    notes+=("$1 SKIPPED: $why")
    return 1
}

judge() { # judge NAME STATUS LOG PASSED
    if [ "$2" -eq 0 ] && [ "${4:-0}" -gt 0 ]; then
        echo "sanitize: $1: $4 passed"
        passed=$((passed + $4))
    else
        echo "sanitize: $1: FAILED (exit status $2)"
        tail -n 60 "$3"
        notes+=("$1 failed")
        failed=$((failed + 1))
    fi
}

# Builds test programs and runs them: what follows `--` goes to each.
programs() { # programs KIND TEST... [-- ARGS...]
    local kind=$1 names=() args=() program count built
    shift
    while [ $# -gt 0 ] && [ "$1" != -- ]; do names+=(--test "$1"); shift; done
    [ $# -eq 0 ] || { shift; args=("$@"); }
    built=$(RUSTFLAGS=$found "$cargo" test -q -p kvrail --profile loom --features sim \
        --target "$host" --target-dir "$target/sanitize-$kind" "${names[@]}" --no-run \
        --message-format=json-render-diagnostics) ||
        { notes+=("$kind: no build"); failed=$((failed + 1)); return; }
    while IFS= read -r program; do
        timeout --kill-after=10 300 "$program" --test-threads=1 "${args[@]}" < /dev/null \
            > "$work/log" 2>&1
        local status=$?
        count=$(sed -n 's/^test result: ok\. \([0-9]*\) passed.*/\1/p' "$work/log" | tail -n 1)
        program=$(basename "$program")
        judge "$kind ${program%-*}" $status "$work/log" "$count"
    done < <(grep -o '"executable":"[^"]*"' <<< "$built" | cut -d '"' -f 4)
}

# The C ABI through C programs: both sides instrumented, with the compiler's own runtime.
c_abi() {
    local lib=$target/sanitize-address/$host/loom/libkvrail.a name source over
    local sources=(tests/cabi/arguments.c tests/cabi/threads.c examples/c/pair.c)
    RUSTFLAGS=$found "$cargo" build -q -p kvrail-ffi --profile loom --target "$host" \
        --target-dir "$target/sanitize-address" ||
        { notes+=("address: no library"); failed=$((failed + 1)); return; }
    build_fakes "$work" "$target" > "$work/log" 2>&1
    case $? in
    0) sources+=("${device_programs[@]}") ;;
    77) skipped=$((skipped + 1))
        notes+=("address: device memory SKIPPED: no headers of libibverbs") ;;
    *) tail -n 20 "$work/log"
        failed=$((failed + 1)) notes+=("address: the fakes do not build") ;;
    esac
    for source in "${sources[@]}"; do
        name=$(basename "$source" .c) over=()
        case $name in devmem | provider | engine) over=(over_fakes "$name") ;; esac
        "${CC:-cc}" -std=c11 -O1 -g -fsanitize=address -Iinclude -c "$source" -o "$work/$name.o" &&
            "${CC:-cc}" "$work/$name.o" "$lib" -Wl,--whole-archive "$libs"/librustc-*_rt.asan.a \
                -Wl,--no-whole-archive -lgcc_s -lutil -lrt -lpthread -lm -ldl -lc \
                -o "$work/$name" > "$work/log" 2>&1 &&
            "${over[@]}" timeout --kill-after=10 120 "$work/$name" > "$work/log" 2>&1 < /dev/null
        judge "address C ABI, $name" $? "$work/log" 1
    done
}

kinds=("$@")
[ ${#kinds[@]} -gt 0 ] || kinds=(address thread)
for kind in "${kinds[@]}"; do
    flags "$kind" || continue
    case $kind in
        address)
            programs address verbs_device verbs_port verbs_mail engine_sim local_engine local_pair
            c_abi
            ;;
        thread)
            # What the standard library and the test harness do between threads is not seen, so
            # reports about that alone are left out, and so are tests that go through a Mutex.
            export TSAN_OPTIONS="suppressions=$root/scripts/tsan.txt exitcode=66"
            programs thread stress_sim message_sim engine_sim
            ;;
        *) echo "sanitize.sh: unknown kind $kind; known: address thread" >&2; exit 2 ;;
    esac
done
printf '  %s\n' "${notes[@]+"${notes[@]}"}"
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ] || exit 1
[ $passed -gt 0 ] || exit 77
