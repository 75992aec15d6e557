#!/bin/bash
# lab-about: small queues, few reads in flight, one or many pieces, short slices, both path MTUs
# lab-rails: 2
# lab-limit: 110
# lab-needs: mover
. "$LAB_HOME/mover.sh"
# tries WHAT WORDS... : one pair of engines; both ways, every byte.
tries() {
    local what=$1
    shift
    check "$what: engines" mover "$here" "$there" a.stripe_width=0 "$@" || return
    check "$what: read" ask read count=600 min=1 max=20000 notif=100
    check "$what: write" ask write count=600 min=1 max=20000 notif=100
    check "$what: gathered and scattered" gathers
    check "$what: 300 notifications" ask notify count=300 size=2000
    check "$what: a good end" mover_end
}
# The other side's memory in one piece, ours in many.
gathers() {
    local pieces="count=600 min=4 max=8000 there=packed"
    ask write $pieces && ask read $pieces
}
for mtu in 4200 1500; do
    check "$LAB_RAILS rails, MTU $mtu" rails_veth "$LAB_RAILS" $mtu || exit 1
    here=$(devices a) there=$(devices b)
    path=4096
    [ $mtu = 4200 ] || path=1024
    tries "path MTU $path"
    if [ $mtu = 4200 ]; then
        tries "sq_depth 8 here" a.sq_depth=8
        tries "sq_depth 8 on both sides" a.sq_depth=8 b.sq_depth=8
        tries "one peer only" a.max_peers=1 b.max_peers=1
        tries "one piece a work request" a.sges=1 b.sges=1
        tries "slices of 4 KiB" a.slice_bytes=4096 a.sges=16
    fi
    rails_gone
done
