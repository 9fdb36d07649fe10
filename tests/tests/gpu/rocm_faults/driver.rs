//! Names the faults in the terms of HIP.

use std::path::PathBuf;

use peerlane_simulated_driver::Rocm;

use crate::faults::Failing;

/// Calls of a start that fail. The first copy is the test's own, to the input.
pub(crate) const FAILING: &[Failing] = &[
    ("hipMemcpyAsync", 1, "hipMemcpyAsync"),
    ("hipMemcpyAsync", 3, "hipMemcpyAsync"),
    ("hipStreamBatchMemOp", 0, "hipStreamBatchMemOp"),
    ("hipStreamBatchMemOp", 3, "hipStreamBatchMemOp"),
    ("hipEventRecord", 1, "hipEventRecord"),
];

/// How errors name a code that the runtime does not know: with its release and its file.
pub(crate) const UNKNOWN: &str = "unknown result code 9999 of HIP 7.2.43482 (/";

/// One that fails while a start is recorded.
pub(crate) const RECORDED: Failing = ("hipMemcpyAsync", 1, "hipMemcpyAsync");

/// How a device is lost, and what errors say of it.
pub(crate) const LOST: &[(&str, &str, &str)] = &[
    ("illegal_address", "break:700", "hipErrorIllegalAddress (700)"),
    ("launch_failure", "break:719", "hipErrorLaunchFailure (719)"),
    ("context_destroyed", "destroy", "(709)"),
];

/// What hides devices from a process.
pub(crate) const VISIBLE: &str = "HIP_VISIBLE_DEVICES";

/// What older releases lack.
pub(crate) const WITHOUT: &[(&str, &[&str])] = &[
    ("batched_words", &["hipStreamBatchMemOp"]),
    ("named_engines", &["hsa_amd_memory_async_copy_on_engine"]),
];

/// Settings of this vendor under which gathers go other ways.
pub(crate) const SETTINGS: &[(&str, &str)] = &[("NO_CU", "drop"), ("BATCH_ORDER", "parallel")];

/// How errors name the call that a capture refuses.
pub(crate) const REFUSED: &str = "hipStreamBatchMemOp";

/// An installation that lacks these symbols.
pub(crate) fn folder_without(symbols: &[&'static str]) -> PathBuf {
    Rocm::release("7.2").without(symbols).folder()
}

/// HIP has no second context. Its streams of the highest priority have hardware queues of their own.
pub(crate) const MAX_CONNECTIONS: &[u32] = &[];
