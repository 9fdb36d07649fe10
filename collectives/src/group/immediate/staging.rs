//! Leases memory for calls whose memory peers cannot access, and copies to it and from it.
//!
//! All staged calls of a group share one window. It grows, so it is opened a few times only. Calls
//! that graphs record have windows of their own, which stay, because a graph can be replayed at any
//! time.
//!
//! On the host, the calling thread copies. On a stream, an engine does, in the order of the stream.
//! One engine makes the copies of all streams, and engines run their slices in order, so a call on
//! one stream follows those on other streams that use the same memory.

use std::any::Any;
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use peerlane_hal::{
    At, CaptureState, CopyEngine, Deadline, DynEngine, DynError, DynFabric, DynImport, DynRegion,
    EngineRequirements, ErrorKind, Fabric as _, Op, PeerMemory as _, Rank, Role, StreamOrdered,
    Ticket,
};

use crate::element::DType;
use crate::error::Error;
use crate::group::Group;
use crate::group::agreement::{Offer, agree};
use crate::group::window::{self, Inner};
use crate::plan::Tier;
use crate::run::queue;

/// The least size of a window for copies, in bytes.
const WINDOW_BYTES_MIN: u64 = 1 << 16;
/// The output begins at a multiple of this in the window, so it is aligned for all elements.
pub(super) const ALIGN_BYTES: u64 = 512;
/// How long a wait for copies parks at most before it looks again.
const PARK: Duration = Duration::from_millis(10);

/// A copy between memory of the caller and a window.
#[derive(Clone)]
pub(super) struct Copy {
    pub(super) caller: NonNull<u8>,
    pub(super) window: Arc<Inner>,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

// SAFETY: the memory of the caller can be used by any thread, which the calls say that use it.
unsafe impl Send for Copy {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyDirection {
    ToWindow,
    FromWindow,
}

impl Copy {
    /// Copies in the calling thread, if both are memory of the host.
    ///
    /// # Safety
    /// Nobody writes the source or accesses the destination meanwhile.
    unsafe fn run(&self, direction: CopyDirection) {
        let staged = self.window.address(self.offset);
        let (from, to) = match direction {
            CopyDirection::ToWindow => (self.caller, staged),
            CopyDirection::FromWindow => (staged, self.caller),
        };
        let bytes = usize::try_from(self.bytes).expect("memory fits the address space");
        // SAFETY: the caller of this function keeps others away, and both are allocated. The memory
        // of the caller can be a part of the same window, so they may overlap.
        unsafe { std::ptr::copy(from.as_ptr(), to.as_ptr(), bytes) };
    }
}

/// The memory for copies of one group, and the engine that makes those on streams.
#[derive(Default)]
pub(super) struct Staging {
    window: Option<Arc<Inner>>,
    /// The windows of calls that graphs have recorded. The last one is the largest.
    recorded: Vec<Arc<Inner>>,
    copier: Copier,
}

impl Staging {
    /// Returns the bytes of all windows.
    pub(super) fn bytes(&self) -> u64 {
        self.window.iter().chain(&self.recorded).map(|window| window.bytes()).sum()
    }

    fn last_window(&self, is_recorded: bool) -> Option<&Arc<Inner>> {
        if is_recorded { self.recorded.last() } else { self.window.as_ref() }
    }

    /// Returns the window for copies if it has at least `bytes` bytes.
    pub(super) fn leased_window(&self, bytes: u64, is_recorded: bool) -> Option<Arc<Inner>> {
        self.last_window(is_recorded).filter(|window| window.bytes() >= bytes).cloned()
    }

    pub(super) fn copier(&self) -> Copier {
        self.copier.clone()
    }
}

/// Makes the copies of calls: on the calling thread, or by an engine if the group has needed one.
#[derive(Clone, Default)]
pub(super) struct Copier(Option<Arc<Mutex<StagingEngine>>>);

impl Copier {
    fn engine(&self) -> Option<MutexGuard<'_, StagingEngine>> {
        // After a panic, the engine still knows which copies are not complete.
        self.0.as_ref().map(|engine| engine.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn created_engine(&self) -> MutexGuard<'_, StagingEngine> {
        self.engine().expect("a call that needs the engine has created it")
    }

    /// Makes a copy before this function returns.
    ///
    /// # Safety
    /// As [`Copy::run`].
    pub(super) unsafe fn copy_now(
        &self,
        copy: &Copy,
        direction: CopyDirection,
    ) -> Result<(), Error> {
        if copy.bytes == 0 {
            return Ok(());
        }
        if !copy.window.is_on_device() {
            // SAFETY: this function has the same contract.
            unsafe { copy.run(direction) };
            return Ok(());
        }

        let mut engine = self.created_engine();
        // SAFETY: this function has the same contract, until the wait below ends.
        unsafe { engine.submit(Some((copy, direction)), false) }?;
        engine.settle()
    }

    /// Enqueues a copy on a stream, or an empty slice without one.
    ///
    /// Even the empty slice orders this call after the copies of calls on other streams.
    ///
    /// # Safety
    /// Nobody writes the source or accesses the destination until the stream has made the copy.
    pub(super) unsafe fn copy_on(
        &self,
        stream: &dyn Any,
        copy: Option<(&Copy, CopyDirection)>,
    ) -> Result<(), Error> {
        // SAFETY: this function has the same contract.
        unsafe { self.created_engine().submit_on(stream, copy) }
    }

    /// Waits until streams have made all copies, so that the host can use the memory.
    pub(super) fn settle(&self) -> Result<(), Error> {
        self.engine().map_or(Ok(()), |mut engine| engine.settle())
    }

    pub(super) fn capture_state(&self, stream: &dyn Any) -> Result<CaptureState, Error> {
        self.created_engine().capture_state(stream)
    }
}

impl Group {
    /// Creates the engine for copies, if the group has none yet.
    pub(super) fn staging_engine(&mut self) -> Result<(), Error> {
        if self.immediate.staging.copier.0.is_none() {
            let setup = &self.setup;
            let engine = setup.fabric.engine(EngineRequirements {
                kind: setup.named_engine().and_then(|engine| engine.kind(Tier::Local)),
                streams: true,
                ..EngineRequirements::default()
            });
            let engine = engine.map_err(|error| Error::of_fabric("create an engine", error))?;

            let (rank, fabric) = (self.rank(), Arc::clone(&setup.fabric));
            let timeout = self.timeout();
            let engine = StagingEngine {
                engine,
                fabric,
                rank,
                timeout,
                last: Ticket::NONE,
                held: VecDeque::new(),
                recorded: Vec::new(),
            };
            self.immediate.staging.copier = Copier(Some(Arc::new(Mutex::new(engine))));
        }
        Ok(())
    }

    /// Opens a window with at least `bytes` bytes for copies, because the last one is smaller.
    /// Collective.
    ///
    /// The last one is released with all operations over it.
    pub(super) fn grow_lease(
        &mut self,
        bytes: u64,
        is_recorded: bool,
    ) -> Result<Arc<Inner>, Error> {
        let last = self.immediate.staging.last_window(is_recorded);
        let twice = last.map_or(0, |window| 2 * window.bytes());
        let bytes = bytes.max(twice).max(WINDOW_BYTES_MIN).next_multiple_of(ALIGN_BYTES);
        if let Some(old) = self.immediate.staging.window.clone().filter(|_| !is_recorded) {
            // A rank that refuses the call takes part in this exchange, and nothing has changed.
            let offer = Offer::default().field("bytes", bytes);
            let deadline = Deadline::after(self.timeout());
            agree(&self.runtime, "memory for copies", Ok(offer), deadline)?;

            // Until then, streams use it.
            self.immediate.staging.copier.settle()?;
            self.immediate.staging.window = None;
            window::release(self, old).map_err(|(_, error)| error)?;
        }

        let offer = window::offer(DType::U8);
        let window = window::open(self, None, Ok((offer, bytes)))?;
        let staging = &mut self.immediate.staging;
        match is_recorded {
            true => staging.recorded.push(Arc::clone(&window)),
            false => staging.window = Some(Arc::clone(&window)),
        }
        Ok(window)
    }
}

/// An engine of the local fabric, which copies between memory of this rank.
struct StagingEngine {
    engine: DynEngine,
    fabric: Arc<DynFabric>,
    rank: Rank,
    timeout: Duration,
    last: Ticket,
    /// The registered memory of callers and the windows of copies that are not complete.
    held: VecDeque<(Ticket, DynRegion, Arc<Inner>)>,
    /// The same of copies that graphs have recorded.
    recorded: Vec<(DynRegion, Arc<Inner>)>,
}

impl StagingEngine {
    fn with_streams<R>(
        &mut self,
        action: &str,
        call: impl FnOnce(&mut dyn StreamOrdered<Error = DynError>) -> Result<R, DynError>,
    ) -> Result<R, Error> {
        let backend = self.fabric.backend();
        queue::with_streams(&mut self.engine, backend, "use `run`", action, call)
    }

    fn capture_state(&mut self, stream: &dyn Any) -> Result<CaptureState, Error> {
        let action = "query whether the stream captures";
        self.with_streams(action, |streams| streams.capture_state(stream))
    }

    /// Submits a copy, or an empty slice without one.
    ///
    /// # Safety
    /// Nobody writes the source or accesses the destination until the copy is complete.
    unsafe fn submit(
        &mut self,
        copy: Option<(&Copy, CopyDirection)>,
        is_recorded: bool,
    ) -> Result<(), Error> {
        self.forget_complete()?;
        let copy = copy.filter(|(copy, _)| copy.bytes > 0);
        let Some((Copy { caller, window, offset, bytes }, direction)) = copy else {
            // SAFETY: an empty slice accesses no memory.
            self.last = unsafe { submit(&mut self.engine, &[], self.timeout) }?;
            return Ok(());
        };
        let (offset, bytes) = (*offset, *bytes);

        // SAFETY: the caller of this function keeps the memory allocated.
        let region = unsafe { self.fabric.memory().register(*caller, bytes, Role::Data) };
        let region =
            region.map_err(|error| Error::of_fabric("register the memory of the call", error))?;
        let local = At { region: &region, offset: 0 };
        let remote = window.own_import(self.rank, offset);
        let op = match direction {
            CopyDirection::ToWindow => Op::Put { dst: remote, src: local, bytes },
            CopyDirection::FromWindow => Op::Get { dst: local, src: remote, bytes },
        };

        // SAFETY: the caller keeps others away from the memory; `held` and `recorded` keep it
        // registered.
        self.last = unsafe { submit(&mut self.engine, &[op], self.timeout) }?;
        match is_recorded {
            true => self.recorded.push((region, Arc::clone(window))),
            false => self.held.push_back((self.last, region, Arc::clone(window))),
        }
        Ok(())
    }

    /// Submits a copy, or an empty slice, in the order of a stream.
    ///
    /// # Safety
    /// As [`submit`](Self::submit), for every replay too if the stream captures.
    unsafe fn submit_on(
        &mut self,
        stream: &dyn Any,
        copy: Option<(&Copy, CopyDirection)>,
    ) -> Result<(), Error> {
        let is_recorded = self.capture_state(stream)?.is_capturing();

        self.with_streams("fork the engine from the stream", |streams| streams.fork(stream))?;
        // SAFETY: this function has the same contract.
        let submitted = unsafe { self.submit(copy, is_recorded) };
        // The join follows in any case, and the first error counts.
        let joined =
            self.with_streams("join the engine to the stream", |streams| streams.join(stream));
        submitted.and(joined)
    }

    /// Drops the registrations of copies that are complete.
    fn forget_complete(&mut self) -> Result<(), Error> {
        if self.held.is_empty() {
            return Ok(());
        }
        let completed = self.engine.completed();
        let completed =
            completed.map_err(|error| Error::of_fabric("query the completed tickets", error))?;
        while self.held.front().is_some_and(|(ticket, ..)| *ticket <= completed) {
            self.held.pop_front();
        }
        Ok(())
    }

    /// Waits until all copies are complete.
    fn settle(&mut self) -> Result<(), Error> {
        let deadline = Deadline::after(self.timeout);
        loop {
            self.forget_complete()?;
            if self.held.is_empty() {
                return Ok(());
            }

            if deadline.has_passed() {
                let text = format!(
                    "copies of immediate calls are not complete after {:?}; a stream holds them up",
                    self.timeout
                );
                return Err(Error::new(ErrorKind::Timeout, text));
            }
            park(&mut self.engine, deadline)?;
        }
    }
}

/// Submits a slice, and waits for room in the queue of the engine.
///
/// # Safety
/// As [`CopyEngine::submit`].
unsafe fn submit(
    engine: &mut DynEngine,
    ops: &[Op<'_, DynRegion, DynImport>],
    timeout: Duration,
) -> Result<Ticket, Error> {
    let deadline = Deadline::after(timeout);

    loop {
        // SAFETY: this function has the same contract.
        match unsafe { engine.submit(ops) } {
            Err(error)
                if peerlane_hal::Error::kind(&error) == ErrorKind::QueueFull
                    && !deadline.has_passed() =>
            {
                let completed = engine.completed();
                completed
                    .map_err(|error| Error::of_fabric("query the completed tickets", error))?;
                park(engine, deadline)?;
            }
            submitted => return submitted.map_err(|error| Error::of_fabric("submit ops", error)),
        }
    }
}

fn park(engine: &mut DynEngine, deadline: Deadline) -> Result<(), Error> {
    let limit = PARK.min(deadline.remaining());
    engine.park(limit).map_err(|error| Error::of_fabric("park the engine", error))
}
