//! Exports the C symbols of `libcuda.so.1` that Peerlane and its users' crates call, together with
//! [`calls`](crate::calls).
//!
//! Left out: other kernels than those of reductions, arrays, managed memory, pools beyond the default one, contexts other than
//! primary ones.

#![allow(non_snake_case, reason = "the vendor's names of the symbols")]

mod context;
mod device;
mod memory;

use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use crate::device::session::Session;
use crate::runtime::Api;
use crate::runtime::code::Outcome;

/// The CUDA driver API: calls use the context that is current on their thread.
#[derive(Debug)]
pub(crate) struct Cuda;

impl Api for Cuda {
    /// Blocking, without timing, for other processes.
    const EVENT_FLAGS: c_uint = 7;
    /// Portable, device-mapped, write-combined.
    const HOST_FLAGS: c_uint = 7;
    /// Portable, device-mapped, memory of a device, read-only.
    const REGISTER_FLAGS: c_uint = 15;
    const P2P_PERFORMANCE_RANK: c_int = 1;
    const BRANCHES_TAKE_CHANNELS: bool = true;

    fn visible() -> Outcome<&'static [u32]> {
        context::visible()
    }

    fn current() -> Outcome<Arc<Session>> {
        context::current()
    }

    fn ready() -> Outcome {
        context::current().map(|_| ())
    }

    fn attribute(physical: u32, attribute: c_int) -> Outcome<u64> {
        device::attribute(physical, attribute)
    }
}
