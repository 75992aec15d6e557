#!/bin/bash
# lab-about: the published connector of vllm-rbln over verbs: a link goes down between two pulls
# lab-rails: 2
# lab-limit: 900
# lab-mem: 6G
# lab-maps: 262144
# lab-needs: drive
. "$LAB_HOME/rails.sh"
check "$LAB_RAILS rails" rails_veth "$LAB_RAILS" || exit 1
cases=${KVRAIL_LAB_CASES:-} # others, one a line
if [ -z "$cases" ]; then
    cut=''
    [ "$LAB_RAILS" = 1 ] || cut=', "cut": "between"'
    cases="{\"slices\": 2, \"order\": \"random\"$cut}"
fi
nics="\"nics\": [\"$(devices b)\", \"$(devices a)\"]"
all=()
while read -r case; do
    case=${case#\{}
    [ "$case" = '}' ] || case=", $case"
    all+=("{$nics$case")
done <<< "$cases"
export KVRAIL_DRIVE_LOG=$LAB_OUT/drive.log
check "the connector moved every byte" scripts/drive.sh "${all[@]}"
status=$?
say "$(cat "$check_log")"
exit $status
