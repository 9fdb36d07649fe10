//! Layers over the engines of a backend, which trace, delay, throttle, restrict or fail them.
//!
//! A layer makes engines; [`Wrapped`] is a fabric with the engines of a layer and the regions and
//! keys of the backend. Everything that runs on a fabric runs on a wrapped one, which can be
//! wrapped again. A correct layer keeps the contract; the conformance suite runs over each of them.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `trace` | writes every op and completion to a log |
//! | `delay` | holds ops back and reports completion late, by a seed |
//! | `throttle` | limits the rate and delays every effect |
//! | `downgrade` | removes capabilities |
//! | `fail_at` | fails at a chosen op |
//! | `streams` | gives engines streams and captured graphs |
//! | `hold` | flags that hold ops back until they are due |
//! | `forward` | a macro that forwards calls to the inner engine |
//! | `error` | the error of a wrapped fabric |

mod delay;
mod downgrade;
mod error;
mod fail_at;
mod forward;
mod hold;
mod kinds;
mod streams;
mod throttle;
mod trace;

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use peerlane_hal::{
    BackendId, Caps, CopyEngine, Deadline, DynRegion, EngineOffer, EngineRequirements, ErrorKind,
    Fabric, Link, PeerMemory, Rank, Role,
};

pub use delay::{Delay, DelayLayer};
pub use downgrade::{Downgrade, DowngradeLayer};
pub use error::Error;
pub use fail_at::{FailAt, FailAtLayer};
pub use kinds::KindsLayer;
pub use streams::{Graph, Stream, StreamLayer, Streams};
pub use throttle::{Throttle, ThrottleLayer};
pub use trace::{Event, Trace, TraceLayer, TraceLog};

/// The type of the memory regions that a rank registers with the fabric.
pub type Local<F> = <<F as Fabric>::Memory as PeerMemory>::Local;
/// The type of the peers' memory regions that a rank imports through the fabric.
pub type Remote<F> = <<F as Fabric>::Memory as PeerMemory>::Remote;

/// Wraps the engines of a fabric, for example to trace or delay their ops.
///
/// # Safety
/// An engine that [`engine`](Self::engine) creates reaches regions of the memory of `fabric`, of
/// its rank and of its connected peers.
pub unsafe trait Layer<F: Fabric>: Clone + Send + Sync + 'static {
    /// The type of the engines that the layer creates.
    type Engine: CopyEngine<Error = Error<F::Error>, Local = Local<F>, Remote = Remote<F>> + 'static;

    /// Creates a wrapped engine over one or more engines of `fabric`. `number` counts the engines
    /// of the fabric from 0.
    ///
    /// # Errors
    /// Returns the error of the fabric, or the reason why the layer cannot work on it.
    fn engine(
        &self,
        fabric: &F,
        number: u64,
        requirements: EngineRequirements,
    ) -> Result<Self::Engine, Error<F::Error>>;

    /// Returns why the layer cannot work on engines with such capabilities, or `None` if it can.
    fn missing(&self, caps: &Caps) -> Option<String> {
        let _ = caps;
        None
    }

    /// Returns the kinds of engines that a fabric offers, as changed by the layer.
    fn offers(&self, own: Vec<EngineOffer>) -> Vec<EngineOffer> {
        own
    }

    /// Returns the medium and bandwidth of the link to a peer, as changed by the layer.
    fn link(&self, link: Link) -> Link {
        link
    }

    /// Makes the next submission to `engine` fail with an error that poisons it, and returns the
    /// kind of that error. Returns `None` if the layer cannot do this. For tests of the behaviour
    /// after a failure.
    fn break_engine(engine: &mut Self::Engine) -> Option<ErrorKind> {
        let _ = engine;
        None
    }
}

/// A fabric whose engines are wrapped by a layer, for example to trace or delay them.
#[derive(Debug)]
pub struct Wrapped<F, L> {
    fabric: F,
    layer: L,
    engines: AtomicU64,
}

impl<F: Fabric, L: Layer<F>> Wrapped<F, L> {
    /// Wraps the engines of `fabric` with `layer`.
    pub fn new(fabric: F, layer: L) -> Self {
        Self { fabric, layer, engines: AtomicU64::new(0) }
    }
}

// SAFETY: the layer passes all calls on to an implementation that upholds the contract.
unsafe impl<F: Fabric, L: Layer<F>> Fabric for Wrapped<F, L> {
    type Error = Error<F::Error>;
    type Memory = Memory<F::Memory>;
    type Engine = L::Engine;

    fn backend(&self) -> BackendId {
        self.fabric.backend()
    }

    fn rank(&self) -> Rank {
        self.fabric.rank()
    }

    fn memory(&self) -> &Self::Memory {
        Memory::of_inner(self.fabric.memory())
    }

    fn address(&self) -> Vec<u8> {
        self.fabric.address()
    }

    fn connect(
        &mut self,
        peer: Rank,
        address: &[u8],
        deadline: Deadline,
    ) -> Result<(), Self::Error> {
        self.fabric.connect(peer, address, deadline).map_err(Error::Inner)
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        self.fabric.link(peer).map(|link| self.layer.link(link))
    }

    fn moves(&self) -> u64 {
        self.fabric.moves()
    }

    fn reopen(&self, rank: Rank, ranks: usize) -> Result<Self, Self::Error> {
        let fabric = self.fabric.reopen(rank, ranks).map_err(Error::Inner)?;
        Ok(Self::new(fabric, self.layer.clone()))
    }

    fn offers(&self) -> Result<Vec<EngineOffer>, Self::Error> {
        let mut own = self.fabric.offers().map_err(Error::Inner)?;
        // A layer changes ops, and a launch does not consist of ops.
        own.retain(|offer| offer.fused.is_none());
        Ok(self.layer.offers(own))
    }

    fn engine(&self, requirements: EngineRequirements) -> Result<L::Engine, Self::Error> {
        let number = self.engines.fetch_add(1, Ordering::Relaxed);
        self.layer.engine(&self.fabric, number, requirements)
    }
}

/// The memory of a wrapped fabric, which differs from the backend's memory only in its error type.
#[repr(transparent)]
pub struct Memory<M>(M);

impl<M> Memory<M> {
    fn of_inner(inner: &M) -> &Self {
        // SAFETY: `repr(transparent)`: both types have the same layout, and the reference keeps its
        // lifetime.
        unsafe { NonNull::from(inner).cast().as_ref() }
    }
}

impl<M> fmt::Debug for Memory<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").finish_non_exhaustive()
    }
}

// SAFETY: the layer passes all calls on to an implementation that upholds the contract.
unsafe impl<M: PeerMemory> PeerMemory for Memory<M> {
    type Error = Error<M::Error>;
    type Key = M::Key;
    type Local = M::Local;
    type Remote = M::Remote;

    fn allocate(&self, bytes: u64, role: Role) -> Result<M::Local, Self::Error> {
        self.0.allocate(bytes, role).map_err(Error::Inner)
    }

    fn allocate_on_demand(&self, bytes: u64, role: Role) -> Result<M::Local, Self::Error> {
        self.0.allocate_on_demand(bytes, role).map_err(Error::Inner)
    }

    fn allocate_polled_flags(&self, bytes: u64) -> Result<M::Local, Self::Error> {
        self.0.allocate_polled_flags(bytes).map_err(Error::Inner)
    }

    unsafe fn register(
        &self,
        base: NonNull<u8>,
        bytes: u64,
        role: Role,
    ) -> Result<M::Local, Self::Error> {
        // SAFETY: the caller's promise.
        unsafe { self.0.register(base, bytes, role) }.map_err(Error::Inner)
    }

    unsafe fn adopt(&self, held: &DynRegion, role: Role) -> Result<M::Local, Self::Error> {
        // SAFETY: the caller's promise.
        unsafe { self.0.adopt(held, role) }.map_err(Error::Inner)
    }

    fn export(&self, local: &M::Local) -> Result<M::Key, Self::Error> {
        self.0.export(local).map_err(Error::Inner)
    }

    fn import(
        &self,
        peer: Rank,
        key: &M::Key,
        deadline: Deadline,
    ) -> Result<M::Remote, Self::Error> {
        self.0.import(peer, key, deadline).map_err(Error::Inner)
    }
}
