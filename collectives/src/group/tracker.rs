//! Tracks which starts of an operation are not complete, for the watchdog thread and for error
//! texts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use peerlane_hal::{Deadline, ProgressReader, Rank, RegionFlag};

use crate::bootstrap::{AbortRecord, Cause};
use crate::group::call::{Call, Patience};
use crate::group::control::SizedStart;
use crate::group::event::Event;
use crate::group::start_part::{PeerLens, StartPart};
use crate::plan::{Cell, Tier};
use crate::run::buffers::{CROSS_TIER_FLAGS, FlagState, OperationBuffers, Start, TierBuffers};
use crate::run::program::{AwaitedFlag, FlagWriters};

/// Says what an operation does with its memory, the most restrictive last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Activity {
    #[default]
    Idle,
    Open,
    OnStream,
    Captured,
    /// The operation was dropped during a start that peers go on with.
    Abandoned,
}

pub(super) struct StartTracker {
    operation: String,
    /// The number of the call that prepared the operation.
    number: u64,
    rank: Rank,
    /// The timeout of the next starts in nanoseconds.
    timeout_nanos: AtomicU64,
    waits: Vec<AwaitedFlag>,
    /// The flags that tell whether ranks have made a start alike.
    compared: Vec<AwaitedFlag>,
    /// Room for the values of these flags, if the host reads them by one copy.
    span: Mutex<FlagSpan>,
    writers: FlagWriters,
    views: TierBuffers,
    opened: AtomicU64,
    closed: AtomicU64,
    /// The deadline of the oldest incomplete start, in nanoseconds after `origin`.
    /// The time at the origin, by the coarse clock.
    coarse_origin_nanos: u64,
    deadline_nanos: AtomicU64,
    origin: Instant,
    on_stream: AtomicBool,
    captured: AtomicBool,
    replay_waits: AtomicBool,
    driven_by_thread: AtomicBool,
    /// Whether the caller waits for the open start with a descriptor or a future.
    observed: AtomicBool,
    /// The start that a thread waits for, or 0.
    blocked: AtomicU64,
    /// The start that a thread waited for when the watchdog looked.
    seen_blocked: AtomicU64,
    /// Whether that wait ends with the start, and not with a limit of the caller.
    waits_for_end: AtomicBool,
    /// The start that a thread waits for part by part, and when it tells its call to other ranks.
    patience: Mutex<Option<(u64, Patience)>>,
    /// Whether the operation was dropped during a start that nobody finished.
    abandoned: AtomicBool,
    /// Whether a start copies anything, or only signals.
    moves_data: bool,
    /// The last start that stays complete although the group has ended.
    outlasting: AtomicU64,
    /// The last start that the caller knows to be complete.
    finished: AtomicU64,
    event: Event,
    /// The first chunk of the input that the newest start needs and the caller has not let depart.
    missing_part: Mutex<Option<Cell>>,
    /// Whether the caller awaits the arrival of chunks.
    awaits_arrivals: AtomicBool,
    /// The lengths and places of the newest start, if starts can have their own.
    part: Option<PartCell>,
    fused: Option<FusedStart>,
}

/// What the tracker of fused starts knows of their launches.
pub(super) struct FusedStart {
    /// Tells how far the starts have come, also those of graphs, which the host does not count.
    pub(super) progress: ProgressReader,
    /// The number of words of a flag that peers signal.
    pub(super) words: usize,
}

/// Marks a thread as waiting for a start until this is dropped.
pub(super) struct Blocked<'t>(&'t StartTracker);

impl Drop for Blocked<'_> {
    fn drop(&mut self) {
        self.0.blocked.store(0, Ordering::Relaxed);
    }
}

/// Holds the part of the newest starts, and which starts have it.
pub(super) struct PartCell {
    part: Mutex<StartPart>,
    /// The lengths that this rank and each other one exchange, by rank; empty unless each pair of
    /// ranks has its own.
    pairs: Mutex<Box<[PeerLens]>>,
    /// The last start with another part.
    before: AtomicU64,
}

/// The largest number of words that [`FlagSpan`] reads by one copy.
const FLAG_SPAN_WORDS_MAX: u64 = 4096;

/// Adjacent flags of the local fabric, which the host reads from the device by one copy.
struct FlagSpan {
    first: Option<RegionFlag>,
    values: Box<[[u8; 8]]>,
}

impl FlagSpan {
    fn from_flags(compared: &[AwaitedFlag]) -> Self {
        let addresses = compared.iter().filter(|wait| Self::takes(wait)).map(|wait| wait.place);
        let first = addresses.clone().min_by_key(|address| address.word);
        let last = addresses.map(|address| address.word).max();
        let words = first.zip(last).map_or(0, |(first, last)| last - first.word + 1);

        // The flags of many chunks are far apart, so that single reads are not slower than one long
        // copy.
        let words = if words > FLAG_SPAN_WORDS_MAX { 0 } else { words as usize };
        Self { first, values: vec![[0; 8]; words].into() }
    }

    fn takes(wait: &AwaitedFlag) -> bool {
        wait.tier == Tier::Local && wait.place.region != CROSS_TIER_FLAGS && wait.place.lag == 0
    }

    fn contains(&self, wait: &AwaitedFlag) -> bool {
        Self::takes(wait) && !self.values.is_empty()
    }

    fn fill(&mut self, view: &OperationBuffers, start: Start) -> bool {
        self.first.is_some_and(|first| view.flag_values(first, start, &mut self.values))
    }

    fn value(&self, wait: &AwaitedFlag) -> u64 {
        let first = self.first.map_or(0, |first| first.word);
        u64::from_ne_bytes(self.values[(wait.place.word - first) as usize])
    }
}

impl PartCell {
    /// Creates a cell; `pairs` is the number of ranks if each pair of ranks has lengths of its own.
    pub(super) fn new(pairs: Option<usize>) -> Self {
        let pairs = vec![PeerLens::default(); pairs.unwrap_or(0)].into();
        Self { part: Mutex::default(), pairs: Mutex::new(pairs), before: AtomicU64::new(0) }
    }

    /// Returns the part in words, with the lengths of blocks that this rank exchanges with `peer`.
    fn describe(&self, peer: Option<Rank>) -> String {
        let part = *self.part.lock().unwrap_or_else(PoisonError::into_inner);
        let pairs = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        let lens = peer.and_then(|peer| Some((peer, *pairs.get(peer.index())?)));
        part.describe(lens)
    }

    fn set(&self, part: &StartPart, pair: &dyn Fn(Rank) -> PeerLens, before: u64) {
        *self.part.lock().unwrap_or_else(PoisonError::into_inner) = *part;
        let mut pairs = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        for (rank, lens) in Rank::all(pairs.len()).zip(&mut *pairs) {
            *lens = pair(rank);
        }
        self.before.store(before, Ordering::Relaxed);
    }

    fn is_of_pairs(&self) -> bool {
        !self.pairs.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Returns whether the start `epoch` has the newest part.
    fn is_of(&self, epoch: u64) -> bool {
        epoch > self.before.load(Ordering::Relaxed)
    }
}

impl StartTracker {
    pub(super) fn new(
        (operation, number): (String, u64),
        rank: Rank,
        timeout: Duration,
        waits: Vec<AwaitedFlag>,
        writers: FlagWriters,
        views: TierBuffers,
        part: Option<PartCell>,
    ) -> Self {
        let compared = part.as_ref().map(|part| compared(&waits, part)).unwrap_or_default();
        let span = Mutex::new(FlagSpan::from_flags(&compared));

        Self {
            compared,
            span,
            operation,
            number,
            rank,
            timeout_nanos: AtomicU64::new(nanos(timeout)),
            waits,
            writers,
            views,
            opened: AtomicU64::new(0),
            closed: AtomicU64::new(0),
            coarse_origin_nanos: coarse_nanos(),
            deadline_nanos: AtomicU64::new(0),
            origin: Instant::now(),
            on_stream: AtomicBool::new(false),
            captured: AtomicBool::new(false),
            moves_data: true,
            replay_waits: AtomicBool::new(false),
            driven_by_thread: AtomicBool::new(false),
            observed: AtomicBool::new(false),
            blocked: AtomicU64::new(0),
            seen_blocked: AtomicU64::new(0),
            waits_for_end: AtomicBool::new(false),
            patience: Mutex::default(),
            abandoned: AtomicBool::new(false),
            outlasting: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            event: Event::default(),
            missing_part: Mutex::default(),
            awaits_arrivals: AtomicBool::new(false),
            part,
            fused: None,
        }
    }

    /// Has the tracker follow fused starts.
    pub(super) fn with_fused(self, fused: Option<FusedStart>) -> Self {
        Self { fused, ..self }
    }

    pub(super) fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout_nanos.load(Ordering::Relaxed))
    }

    /// Sets the timeout of the next starts.
    pub(super) fn set_timeout(&self, timeout: Duration) {
        self.timeout_nanos.store(nanos(timeout), Ordering::Relaxed);
    }

    pub(super) fn rank(&self) -> Rank {
        self.rank
    }

    pub(super) fn buffers(&self) -> &TierBuffers {
        &self.views
    }

    /// Records that the next start is one of the host. Starts on a stream are watched until they
    /// are complete.
    pub(super) fn mark_on_host(&self) {
        if self.due().is_none() {
            self.on_stream.store(false, Ordering::Release);
        }
    }

    pub(super) fn mark_on_stream(&self) {
        self.on_stream.store(true, Ordering::Release);
    }

    pub(super) fn is_on_stream(&self) -> bool {
        self.on_stream.load(Ordering::Acquire)
    }

    pub(super) fn mark_captured(&self) {
        self.captured.store(true, Ordering::Release);
    }

    pub(super) fn set_replay_waits(&self, waits: bool) {
        self.replay_waits.store(waits, Ordering::Release);
    }

    pub(super) fn mark_driven_by_thread(&self) {
        self.driven_by_thread.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_driven_by_thread(&self) -> bool {
        let is_driven = self.driven_by_thread.load(Ordering::SeqCst) || self.is_observed();
        is_driven && (self.is_captured() || self.due().is_some())
    }

    /// Records that a thread waits for a start until the result is dropped, and whether a limit of
    /// the caller can end the wait.
    pub(super) fn block(&self, epoch: u64, has_limit: bool) -> Blocked<'_> {
        self.waits_for_end.store(!has_limit, Ordering::Relaxed);
        self.blocked.store(epoch, Ordering::Relaxed);
        Blocked(self)
    }

    /// Takes the patience of a wait for a start, which may be one part of several.
    pub(super) fn take_patience(&self, epoch: u64) -> Patience {
        let kept = self.patience.lock().unwrap_or_else(PoisonError::into_inner).take();
        let kept = kept.filter(|(of, _)| *of == epoch);
        kept.map_or_else(|| Patience::new(self.rank), |(_, patience)| patience)
    }

    /// Keeps the patience for the next part of a wait.
    pub(super) fn keep_patience(&self, epoch: u64, patience: Patience) {
        *self.patience.lock().unwrap_or_else(PoisonError::into_inner) = Some((epoch, patience));
    }

    /// Returns whether a thread waits for the same start as at the last call.
    pub(super) fn has_waited_for_long(&self) -> bool {
        let blocked = self.blocked.load(Ordering::Relaxed);
        self.seen_blocked.swap(blocked, Ordering::Relaxed) == blocked
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.blocked.load(Ordering::Relaxed) > 0
    }

    /// Returns the start that a thread waits for, or the first open start if no thread waits and
    /// this rank `finishes` all of them.
    pub(super) fn call(&self, finishes: bool) -> Option<Call> {
        let epoch = match self.blocked.load(Ordering::Relaxed) {
            0 if finishes && self.due().is_some() => self.epoch(),
            0 => return None,
            _ if !self.waits_for_end.load(Ordering::Relaxed) => return None,
            epoch => epoch,
        };
        Some(Call::start(&self.operation, self.number, epoch))
    }

    /// Returns the last start that this rank has made.
    pub(super) fn last_call(&self) -> Call {
        Call::start(&self.operation, self.number, self.opened.load(Ordering::Acquire))
    }

    /// Returns the number of starts that this rank has made, if this is the operation.
    pub(super) fn opened_of(&self, operation: &str, number: u64) -> Option<u64> {
        let is_same = self.number == number && self.operation == operation;
        is_same.then(|| self.opened.load(Ordering::Acquire))
    }

    /// Sets the first chunk of the input that the newest start needs and the caller has not let
    /// depart.
    pub(super) fn set_missing_part(&self, part: Option<Cell>) {
        *self.missing_part.lock().unwrap_or_else(PoisonError::into_inner) = part;
    }

    fn missing_part(&self) -> Option<Cell> {
        *self.missing_part.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the newest start waits for its caller.
    pub(super) fn misses_parts(&self) -> bool {
        self.missing_part().is_some()
    }

    /// Returns the first of the missing chunks with its start, as the words after "rank 1".
    pub(super) fn missing_in_words(&self) -> Option<String> {
        let Cell { block, chunk } = self.missing_part()?;
        let start = self.epoch();
        Some(format!(
            "has not let chunk {chunk} of block {block} depart in start {start} of {}",
            self.operation
        ))
    }

    /// Has the caller be told of progress too, because it awaits the arrival of a chunk.
    pub(super) fn await_arrivals(&self) {
        self.awaits_arrivals.store(true, Ordering::SeqCst);
    }

    /// Tells the caller of an observed start that a chunk may have arrived, if it awaits one.
    pub(super) fn tell_progress(&self) {
        if self.awaits_arrivals.load(Ordering::SeqCst) {
            self.tell();
        }
    }

    pub(super) fn event(&self) -> &Event {
        &self.event
    }

    pub(super) fn observe(&self) {
        self.observed.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_observed(&self) -> bool {
        self.observed.load(Ordering::SeqCst)
    }

    /// Tells the caller of an observed start that it may be complete, or that the group may have
    /// ended.
    pub(super) fn tell(&self) {
        if self.is_observed() {
            self.event.signal();
        }
    }

    pub(super) fn tell_complete(&self) {
        if self.is_observed() && self.due().is_none() {
            self.event.signal();
        }
    }

    /// Counts the memory of the operation as used from now on, because peers may still write to it.
    pub(super) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
    }

    fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Acquire)
    }

    pub(super) fn is_captured(&self) -> bool {
        self.captured.load(Ordering::Acquire)
    }

    pub(super) fn open(&self, epoch: u64, deadline: Deadline) {
        self.open_by(epoch, || self.set_deadline(deadline));
    }

    /// Counts a start as open whose thread polls it a few times before it reads the clock.
    ///
    /// The deadline is that of a clock that is a few milliseconds late, until
    /// [`set_deadline`](Self::set_deadline).
    pub(super) fn open_before_polls(&self, epoch: u64) {
        let nanos = || {
            let since_origin = coarse_nanos().saturating_sub(self.coarse_origin_nanos);
            since_origin.saturating_add(nanos(self.timeout()))
        };
        self.open_by(epoch, || self.deadline_nanos.store(nanos(), Ordering::Relaxed));
    }

    fn open_by(&self, epoch: u64, set_deadline: impl FnOnce()) {
        if self.closed.load(Ordering::Relaxed) + 1 == epoch {
            set_deadline();
        }
        if self.observed.swap(false, Ordering::SeqCst) {
            self.event.clear();
        }
        self.opened.store(epoch, Ordering::Release);
    }

    /// Returns how many starts peers may have signalled to this rank, for the next user of the
    /// flags.
    pub(super) fn signalled(&self, started: u64) -> u64 {
        self.fused.as_ref().map_or(started, |fused| (fused.progress)().begun.max(started))
    }

    /// Counts the starts up to `epoch` as complete.
    ///
    /// The caller must hold the lock of the operation's executor.
    pub(super) fn close(&self, epoch: u64) {
        if self.is_abandoned() {
            return;
        }

        // This is sequentially consistent like `observe`: either this thread tells the caller, or
        // the caller sees the end.
        self.closed.fetch_max(epoch, Ordering::SeqCst);

        if self.opened.load(Ordering::Relaxed) > epoch {
            self.set_deadline(Deadline::after(self.timeout()));
        }
    }

    pub(super) fn deadline(&self) -> Deadline {
        let left = self.due().map(|due| due.saturating_duration_since(Instant::now()));
        Deadline::after(left.unwrap_or_else(|| self.timeout()))
    }

    pub(super) fn due(&self) -> Option<Instant> {
        let open = self.opened.load(Ordering::Acquire) > self.closed();
        let nanos = self.deadline_nanos.load(Ordering::Relaxed);
        open.then(|| self.origin + Duration::from_nanos(nanos))
    }

    pub(super) fn is_overdue(&self) -> bool {
        self.due().is_some_and(|due| due <= Instant::now())
    }

    pub(super) fn closed(&self) -> u64 {
        self.closed.load(Ordering::SeqCst)
    }

    pub(super) fn set_deadline(&self, deadline: Deadline) {
        let since_origin = deadline.at().saturating_duration_since(self.origin);
        self.deadline_nanos.store(nanos(since_origin), Ordering::Relaxed);
    }

    pub(super) fn missing(&self) -> Option<(AwaitedFlag, Option<u64>)> {
        self.missing_flags().next()
    }

    /// Returns the other ranks whose signals are missing.
    ///
    /// A graph replay resets the flags that it has passed, so the ranks that signaled these flags
    /// count as missing too.
    pub(super) fn missing_writers(&self) -> BTreeSet<Rank> {
        let writers = self.missing_flags().map(|(wait, _)| self.writers.find_writer(wait.flag));
        writers.filter(|rank| *rank != self.rank).collect()
    }

    /// Records that the starts of the operation copy nothing.
    pub(super) fn without_data(self) -> Self {
        Self { moves_data: false, ..self }
    }

    /// Records the starts that stay complete although the group ends: starts without data, such as
    /// those of a barrier, whose signals have all arrived, even if no thread has looked yet.
    ///
    /// It is called before this rank answers that it knows of the end. Peers release their queues
    /// afterwards: they may then signal what they have not sent, and write to the memory of starts
    /// that are complete, so starts with data do not count.
    pub(super) fn note_outlasting(&self) {
        if self.moves_data {
            return;
        }

        let opened = self.opened.load(Ordering::Acquire);
        let has_arrived =
            |epoch: &u64| self.missing_flags_of(Some(Start::Eager(*epoch))).next().is_none();
        let arrived = (self.epoch()..=opened).take_while(has_arrived).last();
        self.outlasting.fetch_max(arrived.unwrap_or(self.closed()), Ordering::AcqRel);
    }

    /// Returns the last start that stays complete although the group has ended.
    pub(super) fn outlasting(&self) -> u64 {
        self.outlasting.load(Ordering::Acquire)
    }

    fn missing_flags(&self) -> impl Iterator<Item = (AwaitedFlag, Option<u64>)> {
        self.missing_flags_of(self.waiting())
    }

    /// Returns the flags of a start whose signals are missing, with the values that were read.
    ///
    /// A read of a flag can be stuck behind copies on the device. This and all further flags are
    /// then taken as missing, so that the answer to an inquiry is not late.
    fn missing_flags_of(
        &self,
        start: Option<Start>,
    ) -> impl Iterator<Item = (AwaitedFlag, Option<u64>)> {
        let mut is_stuck = false;
        self.waits.iter().filter_map(move |wait| {
            let start = start?;
            let view = self.views.on_tier(wait.tier)?;

            let value = if is_stuck { None } else { self.flag_value(view, wait, start) };
            is_stuck |= value.is_none();

            let expected = view.flag_value_in(start.before(wait.place.lag));
            value.is_none_or(|value| value < expected).then_some((*wait, value))
        })
    }

    /// Returns the least value of the words of a flag.
    fn flag_value(&self, view: &OperationBuffers, wait: &AwaitedFlag, start: Start) -> Option<u64> {
        let &AwaitedFlag { tier, place: flag, .. } = wait;
        // Lanes of the network signal one word.
        let is_launched = tier == Tier::Local && flag.region != CROSS_TIER_FLAGS;
        let fused = self.fused.as_ref().filter(|fused| is_launched && fused.words > 1);
        let Some(words) = fused.map(|fused| fused.words) else {
            return view.flag_value(flag, start);
        };

        let mut values = vec![[0; 8]; words];
        let is_read = view.flag_values(flag, start, &mut values);
        is_read.then(|| values.into_iter().map(u64::from_ne_bytes).min()).flatten()
    }

    fn other_output(&self, wait: &AwaitedFlag) -> Option<u64> {
        let view = self.views.on_tier(wait.tier)?;
        let value = self.flag_value(view, wait, Start::Eager(self.first_incomplete() + 1))?;
        Some(view.epoch_of_value(value))
    }

    /// Returns the number of the first start that is not complete, by which its flags are known.
    ///
    /// Fused starts of graphs count too.
    fn first_incomplete(&self) -> u64 {
        // On several nodes, a start goes on when its launch has ended.
        match &self.fused {
            Some(fused) if self.views.network.is_none() => (fused.progress)().done + 1,
            _ => self.epoch(),
        }
    }

    /// Returns whether a replay waits, and no other start.
    fn is_replay(&self) -> bool {
        self.due().is_none() && self.replay_waits.load(Ordering::Acquire)
    }

    /// Returns the start whose flags are awaited.
    fn waiting(&self) -> Option<Start> {
        match self.is_replay() {
            true if self.fused.is_none() => Some(Start::Captured(0)),
            true => Some(Start::Eager(self.first_incomplete())),
            false => self.due().map(|_| Start::Eager(self.first_incomplete())),
        }
    }

    pub(super) fn epoch(&self) -> u64 {
        self.closed() + 1
    }

    pub(super) fn overdue(&self, timeout: Duration) -> AbortRecord {
        let rank = self.rank;

        if let Some(Start::Captured(_)) = self.waiting()
            && let writers = self.missing_writers()
            && let Some(first) = writers.first()
        {
            let names: Vec<_> = writers.iter().map(Rank::to_string).collect();
            let ranks = if names.len() == 1 { "rank" } else { "ranks" };
            let text = format!(
                "within {timeout:?}: rank {rank} waited for signals from {ranks} {}",
                names.join(", ")
            );
            return self.record(Cause::Timeout, Some(*first), "replay", &text);
        }

        if let Some(Cell { block, chunk }) = self.missing_part() {
            let text = format!(
                "within {timeout:?}: rank {rank} has not let chunk {chunk} of block {block} depart"
            );
            return self.record(Cause::Timeout, Some(rank), "departure", &text);
        }

        let Some((wait, seen)) = self.missing() else {
            let before = if self.is_on_stream() { " or earlier work on its stream" } else { "" };
            let text = format!("rank {rank} did not complete its copies{before}");
            return self.record(
                Cause::Timeout,
                Some(rank),
                "copy",
                &format!("within {timeout:?}: {text}"),
            );
        };

        let (flag, writer) = (wait.flag, self.writers.find_writer(wait.flag));
        let seen =
            seen.zip(self.views.on_tier(wait.tier)).map(|(value, view)| view.epoch_of_value(value));
        let last = match seen.max(self.other_output(&wait)) {
            None => String::new(),
            Some(0) => ", which has never signaled it".to_owned(),
            Some(start) => format!(", which last signaled it in start {start}"),
        };

        let text = format!(
            "within {timeout:?}: rank {rank} waited for the flag \"{flag}\" from rank {writer}{last}"
        );
        self.record(Cause::Timeout, Some(writer), &flag.to_string(), &text)
    }

    pub(super) fn left(&self, has_left: impl Fn(Rank) -> bool) -> Option<AbortRecord> {
        let (wait, _) = self.missing()?;
        let writer = self.writers.find_writer(wait.flag);
        if !has_left(writer) {
            return None;
        }

        let text = format!(
            "because rank {writer} has left the group; rank {} waited for the flag \"{}\"",
            self.rank, wait.flag
        );
        let phase = wait.flag.to_string();
        Some(self.record(Cause::PeerLost, Some(writer), &phase, &text))
    }

    /// Returns the newest start if the record is about this operation, and its starts can have
    /// lengths and places of their own.
    pub(super) fn start_of(&self, record: &AbortRecord) -> Option<SizedStart> {
        let part = self.part.as_ref().filter(|_| self.operation == record.operation)?;
        let epoch = self.opened.load(Ordering::Acquire);
        // A later resize is for a start that is not made yet.
        if !part.is_of(epoch) {
            return None;
        }

        // A mismatch is one of two ranks, of which each knows what it exchanges with the other.
        // Parts that are compared with those of all ranks name no pair.
        let (by, peer) = (record.by, record.peer);
        let other =
            if by == Some(self.rank) { peer } else { by.filter(|_| peer == Some(self.rank)) };
        let other = other.filter(|_| record.cause == Cause::Mismatch);
        Some(SizedStart { epoch, part: part.describe(other) })
    }

    /// Counts starts up to `epoch` as made by another executor of the operation.
    pub(super) fn skip_to(&self, epoch: u64) {
        if self.due().is_none() {
            if !self.is_unfinished() {
                self.note_finished(epoch);
            }
            self.closed.store(epoch, Ordering::Release);
            self.opened.store(epoch, Ordering::Release);
        }
    }

    /// Sets the lengths and places of the starts after `before`. `pair` returns the lengths that
    /// this rank and another one exchange.
    pub(super) fn set_part(&self, part: &StartPart, pair: &dyn Fn(Rank) -> PeerLens, before: u64) {
        let Some(cell) = &self.part else { return };
        let is_of_pairs = cell.is_of_pairs();
        let hash_of = |peer| match is_of_pairs {
            true => part.hash_of_pair((self.rank, peer), pair(peer)),
            false => part.hash,
        };

        let TierBuffers { local, network } = &self.views;
        for digest in [local].into_iter().chain(network).filter_map(|view| view.digest.as_ref()) {
            digest.set(hash_of);
        }
        cell.set(part, pair, before);
    }

    /// Returns whether starts can have lengths and places of their own, which ranks compare.
    pub(super) fn compares_starts(&self) -> bool {
        self.part.is_some()
    }

    /// Returns the record of a mismatch of the first open start that another rank has made with
    /// other lengths or places.
    pub(super) fn first_mismatch(&self) -> Option<AbortRecord> {
        let opened = self.opened.load(Ordering::Acquire);
        (self.epoch()..=opened).find_map(|epoch| self.mismatch(epoch, true))
    }

    /// Returns the record of a mismatch if a rank has signalled a flag of the start `epoch`, but
    /// with other lengths or places.
    ///
    /// Only starts since the last resize can be compared. Flags that the host cannot read directly
    /// are examined only if `slowly` is set.
    pub(super) fn mismatch(&self, epoch: u64, slowly: bool) -> Option<AbortRecord> {
        let part = self.part.as_ref().filter(|part| part.is_of(epoch))?;
        // The device counts the starts of graphs too, and the host does not know where they are
        // among its own.
        if self.fused.is_some() && self.is_captured() {
            return None;
        }
        let start = Start::Eager(epoch);
        let mut span = slowly.then(|| self.span.lock().unwrap_or_else(PoisonError::into_inner));

        // A device that has not answered once is not asked again for each flag.
        let mut is_read = None;
        let mut differs = |wait: &&AwaitedFlag| {
            let (view, address) = (self.views.on_tier(wait.tier)?, wait.place);
            let value = match (view.flag(address, start), &mut span) {
                (Some(word), _) => word.load(Ordering::Relaxed),
                (None, None) => return None,
                (None, Some(span)) if span.contains(wait) => {
                    let is_read = *is_read.get_or_insert_with(|| span.fill(view, start));
                    is_read.then(|| span.value(wait))?
                }
                (None, Some(_)) => view.flag_value(address, start)?,
            };

            let state = view.flag_state(value, start.before(address.lag), address.peer);
            Some(state == FlagState::Differs)
        };

        let flag = self.compared.iter().find(|wait| differs(wait) == Some(true))?.flag;
        drop(span);

        let operation = self.operation.clone();
        let writer = self.writers.find_writer(flag);
        let text = format!(
            "{operation}, start {epoch}: ranks disagree: rank {} started it with {}",
            self.rank,
            part.describe(Some(writer))
        );

        Some(AbortRecord {
            cause: Cause::Mismatch,
            by: Some(self.rank),
            peer: Some(writer),
            operation,
            phase: flag.to_string(),
            epoch,
            text,
            unanswered: false,
        })
    }

    pub(super) fn record(
        &self,
        cause: Cause,
        peer: Option<Rank>,
        phase: &str,
        text: &str,
    ) -> AbortRecord {
        let operation = self.operation.clone();
        let (epoch, start) = match self.is_replay() {
            true => (0, "a replayed start".to_owned()),
            false => (self.epoch(), format!("start {}", self.epoch())),
        };

        AbortRecord {
            cause,
            by: Some(self.rank),
            peer,
            phase: phase.to_owned(),
            epoch,
            text: format!("{operation}, {start}, did not finish {text}"),
            unanswered: false,
            operation,
        }
    }

    /// Records that the caller knows that the starts up to `epoch` are complete.
    pub(super) fn note_finished(&self, epoch: u64) {
        self.finished.fetch_max(epoch, Ordering::AcqRel);
    }

    /// Returns whether the caller does not know yet that all starts are complete.
    pub(super) fn is_unfinished(&self) -> bool {
        self.opened.load(Ordering::Acquire) > self.finished.load(Ordering::Acquire)
    }

    /// Returns how the operation uses its memory now.
    ///
    /// A start of the host counts as open until its caller knows that it is complete, and not only
    /// until it is: whether another start is refused then depends on what this rank has called, and
    /// never on how fast the ranks are.
    pub(super) fn activity(&self) -> Activity {
        if self.is_abandoned() {
            return Activity::Abandoned;
        }

        match (self.is_captured(), self.is_on_stream()) {
            (true, _) => Activity::Captured,
            (false, true) if self.due().is_some() => Activity::OnStream,
            (false, false) if self.is_unfinished() => Activity::Open,
            _ => Activity::Idle,
        }
    }
}

/// Returns the flags that show a rank whether others have made a start alike.
///
/// Flags of the start before tell nothing, because that one can have had other lengths. If each
/// pair of ranks has lengths of its own, all flags between two ranks say the same, so the last one
/// of each rank is enough. The host of a GPU reads it from the device.
fn compared(waits: &[AwaitedFlag], part: &PartCell) -> Vec<AwaitedFlag> {
    let of_start = waits.iter().filter(|wait| wait.place.lag == 0).copied();
    if !part.is_of_pairs() {
        return of_start.collect();
    }

    let mut last_of: BTreeMap<Rank, AwaitedFlag> = BTreeMap::new();
    for wait in of_start {
        last_of.insert(wait.place.peer, wait);
    }

    last_of.into_values().collect()
}

/// Returns a duration in nanoseconds. More than 584 years do not fit, and nobody waits for so long.
/// Returns the time of a clock that advances every few milliseconds and is read in a fifth of the
/// time of the exact one.
fn coarse_nanos() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    // The clock counts from the start of the machine.
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
