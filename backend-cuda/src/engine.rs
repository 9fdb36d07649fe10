//! The queue of copies, signals and waits, on streams of the driver.
//!
//! The queue itself is `peerlane_toolkit::streams`, which ROCm has too; here stand the calls of CUDA
//! that it is made of, and what was measured on NVIDIA's devices.
//!
//! | the contract | here |
//! | --- | --- |
//! | put, get | on the main stream or on one beside it; neighbours on one stream in one `cuMemcpyBatchAsync`, or each a `cuMemcpyAsync` |
//! | neighbouring signals, waits, resets | one `cuStreamBatchMemOp` on the main stream |
//! | ticket | an event on the main stream at the end of a slice |
//! | `completed` | looks at these events, in a mode in which captures of others do not mind |
//! | `fork` | the caller's stream becomes the main stream, until the `join` |
//! | a slice while that stream captures | the same calls, with streams and events of their own, and no ticket |
//! | `release` | a stream of its own writes the awaited values |

mod copies;
mod graphs;
mod queue;
mod stream;

mod words;

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::{Caps, CopyEngine, Op, Ticket};
use peerlane_toolkit::streams::{self, Abilities, Found, StreamDevice};
pub(crate) use peerlane_toolkit::streams::{EngineSetup, probe_signal};
pub use peerlane_toolkit::streams::{OwnCopy, SignalBy};

pub use self::stream::Stream;
use crate::device::Context;
use crate::error::Error;
use crate::memory::{Local, Remote};

/// Copies to peers on two streams were the best of those that were tried, for all sizes from 4 KiB
/// up; a third one was worse from 64 MiB up (docs/perf/cuda-streams.md).
const PEER_STREAMS_MAX: usize = 2;
/// docs/perf/cuda-submission.md
const ONE_STREAM_BYTES_MAX: u64 = 512 << 10;
/// The same page. Up to here a kernel costs the host more than the link takes.
const OWN_LINK_BYTES_MAX: u64 = 256 << 10;
/// In a graph it also costs a branch.
const OWN_LINK_CAPTURED_BYTES_MAX: u64 = 512 << 10;
/// A graph with the own copy on a third branch ran its branches one after the other.
const CAPTURED_SIDES_MAX: usize = 1;

impl StreamDevice for Context {
    fn abilities(&self) -> Result<Abilities, Error> {
        Ok(Abilities {
            copy_engines: self.copy_engines,
            peer_streams_max: PEER_STREAMS_MAX,
            one_stream_bytes_max: ONE_STREAM_BYTES_MAX,
            captured_sides_max: CAPTURED_SIDES_MAX,
            piece_bytes_max: u64::MAX,
            own_link_bytes_max: Some(OWN_LINK_BYTES_MAX),
            own_link_captured_bytes_max: Some(OWN_LINK_CAPTURED_BYTES_MAX),
        })
    }

    fn found() -> &'static Found<Error> {
        static FOUND: Found<Error> = Found::new();
        &FOUND
    }
}

/// One in-order queue over CUDA.
#[derive(Debug)]
pub struct Engine(streams::Engine<Context>);

impl Engine {
    /// An engine that reaches `setup.peers`.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the driver or the device lacks what signals and waits need.
    pub(crate) fn open(context: Arc<Context>, setup: EngineSetup) -> Result<Self, Error> {
        streams::Engine::open(context, setup).map(Self)
    }
}

impl CopyEngine for Engine {
    type Error = Error;
    type Local = Local;
    type Remote = Remote;
    type Stream = Stream;

    fn caps(&self) -> &Caps {
        self.0.caps()
    }

    unsafe fn submit(&mut self, ops: &[Op<'_, Local, Remote>]) -> Result<Ticket, Error> {
        // SAFETY: the caller's, by the same contract.
        unsafe { self.0.submit(ops) }
    }

    fn completed(&mut self) -> Result<Ticket, Error> {
        self.0.completed()
    }

    fn park(&mut self, limit: Duration) -> Result<(), Error> {
        self.0.park(limit)
    }

    /// The device makes progress by itself.
    fn is_busy(&self) -> bool {
        false
    }

    fn waker(&self) -> Waker {
        self.0.waker()
    }

    fn release(&mut self) -> Result<(), Error> {
        self.0.release()
    }

    fn is_capturing(&mut self, stream: &Stream) -> Result<bool, Error> {
        self.0.is_capturing(&stream.0)
    }

    fn fork(&mut self, from: &Stream) -> Result<(), Error> {
        self.0.fork(&from.0)
    }

    fn join(&mut self, into: &Stream) -> Result<(), Error> {
        self.0.join(&into.0)
    }
}
