//! A rank on a GPU: what it contributes, and its group. What differs between vendors is in a module
//! `vendor` of the test program.

#![allow(dead_code, reason = "each test program uses a part")]

pub(crate) mod data;
pub(crate) mod machine;
mod pinned;
pub(crate) mod stage;
mod waiting;
