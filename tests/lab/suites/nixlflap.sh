#!/bin/bash
# lab-about: two NIXL agents move data while links come and go each second, every byte compared
# lab-rails: 2
# lab-limit: 240
# lab-mem: 2G
# lab-needs: verbs plugin venv
. "$LAB_HOME/rails.sh"
check "$LAB_RAILS rails" rails_veth "$LAB_RAILS" || exit 1
export NIXL_PLUGIN_DIR=$PWD/build/plugins NIXL_LOG_LEVEL=WARN PYTHONDONTWRITEBYTECODE=1
export KVRAIL_TRANSPORT=${KVRAIL_LAB_TRANSPORT:-verbs} KVRAIL_STRIPE_WIDTH=0
export PYTHONPATH=tests/nixl:tests/lab
flap=/tmp/nixl-flap
flapper() { # what nixl_flap.py says
    local n=0 rail
    while [ ! -e $flap.end ]; do
        if [ -e $flap.on ]; then
            rail=$((n % LAB_RAILS)) n=$((n + 1))
            rail_down $rail && sleep 0.5 && rail_up $rail || echo "rail $rail: not as it should be"
            echo $n > $flap.count
            sleep 0.5
        else
            : > $flap.off
            sleep 0.1
        fi
    done
}
flapper &
build/venv/bin/python tests/lab/nixl_flap.py --here "$(devices a)" --there "$(devices b)" \
    --flapper $flap
status=$?
: > $flap.end
wait
exit $status
