#!/bin/bash
# lab-about: withdrawn regions, ranges past the end, others' keys: an error, no byte touched
# lab-rails: 1 2
# lab-limit: 60
# lab-needs: mover
. "$LAB_HOME/mover.sh"
check "$LAB_RAILS rails" rails_veth "$LAB_RAILS" || exit 1
here=$(devices a) there=$(devices b)
# The status of a remote access error, and that neither side's memory changes.
refused="expect=-31 touch=none within=10"
blocks="count=20 min=1000 max=60000"
works() { # works WHAT : the next transfers are right
    check "$1: the next read works" ask read $blocks notif=10
    check "$1: the next write works" ask write $blocks notif=10
}
# Each case by itself: the rails were just broken and came back.
for what in read write; do
    check "engines for $what" mover "$here" "$there" targets=2 bytes=4194304 a.stripe_width=0 ||
        exit 1
    check "$what: before" ask $what $blocks
    ask drop > /dev/null
    check "$what from a withdrawn region: remote access error" ask $what $blocks $refused
    check "$what: the other target is not touched by it" ask $what $blocks to=1
    ask renew > /dev/null
    works "after a withdrawn region"
    ask forge longer > /dev/null
    check "$what past the end: remote access error" ask $what $blocks $refused
    ask renew > /dev/null
    works "after a range"
    ask forge keys > /dev/null
    check "$what with another's keys: remote access error" ask $what $blocks $refused
    ask renew > /dev/null
    works "after another's keys"
    check "$what: a good end" mover_end
done
