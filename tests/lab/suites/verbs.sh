#!/bin/bash
# lab-about: what kvrail asks of verbs, by the real libibverbs: every operation, and refusals
# lab-rails: 1
# lab-limit: 120
# lab-needs: checks
. "$LAB_HOME/rails.sh"
# Path MTU 4096, then 1024.
for mtu in 4200 1500; do
    check "a rail of MTU $mtu" rails_veth 1 $mtu || exit 1
    say "verbs-check"
    "$LAB_BIN/verbs-check" ra0 rb0 || fail "verbs-check at MTU $mtu: exit status $?"
    say "end"
    check "the rail is removed" rails_gone
done
