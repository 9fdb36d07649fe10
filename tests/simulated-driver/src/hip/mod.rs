//! The HIP face: the C symbols of `libamdhip64.so` that Peerlane calls, from ROCm 5.7 to 7.2.
//!
//! What HIP does other than the CUDA driver:
//!
//! | rule | here |
//! | --- | --- |
//! | a thread has a current device, not a context; its session begins with the first use | [`init`] |
//! | giving memory back waits for every stream of its device | [`memory`] |
//! | an address inside of an allocation travels with its offset | [`ipc`] |
//! | a wait looks at the bits of a mask | [`words`] |
//! | copies between devices choose between compute units and engines by their kind | [`copy`] |
//!
//! Left out: kernels, arrays, managed memory, pools, contexts.

#![allow(non_snake_case, non_camel_case_types, reason = "the symbols' and types' own names")]

mod call;
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

use std::ffi::c_int;
use std::sync::Arc;

use crate::device::session::Session;
use crate::runtime::Face;
use crate::runtime::code::Outcome;

/// Calls are about the current device of their thread.
#[derive(Debug)]
pub(crate) struct Hip;

impl Hip {
    /// The device behind an ordinal, if the runtime was started; starts nothing.
    pub(crate) fn started(ordinal: c_int) -> Option<u32> {
        init::started()?.get(usize::try_from(ordinal).ok()?).copied()
    }
}

impl Face for Hip {
    fn visible() -> Outcome<&'static [u32]> {
        init::visible()
    }

    fn current() -> Outcome<Arc<Session>> {
        init::current()
    }

    fn ready() -> Outcome {
        init::visible().map(|_| ())
    }
}
