//! Defines the types in the traits of a GPU: handles, address ranges, copies, limits and links.

use std::ffi::c_void;

use peerlane_hal::{EngineRequirements, LinkKind, Rank, SharedQueues};

use super::DevicePtr;
use crate::streams::SignalBy;

/// The address range of one allocation of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first address.
    pub address: DevicePtr,
    /// The length in bytes.
    pub bytes: u64,
}

impl Extent {
    /// Returns the address behind the last byte.
    pub const fn end(self) -> DevicePtr {
        self.address + self.bytes
    }
}

/// The amount of memory of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreeBytes {
    /// Bytes that are not allocated now.
    pub free: u64,
    /// All bytes of the device.
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
    /// A handle of a stream, an in-order queue of a device.
    StreamHandle;
    /// A handle of an event, a point in a stream.
    EventHandle;
    /// A handle of a recorded graph.
    GraphHandle;
    /// A handle of an instantiated graph, which can be replayed.
    ExecHandle;
}

impl StreamHandle {
    /// Describes the default stream that the handle is the number of. CUDA and HIP use the same numbers.
    pub fn default_stream(self) -> Option<&'static str> {
        match self.0 as usize {
            0 => Some("the default stream (a null handle)"),
            1 => Some("the legacy default stream"),
            2 => Some("the thread's default stream"),
            _ => None,
        }
    }
}

/// The capture state of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureState {
    /// The stream does not capture.
    None,
    /// The stream captures, and the capture has this number.
    Active(u64),
    /// The stream captures or its capture was invalidated, and the driver does not say which capture it is.
    Unknown,
}

/// Describes whether a driver runs several memory operations of one call in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batching {
    /// One call takes several operations, runs them in order, and costs about as much as one operation.
    Trusted,
    /// A probe decides whether such a call runs its operations in order.
    Probe,
    /// The driver has no such call.
    Never,
}

/// The kind of a copy by its two ends. A driver may have a call for each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyKind {
    /// Two addresses of this device.
    Local,
    /// The copy is between this device and a peer's.
    Peer,
    /// A word of this device and the flag of a peer.
    Flag,
    /// A device and the host.
    Host,
}

/// Copies that go onto one stream in one call, as the arrays that drivers take.
#[derive(Debug)]
pub struct CopyBatch<'a> {
    /// The destination of each copy.
    pub to: &'a mut [DevicePtr],
    /// The source of each copy.
    pub from: &'a mut [DevicePtr],
    /// The length of each copy in bytes.
    pub bytes: &'a mut [usize],
}

/// The handle by which another process opens an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IpcHandle(pub [u8; 64]);

/// A reference to physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryHandle(pub u64);

/// The driver's classification of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pointee {
    /// Unknown to the driver.
    Unknown,
    /// Host memory that was allocated by or registered with the driver.
    Host,
    /// Memory that migrates between host and device.
    Managed,
    /// Memory of the device with this number, where the driver says which.
    Device(Option<i32>),
    /// A type that is newer than the backend, with the driver's number.
    Other(u64),
}

/// The limits of a device's streams, as the backend measured or probed them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamLimits {
    /// Number of copies that run at the same time without a loss of rate.
    pub copy_engines: u32,
    /// Largest number of streams for copies to peers.
    pub peer_streams_max: usize,
    /// Largest copy to a peer that is faster on one stream, if the copies go there in one call.
    pub one_stream_bytes_max: u64,
    /// Largest number of side streams in a graph. With more, graphs ran their branches one after the other.
    pub captured_sides_max: usize,
    /// Largest copy in one piece.
    pub piece_bytes_max: u64,
    /// Largest self copy that goes over the link by default.
    pub self_copy_link_bytes_max: Option<u64>,
    /// Largest self copy that goes over the link by default in a graph.
    pub self_copy_link_captured_bytes_max: Option<u64>,
    /// The hardware queues of the streams of a process.
    pub shared_queues: SharedQueues,
}

/// Returns the hardware queues of a driver that reads their number from an environment variable, with its default and its limit.
pub fn shared_queues(variable: &'static str, default: u32, max: u32) -> SharedQueues {
    let set = std::env::var(variable).ok().and_then(|text| text.trim().parse().ok());
    let count = set.filter(|count| *count > 0).unwrap_or(default).min(max);
    SharedQueues { count, variable }
}

/// The driver's answer to the question whether two devices reach each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reachability {
    /// The devices reach each other in both directions.
    Direct {
        /// The link that carries the bytes.
        kind: LinkKind,
        /// Bytes per second in each direction, where the platform says so.
        bytes_per_second: Option<f64>,
    },
    /// The devices do not reach each other, for this reason.
    Unreachable(&'static str),
    /// The other device is not visible in this process; an import decides.
    NotVisible,
}

/// A connected peer of a new engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConnectedPeer {
    /// The peer.
    pub peer: Rank,
    /// UUID of the peer's device.
    pub device: [u8; 16],
    /// The link that carries the bytes.
    pub kind: LinkKind,
}

/// The parameters of a new engine.
#[derive(Clone, Debug)]
pub struct EngineRequest {
    /// This rank.
    pub rank: Rank,
    /// The connected peers, including this rank.
    pub peers: Vec<ConnectedPeer>,
    /// The method by which signals reach them.
    pub signal: SignalBy,
    /// The planned use of the engine, if it is known.
    pub requirements: EngineRequirements,
    /// The smallest [`striped_rate`](super::PeerDevice::striped_rate) of all ranks, so that all choose alike.
    pub striped_rate: u64,
}

impl EngineRequest {
    /// Returns whether a peer is reached through host memory.
    pub fn is_staged(&self) -> bool {
        self.peers.iter().any(|peer| peer.kind == LinkKind::HostStaged)
    }
}
