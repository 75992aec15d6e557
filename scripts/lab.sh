#!/bin/bash
# Runs suites of tests/lab inside a user-mode Linux with Soft-RoCE (docs/lab.md).
# usage: scripts/lab.sh [--rails N] [--verbose] [--list | --can-run] [SUITE...]
#   no suite: all of them. --rails: so many instead of the counts that the suite names.
#   --can-run: says why not, with exit status 77, and does nothing else.
# Logs: build/lab/SUITE/N-rails/. Environment: docs/lab.md.
# Exit status: 0 nothing failed; 1 something did; 2 a wrong argument; 77 the lab cannot run here.
set -u
cd "$(dirname "$0")/.." || exit 1
root=$PWD lab=$PWD/tests/lab logs=$PWD/build/lab
export LAB_BIN=$logs/bin
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target}
unset MAKEFLAGS MFLAGS MAKELEVEL
rails='' verbose='' mode=run suites=()
passed=0 failed=0 skipped=0 notes=()

usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; }
die() { echo "lab: $*" >&2; exit 2; }
closing() {
    local note
    for note in "${notes[@]}"; do echo "  $note"; done
    echo "$passed passed, $failed failed, $skipped skipped"
}
cannot() {
    skipped=1 notes=("SKIPPED: the lab cannot run here: $1")
    closing
    exit 77
}
suite_file() {
    local file
    for file in "$lab/suites/$1".*; do [ -x "$file" ] && echo "$file" && return; done
    return 1
}
all_suites() {
    local file
    for file in "$lab"/suites/*; do
        [ -f "$file" ] && [ -x "$file" ] && basename "${file%.*}"
    done
}
# header FILE KEY DEFAULT : what the line `# lab-KEY: ...` of a suite says.
header() {
    local value
    value=$(sed -n "s/^# lab-$2: *//p" "$1" | head -n 1)
    echo "${value:-$3}"
}

while [ $# -gt 0 ]; do
    case $1 in
    --rails)
        [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die "--rails '${2:-}' is no number; allowed: 1 to 256"
        [ "$2" -le 256 ] || die "--rails $2 is too many; allowed: 1 to 256"
        rails=$2
        shift
        ;;
    --verbose) verbose=1 ;;
    --list) mode=list ;;
    --can-run) mode=can ;;
    -h | --help) usage; exit 0 ;;
    -*) die "unknown option $1; known: --rails N --verbose --list --can-run" ;;
    *)
        suite_file "$1" > /dev/null || die "unknown suite $1; known: $(all_suites | tr '\n' ' ')"
        suites+=("$1")
        ;;
    esac
    shift
done
[ ${#suites[@]} -gt 0 ] || mapfile -t suites < <(all_suites)

if [ $mode = list ]; then
    for suite in "${suites[@]}"; do
        printf '  %-10s %s\n' "$suite" "$(header "$(suite_file "$suite")" about '')"
    done
    exit 0
fi

# Suites that need the kernel whose Soft-RoCE takes dma-bufs.
wants_patched() {
    local suite
    for suite in "${suites[@]}"; do
        [ "$(header "$(suite_file "$suite")" kernel plain)" = plain ] || return 0
    done
    return 1
}
build_kernel() { "$lab/build-kernel.sh" "$@"; }
build_patched() { KVRAIL_LAB_DMABUF=1 "$lab/build-kernel.sh" "$@"; }
# Is there nothing to build? Without the patched kernel the other suites run; so only root, who can
# install what building takes, is asked for it.
kernels_there() {
    build_kernel --find > /dev/null || return
    [ "$(id -u)" != 0 ] || ! wants_patched || build_patched --find > /dev/null
}

# ---- this machine ----

# Packages that the suites use, by a file of each.
packages() {
    command -v ip > /dev/null && command -v tc > /dev/null && command -v rdma > /dev/null ||
        echo iproute2
    command -v ibv_devices > /dev/null || echo ibverbs-utils
    command -v ib_write_bw > /dev/null || echo perftest
    [ -f /usr/include/infiniband/verbs.h ] || echo libibverbs-dev
    ls /usr/lib/*/libibverbs/librxe-rdmav*.so > /dev/null 2>&1 || echo ibverbs-providers
    command -v gcc > /dev/null || echo gcc
    [ -f /usr/include/stdio.h ] || echo libc6-dev
    command -v setpriv > /dev/null || echo util-linux
    if ! kernels_there; then
        command -v make > /dev/null || echo make
        command -v bc > /dev/null || echo bc
        command -v xz > /dev/null || echo xz-utils
        command -v python3 > /dev/null || echo python3
    fi
}
why_not() {
    local missing
    [ "$(uname -s) $(uname -m)" = "Linux x86_64" ] || {
        echo "it needs Linux on x86_64; this is $(uname -s) $(uname -m)"
        return
    }
    missing=$(packages | sort -u | tr '\n' ' ')
    if [ -n "$missing" ]; then
        command -v apt-get > /dev/null || { echo "missing, and no apt-get: $missing"; return; }
        [ "$(id -u)" = 0 ] || { echo "missing: apt-get install ${missing% } (needs root)"; return; }
    fi
    if ! "$lab/build-kernel.sh" --find > /dev/null && [ -z "${LAB_KERNEL:-}" ]; then
        command -v apt-get > /dev/null || {
            echo "no kernel is cached, and there is no apt-get to fetch the source of one"
            return
        }
    fi
    # User-mode Linux traces its processes.
    command -v python3 > /dev/null && python3 "$lab/may_trace.py"
}
reason=$(why_not)
[ -z "$reason" ] || cannot "$reason"
[ $mode != can ] || exit 0

missing=$(packages | sort -u | tr '\n' ' ')
if [ -n "$missing" ]; then
    echo "lab: installing $missing"
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086
    { apt-get -qq update && apt-get install -qq -y --no-install-recommends $missing; } \
        > /dev/null || cannot "apt-get could not install $missing"
fi
began=$SECONDS
# The patched kernel first: where both are missing, its build leaves the plain one too.
patched='' unpatched=''
if wants_patched; then
    if [ -n "${LAB_KERNEL:-}" ]; then
        patched=$(build_patched --find) ||
            unpatched="LAB_KERNEL names one kernel, and no patched one is kept"
    else
        patched=$(build_patched)
        case $? in
        0) ;;
        77) unpatched="no kernel with the dma-buf patch; the reason is above" ;;
        *) patched=broken ;;
        esac
    fi
fi
if [ -z "${LAB_KERNEL:-}" ]; then
    LAB_KERNEL=$(build_kernel)
    case $? in
    0) ;;
    77) cannot "no kernel; the reason is above" ;;
    *) failed=1 notes=("the kernel does not build"); closing; exit 1 ;;
    esac
fi
export LAB_KERNEL
echo "lab: kernel $LAB_KERNEL (found or built in $((SECONDS - began)) s)"

# ---- what the suites need built ----

build_checks() {
    local check
    mkdir -p "$LAB_BIN"
    for check in verbs-check rawloop; do
        gcc -std=gnu11 -O2 -Wall -Wextra -Werror -o "$LAB_BIN/$check" "$lab/c/$check.c" -libverbs ||
            return
    done
}
build_plugin() { make --no-print-directory plugin; }
build_venv() { scripts/venv.sh demo; }
# What the drive of the published connector needs: a listing makes it.
build_drive() { build_plugin && scripts/drive.sh --list; }
# link_kvrail OUTPUT ARGUMENT... : a C program with kvrail's static library.
link_kvrail() {
    local output=$LAB_BIN/$1
    shift
    make --no-print-directory lib && mkdir -p "$LAB_BIN" &&
        gcc -std=gnu11 -O2 -Wall -Iinclude "$@" "$CARGO_TARGET_DIR/release/libkvrail.a" \
            -lpthread -ldl -lm -o "$output"
}
# The example as it is, but its second process uses the other devices.
build_example() { link_kvrail pair -include "$lab/c/other_nics.h" examples/c/pair.c; }
# The library that reaches the kernel's own answer to dma-bufs (KVRAIL_IBVERBS).
build_dmabuf() {
    mkdir -p "$LAB_BIN" &&
        gcc -std=gnu11 -O2 -Wall -Wextra -Werror -shared -fPIC \
            -Wl,--version-script="$lab/c/dmabuf_verbs.map" -o "$LAB_BIN/libdmabuf_verbs.so" \
            "$lab/c/dmabuf_verbs.c" -Wl,--no-as-needed -libverbs
}
build_segments() { link_kvrail dmabuf "$lab/c/dmabuf.c"; }
build_mover() { link_kvrail mover "$lab/c/mover.c"; }
build_storm() { link_kvrail storm "$lab/c/storm.c"; }
# The tests of the verbs driver that can run over a real library; where it lies goes to a file.
build_tests() {
    local line
    mkdir -p "$LAB_BIN"
    line=$(cargo test --test verbs_move --no-run 2>&1 | tee /dev/stderr | grep Executable) || return
    line=${line##*(}
    (cd "$root" && realpath "${line%)}") > "$LAB_BIN/verbs_move.path"
}
# The command `kvrail`, beside the suites' other programs.
build_command() {
    make --no-print-directory command && mkdir -p "$LAB_BIN" &&
        cp "$CARGO_TARGET_DIR/release/kvrail" "$LAB_BIN/"
}
# Does this kvrail have the verbs driver? 77: not yet.
build_verbs() { link_kvrail has_verbs "$lab/c/has_verbs.c" && "$LAB_BIN/has_verbs"; }
declare -A ready=()
# need NAME : builds it once; returns what building it came to.
need() {
    local begin=$SECONDS log=$logs/build-$1.log
    if [ -z "${ready[$1]:-}" ]; then
        declare -F "build_$1" > /dev/null || die "a suite needs '$1', which nobody builds"
        mkdir -p "$logs"
        "build_$1" > "$log" 2>&1
        ready[$1]=$?
        echo "lab: built $1 in $((SECONDS - begin)) s (log: ${log#"$root"/})"
    fi
    return "${ready[$1]}"
}

# ---- the suites ----

count() { grep -c "^lab: $1 - " "$2"; }
note_lines() { # note_lines NAME WORD FILE : the first few; all are in the log
    local line n=0
    while IFS= read -r line; do
        n=$((n + 1))
        [ $n -gt 4 ] || notes+=("$1: ${line#lab: }")
    done < <(grep "^lab: $2 - " "$3")
    [ $n -le 4 ] || notes+=("$1: and $((n - 4)) more of these in its log")
}
one() { # one SUITE FILE RAILS KERNEL
    local name="$1, $3 rails" out=$logs/$1/$3-rails begin end rc good bad off booted='' log limit
    rm -rf "$out"
    mkdir -p "$out"
    log=$out/console.log
    begin=$(date +%s%3N)
    limit=$(header "$2" limit 120)
    if [ "$(header "$2" where guest)" = host ]; then
        LAB_RAILS=$3 LAB_HOME=$lab LAB_OUT=$out timeout -k 5 "$limit" "$2" \
            > "$log" 2>&1 < /dev/null &
    else
        LAB_RAILS=$3 LAB_KERNEL=$4 "$lab/boot.sh" --out "$out" --limit "$limit" \
            --mem "${LAB_MEM:-$(header "$2" mem 1G)}" "$2" > "$log" 2>&1 < /dev/null &
    fi
    wait $!
    rc=$?
    end=$(date +%s%3N)
    [ -z "$verbose" ] || sed 's/^/    /' "$log"
    good=$(count ok "$log") bad=$(count FAIL "$log") off=$(count skip "$log")
    note_lines "$name" FAIL "$log"
    note_lines "$name" skip "$log"
    if [ $rc != 0 ] && [ "$bad" = 0 ]; then
        bad=1
        notes+=("$name: FAIL - exit status $rc$([ $rc != 124 ] || echo ' (killed at its limit)')")
    elif [ $((good + bad + off)) = 0 ]; then
        bad=1
        notes+=("$name: FAIL - it gave no verdict")
    fi
    passed=$((passed + good)) failed=$((failed + bad)) skipped=$((skipped + off))
    [ ! -f "$out/booted" ] || booted=", up after $(cat "$out/booted") s"
    printf '%-22s %3d passed, %d failed, %d skipped in %d.%03d s%s\n' "$name:" "$good" "$bad" \
        "$off" $(((end - begin) / 1000)) $(((end - begin) % 1000)) "$booted"
    if [ "$bad" != 0 ]; then
        echo "    the end of ${log#"$root"/}:"
        tail -n 25 "$log" | sed 's/^/    | /'
    fi
}
# omitted SUITE passed|failed|skipped WHY : a suite that cannot be run.
omitted() {
    local -n counter=$2
    counter=$((counter + 1))
    notes+=("$1: ${2^^} - $3")
    echo "$1: ${2^^}: $3"
}
maps=$(cat /proc/sys/vm/max_map_count)
run_suite() {
    local suite=$1 file what n kernel=$LAB_KERNEL
    file=$(suite_file "$suite")
    if [ "$(header "$file" kernel plain)" != plain ]; then
        kernel=$patched
        if [ -n "$unpatched" ]; then
            omitted "$suite" skipped "$unpatched"
            return
        elif [ "$patched" = broken ]; then
            omitted "$suite" failed "the kernel with the dma-buf patch does not build"
            return
        fi
    fi
    n=$(header "$file" maps 0)
    if [ "$n" -gt "$maps" ]; then
        omitted "$suite" skipped "vm.max_map_count is $maps, and a process of the guest needs $n: \
sysctl -w vm.max_map_count=$n"
        return
    fi
    for what in $(header "$file" needs ''); do
        need "$what"
        case $? in
        0) ;;
        77)
            omitted "$suite" skipped "$(tail -n 1 "$logs/build-$what.log")"
            return
            ;;
        *)
            failed=$((failed + 1))
            notes+=("$suite: FAIL - could not build $what: $(tail -n 1 "$logs/build-$what.log")")
            echo "$suite: FAILED: could not build $what:"
            tail -n 15 "$logs/build-$what.log" | sed 's/^/    | /'
            return
            ;;
        esac
    done
    for n in ${rails:-$(header "$file" rails 2)}; do one "$suite" "$file" "$n" "$kernel"; done
}
# The guest that runs is ended too.
trap 'jobs -p | xargs -r kill 2>/dev/null; wait; exit 143' INT TERM HUP

for suite in "${suites[@]}"; do run_suite "$suite"; done
echo
echo "$((SECONDS - began)) s; logs in build/lab/SUITE/N-rails/"
closing
[ $failed = 0 ]
