//! Implements the engines of the ROCm backend, over HIP streams or over SDMA engines.
//!
//! There are two kinds of engine ([`EngineKind`]). Streams of HIP queue waits, can use the caller's
//! stream and can be captured into graphs. Their queue is `peerlane_toolkit::streams`, which CUDA
//! uses too; `hip.rs` holds the calls of HIP that it is made of. SDMA engines of the HSA runtime
//! are selected one by one, and the rank drives them; see `sdma/`.
//!
//! A device that can wait for flags on streams offers both kinds, streams first; other devices
//! offer SDMA engines only. The caller chooses: streams take one SDMA engine for a copy, and SDMA
//! engines reach the rate of a link that several of them serve, but the host drives them. The
//! offers say both.
//!
//! With streams the contract maps to HIP like this:
//!
//! | contract | HIP |
//! | --- | --- |
//! | put, get | `hipMemcpyAsync` on the main stream or on one of the peer streams, to which peers are assigned in turn; pieces of at most 128 MiB |
//! | signals, waits, resets | `hipStreamWriteValue64` and `hipStreamWaitValue64`; adjacent ones in one `hipStreamBatchMemOp` if a test shows that their order is kept |
//! | ticket | an event on the main stream at the end of a slice |
//! | `completed` | queries these events |
//! | `fork` | the caller's stream becomes the main stream until the `join` |
//! | a slice while that stream captures | the same calls, if a test of replays has passed; older runtimes ran them at once |
//! | `release` | a stream of the highest priority writes the awaited values |

mod hip;
mod sdma;

use std::ffi::c_void;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::{Caps, CopyEngine, EngineOffer, Op, Reducer, StreamOrdered, Ticket};
use peerlane_toolkit::device::StreamHandle;
use peerlane_toolkit::peers::EngineRequest;
use peerlane_toolkit::streams;
pub(crate) use peerlane_toolkit::streams::{EngineSetup, probe_signal};
pub use peerlane_toolkit::streams::{SelfCopy, SignalBy};

pub use self::sdma::SdmaEngines;
use self::sdma::SdmaQueue;
pub(crate) use self::sdma::{has_sdma, striped_rate};
use crate::device::Context;
use crate::error::Error;
use crate::memory::{Local, Remote};

/// The assumed bandwidth of one SDMA engine, and of a copy on a stream, in bytes per second.
///
/// It is about the rate of one XGMI link of an MI250X or MI300X according to AMD, 50 GB/s. It was
/// not measured for Peerlane.
const ENGINE_RATE: u64 = 50_000_000_000;
/// The time that driving SDMA engines from the host adds to one operation.
///
/// It is twice `SLEEP_MAX` of `sdma/mod.rs`, once for the flags `ready` and once for the flags
/// `arrived`.
const HOST_DRIVE_TIME: Duration = Duration::from_micros(100);

/// An in-order queue of ops that runs on HIP streams or on SDMA engines.
#[derive(Debug)]
pub struct Engine(Queue);

#[derive(Debug)]
enum Queue {
    Streams(Box<streams::Engine<Context>>),
    Sdma(Box<SdmaQueue>),
}

impl Engine {
    pub(crate) fn open(
        context: &Arc<Context>,
        self_copy: SelfCopy,
        request: &EngineRequest,
    ) -> Result<Self, Error> {
        if request.kind == EngineKind::Sdma.name() {
            let queue = SdmaQueue::open(context, request.rank, &request.peers)?;
            return Ok(Self(Queue::Sdma(Box::new(queue))));
        }

        let setup = EngineSetup::new(request, self_copy, None);
        let engine = streams::Engine::open(Arc::clone(context), setup)?;
        Ok(Self(Queue::Streams(Box::new(engine))))
    }

    /// Returns whether the engine uses streams or SDMA engines, never [`EngineKind::Auto`].
    pub fn kind(&self) -> EngineKind {
        match self.0 {
            Queue::Streams(_) => EngineKind::Streams,
            Queue::Sdma(_) => EngineKind::Sdma,
        }
    }

    /// Returns the SDMA engines that copy to and from each peer. The list is empty for streams, for
    /// which the runtime chooses the engines.
    pub fn sdma_engines(&self) -> Vec<SdmaEngines> {
        match &self.0 {
            Queue::Streams(_) => Vec::new(),
            Queue::Sdma(engine) => engine.engines(),
        }
    }
}

// SAFETY: both kinds of engines uphold the contract.
unsafe impl CopyEngine for Engine {
    type Error = Error;
    type Local = Local;
    type Remote = Remote;

    fn caps(&self) -> &Caps {
        match &self.0 {
            Queue::Streams(engine) => engine.caps(),
            Queue::Sdma(engine) => engine.caps(),
        }
    }

    /// Returns `None`, because there is no HIP kernel for reductions yet (docs/ROCM.md).
    fn prepare_reduce(&mut self) -> Result<Option<Reducer>, Error> {
        match &mut self.0 {
            Queue::Streams(engine) => engine.prepare_reduce(),
            Queue::Sdma(_) => Ok(None),
        }
    }

    unsafe fn submit(&mut self, ops: &[Op<'_, Local, Remote>]) -> Result<Ticket, Error> {
        match &mut self.0 {
            // SAFETY: the caller upholds the contract, which is the same.
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

    fn compute_bytes(&mut self, ops: &[Op<'_, Local, Remote>], captured: bool) -> u64 {
        match &mut self.0 {
            Queue::Streams(engine) => engine.compute_bytes(ops, captured),
            Queue::Sdma(_) => 0,
        }
    }

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = Error>> {
        match &mut self.0 {
            Queue::Streams(engine) => Some(&mut **engine),
            Queue::Sdma(_) => None,
        }
    }
}

/// A HIP stream of the caller, on which an engine can enqueue its work.
#[derive(Clone, Debug)]
pub struct Stream(streams::Stream);

impl Stream {
    /// Wraps a HIP stream handle, so that an engine can be ordered against the stream.
    ///
    /// Default streams are rejected when they are used. The legacy default stream would make the
    /// caller's blocking streams wait for peers, and a per-thread default stream differs on every
    /// thread.
    ///
    /// # Safety
    /// The stream must live until every engine that was forked from it has been forked from another
    /// stream or dropped.
    pub unsafe fn from_raw(raw: *mut c_void) -> Self {
        // SAFETY: the caller upholds the contract of this function.
        Self(unsafe { streams::Stream::new(StreamHandle(raw), None) })
    }
}

impl peerlane_hal::Stream for Stream {}

impl AsRef<streams::Stream> for Stream {
    fn as_ref(&self) -> &streams::Stream {
        &self.0
    }
}

/// Returns the kinds of engines that a device offers, as far as `kind` allows them.
///
/// # Errors
/// The reason why the device has no engines on streams, if no other kind is allowed.
pub(crate) fn offers(context: &Context, kind: EngineKind) -> Result<Vec<EngineOffer>, Error> {
    let streams = || {
        let offer = streams::offer(context)?;
        Ok::<_, Error>(EngineOffer { bytes_per_second: Some(ENGINE_RATE as f64), ..offer })
    };
    let sdma = || {
        let rate = striped_rate(context);
        EngineOffer {
            bytes_per_second: (rate > 0).then_some(rate as f64),
            start_seconds: HOST_DRIVE_TIME.as_secs_f64(),
            ..EngineOffer::new(sdma::CAPS)
        }
    };

    Ok(match kind.for_device(context) {
        EngineKind::Sdma => vec![sdma()],
        EngineKind::Streams if kind == EngineKind::Auto && has_sdma() => vec![streams()?, sdma()],
        _ => vec![streams()?],
    })
}

/// How an engine copies, with HIP streams or with SDMA engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// Offers streams and SDMA engines, or only SDMA engines if the device cannot wait for flags on
    /// streams.
    ///
    /// Streams come first, because they need no host to drive them and can be captured. A group
    /// chooses SDMA engines for an operation that needs no streams if they are predicted to be
    /// faster.
    #[default]
    Auto,
    /// Copies on HIP streams; the runtime selects their SDMA engines.
    Streams,
    /// Copies with SDMA engines that Peerlane selects one by one and drives from the host.
    Sdma,
}

impl EngineKind {
    /// Returns a short name of the engine kind for reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Streams => "streams",
            Self::Sdma => "sdma",
        }
    }

    pub(crate) fn for_device(self, context: &Context) -> Self {
        match self {
            Self::Auto if streams::probe_waits(context).is_err() => Self::Sdma,
            Self::Auto => Self::Streams,
            kind => kind,
        }
    }
}

/// Returns the bandwidth of a copy over several SDMA engines in bytes per second, or 0 if it is not
/// known.
fn rate_of_engines(engines: usize, link: Option<f64>) -> u64 {
    let link = link.map_or(0, |rate| rate as u64);
    link.min(ENGINE_RATE.saturating_mul(engines as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    #[test]
    fn the_link_limits_the_rate_of_its_engines() {
        assert_eq!(rate_of_engines(2, Some(200e9)), 100 * GB);
        assert_eq!(rate_of_engines(4, Some(64e9)), 64 * GB);
        assert_eq!(rate_of_engines(4, None), 0);
        assert_eq!(
            rate_of_engines(0, Some(64e9)),
            0,
            "the runtime selects an engine for each copy"
        );
    }
}
