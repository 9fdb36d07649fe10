//! A way to reach peers.

use crate::deadline::Deadline;
use crate::engine::CopyEngine;
use crate::error::Error;
use crate::key::BackendId;
use crate::memory::PeerMemory;
use crate::rank::Rank;

/// What carries the bytes between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LinkKind {
    /// The same device.
    Own,
    /// Memory of one host.
    SharedMemory,
    /// NVLink between two GPUs.
    NvLink,
    /// XGMI between two GPUs.
    Xgmi,
    /// PCI Express between two devices.
    Pcie,
    /// Memory of the host, because the two devices do not reach each other.
    HostStaged,
    /// An RDMA network.
    Rdma,
}

impl LinkKind {
    /// Whether it is a way around what devices lack, and slower than they could be.
    pub const fn is_fallback(self) -> bool {
        matches!(self, Self::HostStaged)
    }

    /// A short name for tables, such as `shared memory`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::SharedMemory => "shared memory",
            Self::NvLink => "NVLink",
            Self::Xgmi => "XGMI",
            Self::Pcie => "PCIe",
            Self::HostStaged => "through host memory",
            Self::Rdma => "RDMA",
        }
    }
}

/// How this rank reaches one peer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// The peer.
    pub peer: Rank,
    /// What carries the bytes.
    pub kind: LinkKind,
    /// Bytes per second and direction, where the platform says so; `None` where only a
    /// measurement can tell.
    pub bytes_per_second: Option<f64>,
}

/// What an engine is wanted for, as far as a fabric with several kinds of engines chooses by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Its work may be put onto streams of the caller, and into graphs.
    pub streams: bool,
    /// No copy between two ranks is longer, in bytes.
    pub copy_bytes_max: u64,
}

/// A way to reach peers, opened by a constructor of the backend as one rank of a group.
///
/// The order is: [`connect`](Self::connect) all peers, then import their regions and make engines.
/// An engine reaches the peers that were connected before it was made, whether their regions were
/// imported before or after.
pub trait Fabric: Send + 'static {
    /// The backend's error.
    type Error: Error;
    /// The fabric's memory.
    type Memory: PeerMemory<Error = Self::Error>;
    /// The fabric's engine.
    type Engine: CopyEngine<
            Error = Self::Error,
            Local = <Self::Memory as PeerMemory>::Local,
            Remote = <Self::Memory as PeerMemory>::Remote,
        > + 'static;

    /// Which backend this is.
    fn backend(&self) -> BackendId;

    /// The rank as which it was opened.
    fn rank(&self) -> Rank;

    /// Registration, export and import.
    fn memory(&self) -> &Self::Memory;

    /// What peers need to connect to this rank; one blob for all of them, carried out of band.
    fn address(&self) -> Vec<u8>;

    /// Connects one peer, oneself included.
    ///
    /// # Errors
    /// [`PeerLost`](crate::ErrorKind::PeerLost): nobody answers at the address.
    /// [`Mismatch`](crate::ErrorKind::Mismatch): the address is malformed, of another backend or
    /// version, or of another rank. [`Timeout`](crate::ErrorKind::Timeout).
    fn connect(
        &mut self,
        peer: Rank,
        address: &[u8],
        deadline: Deadline,
    ) -> Result<(), Self::Error>;

    /// How the connected `peer` is reached, as data; `None` if it is not connected.
    fn link(&self, peer: Rank) -> Option<Link>;

    /// A new queue that reaches every peer connected so far.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::ErrorKind::OutOfMemory) where queues are a scarce resource.
    fn engine(&mut self) -> Result<Self::Engine, Self::Error>;

    /// The same, of the kind that serves `demand` best where there are several. Ranks of one fabric
    /// that ask alike get engines of alike [`Caps`](crate::Caps).
    ///
    /// # Errors
    /// As [`engine`](Self::engine).
    fn engine_for(&mut self, demand: Demand) -> Result<Self::Engine, Self::Error> {
        let _ = demand;
        self.engine()
    }
}
