//! A rank on a GPU as its owner sees it: memory, streams and graphs by the crate that users have.

#![allow(dead_code, reason = "each test program uses a part")]

pub(crate) mod data;
pub(crate) mod gpu;
pub(crate) mod memory;
pub(crate) mod segments;
pub(crate) mod stage;
pub(crate) mod stream;
