#!/bin/bash
# lab-about: the lab's own tools: each fault really happens, and really ends
# lab-rails: 2
# lab-limit: 180
# lab-needs: checks
. "$LAB_HOME/rails.sh"
raw() { "$LAB_BIN/rawloop" "$@"; }
moves() { raw "ra$1" "rb$1" write 65536 4 16; }
# Megabytes a second of a run.
speed() { raw "$@" | sed -n 's/.* MB\/s=\([0-9]*\).*/\1/p'; }
dropped() { tc -s qdisc show dev "$1" | sed -n 's/.*dropped \([0-9]*\).*/\1/p' | head -n 1; }
counter() { cat "/sys/class/infiniband/$1/ports/1/hw_counters/$2"; }
fails_with() { # fails_with TEXT COMMAND... : it fails, says so, and soon
    local text=$1 output began=$SECONDS
    shift
    if output=$("$@" 2>&1); then echo "it passed: $output"; return 1; fi
    echo "$output"
    [[ $output == *"$text"* ]] && [ $((SECONDS - began)) -le 10 ]
}
grows() { # grows DEVICE COUNTER COMMAND...
    local before after dev=$1 name=$2
    shift 2
    before=$(counter "$dev" "$name")
    "$@" || return
    after=$(counter "$dev" "$name")
    echo "$name of $dev: $before, then $after"
    [ "$after" -gt "$before" ]
}

loses_some() {
    local before
    before=$(dropped a0)
    loss a0 2% && raw ra0 rb0 write 65536 4 64 || return
    echo "dropped: $before, then $(dropped a0)"
    [ "$(dropped a0)" -gt "$before" ]
}
# One operation in flight: a queue of several would outlast the time of a retry.
limits_rate() {
    local slow fast
    fast=$(speed ra0 rb0 write 65536 1 64)
    rate a0 32mbit || return
    slow=$(speed ra0 rb0 write 65536 1 24)
    echo "$fast MB/s without, $slow MB/s with a limit of 4"
    [ "$slow" -le 4 ] && [ "$slow" -ge 1 ] && [ "$fast" -ge 12 ]
}
delays() {
    local took
    delay a0 20ms || return
    took=$(raw ra0 rb0 read 64 1 10 | sed -n 's/.* seconds=\([0-9]*\)\.\([0-9]\{3\}\).*/\1\2/p')
    echo "10 READs took $took ms"
    [ $((10#$took)) -ge 200 ]
}
# The link is cut while data moves; the program must end by itself.
cut_under_load() {
    local began=$SECONDS rc
    raw ra0 rb0 write 65536 4 1000000 > /tmp/cut.log &
    sleep 0.3
    rail_down 0
    wait $!
    rc=$?
    cat /tmp/cut.log
    [ $rc = 1 ] && [ $((SECONDS - began)) -le 5 ] && port_is ra0 DOWN && port_is rb0 DOWN
}
back_up() {
    local before after
    rail_up 0 || return
    before=$(cnt tx packets a0)
    moves 0 || return
    after=$(cnt tx packets a0)
    echo "a0 sent $((after - before)) packets for 1 MiB"
    [ $((after - before)) -ge 256 ]
}

check "2 rails" rails_veth "$LAB_RAILS" || exit 1
check "loss of all: an error, not a hang" eval 'loss a0 100% && fails_with "retry" moves 0'
check "the other rail goes on" moves 1
check "heal ends it" eval 'heal a0 && moves 0'
check "loss of 2 %: packets are lost, the bytes are right" loses_some
heal a0
check "rate limits" limits_rate
check "heal ends the limit" eval 'heal a0 && [ "$(speed ra0 rb0 write 65536 1 64)" -ge 12 ]'
check "delay delays" delays
heal a0
check "reorder: packets out of order, the bytes are right" \
    eval 'reorder a0 1% && grows rb0 out_of_seq_request raw ra0 rb0 write 65536 4 64'
heal a0
check "duplicate: packets come twice, the bytes are right" \
    eval 'duplicate a0 5% && grows rb0 duplicate_request raw ra0 rb0 write 65536 4 64'
heal a0
say "link"
check "a link cut under load ends the work; both ports are down" cut_under_load
check "the other rail goes on" moves 1
check "the link comes back, and packets cross it" back_up
check "the b end goes down and comes back" eval \
    'rail_down 1 b && port_is ra1 DOWN && rail_up 1 b && moves 1'
say "end"
