//! Runs a rank on a GPU: its data and its group.
//!
//! The test program's module `vendor` holds what differs between vendors.

#![allow(dead_code, reason = "each test program uses a part")]

pub(crate) mod data;
pub(crate) mod machine;
mod pinned;
pub(crate) mod test_rank;
mod waiting;
