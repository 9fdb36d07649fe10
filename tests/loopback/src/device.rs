//! Allocates and accesses memory of the device. It is the only file that touches raw memory.

use std::sync::atomic::{AtomicU64, Ordering};

/// An allocation of the device, in words so that flags are aligned.
#[derive(Debug)]
pub(crate) struct Allocation(Box<[AtomicU64]>);

impl Allocation {
    pub(crate) fn zeroed(bytes: u64) -> Option<Self> {
        let words = usize::try_from(bytes.div_ceil(8)).ok()?;
        let mut memory = Vec::new();
        memory.try_reserve_exact(words).ok()?;
        memory.extend((0..words).map(|_| AtomicU64::new(0)));
        Some(Self(memory.into_boxed_slice()))
    }

    pub(crate) fn address(&self) -> u64 {
        self.0.as_ptr().expose_provenance() as u64
    }
}

fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// Copies bytes between two addresses of the device.
///
/// # Safety
/// Both ranges are in registered regions that live, and do not overlap.
pub(crate) unsafe fn copy(dst: u64, src: u64, bytes: u64) {
    // SAFETY: the caller's.
    unsafe { pointer(src).copy_to_nonoverlapping(pointer(dst), bytes as usize) }
}

/// Stores a flag, after everything that this thread has copied.
///
/// # Safety
/// The address is that of a flag in a registered region that lives.
pub(crate) unsafe fn store(flag: u64, value: u64) {
    // SAFETY: the caller's; flags are aligned words that engines access as atomics only.
    unsafe { AtomicU64::from_ptr(pointer(flag).cast()) }.store(value, Ordering::Release);
}

/// Loads a flag, before everything that this thread copies next.
///
/// # Safety
/// As [`store`].
pub(crate) unsafe fn load(flag: u64) -> u64 {
    // SAFETY: the caller's.
    unsafe { AtomicU64::from_ptr(pointer(flag).cast()) }.load(Ordering::Acquire)
}
