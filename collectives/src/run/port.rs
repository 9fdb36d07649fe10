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
    Rank, Region, StreamOrdered, Ticket,
};

use crate::error::Error;
use crate::reduction::Reduction;
use crate::run::buffers::{BufferOffset, FlagAddress, FlagState, OperationBuffers, Start};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BoundStep {
    Put {
        peer: Rank,
        dst: BufferOffset,
        src: BufferOffset,
        bytes: u64,
    },
    Get {
        peer: Rank,
        dst: BufferOffset,
        src: BufferOffset,
        bytes: u64,
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
    fn is_empty(&self) -> bool {
        matches!(self, Self::Put { bytes: 0, .. } | Self::Get { bytes: 0, .. })
    }
}

pub(crate) trait Port: Send {
    fn caps(&self) -> &Caps;

    /// Submits copies and flag operations to the engine; signals and waits carry the value of `start`.
    ///
    /// # Safety
    /// As [`CopyEngine::submit`].
    unsafe fn submit(&mut self, steps: &[BoundStep], start: Start) -> Result<Ticket, Error>;

    /// Returns what a flag of this rank says, and resets it if it was signalled in a captured start. Returns `None` if
    /// the host cannot read the flag.
    fn try_consume(&self, flag: FlagAddress, start: Start) -> Option<FlagState>;

    /// Adds contributions to one target, on the calling thread.
    ///
    /// `steps` are additions to the same target, in order. All steps before them in the lane are complete.
    ///
    /// # Safety
    /// Nobody else accesses the target, or writes the sources. All of them are in host memory.
    unsafe fn reduce(&mut self, reduction: Reduction, steps: &[BoundStep], start: Start);

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
    /// The vector is empty between calls, so that only its allocation is reused.
    ops: Ops<'static>,
    /// The contributions of one addition; empty between calls.
    sources: Vec<*const u8>,
}

// SAFETY: the pointers are only used within a call.
unsafe impl Send for EnginePort {}

impl EnginePort {
    pub(crate) fn new(
        engine: DynEngine,
        backend: BackendId,
        buffers: Arc<OperationBuffers>,
    ) -> Self {
        Self { engine, backend, buffers, ops: Vec::new(), sources: Vec::new() }
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
        let mut ops: Ops<'_> = recycle(std::mem::take(&mut self.ops));
        // Only operations that have been resized have copies of no bytes.
        let steps = steps.iter().filter(|step| !step.is_empty());
        ops.extend(steps.map(|step| resolve(&self.buffers, step, start)));
        // SAFETY: the contract of this function is that of `CopyEngine::submit`.
        let submitted = unsafe { self.engine.submit(&ops) };
        self.ops = recycle(ops);
        submitted.map_err(|error| Error::of_fabric("submit ops", error))
    }

    fn try_consume(&self, flag: FlagAddress, start: Start) -> Option<FlagState> {
        let word = self.buffers.flag(flag, start)?;
        // Acquire: the data that the signal published is visible to steps that are submitted next.
        let value = word.load(Ordering::Acquire);
        let state = self.buffers.flag_state(value, flag.signalled_in(start));
        if state == FlagState::Signalled && start == Start::Captured {
            // Release: a writer that sees the 0 may signal again.
            word.store(0, Ordering::Release);
        }
        Some(state)
    }

    unsafe fn reduce(&mut self, reduction: Reduction, steps: &[BoundStep], start: Start) {
        let Some(&BoundStep::Reduce { dst, bytes, .. }) = steps.first() else { return };
        let buffers = &self.buffers;
        let pointer = |place| {
            let At { region, offset } = buffers.local(place, start);
            // The layout places it inside of the region.
            region.base().as_ptr().wrapping_add(offset as usize)
        };
        self.sources.clear();
        self.sources.extend(steps.iter().filter_map(|step| match *step {
            BoundStep::Reduce { src, .. } => Some(pointer(src).cast_const()),
            _ => None,
        }));
        // SAFETY: the caller guarantees it; places of one element type are aligned to it.
        unsafe { reduction.run(pointer(dst), &self.sources, bytes as usize) };
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

#[inline(always)]
pub(crate) fn resolve<'a>(
    buffers: &'a OperationBuffers,
    step: &BoundStep,
    start: Start,
) -> Op<'a, DynRegion, DynImport> {
    match *step {
        BoundStep::Put { peer, dst, src, bytes } => {
            Op::Put { dst: buffers.remote(peer, dst, start), src: buffers.local(src, start), bytes }
        }
        BoundStep::Get { peer, dst, src, bytes } => {
            Op::Get { dst: buffers.local(dst, start), src: buffers.remote(peer, src, start), bytes }
        }
        BoundStep::Reduce { .. } => unreachable!("a lane adds by itself"),
        BoundStep::Signal { peer, flag } => {
            let value = buffers.signal_value(start);
            Op::Signal { flag: buffers.remote_flag(peer, flag, start), value }
        }
        BoundStep::Wait { flag } => {
            let reset = start == Start::Captured;
            let value = buffers.flag_value_in(flag.signalled_in(start));
            Op::Wait { flag: buffers.local_flag(flag, start), value, reset }
        }
    }
}

/// Collecting an emptied vector in place keeps its buffer. tests/tests/steady_state tests that a start allocates nothing.
pub(crate) fn recycle<'b>(mut ops: Ops<'_>) -> Ops<'b> {
    ops.clear();
    ops.into_iter().map(|_| unreachable!("cleared above")).collect()
}
