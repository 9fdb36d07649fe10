//! Exports the C symbols of `libamdhip64.so` that Peerlane calls, from ROCm 5.7 to 7.2, together with
//! [`calls`](crate::calls).
//!
//! HIP differs from the CUDA driver in these rules:
//!
//! | rule | module |
//! | --- | --- |
//! | a thread has a current device, not a context; its session begins with the first use | [`init`] |
//! | freeing memory waits for every stream of its device | [`memory`] |
//! | an address inside an allocation is shared with its offset | [`memory`] |
//! | a wait compares the bits of a mask | [`stream`] |
//! | the kind of a copy between devices selects compute units or engines | [`stream`] |
//!
//! Left out: kernels, arrays, managed memory, pools, contexts.

#![allow(non_snake_case, non_camel_case_types, reason = "the vendor's names of symbols and types")]

mod device;
mod init;
mod memory;
mod stream;

use std::cell::Cell;
use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use crate::device::session::Session;
use crate::runtime::code::{NOT_READY, Outcome, Status};
use crate::runtime::{Api, call};

/// The HIP API: calls use the current device of their thread.
#[derive(Debug)]
pub(crate) struct Hip;

impl Hip {
    /// Returns the device of an ordinal if the runtime was started; does not start it.
    pub(crate) fn started(ordinal: c_int) -> Option<u32> {
        init::started()?.get(usize::try_from(ordinal).ok()?).copied()
    }
}

impl Api for Hip {
    /// Blocking, without timing, for other processes; without a fence of the system, with one of the
    /// device, with one of the system.
    const EVENT_FLAGS: c_uint = 0xe000_0007;
    /// Portable, device-mapped, write-combined; uncached, of the NUMA node that the user chose,
    /// coherent, not coherent.
    const HOST_FLAGS: c_uint = 0xf000_0007;
    /// Portable, device-mapped, memory of a device, read-only; uncached.
    const REGISTER_FLAGS: c_uint = 0x8000_000f;
    const P2P_PERFORMANCE_RANK: c_int = 0;
    const BRANCHES_TAKE_CHANNELS: bool = false;

    fn visible() -> Outcome<&'static [u32]> {
        init::visible()
    }

    fn current() -> Outcome<Arc<Session>> {
        init::current()
    }

    fn ready() -> Outcome {
        init::visible().map(|_| ())
    }

    fn attribute(physical: u32, attribute: c_int) -> Outcome<u64> {
        device::attribute(physical, attribute)
    }

    /// Also keeps an error until the thread asks for its last one.
    fn enter(name: &'static str, body: impl FnOnce() -> Outcome) -> Status {
        let result = call::enter(name, body);
        if result != 0 && result != NOT_READY.0 {
            LAST_ERROR.set(result);
        }
        result
    }
}

thread_local! {
    static LAST_ERROR: Cell<Status> = const { Cell::new(0) };
}

#[unsafe(no_mangle)]
extern "C" fn hipGetLastError() -> Status {
    LAST_ERROR.take()
}

#[unsafe(no_mangle)]
extern "C" fn hipPeekAtLastError() -> Status {
    LAST_ERROR.get()
}
