//! Puts from host memory to host memory, through the device.
//!
//! Where two devices do not reach each other, regions are pinned host memory. A copy from host memory
//! to host memory holds the caller until it is done, whichever call asks for it ("API synchronization
//! behavior" in NVIDIA's reference of the runtime), and behind a queued wait that may be never. So such
//! a put is two copies, each of them asynchronous: to a buffer on the device and from there.

use super::route::TRACKS_MAX;
use crate::device::Context;
use crate::error::Error;
use crate::sys::CUdeviceptr;

/// The buffer of one track; the order of the track's stream keeps its pieces apart.
pub(super) const BUFFER_BYTES: u64 = 8 << 20;

/// A buffer for each track.
#[derive(Debug)]
pub(super) struct Bounce {
    base: CUdeviceptr,
}

impl Bounce {
    /// The context is current.
    pub(super) fn new(context: &Context) -> Result<Self, Error> {
        let mut base = 0;
        let bytes = TRACKS_MAX * BUFFER_BYTES as usize;
        // SAFETY: the result is stored in a local.
        let code = unsafe { (context.driver.mem_alloc)(&raw mut base, bytes) };
        context.check("cuMemAlloc", code)?;
        Ok(Self { base })
    }

    pub(super) fn buffer(&self, track: usize) -> CUdeviceptr {
        debug_assert!(track < TRACKS_MAX, "every track has a buffer");
        self.base + track as u64 * BUFFER_BYTES
    }

    /// Nothing uses it any more; the context is current.
    pub(super) fn free(self, context: &Context) {
        // SAFETY: allocated by `new`, and idle, as the caller says.
        let _ = unsafe { (context.driver.mem_free)(self.base) };
    }
}
