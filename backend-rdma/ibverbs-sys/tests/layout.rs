//! The structures against the header, by a C compiler, where both are installed.

use std::path::Path;

use c_layout::{Claim, Header};
use ibverbs_sys::*;

fn structures() -> Vec<Claim> {
    [
        c_layout::claims!("struct ibv_pd", ibv_pd, head { context, handle }),
        c_layout::claims!(
            "struct ibv_mr",
            ibv_mr { context, pd, addr, length, handle, lkey, rkey }
        ),
        c_layout::claims!("struct ibv_comp_channel", ibv_comp_channel { context, fd, refcnt }),
        c_layout::claims!(
            "struct ibv_cq",
            ibv_cq,
            head { context, channel, cq_context, handle, cqe }
        ),
        c_layout::claims!("struct ibv_srq", ibv_srq, head { context, srq_context, pd, handle }),
        c_layout::claims!(
            "struct ibv_qp",
            ibv_qp,
            head { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type }
        ),
        c_layout::claims!(
            "struct ibv_context",
            ibv_context,
            head { device, ops, cmd_fd, async_fd, num_comp_vectors }
        ),
        c_layout::claims!(
            "struct ibv_context_ops",
            ibv_context_ops { poll_cq, req_notify_cq, post_srq_recv, post_send, post_recv }
        ),
        c_layout::claims!(
            "struct ibv_device",
            ibv_device { node_type, transport_type, name, dev_name, dev_path, ibdev_path }
        ),
        c_layout::claims!(
            "struct ibv_gid_entry",
            ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex }
        ),
        c_layout::claims!(
            "struct ibv_device_attr",
            ibv_device_attr {
                node_guid,
                max_mr_size,
                vendor_id,
                max_qp,
                max_qp_wr,
                device_cap_flags,
                max_sge,
                max_cqe,
                max_qp_rd_atom,
                max_qp_init_rd_atom,
                atomic_cap,
                max_srq,
                max_srq_wr,
                max_pkeys,
                phys_port_cnt
            }
        ),
        c_layout::claims!(
            "struct ibv_port_attr",
            ibv_port_attr {
                state,
                max_mtu,
                active_mtu,
                gid_tbl_len,
                max_msg_sz,
                pkey_tbl_len,
                lid,
                active_width,
                active_speed,
                link_layer,
                flags,
                port_cap_flags2
            }
        ),
        c_layout::claims!(
            "struct ibv_wc",
            ibv_wc { wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, wc_flags }
        ),
        c_layout::claims!(
            "struct ibv_global_route",
            ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        ),
        c_layout::claims!(
            "struct ibv_ah_attr",
            ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
        ),
        c_layout::claims!("struct ibv_srq_attr", ibv_srq_attr { max_wr, max_sge, srq_limit }),
        c_layout::claims!("struct ibv_srq_init_attr", ibv_srq_init_attr { srq_context, attr }),
        c_layout::claims!(
            "struct ibv_qp_cap",
            ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        ),
        c_layout::claims!(
            "struct ibv_qp_init_attr",
            ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        ),
        c_layout::claims!(
            "struct ibv_qp_attr",
            ibv_qp_attr {
                qp_state,
                path_mtu,
                rq_psn,
                sq_psn,
                dest_qp_num,
                qp_access_flags,
                cap,
                ah_attr,
                alt_ah_attr,
                pkey_index,
                max_rd_atomic,
                max_dest_rd_atomic,
                min_rnr_timer,
                port_num,
                timeout,
                retry_cnt,
                rnr_retry,
                rate_limit
            }
        ),
        c_layout::claims!("struct ibv_sge", ibv_sge { addr, length, lkey }),
        c_layout::claims!(
            "struct ibv_send_wr",
            ibv_send_wr {
                wr_id,
                next,
                sg_list,
                num_sge,
                opcode,
                send_flags,
                imm_data,
                wr,
                qp_type
            }
        ),
        c_layout::claims!("struct ibv_recv_wr", ibv_recv_wr { wr_id, next, sg_list, num_sge }),
        c_layout::claims!("struct ibv_async_event", ibv_async_event { element, event_type }),
    ]
    .concat()
}

macro_rules! constants {
    ($($c:literal = $rust:expr,)*) => {
        vec![$(Claim::of($c, $rust as u64)),*]
    };
}

fn constants() -> Vec<Claim> {
    constants! {
        "IBV_QPT_RC" = ibv_qp_type::RC.0,
        "IBV_QPS_RTS" = ibv_qp_state::RTS.0,
        "IBV_QPS_ERR" = ibv_qp_state::ERR.0,
        "IBV_WR_RDMA_WRITE_WITH_IMM" = ibv_wr_opcode::RDMA_WRITE_WITH_IMM.0,
        "IBV_WR_RDMA_READ" = ibv_wr_opcode::RDMA_READ.0,
        "IBV_WC_RECV" = ibv_wc_opcode::RECV.0,
        "IBV_WC_RECV_RDMA_WITH_IMM" = ibv_wc_opcode::RECV_RDMA_WITH_IMM.0,
        "IBV_WC_WR_FLUSH_ERR" = ibv_wc_status::WR_FLUSH_ERR.0,
        "IBV_WC_REM_ACCESS_ERR" = ibv_wc_status::REM_ACCESS_ERR.0,
        "IBV_WC_RETRY_EXC_ERR" = ibv_wc_status::RETRY_EXC_ERR.0,
        "IBV_WC_GENERAL_ERR" = ibv_wc_status::GENERAL_ERR.0,
        "IBV_EVENT_PORT_ERR" = ibv_event_type::PORT_ERR.0,
        "IBV_EVENT_WQ_FATAL" = ibv_event_type::WQ_FATAL.0,
        "IBV_PORT_ACTIVE" = ibv_port_state::ACTIVE.0,
        "IBV_MTU_4096" = ibv_mtu::MTU_4096.0,
        "IBV_LINK_LAYER_ETHERNET" = IBV_LINK_LAYER_ETHERNET,
        "IBV_GID_TYPE_ROCE_V2" = IBV_GID_TYPE_ROCE_V2,
        "IBV_ACCESS_REMOTE_READ" = ibv_access_flags::REMOTE_READ.bits(),
        "IBV_QP_PORT" = ibv_qp_attr_mask::PORT.bits(),
        "IBV_QP_RNR_RETRY" = ibv_qp_attr_mask::RNR_RETRY.bits(),
        "IBV_QP_MIN_RNR_TIMER" = ibv_qp_attr_mask::MIN_RNR_TIMER.bits(),
        "IBV_QP_MAX_DEST_RD_ATOMIC" = ibv_qp_attr_mask::MAX_DEST_RD_ATOMIC.bits(),
        "IBV_QP_DEST_QPN" = ibv_qp_attr_mask::DEST_QPN.bits(),
        "IBV_SEND_INLINE" = ibv_send_flags::INLINE.bits(),
        "IBV_WC_WITH_IMM" = ibv_wc_flags::WITH_IMM.bits(),
    }
}

#[test]
fn the_structures_are_those_of_the_header() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let header = Header { includes: "#include <infiniband/verbs.h>", arguments: Vec::new() };
    if !header.is_there(folder) {
        peerlane_test_support::not_covered(
            "the_structures_are_those_of_the_header",
            "there is no C compiler with <infiniband/verbs.h> (libibverbs-dev)",
        );
        return;
    }
    let claims = [structures(), constants()].concat();
    c_layout::check(&header, &claims, folder).unwrap();
}
