#!/bin/bash
# lab-about: what kvrail asks of verbs, by the real libibverbs: every operation, and refusals
# lab-rails: 1
# lab-limit: 120
# lab-needs: checks
. "$LAB_HOME/rails.sh"
check_rail() { # check_rail WHAT COMMAND... : the command makes the rail
    local what=$1
    shift
    check "a rail $what" "$@" || exit 1
    say "verbs-check"
    "$LAB_BIN/verbs-check" ra0 rb0 || fail "verbs-check on a rail $what: exit status $?"
    say "end"
}
check_rail "of path MTU 4096" rails_veth 1 4200
check "the rail is removed" rails_gone
check_rail "of path MTU 1024" rails_veth 1 1500
check "the rail is removed" rails_gone
check_rail "over a router" rails_routed 1
# Bytes that the router sent towards b0: the ninth number of its line.
routed() {
    local sent
    sent=$(ip netns exec router awk '$1 == "b0:" {print $10}' /proc/net/dev)
    echo "the router sent '$sent' bytes to b0"
    [ "$sent" -ge 1200000 ]
}
check "the router forwarded what was written" routed
check "the rail is removed" rails_gone
