//! Implements the doorbell word of a rank, with which a rank that sets a flag wakes the rank that waits for it.
//!
//! The rank announces in the word that it is about to sleep. A writer of its flags takes back the announcement and wakes it.

use crate::sync::{AtomicU32, Ordering, fence};

/// The bit of the word that announces that the rank is about to sleep. The bits above it count wake-ups.
const PARKING: u32 = 1;

pub(crate) fn is_announced(word: &AtomicU32) -> bool {
    word.load(Ordering::Relaxed) & PARKING != 0
}

/// Announces a sleep, before the last check of the flags. Returns the value of the word that the rank sleeps on.
pub(crate) fn announce(word: &AtomicU32) -> u32 {
    let announced = word.fetch_or(PARKING, Ordering::SeqCst) | PARKING;
    fence(Ordering::SeqCst);
    announced
}

/// Orders the stores of flags before the [checks](take_announcement) for ranks that sleep.
pub(crate) fn after_signals() {
    fence(Ordering::SeqCst);
}

/// Takes back an announced sleep, after the fence behind the stores of the flags. Returns whether the rank must be woken.
pub(crate) fn take_announcement(word: &AtomicU32) -> bool {
    let seen = word.load(Ordering::Relaxed);
    // Adding 1 to the odd word clears the bit and counts. A writer that loses this race need not wake.
    let next = seen.wrapping_add(1);
    seen & PARKING != 0
        && word.compare_exchange(seen, next, Ordering::SeqCst, Ordering::Relaxed).is_ok()
}
