#!/bin/bash
# lab-about: two NIXL agents with backend RBLN over verbs, pull and push, every byte compared
# lab-rails: 1 2 4
# lab-limit: 240
# lab-mem: 2G
# lab-needs: verbs plugin venv
. "$LAB_HOME/rails.sh"
check "$LAB_RAILS rails" rails_veth "$LAB_RAILS" || exit 1
export NIXL_PLUGIN_DIR=$PWD/build/plugins NIXL_LOG_LEVEL=WARN PYTHONDONTWRITEBYTECODE=1
export KVRAIL_TRANSPORT=${KVRAIL_LAB_TRANSPORT:-verbs} KVRAIL_STRIPE_WIDTH=0
export PYTHONPATH=tests/nixl:tests/lab
exec build/venv/bin/python tests/lab/nixl_pair.py --here "$(devices a)" --there "$(devices b)"
