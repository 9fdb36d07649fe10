//! Starts ranks for tests, and replaces some by raw connections.

pub(crate) mod rank_processes;
pub(crate) mod raw;
