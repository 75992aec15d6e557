#!/bin/bash
# The unsafe code of the verbs driver under valgrind's memcheck: its tests over the double of
# libibverbs. verbs_mail and verbs_move take ten minutes each here; name them to run them.
# usage: scripts/valgrind.sh [TEST ...]      names of test programs; default: those of the driver
# Exit status: 0 nothing failed; 1 something did; 77 it cannot run here (the last line says why).
set -u
cd "$(dirname "$0")/.." || exit 1
cargo=${CARGO:-cargo}
cannot() { echo "  SKIPPED: $1"; echo "0 passed, 0 failed, 1 skipped"; exit 77; }
command -v valgrind > /dev/null || cannot "valgrind is not installed (apt-get install valgrind)"
tests=("$@")
[ ${#tests[@]} -gt 0 ] || tests=(verbs_device verbs_port)
args=()
for name in "${tests[@]}"; do args+=(--test "$name"); done
# Random cases cost fifty times as much here; the same tests run many without valgrind.
export PROPTEST_CASES=${PROPTEST_CASES:-4} RUST_BACKTRACE=0
built=$("$cargo" test -q -p kvrail "${args[@]}" --no-run --message-format=json) || exit 1
programs=$(grep -o '"executable":"[^"]*"' <<< "$built" | cut -d '"' -f 4)
log=$(mktemp) passed=0 failed=0
trap 'rm -f "$log"' EXIT
while IFS= read -r program; do
    name=$(basename "$program")
    if valgrind -q --error-exitcode=9 --fair-sched=yes --child-silent-after-fork=yes \
        "$program" --test-threads=1 < /dev/null > "$log" 2>&1; then
        line=$(grep -E '^test result: ok' "$log" | tail -n 1)
        count=$(sed -n 's/.* \([0-9]*\) passed.*/\1/p' <<< "$line")
        echo "valgrind: ${name%-*}: ${count:-0} passed"
        passed=$((passed + ${count:-0}))
        [ "${count:-0}" -gt 0 ] || failed=$((failed + 1))
    else
        echo "valgrind: ${name%-*}: FAILED (exit status $?)"
        tail -n 60 "$log"
        failed=$((failed + 1))
    fi
done <<< "$programs"
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]
