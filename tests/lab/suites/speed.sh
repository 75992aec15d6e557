#!/bin/bash
# lab-about: stripe width 0 over 2 rails: equal ones share bytes, of unequal ones bytes follow speed
# lab-rails: 2
# lab-limit: 90
# lab-needs: mover
. "$LAB_HOME/mover.sh"
check "$LAB_RAILS rails" rails_veth "$LAB_RAILS" || exit 1
here=$(devices a) there=$(devices b)
# READs bring data from the b ends, WRITEs from the a ends.
# shares COMMAND FAST SLOW PERCENT [BLOCKS] : rail 0 carries FAST/SLOW of what rail 1 does, give or
# take; by the engine's counters, and by those of the interface that the data leaves.
shares() {
    local what=$1 end=a fast slow x y
    [ "$what" = write ] || end=b
    get_cnt tx bytes ${end}0 && x=-$REPLY
    get_cnt tx bytes ${end}1 && y=-$REPLY
    ask "$what" count=${5:-1024} slots=256 min=65536 max=65536 || return
    get_cnt tx bytes ${end}0 && x=$((x + REPLY))
    get_cnt tx bytes ${end}1 && y=$((y + REPLY))
    rail_bytes 0 && fast=$REPLY
    rail_bytes 1 && slow=$REPLY
    echo "engine: $fast and $slow bytes; ${end}0 and ${end}1 sent $x and $y"
    within $((fast * $3)) $((slow * $2)) "$4" && within $((x * $3)) $((y * $2)) "$4"
}
# within A B PERCENT : so near to each other.
within() {
    echo "$1 against $2: $((100 * $1 / $2)) %"
    [ $((100 * $1)) -ge $(((100 - $3) * $2)) ] && [ $((100 * $1)) -le $(((100 + $3) * $2)) ]
}
check "engines" mover "$here" "$there" a.stripe_width=0 || exit 1
# Without a limit the one processor decides, not the rails: the kernel serves their queue pairs
# unevenly for moments, which evens out. So these shares are shown, and only all bytes checked.
for what in read write; do
    check "$what: rails without a limit" ask $what count=4096 slots=256 min=65536 max=65536
    say "$ANSWER"
done
# rates FAST SLOW : of rail 0 and rail 1, both ends.
rates() {
    local end
    for end in a b; do rate ${end}0 "$1" && rate ${end}1 "$2" || return; done
}
# So slow that the processor has time left also where the host gives it little: at 320 Mbit/s it was
# once 8 % off.
rates 80mbit 80mbit
for what in read write; do
    check "$what: equal rails share bytes within 5 %" shares $what 1 1 5
    say "$ANSWER"
done
rates 320mbit 80mbit
for what in read write; do
    check "$what: 320 against 80 Mbit/s, bytes 4 to 1 within 15 %" shares $what 4 1 15 2560
    say "$ANSWER"
done
check "a good end" mover_end
