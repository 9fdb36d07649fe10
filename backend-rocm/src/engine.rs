//! The queue of copies, signals and waits.
//!
//! There are two kinds ([`EngineKind`]). Streams of HIP queue waits, take the caller's stream and are
//! recorded into graphs; that queue is `peerlane_toolkit::streams`, which CUDA has too, over the calls
//! in `hip/`:
//!
//! | the contract | here |
//! | --- | --- |
//! | put, get | `hipMemcpyAsync` on the main stream, or on one of those beside it, which peers take in turn; pieces of at most 128 MiB |
//! | signals, waits, resets | `hipStreamWriteValue64` and `hipStreamWaitValue64`; neighbours in one `hipStreamBatchMemOp` where a trial shows that their order is kept |
//! | ticket | an event on the main stream at the end of a slice |
//! | `completed` | looks at these events |
//! | `fork` | the caller's stream becomes the main stream, until the `join` |
//! | a slice while that stream captures | the same calls, where a trial of replays has passed; older runtimes ran them at once |
//! | `release` | a stream of the highest priority writes the awaited values |
//!
//! SDMA engines of the HSA runtime are chosen one by one and driven by the rank; see `sdma.rs`.

mod hip;
mod kind;
mod sdma;
mod stream;

use std::any::Any;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::{Caps, CopyEngine, Op, StreamOrdered, Ticket};
use peerlane_toolkit::device::Fault;
use peerlane_toolkit::peers::Purpose;
use peerlane_toolkit::streams;
pub(crate) use peerlane_toolkit::streams::{EngineSetup, probe_signal};
pub use peerlane_toolkit::streams::{OwnCopy, SignalBy};

pub use self::kind::EngineKind;
use self::sdma::Sdma;
pub use self::sdma::SdmaWay;
pub(crate) use self::sdma::striped_rate;
pub use self::stream::Stream;
use crate::device::Context;
use crate::error::Error;
use crate::memory::{Local, Remote};

/// One in-order queue over ROCm.
#[derive(Debug)]
pub struct Engine(Queue);

/// Of one kind.
#[derive(Debug)]
enum Queue {
    Streams(Box<streams::Engine<Context>>),
    Sdma(Box<Sdma>),
}

impl Engine {
    /// An engine that reaches the peers of `purpose`.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if a runtime or the device lacks what the kind needs; the runtime's
    /// refusal.
    pub(crate) fn open(
        context: &Arc<Context>,
        kind: EngineKind,
        own_copy: OwnCopy,
        purpose: &Purpose,
    ) -> Result<Self, Error> {
        Ok(Self(match kind.chosen(context, purpose) {
            EngineKind::Sdma => {
                Queue::Sdma(Box::new(Sdma::open(context, purpose.rank, &purpose.peers)?))
            }
            EngineKind::Auto | EngineKind::Streams => {
                let setup = EngineSetup {
                    rank: purpose.rank,
                    peers: purpose.peers.iter().map(|peer| peer.peer).collect(),
                    signal: purpose.signal,
                    own_copy,
                    staged: purpose.is_staged(),
                };
                Queue::Streams(Box::new(streams::Engine::open(Arc::clone(context), setup)?))
            }
        }))
    }

    /// What it is; never [`EngineKind::Auto`].
    pub fn kind(&self) -> EngineKind {
        match self.0 {
            Queue::Streams(_) => EngineKind::Streams,
            Queue::Sdma(_) => EngineKind::Sdma,
        }
    }

    /// Which SDMA engines copy to and from each peer; nothing of streams, which do not say.
    pub fn sdma_ways(&self) -> Vec<SdmaWay> {
        match &self.0 {
            Queue::Streams(_) => Vec::new(),
            Queue::Sdma(engine) => engine.ways(),
        }
    }

    fn stream_engine(&mut self) -> Result<&mut streams::Engine<Context>, Error> {
        match &mut self.0 {
            Queue::Streams(engine) => Ok(engine),
            Queue::Sdma(_) => {
                Err(Fault::Argument("SDMA engines take no streams".to_owned()).into())
            }
        }
    }
}

impl CopyEngine for Engine {
    type Error = Error;
    type Local = Local;
    type Remote = Remote;

    fn caps(&self) -> &Caps {
        match &self.0 {
            Queue::Streams(engine) => engine.caps(),
            Queue::Sdma(engine) => engine.caps(),
        }
    }

    unsafe fn submit(&mut self, ops: &[Op<'_, Local, Remote>]) -> Result<Ticket, Error> {
        match &mut self.0 {
            // SAFETY: the caller's, by the same contract.
            Queue::Streams(engine) => unsafe { engine.submit(ops) },
            // SAFETY: as above.
            Queue::Sdma(engine) => unsafe { engine.submit(ops) },
        }
    }

    fn completed(&mut self) -> Result<Ticket, Error> {
        match &mut self.0 {
            Queue::Streams(engine) => engine.completed(),
            Queue::Sdma(engine) => engine.completed(),
        }
    }

    fn park(&mut self, limit: Duration) -> Result<(), Error> {
        match &mut self.0 {
            Queue::Streams(engine) => engine.park(limit),
            Queue::Sdma(engine) => engine.park(limit),
        }
    }

    /// The device makes progress by itself.
    fn is_busy(&self) -> bool {
        false
    }

    fn waker(&self) -> Waker {
        match &self.0 {
            Queue::Streams(engine) => engine.waker(),
            Queue::Sdma(engine) => engine.waker(),
        }
    }

    fn release(&mut self) -> Result<(), Error> {
        match &mut self.0 {
            Queue::Streams(engine) => engine.release(),
            Queue::Sdma(engine) => engine.release(),
        }
    }

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = Error>> {
        match &self.0 {
            Queue::Streams(_) => Some(self),
            Queue::Sdma(_) => None,
        }
    }
}

impl StreamOrdered for Engine {
    type Error = Error;

    fn is_capturing(&mut self, stream: &dyn Any) -> Result<bool, Error> {
        self.stream_engine()?.is_capturing(&stream_of(stream)?.0)
    }

    fn fork(&mut self, from: &dyn Any) -> Result<(), Error> {
        self.stream_engine()?.fork(&stream_of(from)?.0)
    }

    fn join(&mut self, into: &dyn Any) -> Result<(), Error> {
        self.stream_engine()?.join(&stream_of(into)?.0)
    }
}

fn stream_of(stream: &dyn Any) -> Result<&Stream, Error> {
    peerlane_hal::stream_of(stream).map_err(|text| Fault::Mismatch(text).into())
}
