#!/bin/bash
# lab-about: loss, delay, reordering and duplicates on 1 rail of 2, and a rail that goes silent
# lab-rails: 2
# lab-limit: 110
# lab-needs: mover
. "$LAB_HOME/mover.sh"
check "$LAB_RAILS rails" rails_veth "$LAB_RAILS" || exit 1
here=$(devices a) there=$(devices b)
counter() { read -r REPLY < "/sys/class/infiniband/$1/ports/1/hw_counters/$2"; }
dropped() {
    REPLY=$(tc -s qdisc show dev "$1" | sed -n 's/.*dropped \([0-9]*\).*/\1/p' | head -n 1)
}
# slow MILLISECONDS COMMAND... : it takes that long at least.
slow() {
    local least=$1
    shift
    ask "$@" || return
    answered seconds
    REPLY=${REPLY/./}
    [ $((10#$REPLY)) -ge $((1000 * least)) ]
}
# until_seen LOOK COMMAND... : the command, over and over, until the fault has happened: `LOOK` has
# grown. A rail with faults is slow, so few of a command's packets may go over it.
until_seen() {
    local look=$1 before n
    shift
    $look
    before=$REPLY
    for ((n = 0; n < 50; n++)); do
        ask "$@" || return
        $look
        [ "$REPLY" -le "$before" ] || return 0
    done
    echo "$look: $before before and after $n times"
    return 1
}
grows() { until_seen "counter $1 $2" "${@:3}"; } # grows DEVICE COUNTER COMMAND...
drops() { until_seen "dropped $1" "${@:2}"; } # drops NETDEV COMMAND...
both_ends() { # both_ends FAULT VALUE...
    "$1" a0 "${@:2}" && "$1" b0 "${@:2}"
}
blocks="count=400 min=1 max=30000 notif=500"

check "engines" mover "$here" "$there" a.stripe_width=0 || exit 1
both_ends loss 1%
check "loss of 1 %: read" drops b0 read $blocks
check "loss of 1 %: write" drops a0 write $blocks
check "loss of 1 %: 500 notifications in order" ask notify count=500 size=300
both_ends delay 5ms
check "delay of 5 ms: read" ask read $blocks
check "delay of 5 ms: write" ask write $blocks
delay a1 5ms && delay b1 5ms
# There and back; without the delay it is one or two.
check "delay of 5 ms on both rails: a byte is read in 10 ms or more" slow 10 read count=1 max=1
check "delay of 5 ms on both rails: a byte is written in 10 ms or more" slow 10 write count=1 max=1
heal a1 && heal b1
both_ends reorder 1%
check "reordering of 1 %: read" ask read $blocks
check "reordering of 1 %: write" grows rb0 out_of_seq_request write $blocks
both_ends duplicate 1%
check "duplicates of 1 %: read" grows rb0 duplicate_request read $blocks times=2
check "duplicates of 1 %: write" grows rb0 duplicate_request write $blocks
both_ends heal
check "healed: both rails carry" ask write $blocks

# Silent from now on, without a link event: the other rail takes what this one had.
silence() { # silence COMMAND... : new engines with both rails, then one goes silent
    mover_end && mover "$here" "$there" a.stripe_width=0 &&
        ask read count=64 min=32768 max=32768 && rail_bytes 0 && [ "$REPLY" != 0 ] || return
    both_ends loss 100%
    ask "$@"
}
# Notifications in such moments are the suite silent's.
quiet="count=400 min=1 max=30000"
large="count=400 min=30000 max=30000 within=12"
check "silence, read: ends well on the other rail" silence read $large
say "$ANSWER"
check "still silent: write" ask write $quiet
both_ends heal
check "silence, write: ends well on the other rail" silence write $large
say "$ANSWER"
check "still silent: write" ask write $quiet
check "still silent: read" ask read $quiet
both_ends heal
check "after it: read" ask read $blocks
check "a good end" mover_end
