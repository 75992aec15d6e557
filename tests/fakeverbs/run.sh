#!/bin/bash
# Builds the fake libibverbs and runs its checks.
# usage: run.sh [plain|valgrind|helgrind|address|thread]... [-- PART-OF-A-CHECK'S-NAME]
#   plain is the default. The build goes to FAKEVERBS_OUT, else to a folder that is removed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
out=${FAKEVERBS_OUT:-$scratch/out}
kinds=() part=()
while [ $# -gt 0 ]; do
    case $1 in
    --) part=("${@:2}"); break ;;
    *) kinds+=("$1") ;;
    esac
    shift
done
passed=0 failed=0
for kind in "${kinds[@]:-plain}"; do
    san='' wrap=()
    case $kind in
    address | thread) san=$kind ;;
    valgrind) wrap=(valgrind -q --error-exitcode=9 --leak-check=full --trace-children=yes
        --show-leak-kinds=definite --errors-for-leak-kinds=definite --fair-sched=try) ;;
    helgrind) wrap=(valgrind -q --tool=helgrind --error-exitcode=9 --fair-sched=try) ;;
    plain) ;;
    *) echo "run.sh: unknown kind $kind" >&2; exit 2 ;;
    esac
    "$here/build.sh" "$out/$kind" $san
    mkdir -p "$scratch/bus-$kind"
    echo "fakeverbs: $kind"
    log=$scratch/$kind.log
    FAKEVERBS_BUS=$scratch/bus-$kind LD_LIBRARY_PATH=$out/$kind \
        "${wrap[@]}" "$out/$kind/check" "${part[@]}" 2>&1 | tee "$log" | grep -v '^$' || true
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$log" || echo "0 passed, 1 failed")
    passed=$((passed + ${line%% *})) failed=$((failed + $(cut -d' ' -f3 <<<"$line")))
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
