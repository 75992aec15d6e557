# The fakes of libibverbs and of CUDA's driver, for C programs that run under a tool. To be sourced
# by a bash script that stands in the repository's root.

# build_fakes WORK TARGET: what both need, in folders of the caller's and of cargo's. 77: the
# headers of libibverbs are missing.
build_fakes() {
    fakes_work=$1 fakes_verbs=$2/tmp/verbs_engine-fake
    printf '#include <infiniband/verbs.h>\n' | "${CC:-cc}" -fsyntax-only -x c - 2> /dev/null ||
        return 77
    # The tests of the verbs driver have it there; built anew where a source is newer.
    [ -z "$(find tests/fakeverbs -newer "$fakes_verbs/bench" 2>&1)" ] ||
        bash tests/fakeverbs/build.sh "$fakes_verbs" || return 1
    BUILD=1 sh tests/fakecuda/run.sh "$fakes_work" "$fakes_work"
}

# over_fakes PROGRAM COMMAND...: with the NICs that PROGRAM, one of the list below, asks for.
device_programs=(tests/cabi/devmem.c tests/fakecuda/provider.c tests/fakecuda/engine.c)
over_fakes() {
    local nics=2 knobs='' folder
    # The last two NICs play another host.
    [ "$1" != engine ] || { nics=4; knobs="fake2.port1.ip=10.1.0.2;fake3.port1.ip=10.1.1.2"; }
    folder=$fakes_work/$1-nics
    mkdir -p "$folder/bus"
    shift
    (
        export FAKEVERBS_DEVICES=$nics FAKEVERBS_SET=$knobs FAKEVERBS_BUS=$folder/bus
        export KVRAIL_IBVERBS=$fakes_verbs/libfakeverbs.so KVRAIL_SYSROOT=$folder/tree
        export KVRAIL_LIBCUDA=$fakes_work/libfakecuda.so
        "$fakes_verbs/fakeverbs-tree" "$folder/tree" && exec "$@"
    )
}
