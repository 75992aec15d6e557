#!/bin/bash
# Instructions that the loss of one rail of four costs in software, from the error completion to
# claims that others can take and a peer that was told, on both sides of a connection: valgrind's
# callgrind counts what runs inside of the two functions that do it, over the fake libibverbs, in
# a build without optimisation. Waiting for a token is left out: valgrind runs one thread at a
# time, and who waits spins until the holder has its turn, which says nothing of the work.
# usage: scripts/failover.sh [LIMIT]     fails above LIMIT instructions a loss (default 2000000)
# Exit status: 0 fine; 1 too many, or no count; 77 it cannot run here (the last line says why).
set -u
cd "$(dirname "$0")/.." || exit 1
limit=${1:-2000000} cargo=${CARGO:-cargo}
cannot() { echo "  SKIPPED: $1"; echo "0 passed, 0 failed, 1 skipped"; exit 77; }
command -v valgrind > /dev/null || cannot "valgrind is not installed (apt-get install valgrind)"
out=$(mktemp -d) || exit 1
trap 'rm -rf "$out"' EXIT
wrap="valgrind --tool=callgrind --toggle-collect=*rail_failed* --toggle-collect=*drop_lanes*"
wrap="$wrap --callgrind-out-file=$out/calls --trace-children=no"
# Where there is no fake library the test skips itself, and there is no count.
KVRAIL_TEST_WRAP="$wrap" "$cargo" test -q -p kvrail --test verbs_engine -- \
    --exact cost::one_rail_of_four_breaks_under_a_striped_transfer > "$out/log" 2>&1
status=$?
if [ $status -ne 0 ] || [ ! -s "$out/calls" ]; then
    tail -n 40 "$out/log"
    grep -q SKIPPED "$out/log" && cannot "$(grep -m 1 -o 'SKIPPED: .*' "$out/log")"
    echo "0 passed, 1 failed, 0 skipped"
    exit 1
fi
# Instructions inside of a function, with all that it calls. It has a line for each file that the
# compiler took code of; that of its own file comes with the whole.
inside() {
    callgrind_annotate --inclusive=yes --threshold=100 --auto=no "$out/calls" |
        awk -v name="$1" '$0 ~ name { gsub(",", "", $1); if ($1 + 0 > most) most = $1 + 0 }
                          END { print most + 0 }'
}
total=$(sed -n 's/^totals: //p' "$out/calls")
waiting=$(inside 'PollToken::wait_and_take')
# The test loses a rail twice; a connection has two sides, which are both counted.
each=$(((${total:-0} - waiting + 1) / 2))
echo "failover: $each instructions a lost rail, both sides together (limit $limit)," \
    "and $((waiting / 2)) of waiting"
if [ "$each" -gt 0 ] && [ "$each" -le "$limit" ]; then
    echo "1 passed, 0 failed, 0 skipped"
else
    echo "0 passed, 1 failed, 0 skipped"
    exit 1
fi
