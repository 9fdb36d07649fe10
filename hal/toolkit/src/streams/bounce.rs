//! Puts from host memory to host memory, through the device.
//!
//! Where two devices do not reach each other, regions are pinned host memory. A copy from host memory
//! to host memory holds the caller until it is done, whichever call asks for it ("API synchronization
//! behavior" in NVIDIA's reference of the runtime), and behind a queued wait that may be never. So such
//! a put is two copies, each of them asynchronous: to a buffer on the device and from there.

use std::sync::Arc;

use crate::device::{DevicePtr, MemoryCalls};
use crate::retire;

/// The buffer of one track; the order of the track's stream keeps its pieces apart.
pub(super) const BUFFER_BYTES: u64 = 8 << 20;

/// A buffer for each track.
#[derive(Debug)]
pub(super) struct Bounce {
    base: DevicePtr,
    tracks: usize,
}

impl Bounce {
    /// The context is current.
    pub(super) fn new<D: MemoryCalls>(context: &D, tracks: usize) -> Result<Self, D::Error> {
        Ok(Self { base: context.allocate(tracks * BUFFER_BYTES as usize)?, tracks })
    }

    pub(super) fn buffer(&self, track: usize) -> DevicePtr {
        debug_assert!(track < self.tracks, "every track has a buffer");
        self.base + track as u64 * BUFFER_BYTES
    }

    /// Nothing uses it any more.
    pub(super) fn free<D: MemoryCalls>(self, context: &Arc<D>) {
        let base = self.base;
        // SAFETY: allocated by `new`, freed once, and idle, as the caller says.
        retire::free(context, move |context| unsafe { context.free(base) });
    }
}
