#!/bin/bash
# lab-about: the lab itself: status and words of a guest pass through, a hang is ended, nothing stays
# lab-where: host
# lab-rails: 1
# lab-limit: 120
. "$LAB_HOME/rails.sh"
boot=$LAB_HOME/boot.sh
gives() { # gives STATUS TEXT COMMAND...
    local want=$1 text=$2 output rc
    shift 2
    output=$("$@" 2>&1)
    rc=$?
    echo "$output"
    echo "exit status $rc"
    [ $rc = "$want" ] && [[ $output == *"$text"* ]]
}
# Processes of the kernel whose command line has this mark.
guests() { pgrep -f "lab_mark=$1" | wc -l; }
leaves_nothing() { # leaves_nothing MARK COMMAND... : after it, no process and no file of the guest
    local mark=$1
    shift
    "$@" || return
    [ "$(guests "$mark")" = 0 ] || { echo "$(guests "$mark") processes still run"; return 1; }
    [ -z "$(ls -A "$TMPDIR")" ] || { echo "left in $TMPDIR: $(ls "$TMPDIR")"; return 1; }
}
export TMPDIR
TMPDIR=$(mktemp -d)
trap 'rm -rf "$TMPDIR"' EXIT
mark() { export LAB_KERNEL_ARGS="lab_mark=$$.$1"; echo "$$.$1"; }

check "exit status 0 and output" gives 0 "here I am" "$boot" echo "here I am"
check "exit status 7" gives 7 "" "$boot" /bin/sh -c 'exit 7'
check "arguments arrive as they are" gives 0 "[a b][*][\$x]" "$boot" printf '[%s]' 'a b' '*' '$x'
m=$(mark hang) LAB_KERNEL_ARGS=lab_mark=$m
check "a guest that hangs is killed at its limit" \
    leaves_nothing "$m" gives 124 "killed" "$boot" --limit 3 sleep 100
check "a guest that loops is killed at its limit" \
    leaves_nothing "$m" gives 124 "killed" "$boot" --limit 3 /bin/sh -c 'while :; do :; done'
terminated() {
    local pid rc
    "$boot" --limit 60 /bin/sh -c 'echo started; sleep 100' > "$TMPDIR/log" 2>&1 &
    pid=$!
    until_true 10 grep -q started "$TMPDIR/log" || { cat "$TMPDIR/log"; kill $pid; return 1; }
    [ "$(guests "$m")" -gt 0 ] || { echo "no guest is seen to run"; kill $pid; return 1; }
    kill $pid
    wait $pid
    rc=$?
    rm -f "$TMPDIR/log"
    [ $rc = 143 ]
}
check "SIGTERM ends the guest too" leaves_nothing "$m" terminated
check "a kernel that dies is no success" \
    leaves_nothing "$m" gives 99 "without running the command" "$boot" --mem 16M true
check "files of the guest come back" eval '"$boot" --out "$LAB_OUT/back" /bin/sh -c \
    "echo 123 > \$LAB_OUT/file" && [ "$(cat "$LAB_OUT/back/file")" = 123 ]'
