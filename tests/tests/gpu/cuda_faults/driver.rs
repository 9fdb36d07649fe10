//! Names the faults in the terms of the CUDA driver.

use std::path::PathBuf;

use crate::faults::Failing;

/// Calls of a start that fail.
pub(crate) const FAILING: &[Failing] = &[
    ("cuMemcpyAsync", 0, "cuMemcpyAsync"),
    ("cuMemcpyAsync", 4, "cuMemcpyAsync"),
    ("cuStreamBatchMemOp_v2", 0, "cuStreamBatchMemOp"),
    ("cuStreamBatchMemOp_v2", 3, "cuStreamBatchMemOp"),
    ("cuEventRecord", 1, "cuEventRecord"),
    ("cuMemcpyBatchAsync_v2", 1, "cuMemcpyBatchAsync_v2"),
];

/// How errors name a code that the driver does not know.
pub(crate) const UNKNOWN: &str = "9999";

/// One that fails while a start is recorded.
pub(crate) const RECORDED: Failing = ("cuMemcpyAsync", 1, "cuMemcpyAsync");

/// How a device is lost, and what errors say of it.
pub(crate) const LOST: &[(&str, &str, &str)] = &[
    ("illegal_address", "break:700", "CUDA_ERROR_ILLEGAL_ADDRESS (700)"),
    ("nvlink_error", "break:220", "(220)"),
    ("context_destroyed", "destroy", "(709)"),
];

/// What hides devices from a process.
pub(crate) const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// What older drivers lack.
pub(crate) const WITHOUT: &[(&str, &[&str])] = &[
    ("memory_with_descriptors", &["cuMemCreate"]),
    ("batched_words", &["cuStreamBatchMemOp_v2"]),
    ("handles_of_segments", &["cuMemRetainAllocationHandle"]),
];

/// Settings of this vendor under which gathers go other ways.
pub(crate) const SETTINGS: &[(&str, &str)] = &[];

/// How errors name the call that a capture refuses.
pub(crate) const REFUSED: &str = "cuStreamBatchMemOp";

/// A driver that lacks these symbols.
pub(crate) fn folder_without(symbols: &[&'static str]) -> PathBuf {
    peerlane_simulated_driver::without_symbols(symbols)
}

/// Numbers of hardware queues with which peers are lost, too.
pub(crate) const MAX_CONNECTIONS: &[u32] = &[1, 2];
