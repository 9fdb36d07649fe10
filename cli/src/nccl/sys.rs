//! Declares the part of NCCL's C interface that this program calls.
//!
//! The layout is that of NCCL 2.28. Newer versions accept it, because the struct contains its own
//! size and version.

use std::ffi::{c_char, c_int, c_uint, c_void};

use peerlane::DType;

use crate::library::functions;

/// A result code of NCCL, an integer because a newer library may have more codes.
pub(crate) type NcclResult = c_int;

/// The NCCL result code `ncclSuccess`.
pub(crate) const SUCCESS: NcclResult = 0;
/// The NCCL reduction `ncclSum`.
pub(crate) const SUM: c_int = 0;

/// The element types that NCCL has, with their numbers (`ncclDataType_t`).
const DATA_TYPES: [(DType, c_int); 10] = [
    (DType::I8, 0),
    (DType::U8, 1),
    (DType::I32, 2),
    (DType::U32, 3),
    (DType::I64, 4),
    (DType::U64, 5),
    (DType::F16, 6),
    (DType::F32, 7),
    (DType::F64, 8),
    (DType::Bf16, 9),
];

/// Returns the NCCL data type (`ncclDataType_t`) of elements, or `None` if NCCL has none.
pub(crate) fn data_type(dtype: DType) -> Option<c_int> {
    DATA_TYPES.into_iter().find(|(known, _)| *known == dtype).map(|(_, number)| number)
}

/// The NCCL window flag `NCCL_WIN_COLL_SYMMETRIC`.
pub(crate) const WINDOW_SYMMETRIC: c_int = 1;
/// The value of `NCCL_CTA_POLICY_DEFAULT`, the default policy for the use of thread blocks.
pub(crate) const POLICY_DEFAULT: c_int = 0;
/// The value of `NCCL_CTA_POLICY_ZERO`, which uses no thread blocks where copy engines can do the
/// work.
pub(crate) const POLICY_ZERO: c_int = 2;
/// The value of `NCCL_VERSION(2, 28, 0)`, the NCCL version whose struct layout this file declares.
pub(crate) const VERSION: c_int = 22800;

/// The value of `NCCL_CONFIG_UNDEF_INT`, which leaves a setting to NCCL.
const UNDEFINED: c_int = c_int::MIN;
/// The magic number that marks an initialized `ncclConfig_t`.
const MAGIC: c_uint = 0xcafe_beef;

/// The C structure `ncclUniqueId`, which identifies a communicator while its ranks connect.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId(pub(crate) [u8; 128]);

/// The opaque C structure `ncclComm`.
#[repr(C)]
pub(crate) struct Comm {
    _opaque: [u8; 0],
}

/// The opaque C structure `ncclWindow_vidmem`.
#[repr(C)]
pub(crate) struct Window {
    _opaque: [u8; 0],
}

/// The C structure `ncclConfig_v22800` with the settings of a communicator.
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
    channels_per_net_peer: c_int,
    nvlink_centric_sched: c_int,
}

impl Config {
    /// Returns settings that select only the policy for the use of thread blocks.
    pub(crate) fn with_policy(cta_policy: c_int) -> Self {
        Self {
            // A newer library recognizes the layout by these fields.
            size: size_of::<Self>(),
            magic: MAGIC,
            version: VERSION.unsigned_abs(),

            cta_policy,

            // NCCL decides the rest, as for a program that sets nothing.
            blocking: UNDEFINED,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
            comm_name: std::ptr::null(),
            collnet_enable: UNDEFINED,
            shrink_share: UNDEFINED,
            nvls_ctas: UNDEFINED,
            channels_per_net_peer: UNDEFINED,
            nvlink_centric_sched: UNDEFINED,
        }
    }
}

// The size that NCCL 2.28 checks; the pointers determine the padding.
#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<Config>() == 80 && align_of::<Config>() == 8);

functions! {
    struct Functions {
        version = "ncclGetVersion" (*mut c_int) -> NcclResult;
        unique_id = "ncclGetUniqueId" (*mut UniqueId) -> NcclResult;
        join = "ncclCommInitRankConfig"
            (*mut *mut Comm, c_int, UniqueId, c_int, *mut Config) -> NcclResult;
        destroy = "ncclCommDestroy" (*mut Comm) -> NcclResult;
        all_gather = "ncclAllGather"
            (*const c_void, *mut c_void, usize, c_int, *mut Comm, *mut c_void) -> NcclResult;
        all_reduce = "ncclAllReduce"
            (*const c_void, *mut c_void, usize, c_int, c_int, *mut Comm, *mut c_void) -> NcclResult;
        reduce_scatter = "ncclReduceScatter"
            (*const c_void, *mut c_void, usize, c_int, c_int, *mut Comm, *mut c_void) -> NcclResult;
        reduce = "ncclReduce"
            (*const c_void, *mut c_void, usize, c_int, c_int, c_int, *mut Comm, *mut c_void) -> NcclResult;
        broadcast = "ncclBroadcast"
            (*const c_void, *mut c_void, usize, c_int, c_int, *mut Comm, *mut c_void) -> NcclResult;
        all_to_all = "ncclAlltoAll"
            (*const c_void, *mut c_void, usize, c_int, *mut Comm, *mut c_void) -> NcclResult;
        gather = "ncclGather"
            (*const c_void, *mut c_void, usize, c_int, c_int, *mut Comm, *mut c_void) -> NcclResult;
        scatter = "ncclScatter"
            (*const c_void, *mut c_void, usize, c_int, c_int, *mut Comm, *mut c_void) -> NcclResult;
        allocate = "ncclMemAlloc" (*mut *mut c_void, usize) -> NcclResult;
        free = "ncclMemFree" (*mut c_void) -> NcclResult;
        register = "ncclCommWindowRegister"
            (*mut Comm, *mut c_void, usize, *mut *mut Window, c_int) -> NcclResult;
        deregister = "ncclCommWindowDeregister" (*mut Comm, *mut Window) -> NcclResult;
        error_text = "ncclGetErrorString" (NcclResult) -> *const c_char;
        last_error = "ncclGetLastError" (*mut Comm) -> *const c_char;
    }
}
