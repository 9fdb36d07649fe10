//! The CUDA face: the C symbols of `libcuda.so.1` that Peerlane and its users' crates call.
//!
//! | the vendor's word | the device's |
//! | --- | --- |
//! | primary context | session |
//! | stream | queue |
//! | memory operation | word |
//! | legacy IPC handle, fabric handle | name of shared memory |
//! | graph, executable graph | nodes, program |
//!
//! Left out: kernels, arrays, managed memory, pools beyond the default one, contexts other than
//! primary ones.

#![allow(non_snake_case, reason = "the symbols' own names")]

mod batch_copy;
mod blocks;
mod call;
mod code;
mod context;
mod control;
mod copy;
mod device;
mod event;
mod graph;
mod handles;
mod init;
mod ipc;
mod memory;
mod pointer;
mod stream;
mod types;
mod vmm;
mod words;
