//! Exports the C symbols of `libhsa-runtime64.so.1` that Peerlane calls, from ROCm 5.7 to 7.2. Devices
//! and address space are those of [`hip`](crate::hip).
//!
//! | HSA's term | term of [`device`](crate::device) |
//! | --- | --- |
//! | GPU agent | device, with a session |
//! | CPU agent | node of processors |
//! | memory pool | memory of a device or of the host, with a note of its grain |
//! | signal | signal |
//! | SDMA engine | numbered engine |
//!
//! Left out: queues of packets, code objects, images, virtual memory management, counters.

#![allow(non_camel_case_types, reason = "the types' own names")]

mod agent;
mod call;
mod copy;
mod dmabuf;
mod info;
mod init;
mod ipc;
mod memory;
mod pointer;
mod pool;
mod signal;
mod status;
mod types;
