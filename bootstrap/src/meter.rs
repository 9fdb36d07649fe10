//! Counts the bytes that the hub keeps because of each rank.
//!
//! Whatever is kept holds a [`Charge`] for as long as it lives: contributions to exchanges that are not complete, messages that
//! wait until all have read them, and groups. So one number limits all that a rank can make the hub keep.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of bytes that are kept because of one rank.
#[derive(Clone, Debug, Default)]
pub(super) struct Meter(Arc<AtomicUsize>);

/// A number of bytes that count until this is dropped.
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
        self.0.fetch_add(bytes, Ordering::Relaxed);
        Charge { meter: self.clone(), bytes }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.meter.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
