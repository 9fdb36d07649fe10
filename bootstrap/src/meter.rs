//! Counts the bytes of memory that each rank makes the hub use.
//!
//! Everything that is kept holds a [`Charge`] for as long as it lives: contributions to exchanges
//! that are not complete, messages that not all ranks have read, and groups. So one number limits
//! what a rank can make the hub keep.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts the bytes of memory that are charged to one rank, such as those of its contributions.
#[derive(Clone, Debug, Default)]
pub(super) struct Meter(Arc<AtomicUsize>);

/// Keeps a number of bytes counted in a [`Meter`] until the charge is dropped.
#[derive(Debug)]
pub(super) struct Charge {
    meter: Meter,
    bytes: usize,
}

impl Meter {
    pub(super) fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn charge(&self, bytes: usize) -> Charge {
        // Relaxed suffices, because no other memory is read according to the number.
        self.0.fetch_add(bytes, Ordering::Relaxed);
        Charge { meter: self.clone(), bytes }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.meter.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
