#!/bin/bash
# lab-about: dma-bufs on a kernel whose Soft-RoCE takes them: parts, addresses, refusals, cycles
# lab-kernel: dmabuf
# lab-rails: 1 4
# lab-mem: 512M
# lab-limit: 240
# lab-needs: tests dmabuf segments mover
. "$LAB_HOME/mover.sh"
. "$LAB_HOME/cargo_tests.sh"
check "$LAB_RAILS rails" rails_veth "$LAB_RAILS" || exit 1
export KVRAIL_IBVERBS=$LAB_BIN/libdmabuf_verbs.so
if [ "$LAB_RAILS" = 1 ]; then
    # The driver alone.
    KVRAIL_TEST_DMABUF=udmabuf,heap cargo_tests dmabuf::
    exit
fi
here=$(devices a) there=$(devices b)
say "refusals and cycles"
"$LAB_BIN/dmabuf" "$here" takes || fail "dmabuf: exit status $?"

# Every rail carried a good part of eight times 2 MiB. In one of them a rail may have had one slice
# only: they share a processor, and each is over in milliseconds.
shared() { # shared COMMAND...
    local i n sum=()
    for n in 1 2 3 4 5 6 7 8; do
        "$@" || return
        for ((i = 0; i < LAB_RAILS; i++)); do
            rail_bytes $i
            sum[i]=$((${sum[i]:-0} + REPLY))
        done
    done
    for ((i = 0; i < LAB_RAILS; i++)); do
        echo "rail $i: ${sum[i]} bytes in $n transfers"
        [ "${sum[i]}" -gt $((8 * 524288 / LAB_RAILS)) ] || return
    done
}
blocks="count=40 min=1 max=40000"
for kind in udmabuf heap; do
    say "$kind"
    check "$kind: engines" mover "$here" "$there" mem=$kind bytes=2097152 a.stripe_width=0 \
        a.slice_bytes=65536 || exit 1
    for what in read write; do
        check "$kind: $what, odd blocks" ask $what $blocks notif=10
        check "$kind: $what, all in one block, over all rails" \
            shared ask $what count=1 min=2097152 max=2097152 notif=10
        ask drop > /dev/null
        check "$kind: $what of a withdrawn one: remote access error" \
            ask $what $blocks expect=-31 touch=none within=10
        ask renew > /dev/null
        check "$kind: $what after it" ask $what $blocks notif=10
    done
    check "$kind: a good end" mover_end
done
