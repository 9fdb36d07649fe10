//! The names that CUDA's driver has for what goes wrong.

use std::path::PathBuf;

/// A call that fails after so many that do not, and how errors name it.
pub(crate) type Failing = (&'static str, u32, &'static str);

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

/// Settings of the simulated driver under which gathers go other ways.
pub(crate) const SETTINGS: &[(&str, &str)] = &[
    ("PEER_WRITES", "refuse"),
    ("PEER_WRITES", "drop"),
    ("VMM", "off"),
    ("POSIX_FD", "off"),
    ("COPY_ENGINES", "1"),
    ("COPY_ENGINES", "2"),
    ("QUEUE_LENGTH", "900"),
    ("JITTER_US", "500"),
];

/// What captures do with memory operations, and why they are refused then.
pub(crate) const NO_CAPTURES: &[(&str, &str)] = &[
    ("refuse", "cuStreamBatchMemOp"),
    ("drop", "does not do what was recorded"),
    ("now", "does not do what was recorded"),
];

/// A driver that lacks these symbols.
pub(crate) fn folder_without(symbols: &[&'static str]) -> PathBuf {
    peerlane_simulated_driver::without_symbols(symbols)
}
