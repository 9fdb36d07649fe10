//! Describes the faults of CUDA to the tests of faults.

pub(crate) mod driver;
pub(crate) mod opening;
