//! Collects the requests of an engine that have ended.

use std::sync::{Mutex, PoisonError};

use crate::error::Status;
use crate::sys::{Completion, Ended};

/// The requests of one engine that have ended, which whoever drives the network adds.
#[derive(Debug, Default)]
pub(crate) struct Completions(Mutex<Vec<(u64, Outcome)>>);

/// How a request has ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    Done,
    Failed(Status),
    /// The peer has freed the memory.
    Freed,
}

impl Outcome {
    pub(crate) fn from_request(ended: Ended) -> Self {
        ended.map_or_else(Self::Failed, |()| Self::Done)
    }
}

impl Completions {
    pub(crate) fn push(&self, tag: u64, outcome: Outcome) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((tag, outcome));
    }

    /// Moves the ended requests into a list.
    pub(crate) fn drain_into(&self, list: &mut Vec<(u64, Outcome)>) {
        list.append(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Completion for Completions {
    fn complete(&self, tag: u64, ended: Ended) {
        self.push(tag, Outcome::from_request(ended));
    }
}
