# Sourced by suites in which links, peers and addresses come and go: starts processes of
# tests/lab/c/storm.c, which move and compare data all the while.
. "$LAB_HOME/rails.sh"
shopt -s extglob
declare -A storm_pid=() storm_in=() storm_out=()
# The listeners are not on a rail's address, so that only RDMA suffers what a rail suffers.
control=127.0.0.1
export KVRAIL_LOG=${KVRAIL_LOG:-info}

# begin NAME ID NICS WORDS... : starts a process; it listens on port 7000 + ID.
begin() {
    local name=$1 id=$2 nics=$3 in out
    shift 3
    rm -f "/tmp/$name.in" "/tmp/$name.out"
    mkfifo "/tmp/$name.in" "/tmp/$name.out" || return
    # Opened here for both ways: the end of the other process must not block this one.
    exec {in}<> "/tmp/$name.in" {out}<> "/tmp/$name.out"
    # Programs that this shell starts come first: they are the faults.
    nice -n 15 "$LAB_BIN/storm" "$name" id="$id" nics="$nics" \
        e.listen_ip=$control e.port=$((7000 + id)) "$@" \
        < "/tmp/$name.in" > "/tmp/$name.out" 2>> "$LAB_OUT/$name.log" {in}>&- {out}>&- &
    storm_pid[$name]=$! storm_in[$name]=$in storm_out[$name]=$out
    heard "$name" 30
}
# told NAME COMMAND... and heard NAME [SECONDS]: a command; its answer is in ANSWER, and printed.
told() { echo "${*:2}" >&"${storm_in[$1]}"; }
heard() {
    local out=${storm_out[$1]}
    read -r -t "${2:-60}" -u "$out" ANSWER || ANSWER="error $1 gave no answer within ${2:-60} s"
    echo "$1: $ANSWER"
    [[ $ANSWER == ok* ]]
}
ask() { told "$@" && heard "$1"; }
# each COMMAND... : of every process in `everyone`.
each() {
    local name rc=0
    for name in $everyone; do told "$name" "$@"; done
    for name in $everyone; do heard "$name" || rc=1; done
    return $rc
}
# killed NAME : at once, as by the kernel for want of memory.
killed() {
    local in=${storm_in[$1]} out=${storm_out[$1]}
    kill -KILL "${storm_pid[$1]}" && wait "${storm_pid[$1]}" 2>/dev/null
    exec {in}>&- {out}>&-
    unset "storm_pid[$1]"
}
# ended NAME : in good order.
ended() {
    ask "$1" quit && wait "${storm_pid[$1]}" && unset "storm_pid[$1]"
}
# answered NAME : REPLY becomes the value of NAME=... in the last answer.
answered() {
    REPLY=${ANSWER#*" $1="}
    [ "$REPLY" != "$ANSWER" ] || { REPLY=''; return 1; }
    REPLY=${REPLY%% *}
}

# get_resources : what the kernel has of RDMA objects, in all.
get_resources() {
    local word key='' rest
    local -A n=()
    rdma res show > /tmp/resources
    while read -r _ _ rest; do
        for word in $rest; do
            if [[ $word =~ ^[0-9]+$ ]]; then n[$key]=$((${n[$key]:-0} + word)); else key=$word; fi
        done
    done < /tmp/resources
    REPLY="qp=${n[qp]:-0} cq=${n[cq]:-0} mr=${n[mr]:-0} pd=${n[pd]:-0}"
}
# resources_are WANT : within 10 s; what broke is cleared away a moment later.
resources_are() {
    local end=$((SECONDS + 10))
    while get_resources && [ "$REPLY" != "$1" ]; do
        echo "$REPLY; wanted: $1"
        [ $SECONDS -lt $end ] || return 1
        sleep 0.2
    done
}
files_of() {
    local files=("/proc/${storm_pid[$1]}/fd"/*)
    REPLY=${#files[@]}
}
# dials : TCP connections that were accepted so far, on this host.
get_dials() {
    local -a names values
    while read -ra names && read -ra values; do
        [ "${names[0]}" = Tcp: ] || continue
        local i
        for i in "${!names[@]}"; do
            [ "${names[i]}" != PassiveOpens ] || REPLY=${values[i]}
        done
    done < /proc/net/snmp
}

# No transfer failed, of those that the last answer counts, and some were done.
fine() {
    answered failed && [ "$REPLY" = 0 ] && answered done && [ "$REPLY" -gt 0 ] &&
        answered unheard && [ "$REPLY" = 0 ]
}
# failed_by STATUS... : transfers that the last answer counts ended in these statuses and no other,
# some of them in the first.
failed_by() {
    local list status
    answered others
    list=,${REPLY//:*([0-9])/},
    [[ $list == *",$1,"* ]] || return
    for status in "$@"; do list=${list/",$status,"/,}; done
    [ "$list" = , ]
}
# all_fine : of everyone that initiates (`movers`).
all_fine() {
    local name rc=0
    for name in $movers; do ask "$name" sum && fine || rc=1; done
    return $rc
}
# soon MS : the last answer's ms, less what this machine did not let the process run: all of its
# stalls, and for the threads beside it the longest twice.
soon() {
    local gap stalled
    answered gap_ms && gap=$REPLY && answered stalled_ms && stalled=$REPLY && answered ms || return
    echo "after $REPLY ms; the process did not run for $stalled ms, of which $gap ms at a time"
    [ "$REPLY" -le $(($1 + stalled + 2 * gap)) ]
}
# carry RAIL... : every mover has bytes on these rails again.
carry() {
    local rail name rc=0
    for rail in "$@"; do
        for name in $movers; do told "$name" await carries="$rail" within=30; done
        for name in $movers; do heard "$name" || rc=1; done
    done
    return $rc
}
# Numbers of all rails.
rails_all=''
for ((i = 0; i < LAB_RAILS; i++)); do rails_all+=" $i"; done

# speeds RATE : of all rails, both ends; made before there is traffic.
speeds() {
    local i
    rate_now=$1
    for i in $rails_all; do rate "a$i" "$1" && rate "b$i" "$1" || return; done
}
# lossy RAILS PERCENT [ENDS] : so much is lost of what leaves these ends, `a b` by default, all at
# once; the rate stays.
lossy() {
    local i end changes=''
    for i in $1; do
        for end in ${3:-a b}; do
            changes+="qdisc change dev $end$i root netem limit 100000 loss $2 rate $rate_now"$'\n'
        done
    done
    tc -batch - <<< "$changes"
}
# shares NAME PEER READ|WRITE : 64 MiB, of which each rail carries its part within 10 %. Rails
# without a rate share one processor, and bytes follow what each just brought, so they are not as
# equal as in the suite `speed`; a rail that did not come back whole carries next to nothing.
shares() {
    local i sum=0 list part=()
    ask "$1" bulk "$2" op="$3" count=1024 || return
    answered rails
    list=,$REPLY,
    for ((i = 0; i < LAB_RAILS; i++)); do
        part[i]=${list#*",r${1:0:0}a$i:1="} && part[i]=${part[i]%%,*}
        sum=$((sum + part[i]))
    done
    for ((i = 0; i < LAB_RAILS; i++)); do
        echo "rail $i: ${part[i]} of $sum bytes, $((100 * LAB_RAILS * part[i] / sum)) % of its part"
        [ $((100 * LAB_RAILS * part[i])) -ge $((90 * sum)) ] || return
        [ $((100 * LAB_RAILS * part[i])) -le $((110 * sum)) ] || return
    done
}

# cast : the usual processes, moving data. here0 stripes over all rails and here1 over one; both
# read and write memory of there0, which does so with here0's memory.
cast() {
    local nics far
    nics=$(devices a) far=$(devices b)
    everyone='there0 here0 here1' movers=$everyone
    begin there0 0 "$far" e.stripe_width=0 &&
        begin here0 1 "$nics" e.stripe_width=0 && begin here1 2 "$nics" e.stripe_width=1 &&
        ask here0 meet there0 && ask here1 meet there0 && ask there0 meet here0
}
# action OP0 OP1 : here0 does OP0, and here1 and there0 do OP1 (read, write, or both). Where packets
# get lost nobody does both: Soft-RoCE then reports READs as done that are not (docs/lab.md).
action() {
    ask here0 rest there0 && ask here1 rest there0 && ask there0 rest here0 &&
        ask here0 go there0 streams=4 at=0 op="$1" &&
        ask here1 go there0 streams=3 at=1048576 op="$2" &&
        ask there0 go here0 streams=2 at=0 op="$2" && each mark && each await done=3
}
