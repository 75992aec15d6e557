#!/bin/bash
# lab-about: the C example over verbs, two processes that use different devices
# lab-rails: 1 2
# lab-limit: 60
# lab-needs: verbs example
. "$LAB_HOME/rails.sh"
sent() {
    local i sum=0
    for ((i = 0; i < LAB_RAILS; i++)); do
        sum=$((sum + $(cnt tx bytes a$i) + $(cnt tx bytes b$i)))
    done
    echo $sum
}
crosses() {
    local before after
    before=$(sent)
    KVRAIL_TRANSPORT=verbs KVRAIL_STRIPE_WIDTH=0 KVRAIL_LISTEN_IP=$(rail_ip a 0) \
        KVRAIL_NICS=$(devices a) KVRAIL_LAB_OTHER_NICS=$(devices b) "$LAB_BIN/pair" || return
    after=$(sent)
    # 64 blocks of 4097 bytes go over the rails.
    echo "$((after - before)) bytes crossed the rails"
    [ $((after - before)) -ge $((64 * 4097)) ]
}
check "$LAB_RAILS rails" rails_veth "$LAB_RAILS" || exit 1
check "the example's bytes are right, and crossed the rails" crosses
