#!/bin/bash
# lab-about: system calls while data moves in steady state, by strace: few, and all accounted for
# lab-rails: 1
# lab-limit: 90
# lab-needs: mover
. "$LAB_HOME/rails.sh"
command -v strace > /dev/null || { skip "no strace here (apt-get install strace)"; exit 0; }
check "1 rail" rails_veth 1 || exit 1
# Each transfer twice before it counts. `rails` are the marks that calls.py looks for.
for what in write read; do
    echo "$what count=1024 min=65536 max=65536 slots=16 nap=5000 times=2"
    echo rails
    echo "$what count=1024 min=65536 max=65536 slots=16 nap=5000 times=2"
    echo rails
done > /tmp/commands
echo quit >> /tmp/commands
# It stays in place from the start: attached to a running program it hangs on this kernel.
check "mover under strace" strace -f -qq -s 80 -o "$LAB_OUT/calls" \
    "$LAB_BIN/mover" here=ra0 there=rb0 < /tmp/commands || exit 1
exec python3 "$LAB_HOME/calls.py" "$LAB_OUT/calls"
