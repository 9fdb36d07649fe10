//! Translates the steps of a plan into ops of one engine on registered memory.
//!
//! Above a port, a step names peer, buffer and offset; below it, a region and an offset.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::{
    At, BackendId, Caps, CopyEngine, DynEngine, DynError, DynImport, DynRegion, ErrorKind, Op,
    Rank, Region, Rows, StreamOrdered, Ticket,
};

use crate::error::Error;
use crate::run::buffers::{BufferOffset, FlagAddress, FlagState, OperationBuffers, Start};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BoundStep {
    Put {
        peer: Rank,
        dst: BufferOffset,
        src: BufferOffset,
        /// The number of bytes of a row.
        bytes: u64,
        rows: Rows,
    },
    Get {
        peer: Rank,
        dst: BufferOffset,
        src: BufferOffset,
        bytes: u64,
        rows: Rows,
    },
    /// Adds to `dst`; the first of the steps of one `dst` overwrites it.
    Reduce {
        dst: BufferOffset,
        src: BufferOffset,
        bytes: u64,
    },
    Signal {
        peer: Rank,
        flag: FlagAddress,
    },
    Wait {
        flag: FlagAddress,
    },
}

impl BoundStep {
    /// Returns the bytes that the step copies or adds.
    pub(crate) fn bytes(&self) -> u64 {
        match *self {
            Self::Put { bytes, rows, .. } | Self::Get { bytes, rows, .. } => bytes * rows.count,
            Self::Reduce { bytes, .. } => bytes,
            Self::Signal { .. } | Self::Wait { .. } => 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        matches!(self, Self::Put { bytes: 0, .. } | Self::Get { bytes: 0, .. })
    }
}

pub(crate) trait Port: Send {
    fn caps(&self) -> &Caps;

    /// Submits steps to the engine; signals and waits carry the value of `start`. All additions to
    /// one target are in one slice.
    ///
    /// # Safety
    /// As [`CopyEngine::submit`].
    unsafe fn submit(&mut self, steps: &[BoundStep], start: Start) -> Result<Ticket, Error>;

    /// Returns what a flag of this rank says, and resets it if it was signalled in a captured
    /// start. Returns `None` if the host cannot read the flag.
    fn try_consume(&self, flag: FlagAddress, start: Start) -> Option<FlagState>;

    /// Adds contributions to one target, on the calling thread.
    ///
    /// `steps` are additions to the same target, in order. All steps before them in the lane are
    /// complete.
    ///
    /// # Safety
    /// Nobody else accesses the target, or writes the sources. All of them are in host memory.
    unsafe fn reduce(&mut self, steps: &[BoundStep], start: Start);

    fn completed(&mut self) -> Result<Ticket, Error>;
    fn park(&mut self, limit: Duration) -> Result<(), Error>;
    fn is_busy(&self) -> bool;
    fn waker(&self) -> Waker;
    fn release(&mut self) -> Result<(), Error>;

    // The caller's stream is passed without its type. A stream of another backend is a mismatch.

    fn is_capturing(&mut self, stream: &dyn Any) -> Result<bool, Error>;
    fn fork(&mut self, from: &dyn Any) -> Result<(), Error>;
    fn join(&mut self, into: &dyn Any) -> Result<(), Error>;

    fn replay_wait(&mut self) -> Result<Option<Duration>, Error>;
}

pub(crate) type Ops<'a> = Vec<Op<'a, DynRegion, DynImport>>;

pub(crate) struct EnginePort {
    engine: DynEngine,
    backend: BackendId,
    buffers: Arc<OperationBuffers>,
    // The contents of the vectors are not used after a call, only their allocations.
    ops: Ops<'static>,
    sources: Vec<At<'static, DynRegion>>,
    addresses: Vec<*const u8>,
}

// SAFETY: the addresses are only used within a call.
unsafe impl Send for EnginePort {}

impl EnginePort {
    pub(crate) fn new(
        engine: DynEngine,
        backend: BackendId,
        buffers: Arc<OperationBuffers>,
    ) -> Self {
        let (ops, sources, addresses) = (Vec::new(), Vec::new(), Vec::new());
        Self { engine, backend, buffers, ops, sources, addresses }
    }

    fn streams(&mut self) -> Result<&mut dyn StreamOrdered<Error = DynError>, Error> {
        let (backend, kind) = (self.backend, self.engine.caps().kind);
        self.engine.streams().ok_or_else(|| {
            let text = format!(
                "{kind} engines of the backend {backend} cannot run on a stream; use `start`"
            );
            Error::new(ErrorKind::Mismatch, text)
        })
    }
}

impl Port for EnginePort {
    fn caps(&self) -> &Caps {
        self.engine.caps()
    }

    unsafe fn submit(&mut self, steps: &[BoundStep], start: Start) -> Result<Ticket, Error> {
        let mut sources = recycle(std::mem::take(&mut self.sources));
        let mut ops: Ops<'_> = recycle(std::mem::take(&mut self.ops));
        resolve(&self.buffers, steps, start, &mut sources, &mut ops);
        // SAFETY: the contract of this function is that of `CopyEngine::submit`.
        let submitted = unsafe { self.engine.submit(&ops) };
        self.ops = recycle(ops);
        self.sources = recycle(sources);
        submitted.map_err(|error| Error::of_fabric("submit ops", error))
    }

    fn try_consume(&self, flag: FlagAddress, start: Start) -> Option<FlagState> {
        let word = self.buffers.flag(flag, start)?;
        // Acquire: the data that the signal published is visible to steps that are submitted next.
        let value = word.load(Ordering::Acquire);
        let state = self.buffers.flag_state(value, flag.signalled_in(start), flag.peer);
        if state == FlagState::Signalled && start == Start::Captured {
            // Release: a writer that sees the 0 may signal again.
            word.store(0, Ordering::Release);
        }
        Some(state)
    }

    unsafe fn reduce(&mut self, steps: &[BoundStep], start: Start) {
        let Some(&BoundStep::Reduce { dst, bytes, .. }) = steps.first() else { return };
        let buffers = &self.buffers;
        let reduction = buffers.reduction();
        let pointer = |place| {
            let At { region, offset } = buffers.local(place, start);
            // The layout places it inside of the region.
            region.base().as_ptr().wrapping_add(offset as usize)
        };
        self.addresses.clear();
        self.addresses.extend(steps.iter().filter_map(|step| match *step {
            BoundStep::Reduce { src, .. } => Some(pointer(src).cast_const()),
            _ => None,
        }));
        // SAFETY: the caller guarantees it; places of one element type are aligned to it.
        unsafe { reduction.run(pointer(dst), &self.addresses, bytes as usize) };
    }

    fn completed(&mut self) -> Result<Ticket, Error> {
        self.engine
            .completed()
            .map_err(|error| Error::of_fabric("query the completed tickets", error))
    }

    fn park(&mut self, limit: Duration) -> Result<(), Error> {
        self.engine.park(limit).map_err(|error| Error::of_fabric("park the engine", error))
    }

    fn is_busy(&self) -> bool {
        self.engine.is_busy()
    }

    fn waker(&self) -> Waker {
        self.engine.waker()
    }

    fn release(&mut self) -> Result<(), Error> {
        self.engine.release().map_err(|error| Error::of_fabric("release the engine", error))
    }

    fn is_capturing(&mut self, stream: &dyn Any) -> Result<bool, Error> {
        let capturing = self.streams()?.is_capturing(stream);
        capturing.map_err(|error| Error::of_fabric("query whether the stream captures", error))
    }

    fn fork(&mut self, from: &dyn Any) -> Result<(), Error> {
        self.streams()?
            .fork(from)
            .map_err(|error| Error::of_fabric("fork the engine from the stream", error))
    }

    fn join(&mut self, into: &dyn Any) -> Result<(), Error> {
        self.streams()?
            .join(into)
            .map_err(|error| Error::of_fabric("join the engine to the stream", error))
    }

    fn replay_wait(&mut self) -> Result<Option<Duration>, Error> {
        let Some(streams) = self.engine.streams() else { return Ok(None) };
        streams.replay_wait().map_err(|error| Error::of_fabric("query the running graphs", error))
    }
}

/// Returns whether strided copies are submitted as one op. `on_host` tells that one of the two
/// regions is in memory of the host.
///
/// An engine on streams enqueues each row of such a region as a command of its own, and many
/// commands block the caller.
pub(crate) fn copies_rows(caps: &Caps, on_host: bool) -> bool {
    caps.rows && (caps.polled || !on_host)
}

#[inline(always)]
pub(crate) fn put<'a>(
    dst: At<'a, DynImport>,
    src: At<'a, DynRegion>,
    bytes: u64,
    rows: Rows,
) -> Op<'a, DynRegion, DynImport> {
    match rows {
        Rows::ONE => Op::Put { dst, src, bytes },
        rows => Op::PutRows { dst, src, bytes, rows },
    }
}

#[inline(always)]
pub(crate) fn get<'a>(
    dst: At<'a, DynRegion>,
    src: At<'a, DynImport>,
    bytes: u64,
    rows: Rows,
) -> Op<'a, DynRegion, DynImport> {
    match rows {
        Rows::ONE => Op::Get { dst, src, bytes },
        rows => Op::GetRows { dst, src, bytes, rows },
    }
}

/// Appends the ops of steps to `ops`, and the sources of their reductions to `sources`.
#[inline(always)]
pub(crate) fn resolve<'s, 'a: 's>(
    buffers: &'a OperationBuffers,
    steps: &[BoundStep],
    start: Start,
    sources: &'s mut Vec<At<'a, DynRegion>>,
    ops: &mut Ops<'s>,
) {
    sources.extend(steps.iter().filter_map(|step| match *step {
        BoundStep::Reduce { src, .. } => Some(buffers.local(src, start)),
        _ => None,
    }));
    let mut sources: &[At<'_, DynRegion>] = sources;
    let mut rest = steps;
    while let [step, others @ ..] = rest {
        rest = others;
        // Only operations that have been resized have copies of no bytes.
        if step.is_empty() {
            continue;
        }
        ops.push(match *step {
            BoundStep::Put { peer, dst, src, bytes, rows } => {
                let (dst, src) = (buffers.remote(peer, dst, start), buffers.local(src, start));
                put(dst, src, bytes, rows)
            }
            BoundStep::Get { peer, dst, src, bytes, rows } => {
                let (dst, src) = (buffers.local(dst, start), buffers.remote(peer, src, start));
                get(dst, src, bytes, rows)
            }
            BoundStep::Reduce { dst, bytes, .. } => {
                let (of_target, after) = additions(step, others);
                let (srcs, other_sources) = sources.split_at(1 + of_target.len());
                (rest, sources) = (after, other_sources);
                let (dst, reduction) = (buffers.local(dst, start), buffers.reduction());
                Op::Reduce { dst, srcs, bytes, reduction }
            }
            BoundStep::Signal { peer, flag } => {
                let value = buffers.signal_value(start, peer);
                Op::Signal { flag: buffers.remote_flag(peer, flag, start), value }
            }
            BoundStep::Wait { flag } => {
                let reset = start == Start::Captured;
                let value = buffers.flag_value_in(flag.signalled_in(start));
                Op::Wait { flag: buffers.local_flag(flag, start), value, reset }
            }
        });
    }
}

/// Returns those steps behind an addition that add to the same target, and the steps after them.
pub(crate) fn additions<'a>(
    step: &BoundStep,
    others: &'a [BoundStep],
) -> (&'a [BoundStep], &'a [BoundStep]) {
    let BoundStep::Reduce { dst: target, .. } = *step else { return others.split_at(0) };
    let adds = |step: &BoundStep| matches!(step, BoundStep::Reduce { dst, .. } if *dst == target);
    let count = others.iter().position(|step| !adds(step)).unwrap_or(others.len());
    others.split_at(count)
}

/// Returns how many steps make up at most `ops_max` ops. All additions to one target are one op.
pub(crate) fn steps_of_ops(steps: &[BoundStep], ops_max: usize) -> usize {
    let mut rest = steps;
    for _ in 0..ops_max {
        let [step, others @ ..] = rest else { break };
        rest = additions(step, others).1;
    }
    steps.len() - rest.len()
}

/// Divides steps into slices of at most `ops_max` ops.
pub(crate) fn slices(
    mut steps: &[BoundStep],
    ops_max: usize,
) -> impl Iterator<Item = &[BoundStep]> {
    std::iter::from_fn(move || {
        let (slice, rest) = steps.split_at(steps_of_ops(steps, ops_max));
        steps = rest;
        (!slice.is_empty()).then_some(slice)
    })
}

/// Reuses the allocation of a vector for values of another lifetime.
///
/// Collecting an emptied vector in place keeps its buffer. tests/tests/steady_state tests that a
/// start allocates nothing.
pub(crate) fn recycle<T, U>(mut values: Vec<T>) -> Vec<U> {
    const { assert!(size_of::<T>() == size_of::<U>()) };
    values.clear();
    values.into_iter().map(|_| unreachable!("cleared above")).collect()
}
