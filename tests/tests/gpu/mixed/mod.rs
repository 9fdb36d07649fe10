//! Runs groups over two fabrics whose nodes hold different kinds of memory: of devices and of the
//! host.

#![allow(dead_code, reason = "each test program uses a part")]

pub(crate) mod access;
pub(crate) mod processes;
pub(crate) mod rank;
