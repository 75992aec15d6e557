#!/bin/bash
# lab-about: system calls of a thread that polls and of one that posts while data moves, counted
# lab-rails: 1
# lab-limit: 60
# lab-needs: mover
. "$LAB_HOME/mover.sh"
command -v strace > /dev/null || { skip "no strace here (apt-get install strace)"; exit 0; }
check "1 rail" rails_veth 1 || exit 1
calls=$LAB_OUT/calls
# Of every thread of the initiator, and of what it does between two marks only.
trace() { # trace COMMAND... : counts of system calls meanwhile, in $calls
    local tracer
    strace -f -qq -o "$calls" -p "$MOVER_PID" &
    tracer=$!
    until_true 5 grep -q . "$calls" || { echo "strace shows nothing"; return 1; }
    ask "$@" || return
    kill $tracer
    wait $tracer
    echo "calls, all threads:"
    sed 's/^[0-9]* *//; s/(.*//' "$calls" | sort | uniq -c | sort -rn
}
