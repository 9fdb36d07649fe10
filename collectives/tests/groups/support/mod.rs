//! Opens groups for tests.

pub(crate) mod group;
pub(crate) mod own_process;
pub(crate) mod rank_processes;
pub(crate) mod ranks;
