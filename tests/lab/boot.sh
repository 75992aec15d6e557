#!/bin/bash
# Boots the lab's kernel, runs a command inside as root and exits with its status.
# usage: boot.sh [--out DIR] [--limit SECONDS] [--mem SIZE] COMMAND [ARGUMENT...]
#   --out    where the command's files (it writes them to $LAB_OUT) and the kernel's log go
#   --limit  after so long the guest is killed; default 120
#   --mem    the guest's memory; default 1G. Only what is touched is used
# The kernel: $LAB_KERNEL, else what build-kernel.sh finds or builds. Working folder, PATH, HOME and
# the variables below (PASSED) reach the command.
# Exit status: the command's; 124 killed at the limit; 99 the kernel never ran the command.
set -u
PASSED='^(LAB_|KVRAIL_|CARGO|RUST|PROPTEST|NIXL|UCX|PYTHON|LD_LIBRARY_PATH|PATH|HOME|LANG|STRICT)'
here=$(cd "$(dirname "$0")" && pwd)
out='' limit=${LAB_LIMIT:-120} mem=${LAB_MEM:-1G}
die() { echo "lab: $*" >&2; exit 2; }
while [ $# -gt 0 ]; do
    case $1 in
    --out | --limit | --mem)
        [ $# -gt 1 ] || die "boot.sh: $1 needs a value"
        declare "${1#--}=$2"
        shift 2
        ;;
    -*) die "boot.sh: unknown option $1; known: --out --limit --mem" ;;
    *) break ;;
    esac
done
[ $# -gt 0 ] || die "boot.sh: no command given"
[[ $limit =~ ^[1-9][0-9]*$ ]] || die "boot.sh: limit '$limit' is no whole number of seconds"
[[ $mem =~ ^[1-9][0-9]*[MG]$ ]] || die "boot.sh: memory '$mem' is not like 512M or 1G"
kernel=${LAB_KERNEL:-}
[ -n "$kernel" ] || kernel=$("$here/build-kernel.sh") || exit
[ -x "$kernel" ] || die "LAB_KERNEL=$kernel is no program"

# The kernel's command line has no quoting, so this path must have no space; its socket path is
# short too.
scratch=${TMPDIR:-/tmp}
[[ $scratch =~ ^/[A-Za-z0-9._/-]{1,60}$ ]] || scratch=/tmp
exchange=$(mktemp -d "$scratch/kvrail-lab.XXXXXX") || exit
guest='' timer=''
clean_up() {
    # Everything of the guest is in the kernel's process group.
    [ -z "$guest" ] || kill -KILL -- "-$guest" 2>/dev/null
    [ -z "$timer" ] || kill "$timer" 2>/dev/null
    wait 2>/dev/null
    if [ -n "$out" ] && [ -d "$exchange/out" ]; then
        mkdir -p "$out"
        cp -R "$exchange/out/." "$out/"
        for log in dmesg.log booted; do
            [ ! -f "$exchange/$log" ] || cp "$exchange/$log" "$out/"
        done
    fi
    rm -rf "$exchange"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

mkdir "$exchange/out"
cp "$here/init.sh" "$exchange/init.sh"
sed "s|@EXCHANGE@|$exchange|g" "$here/fstab.in" > "$exchange/fstab"
{
    env -0 | while IFS= read -r -d '' pair; do
        [[ $pair =~ $PASSED ]] && printf 'export %q\n' "$pair"
    done
    printf 'export LAB_HOME=%q LAB_OUT=%q TERM=dumb\n' "$here" "$exchange/out"
    printf 'cd %q || exit 99\n' "$PWD"
    # Inherited limits are the host's; a user's core file of a guest program is of no use.
    echo 'ulimit -c 0'
    printf 'exec'
    printf ' %q' "$@"
    echo
} > "$exchange/command.sh"

# The guest's memory is a file that must be mapped executable: its folder needs the room, and must
# not be mounted noexec. The file has no name, so it goes when the last process of the guest goes.
room_for_memory() {
    local need=${mem%?} dir
    case $mem in *G) need=$((need * 1024)) ;; esac
    for dir in /dev/shm "$scratch" /tmp "$here/../../build"; do
        [ -d "$dir" ] && [ -w "$dir" ] || continue
        [ "$(df -Pm "$dir" | awk 'NR == 2 {print $4}')" -gt "$need" ] || continue
        findmnt -no OPTIONS -T "$dir" 2>/dev/null | grep -qw noexec && continue
        (cd "$dir" && pwd)
        return
    done
    die "no folder has $mem free for the guest's memory (tried /dev/shm, $scratch, /tmp, build)"
}
memory=$(room_for_memory) || exit

ulimit -c 0
TMPDIR=$memory setsid setpriv --pdeathsig KILL "$kernel" mem="$mem" root=/dev/root \
    rootfstype=hostfs rootflags=/ ro init="$exchange/init.sh" con=null con0=null,fd:1 \
    quiet loglevel=4 panic=1 bonding.max_bonds=0 dummy.numdummies=0 ifb.numifbs=0 \
    exchange="$exchange" uml_dir="$exchange/" \
    ${LAB_KERNEL_ARGS:-} < /dev/null &
guest=$!
sleep "$limit" &
timer=$!
wait -n "$guest" "$timer"
if ! kill -0 "$timer" 2>/dev/null && kill -0 "$guest" 2>/dev/null; then
    echo "lab: killed: the guest had not ended after $limit s (--limit)" >&2
    exit 124
fi
if [ -f "$exchange/rc" ]; then
    exit "$(cat "$exchange/rc")"
fi
echo "lab: the kernel ended without running the command; its words are above" >&2
exit 99
