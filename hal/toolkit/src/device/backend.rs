//! Traits that a backend implements for its device in addition to the driver calls: for regions, the stream engine and the fabric.

use std::fmt;
use std::hash::Hash;
use std::sync::Arc;

use super::{
    CopyCalls, DevicePtr, Fault, GraphCalls, IpcCalls, MemoryCalls, VirtualCalls, WordCalls,
};
use crate::peers::DeviceId;
use crate::regions::{Local, Remote};
use crate::streams::{ProbeCache, SignalBy};
use peerlane_hal::{BackendId, CopyEngine, DmaBuf, EngineRequirements, Flush, LinkKind, Rank};

/// The texts and numbers of a vendor.
pub trait Vendor: Copy + fmt::Debug + Eq + Hash + Send + Sync + 'static {
    /// The backend in keys and addresses.
    const BACKEND: BackendId;
    /// The vendor's plain allocator, such as `cudaMalloc`.
    const ALLOCATOR: &'static str;
    /// Reason why mapped memory without a handle cannot leave its process, and what to do.
    const NO_HANDLE: &'static str;
    /// Reason why memory of a stream-ordered pool cannot leave its process, and what to do.
    const POOL: &'static str;
}

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

/// A device whose memory can be registered as regions. The context is current in every call.
pub trait RegionDevice: CopyCalls + IpcCalls + VirtualCalls {
    /// The vendor.
    type Vendor: Vendor;

    /// Returns the name of the device that is the same in all processes.
    fn uuid(&self) -> [u8; 16];

    /// Rejects memory of the caller in which a stream would not see changes of flags.
    ///
    /// # Errors
    /// Returns an error of kind [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) that names
    /// the memory to use.
    fn check_flags(&self, address: DevicePtr) -> Result<(), Self::Error> {
        let _ = address;
        Ok(())
    }

    /// Returns whether flags must be allocated by
    /// [`allocate_flags`](crate::device::MemoryCalls::allocate_flags), because a stream that polls other
    /// memory need not see the writes of peers.
    fn has_flag_memory(&self) -> bool {
        false
    }

    /// Creates the error of an allocation of `requested` bytes for which the device has no memory, with the
    /// bytes that are free.
    fn out_of_memory(&self, requested: u64) -> Self::Error;

    /// Returns the driver's classification of an address.
    ///
    /// # Errors
    /// Returns the driver's error. An unknown address is not an error.
    fn pointee(&self, address: DevicePtr) -> Result<Pointee, Self::Error>;

    /// Returns whether the allocation that begins at `base` has an IPC handle.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn has_ipc_handle(&self, base: DevicePtr) -> Result<bool, Self::Error>;

    /// Permits this device to access what [`allocate`](crate::device::MemoryCalls::allocate) and the
    /// caller's plain allocator give `owner`, a device of the same process. A second call is not an error.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn enable_peer(&self, owner: &Self) -> Result<(), Self::Error>;

    /// Exports a dma-buf that holds the span, with the offset of the span in it.
    ///
    /// # Errors
    /// Returns the driver's error, also where the driver exports no dma-buf.
    fn dma_buf(&self, address: DevicePtr, bytes: u64) -> Result<DmaBuf, Self::Error>;

    /// Returns the flush that makes writes of a NIC visible to the device. Returns `None` where a write is
    /// visible as soon as the NIC reports it.
    ///
    /// # Errors
    /// Returns an error if the driver does not say which, or if there is no such flush.
    fn nic_flush(context: &Arc<Self>) -> Result<Option<Arc<dyn Flush>>, Self::Error>;

    /// Returns whether an error means that the driver does not permit this method, so that another method
    /// may work.
    fn is_refusal(error: &Self::Error) -> bool;
}

/// Returns the backend of a device's vendor.
pub(crate) const fn backend_id<D: RegionDevice>() -> BackendId {
    <D::Vendor as Vendor>::BACKEND
}

/// Adds the requested bytes to an out-of-memory error; other errors stay unchanged.
pub(crate) fn name_bytes<D: RegionDevice>(device: &D, bytes: u64, error: D::Error) -> D::Error {
    if D::is_out_of_memory(&error) { device.out_of_memory(bytes) } else { error }
}

/// A device that the stream engine can use.
pub trait StreamDevice: WordCalls + CopyCalls + GraphCalls + MemoryCalls {
    /// Returns the limits of the device's streams. The context is current.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn stream_limits(&self) -> Result<StreamLimits, Self::Error>;

    /// Returns the process's cache of probe results. Each backend has one, since a generic type has no
    /// statics.
    fn probe_cache() -> &'static ProbeCache<Self::Error>;
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
}

/// The options of a backend's fabric that the toolkit reads.
pub trait PeerOptions: fmt::Debug + Clone + Send + Sync + 'static {
    /// Returns the default options for the device with this ordinal.
    fn on_device(ordinal: u32) -> Self;

    /// Returns whether a slower fallback is refused.
    fn is_strict(&self) -> bool;

    /// Returns the method by which signals reach peers; `None` for the method that a probe finds.
    fn signal(&self) -> Option<SignalBy>;
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
    /// The UUID of its device.
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
    /// The smallest [`striped_rate`](PeerDevice::striped_rate) of all ranks, so that all choose alike.
    pub striped_rate: u64,
}

impl EngineRequest {
    /// Returns whether a peer is reached through host memory.
    pub fn is_staged(&self) -> bool {
        self.peers.iter().any(|peer| peer.kind == LinkKind::HostStaged)
    }
}

/// A device that reaches peers.
pub trait PeerDevice: RegionDevice {
    /// The description of the device that discovery returns.
    type DeviceInfo: fmt::Debug;
    /// The options of the backend's fabric.
    type Options: PeerOptions;
    /// The backend's engine.
    type Engine: CopyEngine<Error = Self::Error, Local = Local<Self>, Remote = Remote<Self>>
        + 'static;

    /// Opens the device that the options name.
    ///
    /// # Errors
    /// Returns an error of kind [`Unavailable`](peerlane_hal::ErrorKind::Unavailable) without a driver or a
    /// device or if another process holds the device, and
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if there is no such device.
    fn open(options: &Self::Options) -> Result<Arc<Self>, Self::Error>;

    /// Returns the description of the device.
    fn info(&self) -> &Self::DeviceInfo;

    /// Returns the identity of the device for peers.
    fn device_id(&self) -> DeviceId;

    /// Returns whether this device and another one reach each other, as the driver says.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn reachability(&self, other: &DeviceId) -> Result<Reachability, Self::Error>;

    /// Probes which method writes to the flag of a peer. The flag is zero before and after.
    ///
    /// # Errors
    /// Returns an error if no method works.
    fn try_signal(&self, flag: DevicePtr) -> Result<SignalBy, Self::Error>;

    /// Returns whether flags are allocated in host memory, for engines that queue no waits.
    fn needs_host_flags(&self, options: &Self::Options) -> bool {
        let _ = options;
        false
    }

    /// Returns the bytes per second of a copy to another device that all copy engines of the link share,
    /// for the slowest link. Returns 0 where all engines are of one kind or the rate is unknown. The rate
    /// is part of the address that peers get.
    fn striped_rate(&self, options: &Self::Options) -> u64 {
        let _ = options;
        0
    }

    /// Creates an engine that reaches the peers.
    ///
    /// # Errors
    /// As [`Fabric::engine`](peerlane_hal::Fabric::engine).
    fn engine(
        context: &Arc<Self>,
        options: &Self::Options,
        request: EngineRequest,
    ) -> Result<Self::Engine, Self::Error>;

    /// Returns the toolkit's error, if the error is one.
    fn fault(error: &Self::Error) -> Option<&Fault>;

    /// Returns whether an error means that a device cannot access the memory that it was to map.
    fn is_no_access(error: &Self::Error) -> bool;

    /// Turns the driver's error into the reason why a peer is not reachable; `text` names the peer. An error
    /// that is not the driver's stays unchanged, and so does that of a lost device.
    fn unreachable(error: Self::Error, text: String) -> Self::Error;
}
