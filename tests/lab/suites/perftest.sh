#!/bin/bash
# lab-about: perftest and a plain C loop at 64 KiB over one rail, by the same clock
# lab-rails: 1
# lab-limit: 240
# lab-needs: checks
. "$LAB_HOME/rails.sh"
. "$LAB_HOME/perftest.sh"
size=65536 depth=16 count=1000

raw_speed() {
    "$LAB_BIN/rawloop" ra0 rb0 "$1" $size $depth $count |
        sed -n 's/.* MB\/s=\([0-9]*\).*/\1/p'
}

check "1 rail" rails_veth 1 || exit 1
for what in write read; do
    theirs=() ours=()
    for run in 1 2 3; do
        perftest_speed ib_${what}_bw $size $depth $count || REPLY=
        theirs+=("$REPLY")
        ours+=("$(raw_speed $what)")
    done
    say "$what of 64 KiB, $depth in flight, MB/s: perftest ${theirs[*]}, plain loop ${ours[*]}"
    median "${theirs[@]}" && a=$REPLY
    median "${ours[@]}" && b=$REPLY
    check "$what: perftest ${a:-?} MB/s, plain loop ${b:-?} MB/s; the loop keeps up" \
        test "$((10 * ${b:-0}))" -ge "$((5 * ${a:-1000000}))"
done
