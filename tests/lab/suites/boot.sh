#!/bin/bash
# lab-about: the rails come up with their IPv4 GIDs, and packets cross them
# lab-rails: 1 2 4 8 12
# lab-limit: 60
# lab-needs: checks
. "$LAB_HOME/rails.sh"

end_is_up() { # end_is_up a|b I
    local dev=r$1$2 port=/sys/class/infiniband/r$1$2/ports/1 gid ndev want a b c d
    port_is "$dev" ACTIVE || { echo "$dev is $REPLY"; return 1; }
    get_gidx "$dev" || { echo "$dev has no RoCE v2 GID of an IPv4 address"; return 1; }
    read -r gid < "$port/gids/$REPLY"
    read -r ndev < "$port/gid_attrs/ndevs/$REPLY"
    get_ip "$1" "$2"
    IFS=. read -r a b c d <<< "$REPLY"
    printf -v want '0000:0000:0000:0000:0000:ffff:%02x%02x:%02x%02x' "$a" "$b" "$c" "$d"
    echo "$dev: $gid of $ndev, wanted $want of $1$2"
    [ "$gid $ndev" = "$want $1$2" ]
}
# 1 MiB in 4096-byte packets is 256 packets; acknowledgements come back.
crosses() {
    local before back
    get_cnt tx packets "a$1"
    before=$REPLY
    get_cnt tx packets "b$1"
    back=$REPLY
    "$LAB_BIN/rawloop" "ra$1" "rb$1" write 65536 4 16 || return
    get_cnt tx packets "b$1"
    back=$((REPLY - back))
    get_cnt tx packets "a$1"
    echo "a$1 sent $((REPLY - before)) packets for 1 MiB, b$1 $back"
    [ $((REPLY - before)) -ge 256 ] && [ $back -ge 1 ]
}
sees_all() {
    local devices seen
    devices=(/sys/class/infiniband/r[ab]*)
    seen=$(ibv_devices | grep -c ' r[ab][0-9]')
    echo "${#devices[@]} in sysfs, libibverbs sees $seen"
    [ "${#devices[@]} $seen" = "$((2 * LAB_RAILS)) $((2 * LAB_RAILS))" ]
}

# Two devices of one host never share a GUID.
own_guids() {
    local device guid seen=' '
    for device in /sys/class/infiniband/r[ab]*; do
        read -r guid < "$device/node_guid"
        [[ $seen != *" $guid "* ]] || {
            echo "${device##*/} has the GUID $guid of another"
            return 1
        }
        seen+="$guid "
    done
}

check "$LAB_RAILS rails are made" rails_veth "$LAB_RAILS" || exit 1
say "rails made"
check "$((2 * LAB_RAILS)) RDMA devices, as many as libibverbs sees" sees_all
check "each with a GUID of its own" own_guids
for ((i = 0; i < LAB_RAILS; i++)); do
    for end in a b; do
        get_ip $end $i
        check "r$end$i is up, with the GID of $REPLY" end_is_up $end $i
    done
    check "packets cross rail $i" crosses $i
done
say "end"
