#!/bin/bash
# lab-about: dma-bufs where the library, then the kernel, takes none: refused, and what to do
# lab-rails: 2
# lab-limit: 60
# lab-needs: dmabuf segments
. "$LAB_HOME/rails.sh"
check "$LAB_RAILS rails" rails_veth "$LAB_RAILS" || exit 1
say "the library refuses"
"$LAB_BIN/dmabuf" "$(devices a)" refuses || fail "dmabuf: exit status $?"
say "the kernel refuses"
KVRAIL_IBVERBS=$LAB_BIN/libdmabuf_verbs.so "$LAB_BIN/dmabuf" "$(devices a)" refuses ||
    fail "dmabuf: exit status $?"
