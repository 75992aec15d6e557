#!/bin/bash
# lab-about: a peer is killed or stopped in mid transfer, as target and as initiator, and comes back
# lab-rails: 2
# lab-limit: 120
# lab-needs: storm
. "$LAB_HOME/storm.sh"
check "$LAB_RAILS rails" rails_veth "$LAB_RAILS" || exit 1
speeds 320mbit
get_resources
before=$REPLY
pause=${KVRAIL_LAB_PAUSE:-8}
far=$(devices b) nics=$(devices a)

# The survivors' other peer, and what they do with it.
another() {
    begin other0 3 "$far" e.stripe_width=0 && ask here0 meet other0 && ask here1 meet other0 &&
        ask here0 go other0 streams=2 at=0 && ask here1 go other0 streams=2 at=1048576
}
untouched() { # untouched NAME PEER : of what NAME moves with PEER nothing failed
    ask "$1" sum "$2" && fine
}
# A long transfer is on its way when the other process is killed: `struck NAME PEER OP`. It may take
# a busy machine seconds to prepare it; one that is posted after the death finds nobody (-61).
struck() {
    ask "$1" bulk "$2" op="$3" count=4096 posted=1 && sleep 0.5 && killed "$2" || return
    heard "$1"
    answered status && [ "$REPLY" = -60 ]
}
# Who moves data with it hears so; what is posted later finds nobody. The failure model has no
# bound in ms for a killed process, so await's own 20 s only end a hang (a stall would be 30 s).
target_dies() {
    local name
    each mark && struck here1 there0 read || return
    for name in here0 here1; do
        ask $name await gone=there0 && ask $name await failed=1 peer=there0 || return
    done
}
others_feel_nothing() {
    ask here0 await done=2 peer=other0 && ask here1 await done=2 peer=other0 &&
        untouched here0 other0 && untouched here1 other0
}
# Under the same name, address and port, with new metadata.
target_is_reborn() {
    local name
    for name in here0 here1; do ask $name rest there0 || return; done
    begin there0 0 "$far" e.stripe_width=0 || return
    for name in here0 here1; do ask $name meet there0 || return; done
    each mark
    ask here0 go there0 && ask here1 go there0 || return
    for name in here0 here1; do ask $name await done=1 peer=there0 || return; done
    ask there0 meet here0 && ask there0 go here0 streams=2 at=0 && ask there0 await done=2
}
# An initiator is killed: its target hears so, and the memory can go to others.
initiator_dies() {
    each mark && ask there0 watch here0 && struck there0 here0 write || return
    ask there0 await gone=here0 && ask there0 await failed=1 peer=here0 &&
        ask there0 rest here0 || return
    ask here1 await done=2 peer=there0 && untouched here1 there0 && untouched here1 other0
}
initiator_is_reborn() {
    begin here0 1 "$nics" e.stripe_width=0 && ask here0 meet there0 && ask there0 meet here0 &&
        ask here0 meet other0 || return
    each mark
    ask here0 go there0 streams=4 at=0 && ask here0 go other0 streams=2 at=0 &&
        ask there0 go here0 && ask here0 await done=1 && ask there0 await done=1
}
# stopped NAME : its NIC still answers, so it is not dead.
stopped() {
    each mark && kill -STOP "${storm_pid[$1]}" && sleep "$pause" &&
        kill -CONT "${storm_pid[$1]}" && each await done=2 && all_fine
}
check "engines" cast || exit 1
check "another target" another || exit 1
everyone='there0 here0 here1 other0'
check "they move data" action both both || exit 1
check "a target is killed: its transfers end in -60, its peers hear so" target_dies
say "$ANSWER"
check "others feel nothing" others_feel_nothing
check "it is back, same name and port: transfers within 5 s" target_is_reborn
for name in here0 here1; do
    check "$name: what it had of the dead one is stale" ask $name stale there0
    say "$ANSWER"
done
check "an initiator is killed: its target hears so, others feel nothing" initiator_dies
check "it is back, same name and port: transfers within 5 s" initiator_is_reborn
check "there0: what it had of the dead one is stale" ask there0 stale here0
check "a target is stopped for $pause s: nothing fails" stopped there0
say "$ANSWER"
check "an initiator is stopped for $pause s: nothing fails" stopped here1
say "$ANSWER"
check "all transfers end, all notifications came once" each rest within=30
for name in here1 here0 there0 other0; do check "$name: a good end" ended $name; done
check "all RDMA resources are given back" resources_are "$before"
