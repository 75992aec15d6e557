#!/bin/bash
# lab-about: the crate's own tests of the verbs driver, over the real library and kernel
# lab-rails: 1
# lab-limit: 90
# lab-needs: tests dmabuf
. "$LAB_HOME/rails.sh"
. "$LAB_HOME/cargo_tests.sh"
check "$LAB_RAILS rails" rails_veth "$LAB_RAILS" || exit 1
cargo_tests --skip dmabuf::
# The library refuses a dma-buf for the kernel; then, past it, the kernel itself does.
export KVRAIL_TEST_DMABUF=refused
cargo_tests dmabuf::a_kernel_that_takes_no_dmabufs
KVRAIL_IBVERBS=$LAB_BIN/libdmabuf_verbs.so cargo_tests dmabuf::a_kernel_that_takes_no_dmabufs
