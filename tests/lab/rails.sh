# Sourced in the guest. One network namespace; rail I is a veth pair a<I>-b<I> with a Soft-RoCE
# device on each end (ra<I>, rb<I>). The a ends are one host, the b ends the other: two processes
# that use different devices. Soft-RoCE names the interface that a packet leaves by, so its packets
# cross the veth although both addresses are this host's; everything else goes over loopback.
#
# Addresses are $LAB_NET.<I>.$LAB_A_HOST and .$LAB_B_HOST; set these before rails_veth for others.
# rails_routed puts a router into each rail, and the b ends into $LAB_NET_B.<I>.
: "${LAB_RAILS:=2}" "${LAB_NET:=10.1}" "${LAB_PREFIX:=24}" "${LAB_MTU:=4200}"
: "${LAB_A_HOST:=1}" "${LAB_B_HOST:=2}"
export LAB_RAILS LAB_NET LAB_PREFIX LAB_MTU LAB_A_HOST LAB_B_HOST

# A new process costs tens of milliseconds in the guest, so most functions here start none: they
# give their result in REPLY. Those with the same name and no `get_` in front print it.

# Messages of a suite. Its verdicts are the lines `lab: ok|FAIL|skip - WHAT`; scripts/lab.sh counts
# them.
ok() { echo "lab: ok - $*"; }
fail() { echo "lab: FAIL - $*"; }
skip() { echo "lab: skip - $*"; }
say() {
    local up
    read -r up _ < /proc/uptime
    echo "[$up] $*"
}

# check WHAT COMMAND... : one verdict; the output is shown only when it fails.
check_log=/tmp/lab-check.$$
check() {
    local what=$1 rc line
    shift
    "$@" > "$check_log" 2>&1
    rc=$?
    if [ $rc = 0 ]; then
        ok "$what"
    else
        while IFS= read -r line || [ -n "$line" ]; do echo "    | $line"; done < "$check_log"
        fail "$what: exit status $rc"
    fi
    return $rc
}

# until_true SECONDS COMMAND... : waits until the command succeeds.
until_true() {
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.02
    done
}

# get_ip a|b I
get_ip() {
    if [ "$1" = a ]; then
        REPLY=$LAB_NET.$2.$LAB_A_HOST
    else
        REPLY=${LAB_NET_B:-$LAB_NET}.$2.$LAB_B_HOST
    fi
}
rail_ip() { get_ip "$@" && echo "$REPLY"; }
# get_mac a|b I : locally administered; the end in the fifth byte, the rail in the sixth.
get_mac() { printf -v REPLY '02:00:00:00:0%s:%02x' "$1" "$2"; }
other_end() { if [ "$1" = a ]; then REPLY=b; else REPLY=a; fi; }
# get_neighbour a|b I : where the other end is. Known in advance: a queue pair that has to ask by
# ARP takes a whole second here, because the answer comes before the kernel waits for it.
get_neighbour() {
    local end ip
    other_end "$1"
    end=$REPLY
    get_ip "$end" "$2"
    ip=$REPLY
    get_mac "$end" "$2"
    REPLY="$ip lladdr $REPLY dev $1$2 nud ${LAB_NUD:-permanent}"
}

accept_own_addresses() {
    local at
    for at in all default; do
        echo 1 > /proc/sys/net/ipv4/conf/$at/accept_local
        echo 0 > /proc/sys/net/ipv4/conf/$at/rp_filter
        echo 1 > /proc/sys/net/ipv4/conf/$at/arp_ignore
        echo 2 > /proc/sys/net/ipv4/conf/$at/arp_announce
    done
}

count_is_allowed() {
    [ "$1" -ge 1 ] && [ "$1" -le 256 ] && return
    echo "$1 rails; allowed: 1 to 256"
    return 2
}

# rails_veth N [MTU] : makes rails 0 to N-1.
rails_veth() {
    local n=$1 mtu=${2:-$LAB_MTU} i end links='' devices=''
    count_is_allowed "$n" || return
    LAB_RAILS=$n
    accept_own_addresses
    for ((i = 0; i < n; i++)); do
        links+="link add a$i mtu $mtu type veth peer name b$i mtu $mtu"$'\n'
        for end in a b; do
            get_mac $end $i
            links+="link set $end$i addrgenmode none address $REPLY"$'\n'
            get_ip $end $i
            links+="addr add $REPLY/$LAB_PREFIX dev $end$i"$'\n'"link set $end$i up"$'\n'
            devices+="link add r$end$i type rxe netdev $end$i"$'\n'
        done
        for end in a b; do
            get_neighbour $end $i
            links+="neigh replace $REPLY"$'\n'
        done
    done
    ip -batch - <<< "$links" && rdma -b - <<< "$devices"
}

# rails_routed N [MTU] : the same, but the ends of a rail are in two subnets, and a router between
# them (a network namespace) forwards. Faults are set as ever, on a<I> and b<I>.
rails_routed() {
    local n=$1 mtu=${2:-$LAB_MTU} i end far links='' router='' devices=''
    count_is_allowed "$n" || return
    LAB_RAILS=$n LAB_NET_B=${LAB_NET_B:-10.2} LAB_PREFIX=24
    export LAB_NET_B
    accept_own_addresses
    ip netns add router && ip netns exec router sysctl -qw net.ipv4.ip_forward=1 || return
    for ((i = 0; i < n; i++)); do
        for end in a b; do
            get_mac $end $i
            links+="link add $end$i mtu $mtu address $REPLY type veth peer"
            links+=" name $end$i mtu $mtu address 06${REPLY#02} netns router"$'\n'
            links+="link set $end$i addrgenmode none"$'\n'
            get_ip $end $i
            links+="addr add $REPLY/24 dev $end$i"$'\n'"link set $end$i up"$'\n'
            router+="addr add ${REPLY%.*}.254/24 dev $end$i"$'\n'"link set $end$i up"$'\n'
            devices+="link add r$end$i type rxe netdev $end$i"$'\n'
        done
        for end in a b; do
            get_ip $end $i
            links+="neigh replace ${REPLY%.*}.254 dev $end$i lladdr 06:00:00:00:0$end:"
            printf -v far '%02x' $i
            links+="$far nud reachable"$'\n'
            far=${REPLY%.*}.254
            other_end $end
            get_ip "$REPLY" $i
            links+="route add ${REPLY%.*}.0/24 via $far dev $end$i metric 100"$'\n'
        done
    done
    ip -batch - <<< "$links" && ip -n router -batch - <<< "$router" && rdma -b - <<< "$devices"
}

# What rails_veth or rails_routed made is gone.
rails_gone() {
    local i links='' devices=''
    for ((i = 0; i < LAB_RAILS; i++)); do
        devices+="link delete ra$i"$'\n'"link delete rb$i"$'\n'
        links+="link del a$i"$'\n'
        [ -z "${LAB_NET_B:-}" ] || links+="link del b$i"$'\n'
    done
    [ -z "${LAB_NET_B:-}" ] || links+="netns del router"$'\n'
    unset LAB_NET_B
    rdma -b - <<< "$devices" && ip -batch - <<< "$links"
}

# Comma-separated devices of one end: `devices a` with two rails is ra0,ra1.
devices() {
    local i list=''
    for ((i = 0; i < LAB_RAILS; i++)); do list+=,r$1$i; done
    echo "${list#,}"
}

# get_gidx DEVICE : index of its RoCE v2 GID of an IPv4 address.
get_gidx() {
    local port=/sys/class/infiniband/$1/ports/1 index gid type
    for ((index = 0; index < 16; index++)); do
        { read -r gid < "$port/gids/$index"; } 2>/dev/null || continue
        [[ $gid == 0000:0000:0000:0000:0000:ffff:* ]] || continue
        { read -r type < "$port/gid_attrs/types/$index"; } 2>/dev/null || continue
        [ "$type" = "RoCE v2" ] || continue
        REPLY=$index
        return
    done
    return 1
}
gidx() { get_gidx "$1" && echo "$REPLY"; }
get_port_state() { read -r _ REPLY < "/sys/class/infiniband/$1/ports/1/state"; }
port_is() { get_port_state "$1" && [ "$REPLY" = "$2" ]; }

# get_cnt tx|rx packets|bytes NETDEV
get_cnt() { read -r REPLY < "/sys/class/net/$3/statistics/$1_$2"; }
cnt() { get_cnt "$@" && echo "$REPLY"; }

# rail_down I [a|b], rail_up I [a|b] : both ends lose the carrier. A link that comes back has lost
# its neighbour, which is entered again; then the ports are awaited.
rail_down() { ip link set "${2:-a}$1" down; }
rail_up() {
    local end links="link set ${2:-a}$1 up"
    for end in a b; do
        get_neighbour $end "$1"
        links+=$'\n'"neigh replace $REPLY"
    done
    ip -batch - <<< "$links" &&
        until_true 5 port_is "ra$1" ACTIVE && until_true 5 port_is "rb$1" ACTIVE
}

# Faults of what leaves NETDEV. `netem` sets all of them at once, what is not named is off:
#   netem a0 loss 1% delay 5ms 1ms
# The queue is made first and then changed: made under traffic it once flushed a QP.
netem() {
    local dev=$1
    shift
    case $(tc qdisc show dev "$dev") in
    *netem*) ;;
    *) tc qdisc add dev "$dev" root netem loss 0% limit 100000 || return ;;
    esac
    # These stay as they were unless they are named.
    case " $* " in *" rate "*) ;; *) set -- "$@" rate 0bit ;; esac
    case " $* " in *" corrupt "*) ;; *) set -- "$@" corrupt 0% ;; esac
    tc qdisc change dev "$dev" root netem limit 100000 "$@"
}
loss() { netem "$1" loss "$2"; }
delay() { netem "$1" delay "${@:2}"; }
reorder() { netem "$1" delay "${3:-1ms}" reorder "$2"; }
duplicate() { netem "$1" duplicate "$2"; }
corrupt() { netem "$1" corrupt "$2"; }
rate() { netem "$1" rate "$2"; }
heal() { netem "$1" loss 0%; }
