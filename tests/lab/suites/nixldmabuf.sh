#!/bin/bash
# lab-about: two NIXL agents over verbs whose VRAM is dma-bufs by their metaInfo, pull and push
# lab-kernel: dmabuf
# lab-rails: 2
# lab-limit: 240
# lab-mem: 2G
# lab-needs: dmabuf verbs plugin venv
. "$LAB_HOME/rails.sh"
check "$LAB_RAILS rails" rails_veth "$LAB_RAILS" || exit 1
export KVRAIL_IBVERBS=$LAB_BIN/libdmabuf_verbs.so KVRAIL_TRANSPORT=verbs KVRAIL_STRIPE_WIDTH=0
export NIXL_PLUGIN_DIR=$PWD/build/plugins NIXL_LOG_LEVEL=WARN PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=tests/nixl:tests/lab
exec build/venv/bin/python tests/lab/nixl_pair.py --here "$(devices a)" --there "$(devices b)" \
    --memory udmabuf
