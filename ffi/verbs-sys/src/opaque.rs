//! Types of C that kvrail meets only as pointers.

macro_rules! opaque {
    ($($name:ident)*) => { $(
        /// Only as a pointer; see rdma-core.
        #[allow(non_camel_case_types, reason = "the name it has in C")]
        #[repr(C)]
        #[derive(Debug)]
        pub struct $name {
            _no_fields: [u8; 0],
        }
    )* };
}

opaque! {
    _compat_ibv_port_attr
    ibv_ah
    ibv_alloc_dm_attr
    ibv_counter_attach_attr
    ibv_counters
    ibv_counters_init_attr
    ibv_cq_ex
    ibv_cq_init_attr_ex
    ibv_dm
    ibv_flow
    ibv_flow_action
    ibv_flow_action_esp_attr
    ibv_flow_attr
    ibv_modify_cq_attr
    ibv_mw
    ibv_mw_bind
    ibv_ops_wr
    ibv_qp_init_attr_ex
    ibv_qp_open_attr
    ibv_qp_rate_limit_attr
    ibv_rwq_ind_table
    ibv_rwq_ind_table_init_attr
    ibv_srq
    ibv_srq_init_attr_ex
    ibv_values_ex
    ibv_wq
    ibv_wq_attr
    ibv_wq_init_attr
    ibv_xrcd
    ibv_xrcd_init_attr
    verbs_ex_private
}

/// Advice of `ibv_advise_mr`, which kvrail does not call.
#[allow(non_camel_case_types, reason = "the name it has in C")]
pub type ib_uverbs_advise_mr_advice = core::ffi::c_uint;
