//! Defines the types in the traits of a GPU, such as handles, address ranges, copies and limits.

use std::ffi::c_void;

pub use peerlane_hal::CaptureState;
use peerlane_hal::{EngineRequirements, LinkKind, Rank, SharedQueues};

use super::DevicePtr;
use crate::streams::SignalBy;

/// The address range of one device memory allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The address of the first byte of the allocation.
    pub address: DevicePtr,
    /// The length of the allocation in bytes.
    pub bytes: u64,
}

impl Extent {
    /// Returns the first address after the allocation.
    pub const fn end(self) -> DevicePtr {
        self.address + self.bytes
    }
}

/// The free and the total memory of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreeBytes {
    /// The number of bytes of device memory that are not allocated now.
    pub free: u64,
    /// The size of the device's memory in bytes.
    pub total: u64,
}

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
            #[repr(transparent)]
            pub struct $name(pub *mut c_void);

            // SAFETY: a handle is never dereferenced here, and drivers accept it from any thread.
            unsafe impl Send for $name {}
            // SAFETY: as for `Send`.
            unsafe impl Sync for $name {}
        )*
    };
}

handles! {
    /// The driver's handle of a stream, an in-order queue of a device.
    StreamHandle;
    /// The driver's handle of an event, a point in a stream.
    EventHandle;
    /// The driver's handle of a captured graph.
    GraphHandle;
    /// The driver's handle of an instantiated graph, which can be replayed.
    ExecHandle;
}

impl StreamHandle {
    /// Returns the name of the default stream that a handle stands for, or returns `None` for a
    /// stream that was created. CUDA and HIP use the same numbers.
    pub fn default_stream(self) -> Option<&'static str> {
        match self.0 as usize {
            0 => Some("the default stream (a null handle)"),
            1 => Some("the legacy default stream"),
            2 => Some("the thread's default stream"),
            _ => None,
        }
    }
}

/// Whether a driver runs several word operations of one call in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batching {
    /// One call takes several word operations, runs them in order, and costs about as much as one
    /// operation.
    Trusted,
    /// A probe decides whether one call runs its word operations in order.
    Probe,
    /// The driver has no call for several word operations.
    Never,
}

/// The kind of a copy by its source and destination. A driver may have a call for each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyKind {
    /// A copy between two addresses of this device.
    Local,
    /// A copy between this device and the device of a peer.
    Peer,
    /// A copy of one word between this device and the flag of a peer.
    Flag,
    /// A copy between a device and the host.
    Host,
}

/// A batch of unordered copies for one call, as the arrays that drivers take.
#[derive(Debug)]
pub struct CopyBatch<'a> {
    /// The destination address of each copy.
    pub to: &'a mut [DevicePtr],
    /// The source address of each copy.
    pub from: &'a mut [DevicePtr],
    /// The length of each copy in bytes.
    pub bytes: &'a mut [usize],
}

/// An IPC handle, by which another process opens an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IpcHandle(pub [u8; 64]);

/// The driver's handle of physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryHandle(pub u64);

/// The kind of memory that the driver knows at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pointee {
    /// Memory that the driver does not know.
    Unknown,
    /// Pinned host memory, allocated by or registered with the driver.
    Host,
    /// Managed memory, which migrates between host and device.
    Managed,
    /// Device memory, with the ordinal of its device if the driver reports it.
    Device(Option<i32>),
    /// A kind of memory that is newer than the backend, with the driver's number for it.
    Other(u64),
}

/// The limits of a device's streams for copies, as the backend measured or probed them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamLimits {
    /// The number of copies that run at the same time without slowing each other down.
    pub copy_engines: u32,
    /// The largest number of streams that an engine uses for copies to peers.
    pub peer_streams_max: usize,
    /// The largest copy in bytes that is faster on one stream than on several, if one call takes
    /// the copies to all peers.
    pub one_stream_bytes_max: u64,
    /// The largest number of streams besides the main stream that a captured graph uses. With more,
    /// graphs ran their branches one after the other.
    pub captured_sides_max: usize,
    /// The largest number of bytes that one copy of the driver takes.
    pub piece_bytes_max: u64,
    /// The largest copy of a rank's own block, in bytes, that goes over the link by default.
    pub self_copy_link_bytes_max: Option<u64>,
    /// The largest copy of a rank's own block, in bytes, that goes over the link by default in a
    /// captured graph.
    pub self_copy_link_captured_bytes_max: Option<u64>,
    /// The hardware queues that all streams of the process share.
    pub shared_queues: SharedQueues,
}

/// Returns the number of hardware queues, read from an environment variable up to `max`, or else
/// `default`.
pub fn shared_queues(variable: &'static str, default: u32, max: u32) -> SharedQueues {
    let set = std::env::var(variable).ok().and_then(|text| text.trim().parse().ok());
    let count = set.filter(|count| *count > 0).unwrap_or(default).min(max);
    SharedQueues { count, variable }
}

/// Whether two devices can access each other's memory, as the driver answers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reachability {
    /// The devices access each other's memory in both directions.
    Direct {
        /// The kind of the link that carries the bytes.
        kind: LinkKind,
        /// The bandwidth in bytes per second and direction, if the platform reports it.
        bytes_per_second: Option<f64>,
    },
    /// The devices cannot access each other's memory, for the given reason.
    Unreachable(&'static str),
    /// The other device is not visible in this process, so only an import shows whether it can be
    /// reached.
    NotVisible,
}

/// A connected peer with its device and link, passed to a new engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConnectedPeer {
    /// The rank of the peer.
    pub peer: Rank,
    /// The UUID of the peer's device.
    pub device: [u8; 16],
    /// The kind of the link to the peer.
    pub kind: LinkKind,
}

/// A kernel for programs of starts, with what it needs for its reduction.
#[derive(Clone, Copy, Debug)]
pub struct FusedKernel {
    /// The driver's handle of the kernel.
    pub handle: *mut c_void,
    /// The mask by which the kernel turns elements into those that it can compare.
    pub flip: u64,
    /// Whether the kernel divides sums by the number of contributions.
    pub divides: bool,
}

// SAFETY: the handle is a number for the driver, which takes it on any thread.
unsafe impl Send for FusedKernel {}

/// The parameters of an engine that a fabric creates.
#[derive(Clone, Debug)]
pub struct EngineRequest {
    /// The rank that the engine serves.
    pub rank: Rank,
    /// The connected peers, including this rank itself.
    pub peers: Vec<ConnectedPeer>,
    /// The method by which the engine writes signals to its peers.
    pub signal: SignalBy,
    /// The kind of the engine among the [offers](super::PeerDevice::offers) of the device.
    pub kind: &'static str,
    /// The features that the caller needs of the engine.
    pub requirements: EngineRequirements,
}

impl EngineRequest {
    /// Returns whether some peer is reached through host memory.
    pub fn is_staged(&self) -> bool {
        self.peers.iter().any(|peer| peer.kind == LinkKind::HostStaged)
    }
}
