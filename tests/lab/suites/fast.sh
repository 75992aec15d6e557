#!/bin/bash
# lab-about: one rail, blocks of 64 KiB: kvrail beside perftest and a plain loop, by the same clock
# lab-rails: 1
# lab-limit: 150
# lab-needs: checks mover
. "$LAB_HOME/mover.sh"
. "$LAB_HOME/perftest.sh"
size=65536 depth=16 count=1024 rounds=${KVRAIL_LAB_ROUNDS:-5}
# Least ratio that passes: it is a measurement, on a machine that does other things too.
least=80

loop_speed() { REPLY=$("$LAB_BIN/rawloop" ra0 rb0 "$1" $size $depth $count |
    sed -n 's/.* MB\/s=\([0-9]*\).*/\1/p'); }
# The same blocks of the same 1 MiB as the others, from the last to the first, so that none goes on
# where the one before ends; the time from post to done.
kvrail_speed() {
    ask "$1" count=$count min=$size max=$size slots=$depth nap=1000 > /dev/null || return
    answered seconds
    REPLY=$((count * size / 10#${REPLY/./}))
}
ratio() { REPLY=$(($1 * 100 / $2)); }
check "1 rail" rails_veth 1 || exit 1
check "engines" mover ra0 rb0 || exit 1
for what in write read; do
    theirs=() loops=() ours=()
    for ((round = 0; round < rounds; round++)); do
        kvrail_speed $what || REPLY=0
        ours+=("$REPLY")
        perftest_speed ib_${what}_bw $size $depth $count || REPLY=0
        theirs+=("$REPLY")
        loop_speed $what
        loops+=("${REPLY:-0}")
    done
    say "$what of 64 KiB, MB/s: kvrail ${ours[*]}; perftest ${theirs[*]}; plain loop ${loops[*]}"
    median "${ours[@]}" && a=$REPLY
    median "${theirs[@]}" && b=$REPLY
    median "${loops[@]}" && c=$REPLY
    ratio "$a" "$b" && ab=$REPLY
    ratio "$a" "$c" && ac=$REPLY
    check "$what: kvrail $a MB/s is $ab % of perftest's $b, $ac % of the plain loop's $c" \
        test "$ab" -ge $least
done
check "a good end" mover_end
