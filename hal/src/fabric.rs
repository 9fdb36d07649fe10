//! Defines fabrics, which connect ranks, and the links between connected ranks.

use crate::deadline::Deadline;
use crate::engine::{Caps, CopyEngine};
use crate::error::Error;
use crate::fused::FusedLimits;
use crate::key::BackendId;
use crate::memory::PeerMemory;
use crate::rank::Rank;

/// The medium over which two ranks exchange data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LinkKind {
    /// No link, because both ranks use the same device.
    Local,
    /// Shared memory between processes or threads of one host.
    SharedMemory,
    /// An NVLink connection between two GPUs.
    NvLink,
    /// An XGMI connection between two GPUs.
    Xgmi,
    /// A PCI Express connection between two devices.
    Pcie,
    /// Staging in host memory, because the two devices cannot access each other.
    HostStaged,
    /// An RDMA network such as InfiniBand or RoCE.
    Rdma,
    /// A network that software such as UCX drives, often Ethernet.
    Network,
    /// A link that only its backend knows, with the name for tables.
    Other(&'static str),
}

impl LinkKind {
    /// Returns whether this link kind is a slow substitute for a direct link that the devices lack.
    pub const fn is_fallback(self) -> bool {
        matches!(self, Self::HostStaged)
    }

    /// Returns a short name of the link kind for tables, such as `shared memory`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "own",
            Self::SharedMemory => "shared memory",
            Self::NvLink => "NVLink",
            Self::Xgmi => "XGMI",
            Self::Pcie => "PCIe",
            Self::HostStaged => "through host memory",
            Self::Rdma => "RDMA",
            Self::Network => "network",
            Self::Other(name) => name,
        }
    }
}

/// The link from this rank to one peer, with its medium and bandwidth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// The rank at the other end of the link.
    pub peer: Rank,
    /// The medium of the link, such as NVLink or PCI Express.
    pub kind: LinkKind,
    /// The bandwidth of the link in bytes per second and direction, if the platform reports it.
    pub bytes_per_second: Option<f64>,
}

/// A kind of engines that a fabric can create, described before any of them exists.
///
/// A caller compares the offers of all ranks, predicts times from them, and creates an engine of
/// the kind that it has chosen ([`EngineRequirements::kind`]). A backend with one kind of engines
/// offers one row:
///
/// ```
/// use peerlane::hal::{Caps, EngineOffer};
///
/// const CAPS: Caps = Caps { gets: true, slice_ops_max: 64, ..Caps::new("ring") };
/// assert_eq!(EngineOffer::new(CAPS).kind(), "ring");
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineOffer {
    /// The capabilities of every engine of the kind, with the name of the kind.
    pub caps: Caps,
    /// Whether engines of the kind support [streams](crate::CopyEngine::streams) and graphs.
    pub streams: bool,
    /// The bandwidth of one copy to a peer in bytes per second, or `None` for that of the
    /// [link](Link::bytes_per_second).
    pub bytes_per_second: Option<f64>,
    /// The time in seconds that each start takes longer than the links explain, such as that of a
    /// thread that drives the engine.
    pub start_seconds: f64,
    /// The time in seconds that a start takes longer in a graph than on a stream.
    pub captured_seconds: f64,
    /// The number of blocks of threads that the copies of one engine occupy on the compute units,
    /// or 0 if only copy engines, NICs or processors copy between devices.
    pub copy_blocks: u32,
    /// The largest number of blocks of threads that all engines of one operation may have, because
    /// they wait for each other and must run at the same time; `u32::MAX` for no limit.
    pub resident_blocks_max: u32,
    /// The limits of [fused starts](crate::FusedStarts), or `None` if engines of the kind have
    /// none.
    pub fused: Option<FusedLimits>,
}

impl EngineOffer {
    /// Returns the offer of engines with such capabilities that have no streams, copy at the rate
    /// of the link and use no compute units.
    pub const fn new(caps: Caps) -> Self {
        Self {
            caps,
            streams: false,
            bytes_per_second: None,
            start_seconds: 0.0,
            captured_seconds: 0.0,
            copy_blocks: 0,
            resident_blocks_max: u32::MAX,
            fused: None,
        }
    }

    /// Returns the name of the kind, such as `streams`.
    pub const fn kind(&self) -> &'static str {
        self.caps.kind
    }
}

/// What a caller needs of an engine, such as its kind and its priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineRequirements {
    /// The name of the kind among those that the fabric [offers](Fabric::offers), or `None` for the
    /// first one that has what is required.
    pub kind: Option<&'static str>,
    /// Whether the engine must support [streams](crate::CopyEngine::streams) and graphs, if the
    /// backend has them.
    pub streams: bool,
    /// Which engines of a rank a thread that polls several of them moves first.
    pub priority: Priority,
    /// Whether the engine works beside kernels of the caller, so that its ops should take few
    /// compute units, even if they are slower when the device is idle.
    pub beside_compute: bool,
    /// The number of blocks of threads of the launches of [fused starts](crate::FusedStarts), or 0
    /// if the engine makes none.
    ///
    /// An engine reserves them, because blocks that wait for peers must all run at the same time.
    pub fused_blocks: u32,
}

/// The priority of an engine among the engines of its rank.
///
/// It is a hint. An engine that copies while it is polled copies little at a time while an engine
/// of a higher priority has ops, and takes no account of engines of a lower one. Copy engines of
/// devices copy in the order of submission, whatever the priority.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// For bulk data that may be late.
    Low,
    /// The default.
    #[default]
    Normal,
    /// For short messages that others wait for.
    High,
}

impl Priority {
    /// All priorities, the lowest first.
    pub const ALL: [Self; 3] = [Self::Low, Self::Normal, Self::High];
}

impl EngineRequirements {
    /// Returns which of the offers of a fabric meets the requirements.
    ///
    /// # Errors
    /// A text for an error of kind [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the
    /// fabric does not offer the [kind](Self::kind), or offers none.
    pub fn select(&self, offers: &[EngineOffer]) -> Result<EngineOffer, String> {
        let has_streams = |offer: &&EngineOffer| offer.streams || !self.streams;
        let found = match self.kind {
            Some(kind) => offers.iter().find(|offer| offer.kind() == kind),
            // A backend without streams offers what it has.
            None => offers.iter().find(has_streams).or(offers.first()),
        };

        found.copied().ok_or_else(|| {
            let known: Vec<_> = offers.iter().map(EngineOffer::kind).collect();
            format!(
                "the kind of engines is {:?}, expected one that the fabric offers: {}",
                self.kind.unwrap_or_default(),
                known.join(" or ")
            )
        })
    }
}

impl Default for EngineRequirements {
    /// Requires an engine of any kind and of normal priority, with streams, on a device without
    /// other work.
    fn default() -> Self {
        Self {
            kind: None,
            streams: true,
            priority: Priority::Normal,
            beside_compute: false,
            fused_blocks: 0,
        }
    }
}

/// The connections of one rank to its peers, with the memory and the engines to reach them.
///
/// First [`connect`](Self::connect) all peers, then import their regions and create engines. An
/// engine reaches the peers that were connected before it was created. A fabric whose only rank
/// connects to itself:
///
/// ```
/// use std::time::Duration;
///
/// use peerlane::hal::{At, CopyEngine, EngineRequirements, Fabric, Op, PeerMemory, Region, Role};
/// use peerlane::{Deadline, Rank, host};
///
/// let soon = Deadline::after(Duration::from_secs(5));
/// let mut fabric = host::Fabric::open(Rank(0), 1)?;
/// fabric.connect(Rank(0), &fabric.address(), soon)?;
/// let local = fabric.memory().allocate(8, Role::Data)?;
/// let key = fabric.memory().export(&local)?;
/// let imported = fabric.memory().import(Rank(0), &key, soon)?;
/// // SAFETY: nobody else uses the region yet.
/// unsafe { local.base().as_ptr().write(7) };
///
/// let mut engine = fabric.engine(EngineRequirements::default())?;
/// let put = Op::Put {
///     dst: At { region: &imported, offset: 4 },
///     src: At { region: &local, offset: 0 },
///     bytes: 4,
/// };
/// // SAFETY: both ranges are in bounds and disjoint, and the regions live until the put is
/// // complete.
/// let ticket = unsafe { engine.submit(&[put]) }?;
/// while engine.completed()? < ticket {
///     engine.park(soon.remaining())?;
/// }
/// // SAFETY: the put is complete.
/// assert_eq!(unsafe { local.base().as_ptr().add(4).read() }, 7);
/// # Ok::<(), host::Error>(())
/// ```
///
/// # Safety
/// The rank never changes. Engines reach regions of this fabric's memory, of this rank and of
/// connected peers, under the contract of their own traits.
pub unsafe trait Fabric: Send + Sync + 'static {
    /// The error type of the backend.
    type Error: Error;
    /// The type that registers and imports memory.
    type Memory: PeerMemory<Error = Self::Error>;
    /// The type of the engines, which copy between local and imported regions.
    type Engine: CopyEngine<
            Error = Self::Error,
            Local = <Self::Memory as PeerMemory>::Local,
            Remote = <Self::Memory as PeerMemory>::Remote,
        >;

    /// Returns the number of the backend that implements the fabric.
    fn backend(&self) -> BackendId;

    /// Returns the rank of the fabric in its group.
    fn rank(&self) -> Rank;

    /// Returns the object that registers, exports and imports memory regions.
    fn memory(&self) -> &Self::Memory;

    /// Returns the address bytes that peers need to connect to this rank. The caller sends them to
    /// the peers.
    fn address(&self) -> Vec<u8>;

    /// Connects this rank to a peer or to itself.
    ///
    /// # Errors
    /// [`PeerLost`](crate::ErrorKind::PeerLost) if the peer does not answer at the address;
    /// [`Mismatch`](crate::ErrorKind::Mismatch) if the address is malformed, or of another backend,
    /// version or rank; [`Timeout`](crate::ErrorKind::Timeout).
    ///
    /// A second connection to the same address changes nothing.
    fn connect(
        &mut self,
        peer: Rank,
        address: &[u8],
        deadline: Deadline,
    ) -> Result<(), Self::Error>;

    /// Returns the link to a peer, or `None` if the peer is not connected.
    fn link(&self, peer: Rank) -> Option<Link>;

    /// Returns how often the fabric has moved a thread of this rank to another core, for reports. A
    /// fabric that moves none returns 0.
    fn moves(&self) -> u64 {
        0
    }

    /// Opens another fabric on the same device and with the same options, as rank `rank` of
    /// `ranks`. It has no connections, and this fabric with its memory and engines stays valid.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if there is no such rank;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the fabric needs another one that it does
    /// not hold.
    fn reopen(&self, rank: Rank, ranks: usize) -> Result<Self, Self::Error>
    where
        Self: Sized;

    /// Returns the kinds of engines that the fabric can create once all peers are connected, the
    /// preferred kind first.
    ///
    /// There is at least one, and no two have the same name. The offers never change after the last
    /// peer was connected.
    ///
    /// # Errors
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the device or its driver lacks what every
    /// kind needs; the error of the vendor's call.
    fn offers(&self) -> Result<Vec<EngineOffer>, Self::Error>;

    /// Creates an engine that reaches every connected peer, with the [`Caps`](crate::Caps) that the
    /// fabric [offers](Self::offers) for its kind.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the fabric does not offer the
    /// kind; [`OutOfMemory`](crate::ErrorKind::OutOfMemory) if the device has no queue left;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the driver refuses what the kind needs, or
    /// the device has no room for [its blocks](EngineRequirements::fused_blocks) beside those of
    /// other engines.
    fn engine(&self, requirements: EngineRequirements) -> Result<Self::Engine, Self::Error>;
}
