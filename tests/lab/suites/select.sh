#!/bin/bash
# lab-about: which NICs become rails, by the guest's own sysfs: command, C ABI and plugin agree
# lab-rails: 3
# lab-limit: 90
# lab-needs: command plugin venv
. "$LAB_HOME/rails.sh"
check "$LAB_RAILS rails" rails_veth "$LAB_RAILS" || exit 1
# The far ends are another host: here only the a ends are to be seen.
for ((i = 0; i < LAB_RAILS; i++)); do rdma link delete rb$i; done
export NIXL_PLUGIN_DIR=$PWD/build/plugins NIXL_LOG_LEVEL=ERROR PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=tests/nixl
exec build/venv/bin/python tests/lab/select_nics.py "$LAB_BIN/kvrail" \
    "$CARGO_TARGET_DIR/release/libkvrail.so"
