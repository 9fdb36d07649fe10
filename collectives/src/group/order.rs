//! Finds ranks that make collective calls in different orders, long before the timeout of a call has passed.
//!
//! A rank that has been in a call for a while tells all ranks which call that is. A rank that is in another call, and has not begun
//! the first one, answers. If the rank that has told has not begun that call either, each of the two makes first what the other makes
//! second. No time helps then, so the group ends at once, with an error that names both calls.
//!
//! Ranks on which several threads make calls do not take part, because one thread may still make the call that another one lacks.
//! Ranks that are late answer nothing, so a late rank costs one message from time to time.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use peerlane_hal::Rank;
use serde::{Deserialize, Serialize};

use super::control;
use super::shared::{Shared, TrackedOperation};
use crate::bootstrap::{AbortRecord, Cause};

/// A call counts as long after this time. Each further message takes twice as long as the one before.
const PATIENCE: Duration = Duration::from_millis(250);

/// The next rank tells its call this much later, so that usually one of the ranks that wait for the same one is enough.
const STAGGER: Duration = Duration::from_millis(2);

/// The number of dropped operations whose starts are known. Of older ones, every start counts as made.
const DROPPED_MAX: usize = 16;

/// A collective call that a rank has begun and not ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Call {
    name: String,
    number: CallNumber,
}

/// The number of a call among the calls of its kind, which is equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum CallNumber {
    /// A start of the operation that was prepared with this number.
    Start { operation: u64, epoch: u64 },
    /// An exchange of messages, counted from 0.
    Exchange(u64),
}

impl Call {
    pub(super) fn start(name: &str, operation: u64, epoch: u64) -> Self {
        Self { name: name.to_owned(), number: CallNumber::Start { operation, epoch } }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number {
            CallNumber::Start { epoch, .. } => write!(f, "start {epoch} of {}", self.name),
            CallNumber::Exchange(_) => write!(f, "the call \"{}\"", self.name),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// The sender has been in this call for long.
    Waits(Call),
    /// The sender is in `own`, and has not begun the call `theirs` that a rank has told.
    Crosses { rank: u32, theirs: Call, own: Call },
}

/// When a thread that waits tells its call.
#[derive(Debug)]
pub(super) struct Patience {
    pause: Duration,
    has_looked: bool,
    /// The time of the next message, once the wait has had its second look.
    next: Option<Instant>,
}

impl Patience {
    pub(super) fn new(rank: Rank) -> Self {
        let stagger = STAGGER.saturating_mul(rank.0).min(PATIENCE);
        Self { pause: PATIENCE + stagger, has_looked: false, next: None }
    }

    /// Returns how long the thread may sleep at most until the next look.
    pub(super) fn left(&self) -> Duration {
        self.next.map_or(self.pause, |next| next.saturating_duration_since(Instant::now()))
    }

    /// Returns whether the call is to be told now. The first look takes no time, because most waits are short.
    pub(super) fn is_over(&mut self) -> bool {
        if !std::mem::replace(&mut self.has_looked, true) {
            return false;
        }
        let now = Instant::now();
        let next = self.next.get_or_insert(now + self.pause);
        if *next > now {
            return false;
        }
        self.pause *= 2;
        *next = now + self.pause;
        true
    }
}

/// What a rank knows of the order of its calls.
#[derive(Debug, Default)]
pub(super) struct Order {
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
}

#[derive(Debug, Default)]
struct Exchanges {
    begun: u64,
    current: Option<(Call, Patience)>,
    /// The time of the last message of another rank.
    told_at: Option<Instant>,
}

impl Order {
    /// Notes which thread makes a call.
    pub(super) fn enter_thread(&self) {
        thread_local!(static TOKEN: Cell<u8> = const { Cell::new(0) });
        let own = TOKEN.with(|token| std::ptr::from_ref(token).addr());
        if self.thread.load(Ordering::Relaxed) == own {
            return;
        }
        let first = self.thread.compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed);
        if first.is_err() {
            self.has_threads.store(true, Ordering::Relaxed);
        }
    }

    /// Forgets the thread that has opened the group, because another one may use it.
    pub(super) fn forget_thread(&self) {
        self.thread.store(0, Ordering::Relaxed);
    }

    pub(super) fn note_prepared(&self, operation: u64) {
        self.prepared.fetch_max(operation, Ordering::Relaxed);
    }

    /// Notes the last start of an operation that is dropped.
    pub(super) fn note_dropped(&self, last: Call) {
        let mut dropped = self.dropped();
        if dropped.len() == DROPPED_MAX {
            dropped.pop_front();
        }
        dropped.push_back(last);
    }

    fn dropped(&self) -> MutexGuard<'_, VecDeque<Call>> {
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_finishes(&self, finishes: bool) {
        self.finishes.store(finishes, Ordering::Relaxed);
    }

    fn exchanges(&self) -> MutexGuard<'_, Exchanges> {
        self.exchanges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_known(&self) -> bool {
        !self.has_threads.load(Ordering::Relaxed)
    }

    /// Returns the call that this rank is in.
    fn current(&self, tracked: &[TrackedOperation]) -> Option<Call> {
        if let Some((call, _)) = &self.exchanges().current {
            return Some(call.clone());
        }
        let finishes = self.finishes.load(Ordering::Relaxed);
        tracked.iter().find_map(|tracked| tracked.tracker.call(finishes))
    }

    fn has_begun(&self, call: &Call, tracked: &[TrackedOperation]) -> bool {
        let (operation, epoch) = match call.number {
            CallNumber::Exchange(number) => return self.exchanges().begun > number,
            CallNumber::Start { operation, epoch } => (operation, epoch),
        };

        let opened = |tracked: &TrackedOperation| tracked.tracker.opened_of(&call.name, operation);
        if let Some(opened) = tracked.iter().filter_map(opened).max() {
            return opened >= epoch;
        }
        let dropped = self.dropped();
        let last = dropped.iter().rev().find_map(|last| match last.number {
            CallNumber::Start { operation: number, epoch } => {
                (number == operation && last.name == call.name).then_some(epoch)
            }
            CallNumber::Exchange(_) => None,
        });
        last.map_or(self.prepared.load(Ordering::Relaxed) >= operation, |last| last >= epoch)
    }
}

/// Notes that a rank is in an exchange until this is dropped.
pub(super) struct InExchange<'s>(&'s Shared);

impl Drop for InExchange<'_> {
    fn drop(&mut self) {
        self.0.order.exchanges().current = None;
    }
}

impl Shared {
    /// Notes the begin of an exchange, whose call the watchdog tells if it takes long.
    pub(super) fn begin_exchange(&self, label: &str) -> InExchange<'_> {
        self.order.enter_thread();
        let mut exchanges = self.order.exchanges();
        let number = CallNumber::Exchange(exchanges.begun);
        exchanges.begun += 1;
        let patience = Patience::new(self.bootstrap.rank());
        exchanges.current = Some((Call { name: label.to_owned(), number }, patience));
        drop(exchanges);
        self.family.wake_watchdog();
        InExchange(self)
    }

    /// Tells the call of an exchange that takes long, and returns the time until the next look.
    pub(super) fn look_at_exchange(&self) -> Option<Duration> {
        let mut exchanges = self.order.exchanges();
        let (_, patience) = exchanges.current.as_mut()?;
        let is_over = patience.is_over();
        let left = patience.left();
        drop(exchanges);
        if is_over {
            self.tell_call();
        }
        Some(left)
    }

    /// Tells all ranks which call this rank is in, unless another rank has just told its own.
    pub(super) fn tell_call(&self) {
        let told_at = self.order.exchanges().told_at;
        let is_told = told_at.is_some_and(|at| at.elapsed() < PATIENCE / 2);
        if is_told || !self.order.is_known() || self.check().is_err() {
            return;
        }
        let call = self.order.current(&self.state().tracked);
        if let Some(call) = call {
            // Whoever cannot be told learns of the timeout.
            let _ = self.bootstrap.broadcast(&control::encode_order(Message::Waits(call)));
        }
    }

    pub(super) fn receive_order(&self, from: Rank, message: Message) {
        let own_rank = self.bootstrap.rank();
        if from == own_rank || !self.order.is_known() {
            return;
        }
        let state = self.state();
        let current = self.order.current(&state.tracked);
        match message {
            Message::Waits(theirs) => {
                let has_begun = self.order.has_begun(&theirs, &state.tracked);
                drop(state);
                self.order.exchanges().told_at = Some(Instant::now());
                if let Some(own) = current.filter(|_| !has_begun) {
                    let crosses = Message::Crosses { rank: from.0, theirs, own };
                    let _ = self.bootstrap.broadcast(&control::encode_order(crosses));
                }
            }
            Message::Crosses { rank, theirs, own } => {
                let is_own = rank == own_rank.0 && current.as_ref() == Some(&theirs);
                let crosses = is_own && !self.order.has_begun(&own, &state.tracked);
                drop(state);
                if crosses {
                    self.end_crossed((own_rank, &theirs), (from, &own));
                }
            }
        }
    }

    /// Returns what this rank does or did last, for a rank that asks, as the words after "rank 1".
    pub(super) fn call_in_words(&self, tracked: &[TrackedOperation]) -> Option<String> {
        let current = self.order.current(tracked).map(|call| format!("waits in {call}"));
        current.or_else(|| self.refusal.text().map(|text| format!("refused its last call: {text}")))
    }

    fn end_crossed(&self, one: (Rank, &Call), other: (Rank, &Call)) {
        let [(low, low_call), (high, high_call)] =
            if one.0 < other.0 { [one, other] } else { [other, one] };
        let text = format!(
            "ranks call in different orders: rank {low} waits in {low_call}, rank {high} in {high_call}, and neither has begun \
             the call of the other; make the same collective calls in the same order on all ranks"
        );
        let record = AbortRecord {
            cause: Cause::Mismatch,
            by: Some(one.0),
            ..AbortRecord::timeout(None, text)
        };
        self.change(|control, now| control.abort(now, record));
    }
}
