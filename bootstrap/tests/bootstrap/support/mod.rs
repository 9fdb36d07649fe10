//! Replaces ranks by raw connections.

pub(crate) mod raw;
