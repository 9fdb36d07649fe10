//! Ports: an engine and the regions of an operation, without their types.
//!
//! Above the port, a step names peer, buffer and offset. Below it, regions have the types of the fabric. One call takes a whole
//! slice, so dynamic dispatch costs nanoseconds per start.

use std::any::{Any, TypeId, type_name};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::{BackendId, Caps, CopyEngine, ErrorKind, Op, PeerMemory, Rank, Ticket};

use crate::error::Error;
use crate::run::turns::Start;
use crate::window::{FlagSpot, HostView, Spot, Windows};

/// A step with offsets, without types and without an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bound {
    Put { peer: Rank, dst: Spot, src: Spot, bytes: u64 },
    Get { peer: Rank, dst: Spot, src: Spot, bytes: u64 },
    Signal { peer: Rank, flag: FlagSpot },
    Wait { flag: FlagSpot },
}

/// A lane's engine with the regions of an operation.
pub(crate) trait Port: Send {
    fn caps(&self) -> &Caps;

    /// Submits a slice. Signals and waits carry the value of `start`.
    ///
    /// # Safety
    /// As [`CopyEngine::submit`].
    unsafe fn submit(&mut self, steps: &[Bound], start: Start) -> Result<Ticket, Error>;

    /// Returns a flag of this rank, if the host can read it.
    fn flag(&self, flag: FlagSpot, start: Start) -> Option<&AtomicU64>;

    fn completed(&mut self) -> Result<Ticket, Error>;
    fn park(&mut self, limit: Duration) -> Result<(), Error>;
    fn is_busy(&self) -> bool;
    fn waker(&self) -> Waker;
    fn release(&mut self) -> Result<(), Error>;

    // The caller's stream crosses the seam without its type. One of another backend is a mismatch.

    fn is_capturing(&mut self, stream: &dyn Any) -> Result<bool, Error>;
    fn fork(&mut self, from: &dyn Any) -> Result<(), Error>;
    fn join(&mut self, into: &dyn Any) -> Result<(), Error>;
}

type Ops<'a, E> = Vec<Op<'a, <E as CopyEngine>::Local, <E as CopyEngine>::Remote>>;

/// The port of an engine of any type.
pub(crate) struct Bind<E: CopyEngine, M: PeerMemory> {
    engine: E,
    backend: BackendId,
    windows: Arc<Windows<M>>,
    /// Empty between calls; only the allocation is reused.
    ops: Ops<'static, E>,
}

impl<E, M> Bind<E, M>
where
    M: PeerMemory,
    E: CopyEngine<Local = M::Local, Remote = M::Remote>,
{
    pub(crate) fn new(engine: E, backend: BackendId, windows: Arc<Windows<M>>) -> Self {
        Self { engine, backend, windows, ops: Vec::new() }
    }

    fn stream<'s>(&self, stream: &'s dyn Any) -> Result<&'s E::Stream, Error> {
        stream.downcast_ref().ok_or_else(|| {
            let backend = self.backend;
            let text = if TypeId::of::<E::Stream>() == TypeId::of::<Infallible>() {
                format!("the backend {backend} has no streams; use `start`")
            } else {
                let wanted = type_name::<E::Stream>();
                format!("the stream is of another type than {wanted} of the backend {backend}")
            };
            Error::new(ErrorKind::Mismatch, text)
        })
    }
}

impl<E, M> Port for Bind<E, M>
where
    M: PeerMemory,
    E: CopyEngine<Local = M::Local, Remote = M::Remote>,
{
    fn caps(&self) -> &Caps {
        self.engine.caps()
    }

    unsafe fn submit(&mut self, steps: &[Bound], start: Start) -> Result<Ticket, Error> {
        let mut ops: Ops<'_, E> = recycle(std::mem::take(&mut self.ops));
        ops.extend(steps.iter().map(|step| resolve(&self.windows, step, start)));
        // SAFETY: the caller's.
        let submitted = unsafe { self.engine.submit(&ops) };
        self.ops = recycle(ops);
        submitted.map_err(|error| Error::of_backend("submit", error))
    }

    fn flag(&self, flag: FlagSpot, start: Start) -> Option<&AtomicU64> {
        HostView::flag(&*self.windows, flag, start)
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
        capturing.map_err(|error| Error::of_backend("look at the stream", error))
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
    windows: &'a Windows<M>,
    step: &Bound,
    start: Start,
) -> Op<'a, M::Local, M::Remote> {
    let value = start.value();
    match *step {
        Bound::Put { peer, dst, src, bytes } => {
            Op::Put { dst: windows.remote(peer, dst, start), src: windows.local(src, start), bytes }
        }
        Bound::Get { peer, dst, src, bytes } => {
            Op::Get { dst: windows.local(dst, start), src: windows.remote(peer, src, start), bytes }
        }
        Bound::Signal { peer, flag } => {
            Op::Signal { flag: windows.flag_of(peer, flag, start), value }
        }
        Bound::Wait { flag } => {
            let reset = start == Start::Captured;
            Op::Wait { flag: windows.own_flag(flag, start), value, reset }
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
