#!/bin/bash
# lab-about: perftest and a plain C loop at 64 KiB over one rail, by the same clock
# lab-rails: 1
# lab-limit: 240
# lab-needs: checks
. "$LAB_HOME/rails.sh"
size=65536 depth=16 few=100 many=1100 port=19000

micros() { echo "${EPOCHREALTIME/./}"; }
# Wall clock, in microseconds, of one perftest run of N operations between rb0 and ra0.
perftest() { # perftest ib_write_bw|ib_read_bw N
    local begin server
    local args=(-s $size -n "$2" -p $port -F)
    # A read has its depth in the device's outstanding reads, a write in the send queue.
    if [ "$1" = ib_read_bw ]; then args+=(-o $depth); fi
    "$1" "${args[@]}" -t $depth -d rb0 -x "$(gidx rb0)" > "$LAB_OUT/$1-server.log" 2>&1 &
    server=$!
    until ss -Hltn "sport = :$port" | grep -q .; do
        kill -0 $server 2>/dev/null || return
    done
    begin=$(micros)
    "$1" "${args[@]}" -t $depth -d ra0 -x "$(gidx ra0)" "$(rail_ip b 0)" \
        > "$LAB_OUT/$1-client.log" 2>&1 || return
    echo $(($(micros) - begin))
    wait $server
    port=$((port + 1))
}
# The time of set-up falls out: two runs, and what the second did more.
perftest_speed() {
    local short long
    short=$(perftest "$1" $few) && [ -n "$short" ] || return
    long=$(perftest "$1" $many) && [ -n "$long" ] || return
    echo $(((many - few) * size / (long - short)))
}
raw_speed() {
    "$LAB_BIN/rawloop" ra0 rb0 "$1" $size $depth $((many - few)) |
        sed -n 's/.* MB\/s=\([0-9]*\).*/\1/p'
}
median() { sort -n | sed -n 2p; }

check "1 rail" rails_veth 1 || exit 1
for what in write read; do
    theirs=() ours=()
    for run in 1 2 3; do
        theirs+=("$(perftest_speed ib_${what}_bw)")
        ours+=("$(raw_speed $what)")
    done
    say "$what of 64 KiB, $depth in flight, MB/s: perftest ${theirs[*]}, plain loop ${ours[*]}"
    a=$(printf '%s\n' "${theirs[@]}" | median) b=$(printf '%s\n' "${ours[@]}" | median)
    check "$what: perftest ${a:-?} MB/s, plain loop ${b:-?} MB/s; the loop keeps up" \
        test "$((10 * ${b:-0}))" -ge "$((5 * ${a:-1000000}))"
done
