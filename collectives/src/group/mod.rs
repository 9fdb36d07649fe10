//! A group: ranks that have found each other over their fabrics and prepare operations together.

mod abort;
mod agreement;
mod all_gather;
mod buffer;
mod guard;
mod links;
mod network;
mod options;
mod place;
mod progress;
mod reach;
mod report;
pub(crate) mod shared;
mod side;
pub(crate) mod watch;
mod window;

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use peerlane_hal::{Deadline, Fabric, PeerMemory, Rank, Role};

pub use abort::{AbortRecord, Cause};
use agreement::{Offer, agree};
pub use all_gather::{AllGather, AllGatherBuilder, Destination, Gathered, Lease, Started};
pub use buffer::Buffer;
pub use options::GroupOptions;
pub use place::Place;
use reach::Reach;
pub use report::{Fallback, LaneReport, LinkReport, Report, TierReport};
use shared::{Closed, Shared};
use window::Users;
pub use window::{Window, WindowSlice, WindowSliceMut};

use crate::bootstrap::Bootstrap;
use crate::cost::Links;
use crate::element::Element;
use crate::error::Error;
use crate::plan::Algorithm;
use crate::topology::Topology;

type Local<F> = <<F as Fabric>::Memory as PeerMemory>::Local;

/// Ranks that are connected over the fabric `F`, and perhaps over another one between nodes.
///
/// Every method marked *collective* is called by all ranks in the same order. When a rank is lost
/// or a deadline passes, the group is over on every rank: all calls return the same error, and the
/// outputs of unfinished operations are worthless.
pub struct Group<F: Fabric> {
    fabric: F,
    /// The fabric between nodes.
    network: Option<Box<dyn Reach>>,
    topology: Topology,
    strict: bool,
    /// Whether local fabrics are of more than one backend.
    mixed: bool,
    /// Why the network does not register this rank's memory, if it does not.
    refusal: Option<Arc<str>>,
    /// What operations choose their algorithm by; equal on all ranks.
    links: Links,
    /// Whether the caller gave them.
    links_measured: bool,
    shared: Arc<Shared>,
    watchdog: Option<JoinHandle<()>>,
    /// Operations prepared so far; part of the fingerprint.
    prepared: u64,
    /// Windows opened so far.
    windows: u64,
    users: Arc<Users>,
    barrier: Option<AllGather<u8>>,
}

impl<F: Fabric> Group<F> {
    /// Opens a group with the default [options](GroupOptions). Collective.
    ///
    /// # Errors
    /// As [`GroupOptions::open`].
    pub fn open(bootstrap: impl Bootstrap + 'static, fabric: F) -> Result<Self, Error> {
        GroupOptions::default().open(bootstrap, fabric)
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.shared.bootstrap.rank()
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.shared.bootstrap.ranks()
    }

    /// Which ranks share a node.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// How long a call waits unless it says otherwise.
    pub fn timeout(&self) -> Duration {
        self.shared.timeout
    }

    /// The fabric that the ranks of a node are connected over; without another one, all ranks.
    pub fn fabric(&self) -> &F {
        &self.fabric
    }

    /// What operations choose their algorithm by, unless they are told.
    pub fn links(&self) -> &Links {
        &self.links
    }

    /// Why the group is over, if it is.
    pub fn abort_record(&self) -> Option<AbortRecord> {
        self.shared.record()
    }

    /// Allocates zeroed memory for `len` elements that every rank can reach.
    ///
    /// # Errors
    /// [`OutOfMemory`](peerlane_hal::ErrorKind::OutOfMemory).
    pub fn allocate<T: Element>(&self, len: usize) -> Result<Buffer<Local<F>, T>, Error> {
        let bytes = all_gather::bytes::<T>("len", len)?;
        let region = self.fabric.memory().allocate(bytes, Role::Data);
        region.map(Buffer::new).map_err(|error| Error::of_backend("allocate a buffer", error))
    }

    /// Registers the caller's own memory.
    ///
    /// # Errors
    /// If the fabric cannot use such memory.
    ///
    /// # Safety
    /// The slice stays allocated, and nobody touches it, until the buffer and whatever it was given
    /// to are dropped on this rank and every peer has closed the group.
    pub unsafe fn register<T: Element>(
        &self,
        slice: &mut [T],
    ) -> Result<Buffer<Local<F>, T>, Error> {
        // SAFETY: the caller's.
        unsafe { self.register_at(std::ptr::NonNull::from(&mut *slice).cast(), slice.len()) }
    }

    /// Registers the caller's own memory by the address of its first byte, such as memory of a device,
    /// which is no slice of the host.
    ///
    /// # Errors
    /// As [`register`](Self::register).
    ///
    /// # Safety
    /// As for [`register`](Self::register): `len` elements from `base` on.
    pub unsafe fn register_at<T: Element>(
        &self,
        base: std::ptr::NonNull<u8>,
        len: usize,
    ) -> Result<Buffer<Local<F>, T>, Error> {
        let bytes = all_gather::bytes::<T>("len", len)?;
        // SAFETY: the caller's.
        let region = unsafe { self.fabric.memory().register(base, bytes, Role::Data) };
        region.map(Buffer::new).map_err(|error| Error::of_backend("register a buffer", error))
    }

    /// Waits until every rank is here. Collective.
    ///
    /// # Errors
    /// The group's end, or that a rank did not come in time.
    pub fn barrier(&mut self) -> Result<(), Error> {
        let mut barrier = match self.barrier.take() {
            Some(barrier) => barrier,
            None => self.all_gather::<u8>(0).algorithm(Algorithm::Direct).parts(1).prepare()?,
        };
        let passed = barrier.run();
        self.barrier = Some(barrier);
        passed
    }

    /// Ends the group when every rank has come here; what was prepared can start no more.
    /// Collective. A group that is dropped without it counts as lost for its peers.
    ///
    /// # Errors
    /// The group's end before, or that a rank did not come in time.
    pub fn close(mut self) -> Result<(), Error> {
        self.barrier = None;
        self.shared.check()?;
        let deadline = Deadline::after(self.shared.timeout);
        agree(&self.shared, "close", Ok(Offer::default()), deadline)?;
        self.shared.close(Closed::Together);
        self.shared.bootstrap.leave(deadline)
    }
}

impl<F: Fabric> Drop for Group<F> {
    fn drop(&mut self) {
        self.barrier = None;
        if self.shared.check().is_ok() {
            // What is prepared may outlive the group and keeps the connection open.
            let how = "its group was dropped without a close";
            let record = AbortRecord::lost(self.rank(), how).encode();
            // If nobody can be told, there is nobody left.
            let _ = self.shared.bootstrap.abort(&record);
        }
        self.shared.close(Closed::Alone);
        for thread in [self.watchdog.take(), self.shared.take_progress()].into_iter().flatten() {
            // A panic there has been printed; there is nobody to hand it to.
            let _ = thread.join();
        }
    }
}

impl<F: Fabric> fmt::Debug for Group<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("rank", &self.rank())
            .field("topology", &self.topology)
            .finish_non_exhaustive()
    }
}
