//! Finds ranks that make collective calls in different orders, long before the timeout of a call
//! has passed.
//!
//! A rank that has been in a call for a while tells all ranks which call that is. A rank that is in
//! another call, and has not begun the first one, answers. If the rank that has told has not begun
//! that call either, each of the two makes first what the other makes second. No time helps then,
//! so the group ends at once, with an error that names both calls.
//!
//! Ranks on which several threads have made calls do not take part, because one thread may still
//! make the call that another one lacks. A rank cannot know the threads that will make their first
//! call; the rule that all ranks make calls in the same order is for them too. Ranks that are late
//! answer nothing, so a late rank costs one message from time to time.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use peerlane_hal::Rank;

use super::list::List;
use super::work::{DynWork, find_start, greatest_of_starts};
use crate::bootstrap::{AbortRecord, Cause};
use crate::group::call::{Call, CallNumber, Message, PATIENCE, Patience};
use crate::group::caller::Caller;
use crate::group::control;
use crate::group::life::LifeCycle;
use crate::group::refusal::Refusal;

/// All ranks of a group that is behind answer, each to all, so larger groups leave it to the
/// timeout.
const RANKS_MAX: usize = 256;

/// The most characters of a call in the error of another rank.
const WORDS_MAX: usize = 300;

/// The number of dropped operations whose starts are known. Of older ones, every start counts as
/// made.
const DROPPED_MAX: usize = 16;

/// What a rank knows of the order of its calls.
#[derive(Debug, Default)]
pub(in crate::group) struct Order {
    /// The thread that makes the calls, or 0.
    thread: AtomicUsize,
    has_threads: AtomicBool,
    /// The number of the last operation that was prepared.
    prepared: AtomicU64,
    /// Whether a call waits for what is open before it exchanges messages.
    finishes: AtomicBool,
    exchanges: Mutex<Exchanges>,
    /// The last operations that were dropped, each with its last start.
    dropped: Mutex<VecDeque<Call>>,
    /// The last call, if this rank has refused it.
    pub(in crate::group) refusal: Refusal,
}

#[derive(Debug, Default)]
struct Exchanges {
    begun: u64,
    current: Option<(Call, Patience)>,
    /// The last call that another rank has told, and when.
    told: Option<(Call, Instant)>,
}

impl Order {
    /// Notes which thread makes a call.
    pub(in crate::group) fn enter_thread(&self) {
        let own = Caller::current().address();
        if self.thread.load(Ordering::Relaxed) == own {
            return;
        }

        let first = self.thread.compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed);
        if first.is_err() {
            self.has_threads.store(true, Ordering::Relaxed);
        }
    }

    /// Forgets the thread that has opened the group, because another one may use it.
    pub(in crate::group) fn forget_thread(&self) {
        self.thread.store(0, Ordering::Relaxed);
    }

    pub(in crate::group) fn note_prepared(&self, operation: u64) {
        self.prepared.fetch_max(operation, Ordering::Relaxed);
    }

    /// Notes the last start of an operation that is dropped.
    pub(in crate::group) fn note_dropped(&self, last: Call) {
        let mut dropped = self.dropped();
        // Each executor of an operation is dropped for itself.
        let others = dropped.iter().position(|other| other.epoch_of(&last).is_some());
        let last = match others.and_then(|index| dropped.remove(index)) {
            Some(other) if other.epoch_of(&last) > last.epoch_of(&last) => other,
            _ => last,
        };

        if dropped.len() == DROPPED_MAX {
            dropped.pop_front();
        }
        dropped.push_back(last);
    }

    fn dropped(&self) -> MutexGuard<'_, VecDeque<Call>> {
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::group) fn set_finishes(&self, finishes: bool) {
        self.finishes.store(finishes, Ordering::Relaxed);
    }

    /// Notes the begin of an exchange, whose call the watchdog tells if it takes long.
    pub(in crate::group) fn begin_exchange(&self, label: &str, rank: Rank) -> InExchange<'_> {
        self.enter_thread();

        let mut exchanges = self.exchanges();
        let number = CallNumber::Exchange(exchanges.begun);
        exchanges.begun += 1;
        exchanges.current = Some((Call { name: label.to_owned(), number }, Patience::new(rank)));
        InExchange(self)
    }

    /// Returns whether the call of an exchange is to be told, and the time until the next look.
    pub(super) fn look_at_exchange(&self) -> Option<(bool, Duration)> {
        let mut exchanges = self.exchanges();
        let (_, patience) = exchanges.current.as_mut()?;
        Some(patience.look())
    }

    /// Tells all ranks which call this rank is in, unless another rank has just told the same one.
    pub(super) fn tell_call(&self, life: &LifeCycle, work: &List<DynWork>) {
        if !self.compares(life) || life.check().is_err() {
            return;
        }

        let Some(call) = self.current(work) else { return };
        let told = self.exchanges().told.clone();
        let is_told = told.is_some_and(|(told, at)| told == call && at.elapsed() < PATIENCE);
        if !is_told {
            // Whoever cannot be told learns of the timeout.
            let _ = life.bootstrap.broadcast(&control::encode_order(Message::Waits(call)));
        }
    }

    /// Compares the calls of another rank with those of this one.
    pub(super) fn receive(
        &self,
        life: &LifeCycle,
        work: &List<DynWork>,
        (from, message): (Rank, Message),
    ) {
        let own_rank = life.bootstrap.rank();
        if from == own_rank || !self.compares(life) {
            return;
        }

        let current = self.current(work);
        match message {
            Message::Waits(theirs) => {
                let has_begun = self.has_begun(&theirs, work);

                // Another message about the same call would tell the others nothing new.
                self.exchanges().told = Some((theirs.clone(), Instant::now()));
                if let Some(own) = current.filter(|_| !has_begun) {
                    // Whoever cannot be told learns of the timeout.
                    let crosses = Message::Crosses { rank: from.0, theirs, own };
                    let _ = life.bootstrap.broadcast(&control::encode_order(crosses));
                }
            }
            Message::Crosses { rank, theirs, own } => {
                let is_own = rank == own_rank.0 && current.as_ref() == Some(&theirs);
                if is_own && !self.has_begun(&own, work) {
                    end_crossed(life, (own_rank, &theirs), (from, &own));
                }
            }
        }
    }

    /// Returns what this rank does or did last, for a rank that asks, as the words after "rank 1".
    pub(super) fn call_in_words(&self, work: &List<DynWork>) -> Option<String> {
        // The other ranks learn why this one does not put.
        if let Some(words) = find_start(work, |tracker| tracker.missing_in_words()) {
            return Some(words);
        }
        let current = self.current(work).map(|call| format!("waits in {call}"));
        let refused = || self.refusal.text().map(|text| format!("refused its last call: {text}"));

        // All ranks pass on what each of them says.
        current.or_else(refused).map(|words| words.chars().take(WORDS_MAX).collect())
    }

    fn exchanges(&self) -> MutexGuard<'_, Exchanges> {
        self.exchanges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn compares(&self, life: &LifeCycle) -> bool {
        !self.has_threads.load(Ordering::Relaxed) && life.bootstrap.ranks() <= RANKS_MAX
    }

    /// Returns the call that this rank is in, until it ends.
    fn current(&self, work: &List<DynWork>) -> Option<Call> {
        if let Some((call, _)) = &self.exchanges().current {
            return Some(call.clone());
        }

        let finishes = self.finishes.load(Ordering::Relaxed);
        find_start(work, |tracker| tracker.call(finishes))
    }

    fn has_begun(&self, call: &Call, work: &List<DynWork>) -> bool {
        let (operation, epoch) = match call.number {
            CallNumber::Exchange(number) => return self.exchanges().begun > number,
            CallNumber::Start { operation, epoch } => (operation, epoch),
        };

        // An operation can have several executors, of which some have made no start, and some may
        // be dropped.
        let opened = greatest_of_starts(work, |tracker| tracker.opened_of(&call.name, operation));
        let last = opened.max(self.dropped().iter().find_map(|last| last.epoch_of(call)));
        last.map_or(self.prepared.load(Ordering::Relaxed) >= operation, |last| last >= epoch)
    }
}

/// Notes that a rank is in an exchange until this is dropped.
pub(in crate::group) struct InExchange<'o>(&'o Order);

impl Drop for InExchange<'_> {
    fn drop(&mut self) {
        self.0.exchanges().current = None;
    }
}

/// Ends a group because two ranks wait in calls that the other one has not begun.
fn end_crossed(life: &LifeCycle, one: (Rank, &Call), other: (Rank, &Call)) {
    let [(low, low_call), (high, high_call)] =
        if one.0 < other.0 { [one, other] } else { [other, one] };
    let text = format!(
        "ranks call in different orders: rank {low} waits in {low_call}, rank {high} in {high_call}, and neither has begun \
         the call of the other; make the same collective calls in the same order on all ranks"
    );

    let record =
        AbortRecord { cause: Cause::Mismatch, by: Some(one.0), ..AbortRecord::timeout(None, text) };
    life.change(|control, now| control.abort(now, record));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_start_of_an_operation_with_several_executors_counts() {
        let order = Order::default();
        order.note_prepared(9);
        let start = |operation, epoch| Call::start("all-gather", operation, epoch);
        for (operation, epoch) in [(1, 5), (1, 0), (2, 0), (2, 5)] {
            order.note_dropped(start(operation, epoch));
        }
        for operation in [1, 2] {
            assert!(order.has_begun(&start(operation, 5), &List::default()));
            assert!(!order.has_begun(&start(operation, 6), &List::default()));
        }
        assert_eq!(order.dropped().len(), 2);

        // What is not known counts as made, but not the start of an operation that is not prepared
        // yet.
        assert!(order.has_begun(&start(3, 5), &List::default()));
        assert!(!order.has_begun(&start(10, 1), &List::default()));
        (1..20).for_each(|operation| order.note_dropped(start(operation, 1)));
        assert_eq!(order.dropped().len(), DROPPED_MAX);
    }

    #[test]
    fn threads_that_make_calls_for_another_one_count_as_that() {
        let order = Order::default();
        order.enter_thread();
        let caller = Caller::current();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                caller.take_over();
                order.enter_thread();
            });
        });
        assert!(!order.has_threads.load(Ordering::Relaxed));
        std::thread::scope(|scope| {
            scope.spawn(|| order.enter_thread());
        });
        assert!(order.has_threads.load(Ordering::Relaxed));
    }
}
