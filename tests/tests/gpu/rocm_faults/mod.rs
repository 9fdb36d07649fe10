//! Describes the faults of ROCm to the tests of faults.

pub(crate) mod driver;
pub(crate) mod opening;
