//! Opens groups for tests.

pub(crate) mod group;
pub(crate) mod own_process;
pub(crate) mod ranks;
