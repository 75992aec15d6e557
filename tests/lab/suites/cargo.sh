#!/bin/bash
# lab-about: the crate's own tests of the verbs driver, over the real library and kernel
# lab-rails: 1
# lab-limit: 90
# lab-needs: tests
. "$LAB_HOME/rails.sh"
check "$LAB_RAILS rails" rails_veth "$LAB_RAILS" || exit 1
export KVRAIL_TEST_RAIL="ra0@a0=$(rail_ip a 0),rb0@b0=$(rail_ip b 0)"
# Its path is in a file of build_tests (scripts/lab.sh).
read -r program < "$LAB_BIN/verbs_move.path"
"$program" > "$LAB_OUT/verbs_move.log" 2>&1
rc=$?
# One verdict a test.
while IFS= read -r line; do
    case $line in
    "test "*" ... "*ok) ok "${line#test }" ;;
    "test result:"*) say "$line" ;;
    esac
done < "$LAB_OUT/verbs_move.log"
[ $rc = 0 ] || { cat "$LAB_OUT/verbs_move.log"; fail "verbs_move: exit status $rc"; }
