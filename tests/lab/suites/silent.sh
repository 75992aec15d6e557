#!/bin/bash
# lab-about: rails go silent without a link event: one, its answers only, all; loss of 1 %
# lab-rails: 2
# lab-limit: 170
# lab-needs: storm
. "$LAB_HOME/storm.sh"
check "$LAB_RAILS rails" rails_veth "$LAB_RAILS" || exit 1
speeds 320mbit
get_resources
before=$REPLY

dropped() { tc -s qdisc show dev "$1" | sed -n 's/.*dropped \([0-9]*\).*/\1/p' | head -n 1; }
hush() { lossy "$rails_all" 100%; }
speak() { lossy "$rails_all" 0%; }
# quiet RAIL [ENDS] : what these ends send is lost until the rail was given up, and a while longer.
quiet() {
    each mark && lossy "$1" 100% "${2:-a b}" && ask here0 await down=1 within=10 || return
    say "$ANSWER"
    sleep 0.7 && lossy "$1" 0% && carry "$1" && all_fine
}
# What here0 writes lands, but it hears nothing of that, and writes it once more elsewhere.
other_way() { action write read && quiet 1 b; }
# What here0 writes over rail 0 arrives 2.5 s late, when the rail was long given up; the other
# process is stopped and cannot close its end. So nothing may be done before it goes on.
late() {
    local movers=here0
    each rest && ask here0 go there0 op=write && ask here0 await done=2 && each mark || return
    kill -STOP "${storm_pid[there0]}"
    tc qdisc change dev a0 root netem limit 100000 delay 2500ms loss 0% rate "$rate_now"
    ask here0 await down=1 within=10 && sleep 3.5 && lossy 0 0%
    kill -CONT "${storm_pid[there0]}"
    carry 0 && all_fine
}
all_short() {
    each mark && hush && ask here0 await down="$LAB_RAILS" within=10 || return
    sleep 1 && speak && carry $rails_all && all_fine
}
all_long() {
    local name
    hush && each mark || return
    for name in $movers; do
        ask "$name" await failed=1 within=15 && soon 5000 || return
        ask "$name" sum && answered first && [ "$REPLY" = -60 ] || return
    done
}
afterwards() { each mark && speak && each await done=3 within=20 && carry $rails_all; }
some_loss() {
    local i lost=0
    each mark
    for i in $rails_all; do lost=$((lost - $(dropped "a$i"))); done
    lossy "$rails_all" 1% && sleep 3 || return
    for i in $rails_all; do lost=$((lost + $(dropped "a$i"))); done
    echo "$lost packets were lost"
    [ "$lost" -gt 0 ] && speak && each await done=3 && all_fine
}
steady() { resources_are "$steady"; }

check "engines" cast || exit 1
check "they move data" action read write || exit 1
get_resources
steady=$REPLY
if [ "$LAB_RAILS" -gt 1 ]; then
    check "rail 0 is silent: nothing fails, it carries again" quiet 0
    say "$ANSWER"
    check "rail 0 loses all that the a end sends: nothing fails, it carries again" quiet 0 a
    say "$ANSWER"
    check "the other way, rail 1 loses all that the b end answers: the same" other_way
    say "$ANSWER"
    check "what rail 0 carried lands late: none of it is done before the other end is closed" late
    say "$ANSWER"
    check "they move data" action write read
fi
check "all rails are silent for a moment: nothing fails, all carry again" all_short
say "$ANSWER"
check "nothing is left of the old rails" steady
check "all rails are silent for long: every transfer ends in -60 within 5 s" all_long
say "$ANSWER"
check "they are heard again: transfers work, without a restart" afterwards
check "loss of 1 % on all rails: nothing fails" some_loss
say "$ANSWER"
check "all rails carry" carry $rails_all
check "nothing is left of the old rails" steady
check "all transfers end, all notifications came once" each rest within=30
for name in here1 here0 there0; do check "$name: a good end" ended $name; done
check "all RDMA resources are given back" resources_are "$before"
