//! The allocator of the program: one allocation of the driver, divided from front to back.

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DriverError, result};
use peerlane::{Buffer, Error, Group};

pub struct Arena {
    stream: Arc<CudaStream>,
    base: u64,
    len: usize,
    used: usize,
}

/// A part of the arena, as a slice of cudarc.
pub struct Part {
    pub slice: ManuallyDrop<CudaSlice<f32>>,
    /// The first element in the arena.
    pub begin: usize,
}

impl Arena {
    pub fn new(stream: &Arc<CudaStream>, len: usize) -> Result<Self, DriverError> {
        stream.context().bind_to_thread()?;
        // Peers can access memory of `cuMemAlloc`, but not that of a stream-ordered pool.
        // SAFETY: the context is current on this thread.
        let base = unsafe { result::malloc_sync(len * size_of::<f32>()) }?;
        Ok(Self { stream: Arc::clone(stream), base, len, used: 0 })
    }

    pub fn take(&mut self, len: usize) -> Part {
        let begin = self.used;
        // Parts begin at multiples of 256 bytes, as those of the driver do.
        self.used += len.next_multiple_of(64);
        assert!(self.used <= self.len, "the arena is large enough");
        self.part(begin..begin + len)
    }

    /// Returns a slice over elements of the arena.
    pub fn part(&self, range: Range<usize>) -> Part {
        let address = self.base + (range.start * size_of::<f32>()) as u64;
        // SAFETY: the elements are in the allocation, and the slice is never dropped.
        let slice = unsafe { self.stream.upgrade_device_ptr(address, range.len()) };
        Part { slice: ManuallyDrop::new(slice), begin: range.start }
    }

    /// Registers the whole arena with a group.
    ///
    /// # Safety
    /// The arena must outlive the window over the buffer on every rank.
    pub unsafe fn register(&self, group: &Group) -> Result<Buffer<f32>, Error> {
        let base = NonNull::new(self.base as *mut u8).expect("the driver allocates nothing at 0");
        // SAFETY: the arena is that long, and the caller keeps it.
        unsafe { group.register_at(base, self.len) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: `new` has allocated it, and the stream is idle. What cannot be freed is left to the driver.
        let _ = self.stream.synchronize().and_then(|()| unsafe { result::free_sync(self.base) });
    }
}
