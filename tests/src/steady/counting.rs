//! Counts allocations.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

static ALLOCATED: AtomicU64 = AtomicU64::new(0);
static FREED: AtomicU64 = AtomicU64::new(0);

/// Counts the calls of the system's allocator, in a program whose allocator it is.
#[derive(Debug)]
pub struct Counting;

// SAFETY: every call is passed on as it came; counting touches no memory that is handed out.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        FREED.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise; `place` came from `System`.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        ALLOCATED.fetch_add(1, Ordering::Relaxed);
        FREED.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise; `place` came from `System`.
        unsafe { System.realloc(place, layout, bytes) }
    }
}

/// Calls of the allocator, by all threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    allocated: u64,
    freed: u64,
}

impl Counts {
    /// Returns the calls until now.
    ///
    /// # Panics
    /// If the allocator of the program is not [`Counting`].
    pub fn now() -> Self {
        let allocated = ALLOCATED.load(Ordering::Relaxed);
        let freed = FREED.load(Ordering::Relaxed);

        // Every program has allocated before its main function.
        assert!(allocated > 0, "the allocator of this program does not count");
        Self { allocated, freed }
    }

    /// Returns the calls after an earlier count.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self { allocated: self.allocated - before.allocated, freed: self.freed - before.freed }
    }
}
