#!/bin/bash
# Cargo runner: runs a test program inside the lab, with LAB_RAILS rails (default 2). Arguments,
# working folder and exit status pass through.
#   CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=$PWD/tests/lab/runner.sh cargo test --test NAME
here=$(cd "$(dirname "$0")" && pwd)
export LAB_RAILS=${LAB_RAILS:-2}
# Without exec, so that a signal to this program's group finds boot.sh's own clean-up in time.
"$here/boot.sh" --limit "${LAB_LIMIT:-600}" --mem "${LAB_MEM:-2G}" \
    /bin/bash -c '. "$LAB_HOME/rails.sh" && rails_veth "$LAB_RAILS" && exec "$@"' runner "$@"
