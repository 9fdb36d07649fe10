//! Emulates streams and captured graphs with threads, to test work on a caller's stream without a
//! device.
//!
//! A [`Stream`] is a thread that runs one job after the other. A slice is submitted to the inner
//! engine at once, behind a queued wait that holds it. The stream ends this wait when it reaches
//! the slice, and goes on when the slice is complete. So the inner backend keeps the contract, and
//! a blocked stream blocks its slices. Captured slices are submitted at each replay to a separate
//! engine, since they must not be queued behind slices that are still held.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use peerlane_hal::{
    At, Caps, CaptureState, CopyEngine, EngineOffer, EngineRequirements, Error as _, ErrorKind,
    Fabric, Flag, Mark, Op, Reducer, StreamOrdered, Ticket, stream_of,
};

use crate::hold::{self, HoldFlags};
use crate::{Error, Layer, Local, Remote};

/// A layer that gives streams to all engines of a fabric.
#[derive(Clone, Copy, Debug)]
pub struct StreamLayer {
    /// The maximum number of incomplete `submit` calls in the queue of an engine.
    pub slices_max: usize,
}

impl Default for StreamLayer {
    fn default() -> Self {
        Self { slices_max: 256 }
    }
}

/// Returns the capabilities of an engine whose inner engine has the capabilities `own`.
fn caps(own: Caps) -> Caps {
    // The wait that holds a slice takes one of its ops. The threads of the streams poll the
    // engines, so the caller does not.
    let slice_ops_max = own.slice_ops_max.saturating_sub(1);
    Caps { slice_ops_max, polled: false, flags_batched: true, rows: false, ..own }
}

// SAFETY: the engines wrap engines of the fabric.
unsafe impl<F: Fabric + 'static> Layer<F> for StreamLayer {
    type Engine = Streams<F>;

    fn engine(
        &self,
        fabric: &F,
        _: u64,
        requirements: EngineRequirements,
    ) -> Result<Self::Engine, Error<F::Error>> {
        Streams::new(fabric, requirements, self.slices_max)
    }

    fn offers(&self, own: Vec<EngineOffer>) -> Vec<EngineOffer> {
        let caps = |offer: EngineOffer| caps(offer.caps);
        let offer = |offer| EngineOffer { caps: caps(offer), streams: true, ..offer };
        own.into_iter().map(offer).collect()
    }

    fn missing(&self, caps: &Caps) -> Option<String> {
        hold::cannot_hold(caps)
    }
}

const HOLD_WORD: u64 = 0;
const POLL_INTERVAL: Duration = Duration::from_micros(20);
/// The longest sleep of a parked caller, because a flag that a device stores wakes no thread.
const PARK_MAX: Duration = Duration::from_millis(1);
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// An engine with streams and captured graphs, over engines of `F` that have none.
pub struct Streams<F: Fabric> {
    shared: Arc<Shared<F>>,
    caps: Caps,
    slices_max: usize,
    own: Stream,
    forked: Option<Stream>,
    /// The number of the last fork beside a stream that captures, and how many marks it has.
    captured: Option<u64>,
    forks: u64,
    marks: usize,
    last: Ticket,
}

struct Shared<F: Fabric> {
    engines: Mutex<Engines<F>>,
    wakeup: Arc<Wakeup>,
}

struct Engines<F: Fabric> {
    engine: F::Engine,
    opener: F::Engine,
    replayer: F::Engine,
    replays: Vec<Instant>,
    broken: Option<Error<F::Error>>,
    // Declared after the engines, so that it is dropped last.
    hold: HoldFlags<F>,
    released: bool,
    /// The number of `release` calls, because a graph replay that starts after a release is blocked
    /// until the next one.
    releases: u64,
    dropped: bool,
}

#[derive(Default)]
struct Wakeup {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl Wake for Wakeup {
    fn wake(self: Arc<Self>) {
        *self.woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }
}

/// A copy of an op without lifetimes; the contract of `submit` keeps its regions alive.
enum StoredOp<F: Fabric> {
    Put { dst: (*const Remote<F>, u64), src: (*const Local<F>, u64), bytes: u64 },
    Get { dst: (*const Local<F>, u64), src: (*const Remote<F>, u64), bytes: u64 },
    Signal { flag: (*const Remote<F>, u64), value: u64 },
    Wait { flag: (*const Local<F>, u64), value: u64, reset: bool },
}

// SAFETY: it names regions, which are `Send` and `Sync`.
unsafe impl<F: Fabric> Send for StoredOp<F> {}
// SAFETY: as above.
unsafe impl<F: Fabric> Sync for StoredOp<F> {}

impl<F: Fabric> StoredOp<F> {
    /// Copies an op without the lifetimes of its regions.
    ///
    /// # Errors
    /// Returns an error if the layer does not pass on such ops.
    fn new(op: &Op<'_, Local<F>, Remote<F>>) -> Result<Self, Error<F::Error>> {
        Ok(match *op {
            Op::Put { dst, src, bytes } => {
                Self::Put { dst: (dst.region, dst.offset), src: (src.region, src.offset), bytes }
            }
            Op::Get { dst, src, bytes } => {
                Self::Get { dst: (dst.region, dst.offset), src: (src.region, src.offset), bytes }
            }
            Op::Signal { flag, value } => Self::Signal { flag: (flag.region, flag.word), value },
            Op::Wait { flag, value, reset } => {
                Self::Wait { flag: (flag.region, flag.word), value, reset }
            }
            // The layer has neither rows (`caps`) nor reductions (`prepare_reduce`).
            Op::PutRows { .. } | Op::GetRows { .. } | Op::Reduce { .. } => {
                return Err(hold::refused_op(op));
            }
            #[cfg(not(peerlane_workspace))]
            _ => return Err(hold::refused_op(op)),
        })
    }

    /// Restores a stored op with references to its regions.
    ///
    /// # Safety
    /// The regions are alive.
    unsafe fn restored<'a>(&self) -> Op<'a, Local<F>, Remote<F>> {
        match *self {
            Self::Put { dst, src, bytes } => {
                // SAFETY: the caller's.
                let to = unsafe { &*dst.0 };
                // SAFETY: the caller's.
                let from = unsafe { &*src.0 };

                let dst = At { region: to, offset: dst.1 };
                Op::Put { dst, src: At { region: from, offset: src.1 }, bytes }
            }
            Self::Get { dst, src, bytes } => {
                // SAFETY: the caller's.
                let to = unsafe { &*dst.0 };
                // SAFETY: the caller's.
                let from = unsafe { &*src.0 };

                let dst = At { region: to, offset: dst.1 };
                Op::Get { dst, src: At { region: from, offset: src.1 }, bytes }
            }
            Self::Signal { flag, value } => {
                // SAFETY: the caller's.
                let region = unsafe { &*flag.0 };
                Op::Signal { flag: Flag { region, word: flag.1 }, value }
            }
            Self::Wait { flag, value, reset } => {
                // SAFETY: the caller's.
                let region = unsafe { &*flag.0 };
                Op::Wait { flag: Flag { region, word: flag.1 }, value, reset }
            }
        }
    }
}

impl<F: Fabric> Engines<F> {
    /// Ends the hold of a slice after all earlier slices are complete, and returns whether the
    /// slice itself is complete.
    fn advance(&mut self, ticket: Ticket, opened: &mut bool) -> Result<bool, Error<F::Error>> {
        self.opener.completed().map_err(Error::Inner)?;
        let done = self.engine.completed().map_err(Error::Inner)?;

        // A released engine lets all waits pass and needs no signal.
        if !*opened && !self.released && done.0 + 1 >= ticket.0 {
            let flag = Flag { region: self.hold.alias(), word: HOLD_WORD };
            let open = [Op::Signal { flag, value: ticket.0 }];
            // SAFETY: the import lives as long as the opener, which is the only writer of the flag.
            match unsafe { self.opener.submit(&open) } {
                Ok(_) => *opened = true,
                // The next call signals the flag again.
                Err(error) if error.kind() == ErrorKind::QueueFull => {}
                Err(error) => return Err(Error::Inner(error)),
            }
        }

        Ok(done >= ticket)
    }

    /// Submits captured ops again, or returns `None` if the engine has no room for them yet.
    fn replay(&mut self, slice: &[StoredOp<F>]) -> Result<Option<Ticket>, Error<F::Error>> {
        self.replayer.completed().map_err(Error::Inner)?;

        // SAFETY: the regions live until the last replay is complete (the contract of
        // `CopyEngine::submit`).
        let ops: Vec<_> = slice.iter().map(|stored| unsafe { stored.restored() }).collect();
        // SAFETY: the caller of `submit` vouches for each replay as for the recorded slice.
        match unsafe { self.replayer.submit(&ops) } {
            Ok(ticket) => Ok(Some(ticket)),
            Err(error) if error.kind() == ErrorKind::QueueFull => Ok(None),
            Err(error) => Err(Error::Inner(error)),
        }
    }
}

impl<F: Fabric> Shared<F> {
    fn engines(&self) -> MutexGuard<'_, Engines<F>> {
        self.engines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks the thread of a stream until `step` returns true or fails, then wakes the parked
    /// caller. The first error breaks the engine.
    fn block_until(&self, mut step: impl FnMut(&mut Engines<F>) -> Result<bool, Error<F::Error>>) {
        loop {
            let mut engines = self.engines();
            match step(&mut engines) {
                Ok(true) => break,
                Ok(false) => {}
                // The caller has aborted, so errors after the release are not reported.
                Err(_) if engines.released => break,
                Err(error) => {
                    engines.broken.get_or_insert(error);
                    break;
                }
            }

            // The caller and other streams use the engines during the sleep.
            drop(engines);
            std::thread::sleep(POLL_INTERVAL);
        }

        Arc::clone(&self.wakeup).wake();
    }
}

impl<F: Fabric + 'static> Streams<F> {
    pub(super) fn new(
        fabric: &F,
        requirements: EngineRequirements,
        slices_max: usize,
    ) -> Result<Self, Error<F::Error>> {
        let engine = || fabric.engine(requirements).map_err(Error::Inner);
        let (engine, opener, replayer) = (engine()?, engine()?, engine()?);
        let own = *engine.caps();
        hold::check_hold(&own)?;

        let engines = Engines {
            engine,
            opener,
            replayer,
            replays: Vec::new(),
            broken: None,
            hold: HoldFlags::new(fabric)?,
            released: false,
            releases: 0,
            dropped: false,
        };
        let shared = Arc::new(Shared { engines: Mutex::new(engines), wakeup: Arc::default() });

        Ok(Self {
            shared,
            caps: caps(own),
            slices_max,
            own: Stream::new(),
            forked: None,
            captured: None,
            forks: 0,
            marks: 0,
            last: Ticket::NONE,
        })
    }

    /// Has the later jobs of a stream follow those that another one holds now.
    fn order(&self, ahead: &Stream, behind: &Stream) {
        let reached = Arc::new(AtomicBool::new(false));
        let reach = Arc::clone(&reached);
        ahead.run(move || reach.store(true, Ordering::Release));

        let shared = Arc::clone(&self.shared);
        behind.run(move || {
            shared.block_until(|engines| Ok(reached.load(Ordering::Acquire) || engines.dropped));
        });
    }

    /// Has a stream wait for a slice.
    fn block_after(&self, into: &Stream, ticket: Ticket) {
        let shared = Arc::clone(&self.shared);
        into.run(move || {
            shared.block_until(|engines| {
                Ok(engines.engine.completed().map_err(Error::Inner)? >= ticket)
            });
        });
    }

    /// Records a job that submits a slice to the replayer and blocks the stream until the slice is
    /// complete.
    fn capture(&self, stream: &Stream, slice: Vec<StoredOp<F>>) {
        let shared = Arc::clone(&self.shared);
        stream.run(move || {
            // `replay_wait` returns the age of the oldest replay that is not complete.
            let begun = Instant::now();
            shared.engines().replays.push(begun);

            let mut ticket = None;
            let mut releases = None;
            shared.block_until(|engines| {
                let before = *releases.get_or_insert(engines.releases);
                if engines.released {
                    // The slice may no longer access its regions, but it blocks its stream as on a
                    // device.
                    return Ok(engines.dropped || engines.releases > before);
                }

                if ticket.is_none() {
                    ticket = engines.replay(&slice)?;
                }
                let done = engines.replayer.completed().map_err(Error::Inner)?;
                Ok(ticket.is_some_and(|ticket| done >= ticket))
            });

            shared.engines().replays.retain(|replay| *replay != begun);
        });
    }
}

// SAFETY: the layer passes all calls on to an implementation that upholds the contract.
unsafe impl<F: Fabric + 'static> CopyEngine for Streams<F> {
    type Error = Error<F::Error>;
    type Local = Local<F>;
    type Remote = Remote<F>;

    fn caps(&self) -> &Caps {
        &self.caps
    }

    /// Returns `None`, because this layer does not support reductions.
    fn prepare_reduce(&mut self) -> Result<Option<Reducer>, Self::Error> {
        Ok(None)
    }

    unsafe fn submit(
        &mut self,
        ops: &[Op<'_, Local<F>, Remote<F>>],
    ) -> Result<Ticket, Self::Error> {
        let (seen, expected) = (ops.len(), self.caps.slice_ops_max);
        if seen > expected {
            let text = format!(
                "a slice has {seen} ops, expected at most {expected} (slice_ops_max of the \
                 engine); split it into several slices"
            );
            return Err(Error::layer(ErrorKind::InvalidArgument, text));
        }
        let stored: Vec<_> = ops.iter().map(StoredOp::new).collect::<Result<_, _>>()?;

        let stream = self.forked.as_ref().unwrap_or(&self.own);
        // A captured slice is submitted at each replay and takes no ticket of this queue.
        if stream.capture_state().is_capturing() {
            self.capture(stream, stored);
            return Ok(self.last);
        }

        let mut engines = self.shared.engines();
        let open = self.last.0 - engines.engine.completed().map_err(Error::Inner)?.0;
        if open >= self.slices_max as u64 {
            let text = format!(
                "the queue of the engine is full: {open} slices are not complete, expected less \
                 than {}; submit again after a ticket completes",
                self.slices_max
            );
            return Err(Error::layer(ErrorKind::QueueFull, text));
        }

        // The hold flag counts slices: it reaches the ticket of a slice when its stream does.
        let Engines { engine, hold, .. } = &mut *engines;
        let flag = Flag { region: hold.local(), word: HOLD_WORD };
        let wait = Op::Wait { flag, value: self.last.0 + 1, reset: false };
        let gated: Vec<_> = std::iter::once(wait).chain(ops.iter().copied()).collect();
        // SAFETY: the caller's promise. The hold flag is boxed and lives as long as the engine, its
        // only reader.
        let ticket = unsafe { engine.submit(&gated) }.map_err(Error::Inner)?;
        drop(engines);
        self.last = ticket;

        let shared = Arc::clone(&self.shared);
        let opened = Mutex::new(false);
        stream.run(move || {
            let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
            shared.block_until(|engines| engines.advance(ticket, &mut opened));
        });
        Ok(ticket)
    }

    fn completed(&mut self) -> Result<Ticket, Self::Error> {
        let mut engines = self.shared.engines();
        match engines.broken.take() {
            // The error stays here, so that every later call fails with its kind and text.
            Some(error) => {
                let (kind, text) = (error.kind(), error.to_string());
                engines.broken = Some(error);
                Err(Error::layer(kind, text))
            }
            None => engines.engine.completed().map_err(Error::Inner),
        }
    }

    fn park(&mut self, limit: Duration) -> Result<(), Self::Error> {
        let wakeup = &self.shared.wakeup;
        let woken = wakeup.woken.lock().unwrap_or_else(PoisonError::into_inner);
        let limit = limit.min(PARK_MAX);

        let waited = wakeup.changed.wait_timeout_while(woken, limit, |woken| !*woken);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
        Ok(())
    }

    /// Returns false, because the threads of the streams make progress without being polled.
    fn is_busy(&self) -> bool {
        false
    }

    fn waker(&self) -> Waker {
        Waker::from(Arc::clone(&self.shared.wakeup))
    }

    fn release(&mut self) -> Result<(), Self::Error> {
        let mut engines = self.shared.engines();
        engines.released = true;
        engines.releases += 1;
        engines.engine.release().map_err(Error::Inner)?;
        engines.replayer.release().map_err(Error::Inner)
    }

    fn compute_bytes(&mut self, ops: &[Op<'_, Local<F>, Remote<F>>], captured: bool) -> u64 {
        self.shared.engines().engine.compute_bytes(ops, captured)
    }

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = Self::Error>> {
        Some(self)
    }
}

// SAFETY: the layer passes all calls on to an implementation that upholds the contract.
unsafe impl<F: Fabric + 'static> StreamOrdered for Streams<F> {
    type Error = Error<F::Error>;

    fn capture_state(&mut self, stream: &dyn Any) -> Result<CaptureState, Self::Error> {
        Ok(layer_stream::<F>(stream)?.capture_state())
    }

    fn fork(&mut self, from: &dyn Any) -> Result<(), Self::Error> {
        self.forked = Some(layer_stream::<F>(from)?.clone());
        Ok(())
    }

    /// Has the own stream wait for a job of `from`. In a capture, the jobs of the engine go onto
    /// `from`, because a captured graph is one sequence of jobs here.
    fn fork_beside(&mut self, from: &dyn Any) -> Result<(), Self::Error> {
        let from = layer_stream::<F>(from)?;
        let is_same = self.forked.as_ref().is_some_and(|forked| forked.is_same_stream(from));
        if self.captured.is_some() && !is_same {
            let text = "the engine is part of a capture that the stream is not part of";
            return Err(Error::layer(ErrorKind::InvalidArgument, text));
        }

        if from.capture_state().is_capturing() {
            if self.captured.is_none() {
                (self.forks, self.marks) = (self.forks + 1, 0);
                self.captured = Some(self.forks);
            }
            self.forked = Some(from.clone());
            return Ok(());
        }

        self.forked = None;
        self.order(from, &self.own);
        Ok(())
    }

    fn mark(&mut self) -> Result<Mark, Self::Error> {
        let Some(fork) = self.captured else { return Ok(Mark::Submitted(self.last)) };
        self.marks += 1;
        Ok(Mark::Captured { fork, index: self.marks - 1 })
    }

    fn order_after(&mut self, mark: Mark, into: &dyn Any) -> Result<(), Self::Error> {
        let into = layer_stream::<F>(into)?;
        match mark {
            Mark::Submitted(ticket) => {
                self.block_after(into, ticket);
                Ok(())
            }
            // What the mark is behind is on that stream already.
            Mark::Captured { fork, .. }
                if self.captured == Some(fork)
                    && self.forked.as_ref().is_some_and(|own| own.is_same_stream(into)) =>
            {
                Ok(())
            }
            Mark::Captured { .. } => {
                let text = "the mark is of a capture that the engine or the stream is not part of";
                Err(Error::layer(ErrorKind::InvalidArgument, text))
            }
        }
    }

    fn join(&mut self, into: &dyn Any) -> Result<(), Self::Error> {
        let forked = self.forked.take();
        self.captured = None;
        let into = layer_stream::<F>(into)?;
        // The jobs of one stream run in order anyway.
        if forked.as_ref().is_some_and(|forked| forked.is_same_stream(into)) {
            return Ok(());
        }

        // Its own stream may hold waits for other streams behind the last slice.
        if forked.is_none() {
            self.order(&self.own, into);
        }
        self.block_after(into, self.last);
        Ok(())
    }

    fn replay_wait(&mut self) -> Result<Option<Duration>, Self::Error> {
        Ok(self.shared.engines().replays.iter().min().map(Instant::elapsed))
    }
}

fn layer_stream<F: Fabric>(stream: &dyn Any) -> Result<&Stream, Error<F::Error>> {
    stream_of(stream).map_err(|text| Error::layer(ErrorKind::Mismatch, text))
}

impl<F: Fabric> Drop for Streams<F> {
    fn drop(&mut self) {
        // Later jobs find released engines, which access no memory.
        let due = Instant::now() + DRAIN_TIMEOUT;
        loop {
            let mut engines = self.shared.engines();
            (engines.released, engines.dropped) = (true, true);

            // An engine that fails here cannot be repaired.
            let _ = engines.replayer.release();
            let _ = engines.engine.release();
            let done = engines.engine.completed();
            drop(engines);

            if done.is_ok_and(|done| done < self.last) && Instant::now() < due {
                std::thread::sleep(POLL_INTERVAL);
            } else {
                break;
            }
        }
    }
}

impl<F: Fabric> fmt::Debug for Streams<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streams").field("last", &self.last).finish_non_exhaustive()
    }
}

/// A job of a stream, which runs again in each replay if it is captured in a graph.
type Job = Arc<dyn Fn() + Send + Sync>;

/// A stream of the caller, which is a thread that runs one job after the other.
#[derive(Clone)]
pub struct Stream(Arc<Handle>);

impl peerlane_hal::Stream for Stream {}

/// A captured graph, which holds the jobs that a stream recorded.
#[derive(Clone)]
pub struct Graph(Arc<[Job]>);

struct Handle(Arc<Queue>);

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    busy: bool,
    closed: bool,
    capture: Option<Capture>,
}

/// A capture that is not complete.
struct Capture {
    number: u64,
    jobs: Vec<Job>,
}

/// Counts the captures of the process.
static CAPTURES: AtomicU64 = AtomicU64::new(0);

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        // A job that panics leaves the state consistent and ends its stream.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the jobs of the stream in order until the stream is closed and no job is left.
    fn run_jobs(&self) {
        loop {
            let mut state = self.state();
            state.busy = false;
            self.changed.notify_all();

            // A closed stream still runs its remaining jobs.
            let job = loop {
                if let Some(job) = state.jobs.pop_front() {
                    break job;
                }
                if state.closed {
                    return;
                }
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            };

            // The lock is dropped first, so that jobs can be pushed during this one.
            state.busy = true;
            drop(state);
            job();
        }
    }
}

impl Stream {
    /// Creates a stream and starts its thread.
    ///
    /// # Panics
    /// Panics if the system has no thread left.
    pub fn new() -> Self {
        let queue = Arc::new(Queue::default());
        let worker = Arc::clone(&queue);
        let thread = std::thread::Builder::new().name("stream".to_owned());
        thread.spawn(move || worker.run_jobs()).expect("a test has a thread for each stream");
        Self(Arc::new(Handle(queue)))
    }

    /// Runs `work` on the stream after the earlier jobs, or records it if the stream captures.
    pub fn run(&self, work: impl Fn() + Send + Sync + 'static) {
        self.push(Arc::new(work));
    }

    fn push(&self, job: Job) {
        let mut state = self.0.0.state();
        match &mut state.capture {
            Some(capture) => capture.jobs.push(job),
            None => state.jobs.push_back(job),
        }

        drop(state);
        self.0.0.changed.notify_all();
    }

    /// Waits for all jobs of the stream, and returns whether they finish within `limit`.
    pub fn is_idle_within(&self, limit: Duration) -> bool {
        let queue = &self.0.0;
        let idle = queue
            .changed
            .wait_timeout_while(queue.state(), limit, |state| state.busy || !state.jobs.is_empty());
        let (_state, waited) = idle.unwrap_or_else(PoisonError::into_inner);
        !waited.timed_out()
    }

    /// Begins a capture, which records all further jobs instead of running them.
    pub fn begin_capture(&self) {
        let number = CAPTURES.fetch_add(1, Ordering::Relaxed);
        self.0.0.state().capture = Some(Capture { number, jobs: Vec::new() });
    }

    /// Ends the capture and returns the recorded jobs as a graph.
    pub fn end_capture(&self) -> Graph {
        let capture = self.0.0.state().capture.take();
        Graph(capture.map(|capture| capture.jobs).unwrap_or_default().into())
    }

    fn capture_state(&self) -> CaptureState {
        match &self.0.0.state().capture {
            Some(capture) => CaptureState::Active(capture.number),
            None => CaptureState::None,
        }
    }

    fn is_same_stream(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Default for Stream {
    fn default() -> Self {
        Self::new()
    }
}

impl Graph {
    /// Runs all recorded jobs of the graph again on `stream`.
    pub fn replay(&self, stream: &Stream) {
        self.0.iter().for_each(|job| stream.push(Arc::clone(job)));
    }

    /// Returns the number of recorded jobs in the graph.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether the graph has no recorded jobs.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // The remaining jobs still run.
        self.0.state().closed = true;
        self.0.changed.notify_all();
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("capture", &self.capture_state()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").field("jobs", &self.len()).finish()
    }
}
