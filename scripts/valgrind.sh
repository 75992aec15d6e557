#!/bin/bash
# Under valgrind: the unsafe code of the verbs driver (its tests), the C ABI through C programs
# with a look for leaks, and the fake libibverbs under memcheck and helgrind.
# usage: scripts/valgrind.sh [TEST ...]   names of test programs; default: the driver's, then C
# Exit status: 0 nothing failed; 1 something did; 77 it cannot run here (the last line says why).
set -u
cd "$(dirname "$0")/.." || exit 1
cargo=${CARGO:-cargo}
target=${CARGO_TARGET_DIR:-target}
target=$(mkdir -p "$target" && cd "$target" && pwd) || exit 1
cannot() { echo "  SKIPPED: $1"; echo "0 passed, 0 failed, 1 skipped"; exit 77; }
command -v valgrind > /dev/null || cannot "valgrind is not installed (apt-get install valgrind)"
tests=("$@")
[ ${#tests[@]} -gt 0 ] || tests=(verbs_device verbs_port verbs_mail verbs_move)
# Random cases cost fifty times as much here; the same tests run many without valgrind.
export PROPTEST_CASES=${PROPTEST_CASES:-4} RUST_BACKTRACE=0
passed=0 failed=0
. scripts/fakes-lib.sh
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
memcheck=(valgrind -q --error-exitcode=9 --fair-sched=yes)

judge() { # judge NAME STATUS PASSED
    if [ "$2" -eq 0 ] && [ "${3:-0}" -gt 0 ]; then
        echo "valgrind: $1: $3 passed"
        passed=$((passed + $3))
    else
        echo "valgrind: $1: FAILED (exit status $2)"
        tail -n 60 "$work/log"
        failed=$((failed + 1))
    fi
}

# Optimised, with assertions and symbols: what takes ten minutes unoptimised takes two.
rust_tests() {
    local args=() name built program count status
    for name in "${tests[@]}"; do args+=(--test "$name"); done
    built=$("$cargo" test -q -p kvrail --profile loom "${args[@]}" --no-run \
        --message-format=json-render-diagnostics) || { failed=$((failed + 1)); return; }
    while IFS= read -r program; do
        name=$(basename "$program")
        "${memcheck[@]}" --child-silent-after-fork=yes "$program" --test-threads=1 \
            < /dev/null > "$work/log" 2>&1
        status=$?
        count=$(sed -n 's/^test result: ok\. \([0-9]*\) passed.*/\1/p' "$work/log" | tail -n 1)
        judge "${name%-*}" $status "$count"
    done < <(grep -o '"executable":"[^"]*"' <<< "$built" | cut -d '"' -f 4)
}

# The C ABI through C programs, device memory over the fake NICs and the fake driver. They give back
# all they took, so what is lost then is a leak; but two fork a child that leaves its parent's
# engine behind.
c_programs() {
    local name leaks source over
    local sources=(tests/cabi/arguments.c tests/cabi/threads.c)
    "$cargo" build -q -p kvrail-ffi --profile loom || { failed=$((failed + 1)); return; }
    build_fakes "$work" "$target" > "$work/log" 2>&1
    case $? in
    0) sources+=("${device_programs[@]}") ;;
    77) echo "valgrind: C ABI, device memory: SKIPPED: no headers of libibverbs" ;;
    *) echo "valgrind: the fakes do not build:" && tail -n 20 "$work/log"
        failed=$((failed + 1)) ;;
    esac
    for source in "${sources[@]}"; do
        name=$(basename "$source" .c) leaks=() over=()
        case $name in arguments | devmem) ;; *)
            leaks=(--leak-check=full --show-leak-kinds=definite,indirect
                --errors-for-leak-kinds=definite,indirect) ;;
        esac
        case $name in arguments | threads) ;; *) over=(over_fakes "$name") ;; esac
        "${CC:-cc}" -std=c11 -O1 -g -Iinclude "$source" "$target/loom/libkvrail.a" \
            -lgcc_s -lutil -lrt -lpthread -lm -ldl -lc -o "$work/$name" > "$work/log" 2>&1 &&
            "${over[@]}" "${memcheck[@]}" --child-silent-after-fork=yes "${leaks[@]}" \
                "$work/$name" 10 < /dev/null > "$work/log" 2>&1
        judge "C ABI, $name" $? 1
    done
}

# The fake libibverbs is C with locks, so helgrind understands it.
fake() {
    local kind status count
    for kind in valgrind helgrind; do
        tests/fakeverbs/run.sh $kind > "$work/log" 2>&1
        status=$?
        count=$(sed -n 's/^\([0-9]*\) passed, 0 failed$/\1/p' "$work/log" | tail -n 1)
        judge "fake libibverbs, $kind" $status "$count"
    done
}

rust_tests
if [ $# -eq 0 ]; then
    c_programs
    if [ "${VALGRIND_FAKE:-0}" != 1 ]; then
        echo "valgrind: the fake libibverbs: left out; VALGRIND_FAKE=1 runs it, for minutes"
    elif command -v gcc > /dev/null && [ -f /usr/include/infiniband/verbs.h ]; then
        fake
    else
        echo "valgrind: the fake libibverbs: SKIPPED: no gcc, or no headers of libibverbs"
    fi
fi
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]
