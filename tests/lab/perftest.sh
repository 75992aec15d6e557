# Sourced by suites that measure: the wall clock around perftest, over rail 0.
: "${perftest_port:=19000}"

micros() { REPLY=${EPOCHREALTIME/./}; }
# perftest_run ib_write_bw|ib_read_bw SIZE DEPTH N : N operations between rb0 and ra0; REPLY becomes
# the client's wall clock in microseconds, set-up included.
perftest_run() {
    local begin server
    local args=(-s "$2" -n "$4" -p $perftest_port -F -t "$3")
    # A read has its depth in the device's outstanding reads, a write in the send queue.
    if [ "$1" = ib_read_bw ]; then args+=(-o "$3"); fi
    "$1" "${args[@]}" -d rb0 -x "$(gidx rb0)" > "$LAB_OUT/$1-server.log" 2>&1 &
    server=$!
    until ss -Hltn "sport = :$perftest_port" | grep -q .; do
        kill -0 $server 2>/dev/null || return
    done
    micros
    begin=$REPLY
    "$1" "${args[@]}" -d ra0 -x "$(gidx ra0)" "$(rail_ip b 0)" > "$LAB_OUT/$1-client.log" 2>&1 ||
        return
    micros
    REPLY=$((REPLY - begin))
    wait $server
    perftest_port=$((perftest_port + 1))
}
# perftest_speed ib_write_bw|ib_read_bw SIZE DEPTH N : REPLY becomes the MB/s of N operations. The
# set-up falls out: two runs, and what the second did more.
perftest_speed() {
    local short few=100
    perftest_run "$1" "$2" "$3" $few || return
    short=$REPLY
    perftest_run "$1" "$2" "$3" $(($4 + few)) || return
    REPLY=$(($4 * $2 / (REPLY - short)))
}
# median VALUE... : into REPLY; the upper one of an even number. Without <(), as the guest has no
# /dev/fd.
median() {
    REPLY=$(printf '%s\n' "$@" | sort -n | sed -n "$(($# / 2 + 1))p")
}
