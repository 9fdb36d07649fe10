//! A range of addresses with physical memory behind it.

use std::sync::{Arc, Mutex, PoisonError};

use super::device::RegionDevice;
use super::physical::Physical;
use crate::device::DevicePtr;

/// Segments, mapped one behind the other; unmapped when dropped.
#[derive(Debug)]
pub(super) struct Mapped<D: RegionDevice> {
    context: Arc<D>,
    address: DevicePtr,
    reserved_bytes: u64,
    /// The lengths of what is mapped.
    segments: Vec<u64>,
}

impl<D: RegionDevice> Mapped<D> {
    /// Maps the segments in order, for the context's device to read and write. The mapping holds
    /// the memory; the references may go.
    pub(super) fn map(context: &Arc<D>, parts: &[Physical<D>]) -> Result<Self, D::Error> {
        let reserved_bytes = parts.iter().map(Physical::bytes).sum();
        let address = context.reserve(reserved_bytes)?;
        let segments = Vec::with_capacity(parts.len());
        // From here on, dropping it undoes what is done.
        let mut mapped = Self { context: Arc::clone(context), address, reserved_bytes, segments };
        let mut at = address;
        for part in parts {
            // SAFETY: the sum of all lengths was reserved, and nothing is mapped at `at` yet.
            unsafe { context.map(at, part.bytes(), part.raw()) }?;
            mapped.segments.push(part.bytes());
            at += part.bytes();
        }
        allow(&**context, address, reserved_bytes)?;
        Ok(mapped)
    }

    pub(super) fn address(&self) -> DevicePtr {
        self.address
    }

    pub(super) fn bytes(&self) -> u64 {
        self.reserved_bytes
    }
}

impl<D: RegionDevice> Drop for Mapped<D> {
    fn drop(&mut self) {
        // Failures mean that the device is gone, and its memory with it.
        let Ok(_current) = self.context.enter_relaxed() else { return };
        let mut at = self.address;
        for bytes in &self.segments {
            // SAFETY: exactly one mapping of `map`, which nobody uses any more: the region is
            // dropped, and the contract of `submit` keeps it until its tickets are complete.
            unsafe { self.context.unmap(at, *bytes) };
            at += bytes;
        }
        // SAFETY: the range of `map`, in which nothing is mapped now.
        unsafe { self.context.unreserve(self.address, self.reserved_bytes) };
    }
}

/// One change of access at a time: two threads that let one device reach the same mapping at once are
/// told CUDA_ERROR_ALREADY_MAPPED (seen with driver 580).
static CHANGING: Mutex<()> = Mutex::new(());

/// Lets the device of `reader` read and write whole mappings, of a range of any context.
pub(super) fn allow<D: RegionDevice>(
    reader: &D,
    address: DevicePtr,
    bytes: u64,
) -> Result<(), D::Error> {
    let _alone = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: whole mappings, as the callers see to.
    unsafe { reader.allow(address, bytes) }
}
