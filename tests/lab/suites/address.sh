#!/bin/bash
# lab-about: the address of a rail changes, and with it its GID, at either end, in mid transfer
# lab-rails: 1 2
# lab-limit: 100
# lab-needs: storm
. "$LAB_HOME/storm.sh"
check "$LAB_RAILS rails" rails_veth "$LAB_RAILS" || exit 1
speeds 320mbit
get_resources
before=$REPLY

# moved END RAIL HOST [SECONDS] : this end of the rail has address .HOST from now on, after
# SECONDS without any. The other end must know where that is.
moved() {
    local end=$1 rail=$2 host=$3 old new mac far
    get_ip "$end" "$rail"
    old=$REPLY new=${REPLY%.*}.$host
    get_mac "$end" "$rail"
    mac=$REPLY
    ip addr del "$old/$LAB_PREFIX" dev "$end$rail" && sleep "${4:-0.2}" || return
    other_end "$end"
    far=$REPLY
    ip -batch - <<< "addr add $new/$LAB_PREFIX dev $end$rail
neigh replace $new lladdr $mac dev $far$rail nud permanent" || return
    # The neighbours of an interface go with its last address.
    get_neighbour "$end" "$rail"
    ip neigh replace $REPLY
}
# As transfers see it: it broke, nothing failed, it carries again.
changes() {
    each mark && moved "$@" && ask here0 await down=1 within=10 && carry "$2" && all_fine
}
gid_is() { # gid_is DEVICE HOST : the last byte of its IPv4 GID
    local gid index
    get_gidx "$1" && index=$REPLY && read -r gid < "/sys/class/infiniband/$1/ports/1/gids/$index"
    echo "$gid"
    printf -v REPLY '%02x' "$2"
    [ "${gid: -2}" = "$REPLY" ]
}
steady() { resources_are "$steady"; }

check "engines" cast || exit 1
check "they move data" action read write || exit 1
get_resources
steady=$REPLY
check "the dialler's address changes: nothing fails, the rail carries again" changes a 0 77
say "$ANSWER"
check "the rail has the new GID" gid_is ra0 77
check "nothing is left of the old rails" steady
LAB_A_HOST=77
check "now the other way" action write read
check "the target's address changes: nothing fails, the rail carries again" changes b 0 88
say "$ANSWER"
check "the rail has the new GID" gid_is rb0 88
LAB_B_HOST=88
check "nothing is left of the old rails" steady
check "no address for 2 s, then the first again: nothing fails" changes a 0 1 2
say "$ANSWER"
check "nothing is left of the old rails" steady
check "all transfers end, all notifications came once" each rest within=30
for name in here1 here0 there0; do check "$name: a good end" ended $name; done
check "all RDMA resources are given back" resources_are "$before"
