//! The structures against the header, by a C compiler, where both are installed.

use std::io::Write as _;
use std::mem::offset_of;
use std::process::{Command, Stdio};

use ibverbs_sys::*;

/// A line of C that prints a size or an offset, and what Rust says.
struct Claim {
    c: String,
    rust: usize,
}

macro_rules! claims {
    ($($name:ident $whole:ident { $($field:ident),* })*) => {{
        let mut claims = Vec::new();
        $(
            let c = concat!("struct ", stringify!($name));
            claims.extend($whole(c, size_of::<$name>()));
            $(claims.push(Claim {
                c: format!("offsetof({c}, {})", stringify!($field)),
                rust: offset_of!($name, $field),
            });)*
        )*
        claims
    }};
}

fn whole(name: &str, rust: usize) -> Option<Claim> {
    Some(Claim { c: format!("sizeof({name})"), rust })
}

/// Only the first fields are declared.
fn head(_name: &str, _rust: usize) -> Option<Claim> {
    None
}

fn structures() -> Vec<Claim> {
    claims! {
        ibv_pd head { context, handle }
        ibv_mr whole { context, pd, addr, length, handle, lkey, rkey }
        ibv_comp_channel whole { context, fd, refcnt }
        ibv_cq head { context, channel, cq_context, handle, cqe }
        ibv_srq head { context, srq_context, pd, handle }
        ibv_qp head { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type }
        ibv_context head { device, ops, cmd_fd, async_fd, num_comp_vectors }
        ibv_context_ops whole { poll_cq, req_notify_cq, post_srq_recv, post_send, post_recv }
        ibv_device whole { node_type, transport_type, name, dev_name, dev_path, ibdev_path }
        ibv_gid_entry whole { gid, gid_index, port_num, gid_type, ndev_ifindex }
        ibv_device_attr whole {
            node_guid, max_mr_size, vendor_id, max_qp, max_qp_wr, device_cap_flags, max_sge, max_cqe,
            max_qp_rd_atom, max_qp_init_rd_atom, atomic_cap, max_srq, max_srq_wr, max_pkeys,
            phys_port_cnt
        }
        ibv_port_attr whole {
            state, max_mtu, active_mtu, gid_tbl_len, max_msg_sz, pkey_tbl_len, lid, active_width,
            active_speed, link_layer, flags, port_cap_flags2
        }
        ibv_wc whole { wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, wc_flags }
        ibv_global_route whole { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        ibv_ah_attr whole { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
        ibv_srq_attr whole { max_wr, max_sge, srq_limit }
        ibv_srq_init_attr whole { srq_context, attr }
        ibv_qp_cap whole { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        ibv_qp_init_attr whole { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        ibv_qp_attr whole {
            qp_state, path_mtu, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap, ah_attr,
            alt_ah_attr, pkey_index, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num,
            timeout, retry_cnt, rnr_retry, rate_limit
        }
        ibv_sge whole { addr, length, lkey }
        ibv_send_wr whole { wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data, wr, qp_type }
        ibv_recv_wr whole { wr_id, next, sg_list, num_sge }
        ibv_async_event whole { element, event_type }
    }
}

macro_rules! constants {
    ($($c:literal = $rust:expr,)*) => {
        vec![$(Claim { c: $c.to_owned(), rust: $rust as usize }),*]
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
        "IBV_ACCESS_REMOTE_READ" = IBV_ACCESS_REMOTE_READ,
        "IBV_QP_PORT" = IBV_QP_PORT,
        "IBV_QP_RNR_RETRY" = IBV_QP_RNR_RETRY,
        "IBV_QP_MIN_RNR_TIMER" = IBV_QP_MIN_RNR_TIMER,
        "IBV_QP_MAX_DEST_RD_ATOMIC" = IBV_QP_MAX_DEST_RD_ATOMIC,
        "IBV_QP_DEST_QPN" = IBV_QP_DEST_QPN,
        "IBV_SEND_INLINE" = IBV_SEND_INLINE,
        "IBV_WC_WITH_IMM" = IBV_WC_WITH_IMM,
    }
}

fn compile(program: &std::path::Path, source: &str) -> std::io::Result<bool> {
    let mut compiler = Command::new("cc")
        .args(["-x", "c", "-", "-o"])
        .arg(program)
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut input = compiler.stdin.take().expect("it is piped");
    input.write_all(source.as_bytes())?;
    drop(input);
    Ok(compiler.wait()?.success())
}

#[test]
fn the_structures_are_those_of_the_header() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let include = "#include <stdio.h>\n#include <stddef.h>\n#include <infiniband/verbs.h>\n";
    let empty = format!("{include}int main(void) {{ return 0; }}\n");
    if !compile(&folder.join("header"), &empty).unwrap_or(false) {
        eprintln!("skipped: wanted a C compiler and <infiniband/verbs.h> (libibverbs-dev)");
        return;
    }
    let claims: Vec<Claim> = structures().into_iter().chain(constants()).collect();
    let prints: Vec<String> =
        claims.iter().map(|it| format!("printf(\"%zu\\n\", (size_t)({}));\n", it.c)).collect();
    let source = format!("{include}int main(void) {{\n{}return 0;\n}}\n", prints.concat());
    let program = folder.join("layout");
    assert!(compile(&program, &source).unwrap(), "the claims are C");
    let output = Command::new(&program).output().unwrap();
    let lines: Vec<&str> = std::str::from_utf8(&output.stdout).unwrap().lines().collect();
    assert_eq!(lines.len(), claims.len());
    for (claim, line) in claims.iter().zip(lines) {
        assert_eq!(claim.rust.to_string(), line, "{}", claim.c);
    }
}
