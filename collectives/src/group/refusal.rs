//! Tells the other ranks of a group that this rank has refused a collective call, so that they do not wait for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::Error;

/// The text of the last collective call of this rank, if it was refused.
#[derive(Debug, Default)]
pub(super) struct Refusal {
    /// Whether there is a text, so that starts do not lock.
    is_noted: AtomicBool,
    text: Mutex<Option<String>>,
}

impl Refusal {
    pub(super) fn note(&self, error: &Error) {
        self.set(Some(error.to_string()));
    }

    /// Forgets the text, because this rank makes another call.
    pub(super) fn clear(&self) {
        if self.is_noted.load(Ordering::Relaxed) {
            self.set(None);
        }
    }

    fn set(&self, text: Option<String>) {
        self.is_noted.store(text.is_some(), Ordering::Relaxed);
        *self.text.lock().unwrap_or_else(PoisonError::into_inner) = text;
    }

    /// Returns the text for ranks that ask what this rank waits for.
    pub(super) fn text(&self) -> Option<String> {
        self.text.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
