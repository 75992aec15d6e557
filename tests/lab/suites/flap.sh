#!/bin/bash
# lab-about: links go down and up in mid transfer: each, all, long, each second; full share after
# lab-rails: 1 2
# lab-limit: 200
# lab-needs: storm
. "$LAB_HOME/storm.sh"
check "$LAB_RAILS rails" rails_veth "$LAB_RAILS" || exit 1
speeds 320mbit
get_resources
before=$REPLY
last=$((LAB_RAILS - 1))
flaps=${KVRAIL_LAB_FLAPS:-12}

down_all() {
    local i links=''
    for i in $rails_all; do links+="link set a$i down"$'\n'; done
    ip -batch - <<< "$links"
}
up_all() { local i; for i in $rails_all; do rail_up "$i" || return; done; }
noticed() { ask here0 await down=1 within=5; }
# As many queue pairs and files as before the faults. A connection that was given up is closed by
# one end first: the file of the other end may outlive the rails for a moment.
steady() {
    local end=$((SECONDS + 10))
    resources_are "$steady" || return
    until files_of there0 && [ "$REPLY" = "$files" ]; do
        echo "there0 has $REPLY open files, had $files"
        [ $SECONDS -lt $end ] || { ls -l "/proc/${storm_pid[there0]}/fd" && ss -tnp; return 1; }
        sleep 0.2
    done
}
# One rail is down for a second.
blink() {
    each mark && rail_down "$1" && sleep 1 && noticed && rail_up "$1" && carry "$1" && all_fine
}
blink_other_way() { action write read && blink 0; }
short() {
    each mark && down_all && sleep 2 && noticed && up_all && carry $rails_all && all_fine
}
# Longer than peer_timeout_ms: what waits ends, with the error that says so.
long() {
    local name
    down_all && each mark || return
    for name in $movers; do
        ask "$name" await failed=1 within=15 && soon 5000 || return
        ask "$name" sum && answered first && [ "$REPLY" = -60 ] || return
    done
}
# Nobody starts anything anew.
afterwards() {
    each mark && up_all || return
    each await done=3 within=20 && carry $rails_all
}
# The last rail comes and goes. Each try to get it back is a dial.
flutter() {
    local i dials most
    each mark
    get_dials && dials=$REPLY
    for ((i = 0; i < flaps; i++)); do
        rail_down $last && sleep 0.5 && rail_up $last && sleep 0.5 || return
    done
    get_dials
    # Two connections; a pause that doubles from 50 ms leaves 8 tries until it is 5 s, and one
    # that is shorter as long as there is no rail at all.
    most=$((2 * (8 + flaps / 5)))
    [ "$LAB_RAILS" != 1 ] || most=$((2 * (8 + flaps)))
    dialled="$((REPLY - dials)) dials in $flaps flaps; allowed: $most"
    echo "$dialled"
    [ $((REPLY - dials)) -le $most ]
}

check "engines" cast || exit 1
check "they move data" action read write || exit 1
get_resources
steady=$REPLY
files_of there0
files=$REPLY
say "$steady, $files files"
if [ "$LAB_RAILS" -gt 1 ]; then
    for i in $rails_all; do
        check "rail $i goes down and comes back: nothing fails, it carries again" blink "$i"
        say "$ANSWER"
    done
    check "the other way, rail 0: nothing fails, it carries again" blink_other_way
fi
check "all links are down for 2 s: nothing fails, all rails carry again" short
say "$ANSWER"
check "nothing is left of the old rails" steady
check "the first way again" action read write
check "all links are down for long: every transfer ends in -60 within 5 s" long
say "$ANSWER"
sleep 1
check "links are back: transfers work, without a restart" afterwards
check "nothing is left of the old rails" steady
check "the last link flaps each second, $flaps times: dials are few" flutter
say "$dialled"
if [ "$LAB_RAILS" -gt 1 ]; then
    check "it flapped: nothing failed, as another rail was up" all_fine
    say "$ANSWER"
fi
check "after it: all rails carry" carry $rails_all
check "nothing is left of the old rails" steady
check "all transfers end, all notifications came once" each rest within=30
if [ "$LAB_RAILS" -gt 1 ]; then
    check "read: the rails have their full share" shares here0 there0 read
    check "write: the rails have their full share" shares here0 there0 write
fi
for name in here1 here0 there0; do check "$name: a good end" ended $name; done
check "all RDMA resources are given back" resources_are "$before"
