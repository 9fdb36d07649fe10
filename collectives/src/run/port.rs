//! Erases the types of engines and regions from the executor.
//!
//! Above a port, a step names peer, buffer and offset. Below it, regions have the types of the fabric. One call takes a whole
//! slice, so dynamic dispatch costs nanoseconds per start.

use std::any::{Any, TypeId, type_name};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::{BackendId, Caps, CopyEngine, ErrorKind, Op, PeerMemory, Rank, Ticket};

use crate::error::Error;
use crate::run::buffers::{BufferOffset, FlagAddress, HostView, OperationBuffers, Start};

/// A step with offsets in buffers, but without types and without an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BoundStep {
    Put { peer: Rank, dst: BufferOffset, src: BufferOffset, bytes: u64 },
    Get { peer: Rank, dst: BufferOffset, src: BufferOffset, bytes: u64 },
    Signal { peer: Rank, flag: FlagAddress },
    Wait { flag: FlagAddress },
}

/// The engine of a lane with the buffers of an operation.
pub(crate) trait Port: Send {
    fn caps(&self) -> &Caps;

    /// Submits a slice. Signals and waits carry the value of `start`.
    ///
    /// # Safety
    /// As [`CopyEngine::submit`].
    unsafe fn submit(&mut self, steps: &[BoundStep], start: Start) -> Result<Ticket, Error>;

    /// Returns a flag of this rank, if the host can read it.
    fn flag(&self, flag: FlagAddress, start: Start) -> Option<&AtomicU64>;

    fn completed(&mut self) -> Result<Ticket, Error>;
    fn park(&mut self, limit: Duration) -> Result<(), Error>;
    fn is_busy(&self) -> bool;
    fn waker(&self) -> Waker;
    fn release(&mut self) -> Result<(), Error>;

    // The caller's stream is passed without its type. A stream of another backend is a mismatch.

    fn is_capturing(&mut self, stream: &dyn Any) -> Result<bool, Error>;
    fn fork(&mut self, from: &dyn Any) -> Result<(), Error>;
    fn join(&mut self, into: &dyn Any) -> Result<(), Error>;
}

type Ops<'a, E> = Vec<Op<'a, <E as CopyEngine>::Local, <E as CopyEngine>::Remote>>;

/// Implements [`Port`] for any engine.
pub(crate) struct EnginePort<E: CopyEngine, M: PeerMemory> {
    engine: E,
    backend: BackendId,
    buffers: Arc<OperationBuffers<M>>,
    /// Empty between calls; only the allocation is reused.
    ops: Ops<'static, E>,
}

impl<E, M> EnginePort<E, M>
where
    M: PeerMemory,
    E: CopyEngine<Local = M::Local, Remote = M::Remote>,
{
    pub(crate) fn new(engine: E, backend: BackendId, buffers: Arc<OperationBuffers<M>>) -> Self {
        Self { engine, backend, buffers, ops: Vec::new() }
    }

    fn stream<'s>(&self, stream: &'s dyn Any) -> Result<&'s E::Stream, Error> {
        stream.downcast_ref().ok_or_else(|| {
            let backend = self.backend;
            let text = if TypeId::of::<E::Stream>() == TypeId::of::<Infallible>() {
                format!("the backend {backend} has no streams; use `start`")
            } else {
                let expected = type_name::<E::Stream>();
                format!("the stream is not the {expected} of the backend {backend}")
            };
            Error::new(ErrorKind::Mismatch, text)
        })
    }
}

impl<E, M> Port for EnginePort<E, M>
where
    M: PeerMemory,
    E: CopyEngine<Local = M::Local, Remote = M::Remote>,
{
    fn caps(&self) -> &Caps {
        self.engine.caps()
    }

    unsafe fn submit(&mut self, steps: &[BoundStep], start: Start) -> Result<Ticket, Error> {
        let mut ops: Ops<'_, E> = recycle(std::mem::take(&mut self.ops));
        ops.extend(steps.iter().map(|step| resolve(&self.buffers, step, start)));
        // SAFETY: the contract of this function is that of `CopyEngine::submit`.
        let submitted = unsafe { self.engine.submit(&ops) };
        self.ops = recycle(ops);
        submitted.map_err(|error| Error::of_backend("submit", error))
    }

    fn flag(&self, flag: FlagAddress, start: Start) -> Option<&AtomicU64> {
        HostView::flag(&*self.buffers, flag, start)
    }

    fn completed(&mut self) -> Result<Ticket, Error> {
        self.engine.completed().map_err(|error| Error::of_backend("completed", error))
    }

    fn park(&mut self, limit: Duration) -> Result<(), Error> {
        self.engine.park(limit).map_err(|error| Error::of_backend("park", error))
    }

    fn is_busy(&self) -> bool {
        self.engine.is_busy()
    }

    fn waker(&self) -> Waker {
        self.engine.waker()
    }

    fn release(&mut self) -> Result<(), Error> {
        self.engine.release().map_err(|error| Error::of_backend("release", error))
    }

    fn is_capturing(&mut self, stream: &dyn Any) -> Result<bool, Error> {
        let stream = self.stream(stream)?;
        let capturing = self.engine.is_capturing(stream);
        capturing.map_err(|error| Error::of_backend("query the capture of the stream", error))
    }

    fn fork(&mut self, from: &dyn Any) -> Result<(), Error> {
        let from = self.stream(from)?;
        self.engine.fork(from).map_err(|error| Error::of_backend("fork from the stream", error))
    }

    fn join(&mut self, into: &dyn Any) -> Result<(), Error> {
        let into = self.stream(into)?;
        self.engine.join(into).map_err(|error| Error::of_backend("join the stream", error))
    }
}

fn resolve<'a, M: PeerMemory>(
    buffers: &'a OperationBuffers<M>,
    step: &BoundStep,
    start: Start,
) -> Op<'a, M::Local, M::Remote> {
    let value = start.value();
    match *step {
        BoundStep::Put { peer, dst, src, bytes } => {
            Op::Put { dst: buffers.remote(peer, dst, start), src: buffers.local(src, start), bytes }
        }
        BoundStep::Get { peer, dst, src, bytes } => {
            Op::Get { dst: buffers.local(dst, start), src: buffers.remote(peer, src, start), bytes }
        }
        BoundStep::Signal { peer, flag } => {
            Op::Signal { flag: buffers.remote_flag(peer, flag, start), value }
        }
        BoundStep::Wait { flag } => {
            let reset = start == Start::Captured;
            Op::Wait { flag: buffers.local_flag(flag, start), value, reset }
        }
    }
}

/// Reuses an allocation for ops of another lifetime.
///
/// Collecting an emptied vector in place keeps its buffer. tests/tests/steady_state.rs tests that a start allocates nothing.
fn recycle<'b, L, R>(mut ops: Vec<Op<'_, L, R>>) -> Vec<Op<'b, L, R>> {
    ops.clear();
    ops.into_iter().map(|_| unreachable!("cleared above")).collect()
}
