#!/bin/bash
# lab-about: blocks of many sizes by READ and WRITE, stripe widths 0 and 1, every byte compared
# lab-rails: 1 2 4 8
# lab-limit: 90
# lab-needs: mover
. "$LAB_HOME/mover.sh"
check "$LAB_RAILS rails" rails_veth "$LAB_RAILS" || exit 1
here=$(devices a) there=$(devices b)

# moves WORDS... : the transfer is right, and its bytes went over the rails.
moves() {
    local moved
    ask "$@" || return
    answered bytes
    moved=$REPLY
    crossed "$moved"
}
crossed() {
    local i sum=-$sent_before
    for ((i = 0; i < LAB_RAILS; i++)); do
        get_cnt tx bytes a$i && sum=$((sum + REPLY))
        get_cnt tx bytes b$i && sum=$((sum + REPLY))
    done
    sent_before=$((sent_before + sum))
    echo "$sum bytes crossed the rails"
    [ "$sum" -ge "$1" ]
}
# uses N COMMAND... : exactly N rails carry something of it.
uses() {
    local i n=0 want=$1
    shift
    ask "$@" || return
    for ((i = 0; i < LAB_RAILS; i++)); do
        rail_bytes $i
        [ "$REPLY" = 0 ] || n=$((n + 1))
    done
    [ $n = "$want" ]
}
sent_before=0
for width in 0 1; do
    crossed 0
    check "width $width: engines over $LAB_RAILS rails" \
        mover "$here" "$there" a.stripe_width=$width || exit 1
    for what in read write; do
        check "width $width: $what one byte" moves $what count=1 min=1 max=1 notif=1
        check "width $width: $what 3000 blocks of 1 to 500 bytes" \
            moves $what count=3000 min=1 max=500 notif=100
        check "width $width: $what 200 odd blocks, 8 transfers, twice" \
            moves $what count=200 min=1 max=70000 parts=8 times=2
        check "width $width: $what 3 blocks of 5 MiB, none longer than a work request" \
            moves $what count=3 min=5242880 max=5242880 notif=65536
        check "width $width: $what into gaps from packed memory" \
            moves $what count=500 min=100 max=9000 there=packed
    done
    n=$LAB_RAILS
    [ $width = 0 ] || n=1
    check "width $width: one transfer over $n rails" uses $n write count=256 min=32768 max=32768
    check "width $width: 2000 notifications in order" ask notify count=2000 size=200
    check "width $width: 20 long notifications in order" ask notify count=20 size=65536
    check "width $width: a good end" mover_end
done
