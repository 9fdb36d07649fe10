//! Fabrics: connections to peers, and the links to them.

use crate::deadline::Deadline;
use crate::engine::CopyEngine;
use crate::error::Error;
use crate::key::BackendId;
use crate::memory::PeerMemory;
use crate::rank::Rank;

/// The medium between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LinkKind {
    /// Both ranks use the same device.
    Local,
    /// Shared memory of one host.
    SharedMemory,
    /// NVLink between two GPUs.
    NvLink,
    /// XGMI between two GPUs.
    Xgmi,
    /// PCI Express between two devices.
    Pcie,
    /// Host memory, because the two devices cannot access each other.
    HostStaged,
    /// An RDMA network.
    Rdma,
}

impl LinkKind {
    /// Returns whether this link replaces a faster one that the devices lack.
    pub const fn is_fallback(self) -> bool {
        matches!(self, Self::HostStaged)
    }

    /// Returns a short name for tables, such as `shared memory`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "own",
            Self::SharedMemory => "shared memory",
            Self::NvLink => "NVLink",
            Self::Xgmi => "XGMI",
            Self::Pcie => "PCIe",
            Self::HostStaged => "through host memory",
            Self::Rdma => "RDMA",
        }
    }
}

/// The link from this rank to one peer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// The peer.
    pub peer: Rank,
    /// The kind of the link.
    pub kind: LinkKind,
    /// The bandwidth in bytes per second and direction, if the platform reports it.
    pub bytes_per_second: Option<f64>,
}

/// The use of an engine, by which a fabric with several kinds of engines chooses one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineRequirements {
    /// Whether the engine must offer [streams](crate::CopyEngine::streams), also in graphs, if the backend has them.
    pub streams: bool,
    /// The size of the longest copy between two ranks in bytes.
    pub copy_bytes_max: u64,
}

impl Default for EngineRequirements {
    /// Requires streams, and copies of any size.
    fn default() -> Self {
        Self { streams: true, copy_bytes_max: u64::MAX }
    }
}

/// A means to reach peers, opened as one rank of a group by a function of the backend.
///
/// First [`connect`](Self::connect) all peers, then import their regions and create engines. An engine reaches the peers that
/// were connected before it was created.
///
/// # Safety
/// The rank never changes. Engines reach regions of this fabric's memory, of this rank and of connected peers, under the
/// contract of their own traits.
pub unsafe trait Fabric: Send + Sync + 'static {
    /// The error of the backend.
    type Error: Error;
    /// The memory of the fabric.
    type Memory: PeerMemory<Error = Self::Error>;
    /// The engine of the fabric.
    type Engine: CopyEngine<
            Error = Self::Error,
            Local = <Self::Memory as PeerMemory>::Local,
            Remote = <Self::Memory as PeerMemory>::Remote,
        >;

    /// Returns the number of the backend.
    fn backend(&self) -> BackendId;

    /// Returns the rank that the fabric was opened as.
    fn rank(&self) -> Rank;

    /// Returns the memory, which registers, exports and imports regions.
    fn memory(&self) -> &Self::Memory;

    /// Returns the address that peers need to connect to this rank. The caller carries it to them.
    fn address(&self) -> Vec<u8>;

    /// Connects a peer, or this rank to itself.
    ///
    /// # Errors
    /// [`PeerLost`](crate::ErrorKind::PeerLost) if the peer does not answer at the address;
    /// [`Mismatch`](crate::ErrorKind::Mismatch) if the address is malformed, or of another backend, version or rank;
    /// [`Timeout`](crate::ErrorKind::Timeout).
    fn connect(
        &mut self,
        peer: Rank,
        address: &[u8],
        deadline: Deadline,
    ) -> Result<(), Self::Error>;

    /// Returns the link to a connected peer, or `None` if it is not connected.
    fn link(&self, peer: Rank) -> Option<Link>;

    /// Opens another fabric with the same options on the same device, as `rank` of `ranks`. It has no connections, and this
    /// fabric with its memory and engines stays valid.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if there is no such rank;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the fabric needs another one that it does not hold.
    fn reopen(&self, rank: Rank, ranks: usize) -> Result<Self, Self::Error>
    where
        Self: Sized;

    /// Creates an engine that reaches every connected peer.
    ///
    /// Ranks of one fabric that pass equal requirements get engines with equal [`Caps`](crate::Caps).
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::ErrorKind::OutOfMemory) if the device has no queue left.
    fn engine(&mut self, requirements: EngineRequirements) -> Result<Self::Engine, Self::Error>;
}
