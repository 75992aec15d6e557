# Sourced by suites that run tests/verbs_move.rs.

runs=0
# cargo_tests [FILTER...] : one verdict a test that ran.
cargo_tests() {
    local program line rc log
    log=$LAB_OUT/verbs_move-$((++runs)).log
    export KVRAIL_TEST_RAIL="ra0@a0=$(rail_ip a 0),rb0@b0=$(rail_ip b 0)"
    # Its path is in a file of build_tests (scripts/lab.sh).
    read -r program < "$LAB_BIN/verbs_move.path"
    "$program" "$@" > "$log" 2>&1
    rc=$?
    while IFS= read -r line; do
        case $line in
        "test "*" ... "*ok) ok "${line#test }" ;;
        "test result:"*) say "$line" ;;
        esac
    done < "$log"
    [ $rc = 0 ] || { cat "$log"; fail "verbs_move: exit status $rc"; }
}
