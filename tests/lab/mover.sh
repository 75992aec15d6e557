# Sourced by suites that move data with kvrail: starts tests/lab/c/mover.c, which keeps its engines
# from command to command.
. "$LAB_HOME/rails.sh"

# mover NICS-HERE NICS-THERE WORDS... : starts it.
mover() {
    local out in here=$1 there=$2
    shift 2
    coproc MOVER {
        exec "$LAB_BIN/mover" here="$here" there="$there" "$@" 2>> "$LAB_OUT/mover.log"
    }
    # Copies, since a subshell does not see a coprocess's own.
    out=${MOVER[0]} in=${MOVER[1]}
    exec {mover_in}>&"$in" {mover_out}<&"$out"
    mover_answer 30
}
mover_answer() {
    read -r -t "$1" -u "$mover_out" REPLY || REPLY="error no answer within $1 s"
    ANSWER=$REPLY
    echo "$REPLY"
    [[ $REPLY == ok* ]]
}
# ask COMMAND... : one command of mover.c; the answer is in ANSWER, and printed.
ask() {
    echo "$*" >&"$mover_in" && mover_answer 40
}
mover_end() {
    local pid=${MOVER_PID:-}
    ask quit || return
    exec {mover_in}>&- {mover_out}<&-
    [ -z "$pid" ] || wait "$pid"
}
# answered NAME : REPLY becomes the value of NAME=... in the last answer.
answered() {
    local rest=${ANSWER#*"$1="}
    REPLY=${rest%%[ )]*}
}
# rail_bytes I : REPLY becomes the bytes of the I-th rail in the last answer.
rail_bytes() {
    answered rails
    REPLY=,$REPLY
    REPLY=${REPLY#*",ra$1:1="}
    REPLY=${REPLY%%,*}
}
