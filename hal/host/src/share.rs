//! Divides the time of a thread between the engines that it polls.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use peerlane_hal::Priority;

/// Counts the engines of a rank that have ops in their queues, by priority.
pub(super) type QueuedEngines = [AtomicUsize; Priority::ALL.len()];

/// How much an engine copies in one poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Share {
    /// No engine is kept waiting.
    Whole,
    /// Engines of the same priority have ops.
    Slice,
    /// An engine of a higher priority has ops.
    Part,
}

/// Counts an engine among those of its rank that have ops in their queues.
#[derive(Debug)]
pub(super) struct Queued {
    engines: Arc<QueuedEngines>,
    priority: Priority,
    is_counted: bool,
}

impl Queued {
    pub(super) fn new(engines: Arc<QueuedEngines>, priority: Priority) -> Self {
        Self { engines, priority, is_counted: false }
    }

    /// Notes whether the engine has ops in its queue.
    pub(super) fn set(&mut self, is_queued: bool) {
        if is_queued == self.is_counted {
            return;
        }

        self.is_counted = is_queued;
        let engines = &self.engines[self.priority as usize];
        // The count only says how soon a poll returns, so it orders nothing.
        match is_queued {
            true => engines.fetch_add(1, Ordering::Relaxed),
            false => engines.fetch_sub(1, Ordering::Relaxed),
        };
    }

    /// Returns how much the engine copies in its next poll.
    pub(super) fn share(&self) -> Share {
        let queued = |engines: &AtomicUsize| engines.load(Ordering::Relaxed);
        let own = self.priority as usize;

        if self.engines[own + 1..].iter().any(|engines| queued(engines) > 0) {
            Share::Part
        } else if queued(&self.engines[own]) > usize::from(self.is_counted) {
            Share::Slice
        } else {
            Share::Whole
        }
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.set(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_shares_with_its_equals_and_yields_to_its_betters() {
        let engines = Arc::<QueuedEngines>::default();
        let [mut low, mut normal, mut other, mut high] =
            [Priority::Low, Priority::Normal, Priority::Normal, Priority::High]
                .map(|priority| Queued::new(Arc::clone(&engines), priority));
        low.set(true);
        normal.set(true);
        assert_eq!([low.share(), normal.share()], [Share::Part, Share::Whole]);

        other.set(true);
        assert_eq!([normal.share(), other.share()], [Share::Slice, Share::Slice]);

        high.set(true);
        let shares = [&low, &normal, &high].map(Queued::share);
        assert_eq!(shares, [Share::Part, Share::Part, Share::Whole]);

        high.set(false);
        drop((normal, other));
        assert_eq!(low.share(), Share::Whole);
    }
}
