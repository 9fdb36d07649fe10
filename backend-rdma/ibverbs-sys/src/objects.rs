//! Declares the C structures of `verbs.h`.
#![allow(missing_docs, reason = "the names are the header's, and so is their documentation")]
#![allow(non_camel_case_types, reason = "the names are the header's")]

use std::ffi::{c_char, c_int, c_void};
use std::fmt;

use crate::values::*;

/// Declares C structures that only libibverbs allocates, and that callers access through pointers. The locks
/// that follow in the header are left out.
macro_rules! made_by_the_library {
    ($($name:ident { $($field:ident: $kind:ty,)* })*) => {$(
        /// A structure of `verbs.h` that the library allocates, with the fields that a program may read.
        #[repr(C)]
        #[derive(Debug)]
        pub struct $name {
            $(pub $field: $kind,)*
        }
    )*};
}

macro_rules! plain {
    ($($name:ident { $($field:ident: $kind:ty,)* })*) => {$(
        /// A complete structure of `verbs.h`, which the caller allocates.
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub struct $name {
            $(pub $field: $kind,)*
        }

        impl Default for $name {
            fn default() -> Self {
                // SAFETY: integers, arrays of them, null pointers and absent functions are all zero
                // bytes.
                unsafe { std::mem::zeroed() }
            }
        }
    )*};
}

made_by_the_library! {
    ibv_pd { context: *mut ibv_context, handle: u32, }
    ibv_mr {
        context: *mut ibv_context, pd: *mut ibv_pd, addr: *mut c_void, length: usize, handle: u32,
        lkey: u32, rkey: u32,
    }
    ibv_comp_channel { context: *mut ibv_context, fd: c_int, refcnt: c_int, }
    ibv_cq {
        context: *mut ibv_context, channel: *mut ibv_comp_channel, cq_context: *mut c_void,
        handle: u32, cqe: c_int,
    }
    ibv_srq {
        context: *mut ibv_context, srq_context: *mut c_void, pd: *mut ibv_pd, handle: u32,
    }
    ibv_qp {
        context: *mut ibv_context, qp_context: *mut c_void, pd: *mut ibv_pd, send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq, srq: *mut ibv_srq, handle: u32, qp_num: u32, state: ibv_qp_state,
        qp_type: ibv_qp_type,
    }
    ibv_context {
        device: *mut ibv_device, ops: ibv_context_ops, cmd_fd: c_int, async_fd: c_int,
        num_comp_vectors: c_int,
    }
    ibv_device {
        _ops: [*mut c_void; 2], node_type: ibv_node_type, transport_type: ibv_transport_type,
        name: [c_char; 64], dev_name: [c_char; 64], dev_path: [c_char; 256],
        ibdev_path: [c_char; 256],
    }
}

/// The function pointers of a device context, in the order of the header; names of unused ones start with
/// `_`.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_context_ops {
    pub _compat: [*mut c_void; 7],
    pub _memory_windows: [*mut c_void; 3],
    pub _compat_create_cq: *mut c_void,
    pub poll_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int>,
    pub req_notify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int>,
    pub _compat_srq: [*mut c_void; 7],
    pub post_srq_recv: Option<
        unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
    >,
    pub _compat_qp: [*mut c_void; 4],
    pub post_send:
        Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int>,
    pub post_recv:
        Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
    pub _compat_rest: [*mut c_void; 5],
}

plain! {
    ibv_gid_entry {
        gid: ibv_gid, gid_index: u32, port_num: u32, gid_type: u32, ndev_ifindex: u32,
    }
    ibv_device_attr {
        fw_ver: [c_char; 64], node_guid: u64, sys_image_guid: u64, max_mr_size: u64,
        page_size_cap: u64, vendor_id: u32, vendor_part_id: u32, hw_ver: u32, max_qp: c_int,
        max_qp_wr: c_int, device_cap_flags: u32, max_sge: c_int, max_sge_rd: c_int, max_cq: c_int,
        max_cqe: c_int, max_mr: c_int, max_pd: c_int, max_qp_rd_atom: c_int, max_ee_rd_atom: c_int,
        max_res_rd_atom: c_int, max_qp_init_rd_atom: c_int, max_ee_init_rd_atom: c_int,
        atomic_cap: ibv_atomic_cap, max_ee: c_int, max_rdd: c_int, max_mw: c_int,
        max_raw_ipv6_qp: c_int, max_raw_ethy_qp: c_int, max_mcast_grp: c_int,
        max_mcast_qp_attach: c_int, max_total_mcast_qp_attach: c_int, max_ah: c_int, max_fmr: c_int,
        max_map_per_fmr: c_int, max_srq: c_int, max_srq_wr: c_int, max_srq_sge: c_int,
        max_pkeys: u16, local_ca_ack_delay: u8, phys_port_cnt: u8,
    }
    ibv_port_attr {
        state: ibv_port_state, max_mtu: ibv_mtu, active_mtu: ibv_mtu, gid_tbl_len: c_int,
        port_cap_flags: u32, max_msg_sz: u32, bad_pkey_cntr: u32, qkey_viol_cntr: u32,
        pkey_tbl_len: u16, lid: u16, sm_lid: u16, lmc: u8, max_vl_num: u8, sm_sl: u8,
        subnet_timeout: u8, init_type_reply: u8, active_width: u8, active_speed: u8, phys_state: u8,
        link_layer: u8, flags: u8, port_cap_flags2: u16,
    }
    ibv_wc {
        wr_id: u64, status: ibv_wc_status, opcode: ibv_wc_opcode, vendor_err: u32, byte_len: u32,
        imm_data: u32, qp_num: u32, src_qp: u32, wc_flags: ibv_wc_flags, pkey_index: u16, slid: u16, sl: u8,
        dlid_path_bits: u8,
    }
    ibv_global_route {
        dgid: ibv_gid, flow_label: u32, sgid_index: u8, hop_limit: u8, traffic_class: u8,
    }
    ibv_ah_attr {
        grh: ibv_global_route, dlid: u16, sl: u8, src_path_bits: u8, static_rate: u8, is_global: u8,
        port_num: u8,
    }
    ibv_srq_attr { max_wr: u32, max_sge: u32, srq_limit: u32, }
    ibv_srq_init_attr { srq_context: *mut c_void, attr: ibv_srq_attr, }
    ibv_qp_cap {
        max_send_wr: u32, max_recv_wr: u32, max_send_sge: u32, max_recv_sge: u32,
        max_inline_data: u32,
    }
    ibv_qp_init_attr {
        qp_context: *mut c_void, send_cq: *mut ibv_cq, recv_cq: *mut ibv_cq, srq: *mut ibv_srq,
        cap: ibv_qp_cap, qp_type: ibv_qp_type, sq_sig_all: c_int,
    }
    ibv_qp_attr {
        qp_state: ibv_qp_state, cur_qp_state: ibv_qp_state, path_mtu: ibv_mtu,
        path_mig_state: ibv_mig_state, qkey: u32, rq_psn: u32, sq_psn: u32, dest_qp_num: u32,
        qp_access_flags: ibv_access_flags, cap: ibv_qp_cap, ah_attr: ibv_ah_attr, alt_ah_attr: ibv_ah_attr,
        pkey_index: u16, alt_pkey_index: u16, en_sqd_async_notify: u8, sq_draining: u8,
        max_rd_atomic: u8, max_dest_rd_atomic: u8, min_rnr_timer: u8, port_num: u8, timeout: u8,
        retry_cnt: u8, rnr_retry: u8, alt_port_num: u8, alt_timeout: u8, rate_limit: u32,
    }
    ibv_sge { addr: u64, length: u32, lkey: u32, }
    ibv_send_wr {
        wr_id: u64, next: *mut ibv_send_wr, sg_list: *mut ibv_sge, num_sge: c_int,
        opcode: ibv_wr_opcode, send_flags: ibv_send_flags, imm_data: u32, wr: ibv_send_target,
        qp_type: u32, _bind_mw: [u64; 6],
    }
    ibv_recv_wr {
        wr_id: u64, next: *mut ibv_recv_wr, sg_list: *mut ibv_sge, num_sge: c_int,
    }
    ibv_send_rdma { remote_addr: u64, rkey: u32, }
    ibv_send_atomic { remote_addr: u64, compare_add: u64, swap: u64, rkey: u32, }
}

/// The global identifier (GID) of a port, 16 bytes in network byte order.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ibv_gid {
    pub raw: [u8; 16],
}

/// The union `wr` of a send request, with the remote address and key of a one-sided operation.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_send_target {
    pub rdma: ibv_send_rdma,
    pub atomic: ibv_send_atomic,
}

impl fmt::Debug for ibv_send_target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ibv_send_target").finish_non_exhaustive()
    }
}

/// An asynchronous event of a device, port, completion queue or queue pair.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_async_event {
    /// A pointer to the object of the event, or the port number in the first four bytes.
    pub element: *mut c_void,
    pub event_type: ibv_event_type,
}
