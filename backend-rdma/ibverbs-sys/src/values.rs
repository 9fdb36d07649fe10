//! Declares the enumerations and flags of `verbs.h`.
#![allow(missing_docs, reason = "the names are the header's, and so is their documentation")]
#![allow(non_camel_case_types, reason = "the names are the header's")]

use bitflags::bitflags;

macro_rules! enumerations {
    ($($name:ident: $integer:ty { $($value:ident = $number:expr,)* })*) => {$(
        /// An enumeration of `verbs.h`; values that this crate does not know are kept unchanged.
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct $name(pub $integer);

        impl $name {
            $(pub const $value: Self = Self($number);)*
        }
    )*};
}

enumerations! {
    ibv_mtu: u32 { MTU_256 = 1, MTU_512 = 2, MTU_1024 = 3, MTU_2048 = 4, MTU_4096 = 5, }
    ibv_port_state: u32 {
        NOP = 0, DOWN = 1, INIT = 2, ARMED = 3, ACTIVE = 4, ACTIVE_DEFER = 5,
    }
    ibv_node_type: i32 {
        UNKNOWN = -1, CA = 1, SWITCH = 2, ROUTER = 3, RNIC = 4, USNIC = 5, USNIC_UDP = 6,
        UNSPECIFIED = 7,
    }
    ibv_transport_type: i32 {
        UNKNOWN = -1, IB = 0, IWARP = 1, USNIC = 2, USNIC_UDP = 3, UNSPECIFIED = 4,
    }
    ibv_qp_type: u32 { RC = 2, UC = 3, UD = 4, }
    ibv_qp_state: u32 {
        RESET = 0, INIT = 1, RTR = 2, RTS = 3, SQD = 4, SQE = 5, ERR = 6, UNKNOWN = 7,
    }
    ibv_mig_state: u32 { MIGRATED = 0, REARM = 1, ARMED = 2, }
    ibv_wr_opcode: u32 {
        RDMA_WRITE = 0, RDMA_WRITE_WITH_IMM = 1, SEND = 2, SEND_WITH_IMM = 3, RDMA_READ = 4,
        ATOMIC_CMP_AND_SWP = 5, ATOMIC_FETCH_AND_ADD = 6,
    }
    ibv_wc_opcode: u32 {
        SEND = 0, RDMA_WRITE = 1, RDMA_READ = 2, COMP_SWAP = 3, FETCH_ADD = 4, RECV = 128,
        RECV_RDMA_WITH_IMM = 129,
    }
    ibv_wc_status: u32 {
        SUCCESS = 0, LOC_LEN_ERR = 1, LOC_QP_OP_ERR = 2, LOC_EEC_OP_ERR = 3, LOC_PROT_ERR = 4,
        WR_FLUSH_ERR = 5, MW_BIND_ERR = 6, BAD_RESP_ERR = 7, LOC_ACCESS_ERR = 8, REM_INV_REQ_ERR = 9,
        REM_ACCESS_ERR = 10, REM_OP_ERR = 11, RETRY_EXC_ERR = 12, RNR_RETRY_EXC_ERR = 13,
        LOC_RDD_VIOL_ERR = 14, REM_INV_RD_REQ_ERR = 15, REM_ABORT_ERR = 16, INV_EECN_ERR = 17,
        INV_EEC_STATE_ERR = 18, FATAL_ERR = 19, RESP_TIMEOUT_ERR = 20, GENERAL_ERR = 21,
    }
    ibv_event_type: u32 {
        CQ_ERR = 0, QP_FATAL = 1, QP_REQ_ERR = 2, QP_ACCESS_ERR = 3, COMM_EST = 4, SQ_DRAINED = 5,
        PATH_MIG = 6, PATH_MIG_ERR = 7, DEVICE_FATAL = 8, PORT_ACTIVE = 9, PORT_ERR = 10,
        LID_CHANGE = 11, PKEY_CHANGE = 12, SM_CHANGE = 13, SRQ_ERR = 14, SRQ_LIMIT_REACHED = 15,
        QP_LAST_WQE_REACHED = 16, CLIENT_REREGISTER = 17, GID_CHANGE = 18, WQ_FATAL = 19,
    }
    ibv_atomic_cap: u32 { NONE = 0, HCA = 1, GLOB = 2, }
}

pub const IBV_LINK_LAYER_UNSPECIFIED: u8 = 0;
pub const IBV_LINK_LAYER_INFINIBAND: u8 = 1;
pub const IBV_LINK_LAYER_ETHERNET: u8 = 2;

pub const IBV_GID_TYPE_IB: u32 = 0;
pub const IBV_GID_TYPE_ROCE_V1: u32 = 1;
pub const IBV_GID_TYPE_ROCE_V2: u32 = 2;

bitflags! {
    /// The access permissions of registered memory (`enum ibv_access_flags`).
    #[repr(transparent)]
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct ibv_access_flags: u32 {
        const LOCAL_WRITE = 1;
        const REMOTE_WRITE = 1 << 1;
        const REMOTE_READ = 1 << 2;
        const REMOTE_ATOMIC = 1 << 3;
        const _ = !0;
    }

    /// The mask of queue pair attributes that `ibv_modify_qp` changes (`enum ibv_qp_attr_mask`).
    #[repr(transparent)]
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct ibv_qp_attr_mask: u32 {
        const STATE = 1;
        const ACCESS_FLAGS = 1 << 3;
        const PKEY_INDEX = 1 << 4;
        const PORT = 1 << 5;
        const AV = 1 << 7;
        const PATH_MTU = 1 << 8;
        const TIMEOUT = 1 << 9;
        const RETRY_CNT = 1 << 10;
        const RNR_RETRY = 1 << 11;
        const RQ_PSN = 1 << 12;
        const MAX_QP_RD_ATOMIC = 1 << 13;
        const MIN_RNR_TIMER = 1 << 15;
        const SQ_PSN = 1 << 16;
        const MAX_DEST_RD_ATOMIC = 1 << 17;
        const DEST_QPN = 1 << 20;
        const _ = !0;
    }

    /// The mask of shared receive queue attributes that `ibv_modify_srq` changes (`enum ibv_srq_attr_mask`).
    #[repr(transparent)]
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct ibv_srq_attr_mask: u32 {
        const LIMIT = 1 << 1;
        const _ = !0;
    }

    /// The options of a send request, such as a fence or inline data (`enum ibv_send_flags`).
    #[repr(transparent)]
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct ibv_send_flags: u32 {
        const FENCE = 1;
        const SIGNALED = 1 << 1;
        const SOLICITED = 1 << 2;
        const INLINE = 1 << 3;
        const _ = !0;
    }

    /// The optional contents of a work completion, such as an immediate value (`enum ibv_wc_flags`).
    #[repr(transparent)]
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct ibv_wc_flags: u32 {
        const WITH_IMM = 1 << 1;
        const _ = !0;
    }
}
