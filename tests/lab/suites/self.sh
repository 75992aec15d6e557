#!/bin/bash
# lab-about: the lab itself, on the host: a guest that hangs is ended and leaves nothing
# lab-where: host
# lab-rails: 1
# lab-limit: 120
. "$LAB_HOME/rails.sh"
boot=$LAB_HOME/boot.sh
log=$LAB_OUT/guest.log
gives() { # gives STATUS TEXT COMMAND...
    local want=$1 text=$2 rc
    shift 2
    "$@" > "$log" 2>&1
    rc=$?
    echo "exit status $rc; the last lines:"
    tail -n 5 "$log"
    [ $rc = "$want" ] && grep -qF -- "$text" "$log"
}
# Where boot.sh puts what lasts only as long as the guest.
TMPDIR=$(mktemp -d)
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
nothing_left() {
    [ -z "$(ls -A "$TMPDIR")" ] || { echo "left in $TMPDIR: $(ls "$TMPDIR")"; return 1; }
}
# Processes of a session that still live; an ended one may not have been waited for.
living() { ps -o stat= -s "$1" | grep -vc '^Z'; }
# ends STATUS SIGNAL LIMIT COMMAND... : starts a guest; when it runs, sends boot.sh the signal (0:
# none, its limit is to end it). Then its status is this one, and no process of the guest is left.
ends() {
    local want=$1 signal=$2 limit=$3 pid session rc
    shift 3
    "$boot" --limit "$limit" /bin/sh -c "echo started; $*" > "$log" 2>&1 &
    pid=$!
    until_true 20 grep -q started "$log" || { kill $pid; cat "$log"; return 1; }
    # The kernel has a session of its own.
    session=$(pgrep -P $pid -f root=/dev/root) || { kill $pid; echo "no kernel runs"; return 1; }
    echo "before: $(living "$session") processes"
    [ "$(living "$session")" -ge 2 ] || { kill $pid; return 1; }
    [ "$signal" = 0 ] || kill -"$signal" $pid
    wait $pid
    rc=$?
    echo "after: exit status $rc, $(living "$session") processes"
    [ $rc = "$want" ] && [ "$(living "$session")" = 0 ] && nothing_left
}

check "exit status 0, and what it prints" gives 0 "here I am" "$boot" echo "here I am"
check "exit status 7" gives 7 "" "$boot" /bin/sh -c 'exit 7'
check "arguments arrive as they are" gives 0 "[a b][*][\$x]" "$boot" printf '[%s]' 'a b' '*' '$x'
check "variables arrive as they are" gives 0 "[a 'b' \"c\"]" \
    env KVRAIL_LAB_TRY="a 'b' \"c\"" "$boot" /bin/sh -c 'echo "[$KVRAIL_LAB_TRY]"'
check "a guest that sleeps is killed at its limit" ends 124 0 5 'sleep 100'
check "a guest that loops is killed at its limit" ends 124 0 5 'while :; do :; done'
check "SIGTERM ends the guest too" ends 143 TERM 60 'sleep 100'
check "a kernel that dies is no success" gives 99 "without running the command" \
    "$boot" --mem 8M true
check "files of the guest come back" eval '"$boot" --out "$LAB_OUT/back" /bin/sh -c \
    "echo 123 > \$LAB_OUT/file" && [ "$(cat "$LAB_OUT/back/file")" = 123 ]'
check "nothing is left behind" nothing_left
