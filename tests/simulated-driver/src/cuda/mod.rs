//! The CUDA face: the C symbols of `libcuda.so.1` that Peerlane and its users' crates call.
//!
//! Left out: kernels, arrays, managed memory, pools beyond the default one, contexts other than
//! primary ones.

#![allow(non_snake_case, reason = "the symbols' own names")]

mod batch_copy;
mod context;
mod copy;
mod device;
mod event;
mod graph;
mod init;
mod ipc;
mod memory;
mod pointer;
mod stream;
mod types;
mod vmm;
mod words;

use std::sync::Arc;

use crate::device::session::Session;
use crate::runtime::Face;
use crate::runtime::code::Outcome;

/// Calls are about the context that is current on their thread.
#[derive(Debug)]
pub(crate) struct Cuda;

impl Face for Cuda {
    fn visible() -> Outcome<&'static [u32]> {
        init::visible()
    }

    fn current() -> Outcome<Arc<Session>> {
        context::current()
    }

    fn ready() -> Outcome {
        context::current().map(|_| ())
    }
}
