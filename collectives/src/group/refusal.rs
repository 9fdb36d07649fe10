//! Tells the other ranks of a group that this rank has refused a collective call, so that they do not wait for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use peerlane_hal::Deadline;

use super::Group;
use super::agreement::agree;
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

impl Group {
    /// Takes part in a collective call that this rank refuses, and returns the error. Collective.
    ///
    /// It is for callers that check arguments before they call the group, such as an interface for another language. The call takes
    /// the place of the collective call: the other ranks return an error at once that names this rank and has the text of `error`,
    /// whichever call it is. Nothing has changed then, and the group goes on.
    ///
    /// The other ranks' call must be one that exchanges messages, such as the preparation of an operation or a
    /// [window](Self::window). A start of a prepared operation exchanges none; see [`note_refusal`](Self::note_refusal).
    ///
    /// ```
    /// # use peerlane_collectives::bootstrap::{Bootstrap, in_process};
    /// # use peerlane_collectives::group::Group;
    /// # use peerlane_host as host;
    /// use peerlane_collectives::error::Error;
    /// use peerlane_hal::ErrorKind;
    ///
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// if group.rank().0 == 1 {
    ///     let text = "dtype is 99, expected 0 to 13";
    ///     let _ = group.refuse(Error::new(ErrorKind::InvalidArgument, text));
    /// } else {
    ///     let error = group.all_gather::<f32>(3).prepare().unwrap_err();
    ///     assert_eq!(
    ///         error.to_string(),
    ///         "all-gather 1: rank 1 failed (invalid argument): dtype is 99, expected 0 to 13"
    ///     );
    /// }
    /// group.barrier()?;
    /// # group.close()
    /// # }).unwrap();
    /// ```
    pub fn refuse(&mut self, error: Error) -> Error {
        // The caller learns why its call was refused, even if the others cannot be told: the next call says why.
        let deadline = Deadline::after(self.timeout());
        let _ = agree(&self.shared, "refusal", Err(error.clone()), deadline);
        self.note_refusal(&error);
        error
    }

    /// Notes that this rank has refused a collective call that exchanges no messages, such as a start.
    ///
    /// The other ranks wait for the start, up to its timeout. They then ask all ranks what they wait for, and the answer of this rank
    /// contains the text of `error`. The next call of this rank clears it.
    pub fn note_refusal(&self, error: &Error) {
        self.shared.refusal.note(error);
    }
}
