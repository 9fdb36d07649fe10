//! Defines the traits that a GPU backend implements, in the order in which a port needs them.
//!
//! | trait | covers |
//! | --- | --- |
//! | [`DeviceContext`] | the context: errors, labels, the context that is current on a thread |
//! | [`MemoryCalls`] | allocations, and pinned host memory |
//! | [`StreamCalls`] | streams, events, and the capture state of a stream |
//! | [`WordCalls`] | writes of 64-bit words and waits for them in a stream |
//! | [`CopyCalls`] | copies in a stream |
//! | [`GraphCalls`] | captures and replays |
//! | [`StreamDevice`] | the limits of the streams; with the traits above, the [engine](crate::streams) works |
//! | [`IpcCalls`] | allocations that another process opens by a handle |
//! | [`VirtualCalls`] | physical memory apart from addresses, and its descriptors |
//! | [`Vendor`], [`RegionDevice`] | texts and queries; with them, [regions](crate::regions) work |
//! | [`PeerOptions`], [`PeerDevice`] | options and links; with them, the [fabric](crate::peers) works |
//!
//! The context is current in every call, except in those of [`DeviceContext`] and where a method says so.

use std::ffi::c_void;
use std::fmt::Debug;
use std::hash::Hash;
use std::marker::PhantomData;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use peerlane_hal::{BackendId, CopyEngine, DmaBuf, Flush};

use super::types::{
    Batching, CaptureState, CopyBatch, CopyKind, EngineRequest, EventHandle, ExecHandle, Extent,
    FreeBytes, GraphHandle, IpcHandle, MemoryHandle, Pointee, Reachability, StreamHandle,
    StreamLimits,
};
use super::{DevicePtr, Entered, Relaxed};
use crate::Fault;
use crate::peers::DeviceId;
use crate::regions::{Local, Remote};
use crate::streams::{ProbeCache, SignalBy, Stream};

/// One device of this process, as its driver knows it.
pub trait DeviceContext: Debug + Send + Sync + Sized + 'static {
    /// The backend's error.
    type Error: peerlane_hal::Error + Clone + From<Fault>;
    /// The driver's entry points. The owner of a handle keeps them to destroy the handle.
    type Library: Copy + Debug + Send + Sync + 'static;
    /// The driver's reference to the context that is current on a thread.
    type Current: Copy + Debug;
    /// The mode that decides how calls of a thread interact with captures of other threads.
    type CaptureMode: Copy + Debug;

    /// Returns the driver's entry points.
    fn library(&self) -> Self::Library;

    /// Returns the name of the device for texts, such as `device 2 (NVIDIA H200)`.
    fn label(&self) -> &Arc<str>;

    /// Returns the driver's number of the device in this process.
    fn device(&self) -> i32;

    /// Returns a number that distinguishes the contexts of one backend in this process. Two ranks on one
    /// device have the same number.
    fn id(&self) -> usize;

    /// Makes the context current on this thread. Returns the context to restore if another one was
    /// current.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn make_current(&self) -> Result<Option<Self::Current>, Self::Error>;

    /// Undoes [`make_current`](Self::make_current). A context that was destroyed since is not restored.
    fn put_back(&self, before: Self::Current);

    /// Keeps all further calls of this thread out of captures that other threads began. Returns the mode
    /// to restore.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn relax_captures(&self) -> Result<Self::CaptureMode, Self::Error>;

    /// Undoes [`relax_captures`](Self::relax_captures).
    fn put_back_captures(&self, before: Self::CaptureMode);

    /// Makes the context current on this thread until the guard is dropped.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn enter(&self) -> Result<Entered<'_, Self>, Self::Error> {
        Ok(Entered { context: self, before: self.make_current()?, not_send: PhantomData })
    }

    /// Makes the context current and keeps this thread's calls out of captures of other threads, until the
    /// guard is dropped.
    ///
    /// Without it, allocations and event queries are refused while another thread captures in the global
    /// mode, and they invalidate that capture.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn enter_relaxed(&self) -> Result<Relaxed<'_, Self>, Self::Error> {
        let entered = self.enter()?;
        Ok(Relaxed { entered, before: self.relax_captures()? })
    }
}

/// Allocates device memory and pinned host memory.
pub trait MemoryCalls: DeviceContext {
    /// Returns whether an error says that the device has no memory left.
    fn is_out_of_memory(error: &Self::Error) -> bool;

    /// Returns the amount of memory of the device; zeros where the driver does not say.
    fn free_bytes(&self) -> FreeBytes;

    /// Allocates `bytes` of device memory, at least 1.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn allocate(&self, bytes: usize) -> Result<DevicePtr, Self::Error>;

    /// Allocates device memory for words that streams wait for, where these need a special kind of memory.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn allocate_flags(&self, bytes: usize) -> Result<DevicePtr, Self::Error> {
        self.allocate(bytes)
    }

    /// Frees device memory. An error of the driver means that the device is lost, and is ignored.
    ///
    /// # Safety
    /// The memory was allocated by [`allocate`](Self::allocate) or
    /// [`allocate_flags`](Self::allocate_flags), is freed once, and is no longer in use.
    unsafe fn free(&self, address: DevicePtr);

    /// Returns whether freeing memory waits for every stream of the device, including one that waits for a
    /// peer.
    fn frees_wait(&self) -> bool {
        false
    }

    /// Returns a number that no other allocation of this process has or had; `None` where the driver knows
    /// no allocation.
    fn allocation_number(&self, address: DevicePtr) -> Option<u64>;

    /// Returns the allocation that holds `address`; for mapped memory, the one mapping. Returns `None`
    /// where the driver knows no allocation.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn extent(&self, address: DevicePtr) -> Result<Option<Extent>, Self::Error>;

    /// Allocates pinned host memory for all devices of the process.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn allocate_host(&self, bytes: usize) -> Result<NonNull<c_void>, Self::Error>;

    /// Frees pinned host memory.
    ///
    /// # Safety
    /// The memory was allocated by [`allocate_host`](Self::allocate_host), is freed once, and is no longer
    /// in use.
    unsafe fn free_host(&self, host: NonNull<c_void>);

    /// Pins memory of this process for all devices of the process.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The range consists of whole pages, which stay mapped until they are unregistered.
    unsafe fn register_host(&self, host: NonNull<c_void>, bytes: usize) -> Result<(), Self::Error>;

    /// Unpins memory of this process. An error of the driver means that the device is lost, and is ignored.
    ///
    /// # Safety
    /// The memory was registered once, is unregistered once, and is no longer in use.
    unsafe fn unregister_host(&self, host: NonNull<c_void>);

    /// Returns the address at which this device reaches pinned host memory.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The memory is pinned.
    unsafe fn host_pointer(&self, host: NonNull<c_void>) -> Result<DevicePtr, Self::Error>;
}

/// Creates streams and events.
///
/// Streams do not synchronize with the default stream, and events record no time. Streams and events are
/// queried under [`DeviceContext::enter_relaxed`].
pub trait StreamCalls: DeviceContext {
    /// Creates a stream. An urgent stream has the highest priority, so that it need not share a hardware
    /// queue with streams that wait.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn create_stream(&self, urgent: bool) -> Result<StreamHandle, Self::Error>;

    /// Destroys a stream. Its remaining work still runs, and some drivers wait for that work. An error of
    /// the driver means that the device is lost, and is ignored.
    ///
    /// # Safety
    /// The stream is alive and is not used afterwards.
    unsafe fn destroy_stream(library: Self::Library, stream: StreamHandle);

    /// Returns whether all work of a stream is complete. Not for a stream that captures.
    ///
    /// # Errors
    /// Returns the driver's error, which is usually that of earlier work.
    ///
    /// # Safety
    /// The stream is alive.
    unsafe fn is_idle(&self, stream: StreamHandle) -> Result<bool, Self::Error>;

    /// Rejects a default stream and a stream of another context.
    ///
    /// # Errors
    /// Returns an error of kind `InvalidArgument` or `Mismatch`, or the driver's error.
    ///
    /// # Safety
    /// The stream is alive or is the number of a default stream.
    unsafe fn check_stream(&self, stream: StreamHandle) -> Result<(), Self::Error>;

    /// Returns whether work that is put onto a stream is recorded. An invalidated capture lasts until it is
    /// ended.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The stream is alive.
    unsafe fn is_capturing(&self, stream: StreamHandle) -> Result<bool, Self::Error>;

    /// Returns the capture that a stream is part of.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The stream is alive.
    unsafe fn capture_state(&self, stream: StreamHandle) -> Result<CaptureState, Self::Error>;

    /// Creates an event.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn create_event(&self) -> Result<EventHandle, Self::Error>;

    /// Destroys an event. Queued waits for it are not affected.
    ///
    /// # Safety
    /// The event is alive and is not used afterwards.
    unsafe fn destroy_event(library: Self::Library, event: EventHandle);

    /// Records an event behind the present work of a stream.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The event and the stream are alive.
    unsafe fn record_event(
        &self,
        event: EventHandle,
        stream: StreamHandle,
    ) -> Result<(), Self::Error>;

    /// Orders the further work of a stream behind the point where the event is recorded now. The event can
    /// be recorded again at once.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The stream and the event are alive.
    unsafe fn wait_for_event(
        &self,
        stream: StreamHandle,
        event: EventHandle,
    ) -> Result<(), Self::Error>;

    /// Returns whether the work in front of an event is complete.
    ///
    /// # Errors
    /// Returns the driver's error, or that of earlier work.
    ///
    /// # Safety
    /// The event is alive.
    unsafe fn has_passed(&self, event: EventHandle) -> Result<bool, Self::Error>;
}

/// Writes 64-bit words and waits for them in a stream (memory operations).
pub trait WordCalls: StreamCalls {
    /// One operation in the driver's format.
    type WordOp: Copy + Debug + Send;

    /// Largest number of operations in one call.
    const WORD_OPS_MAX: usize;

    /// Rejects a driver or a device without memory operations; the text says what to do.
    ///
    /// # Errors
    /// Returns an error of kind `Unavailable`.
    fn check_words(&self) -> Result<(), Self::Error>;

    /// Returns whether one call takes several operations and runs them in order.
    fn batching(&self) -> Batching;

    /// Creates an operation that stores the value after everything before it in the stream.
    fn word_write(address: DevicePtr, value: u64) -> Self::WordOp;

    /// Creates an operation that blocks the stream until the word is at least `value`. At most one of the
    /// word and the value may be 2^63 or more: drivers differ in how they compare two such values.
    fn word_wait(address: DevicePtr, value: u64) -> Self::WordOp;

    /// Creates an operation that stores the lower half of a word after everything before it in the stream. The upper half
    /// stays.
    fn half_write(address: DevicePtr, value: u32) -> Self::WordOp;

    /// Creates an operation that blocks the stream until the word has one of the bits of `bits`.
    fn bits_wait(address: DevicePtr, bits: u64) -> Self::WordOp;

    /// Puts operations onto the stream in one call. There is at least one operation and at most
    /// [`WORD_OPS_MAX`](Self::WORD_OPS_MAX), and more than one only where [`batching`](Self::batching)
    /// permits it. The driver has read the operations when this returns.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The stream is alive. The words stay valid as long as the operations run.
    unsafe fn put_words(
        &self,
        stream: StreamHandle,
        ops: &mut [Self::WordOp],
    ) -> Result<(), Self::Error>;

    /// Returns whether an error means only that a stream cannot write to an address.
    fn is_write_refused(error: &Self::Error) -> bool;
}

/// Copies memory in a stream.
pub trait CopyCalls: StreamCalls {
    /// Returns whether one call may take several copies, without order. A probe decides whether it does.
    fn may_copy_together(&self) -> bool;

    /// Returns whether compute units make copies of this kind.
    fn uses_compute_units(&self, copy_kind: CopyKind) -> bool;

    /// Returns whether copies of this kind must be probed first, because the driver may report success and
    /// copy nothing. A probe of one pair of devices is not valid for another pair.
    fn needs_probe(&self, copy_kind: CopyKind) -> bool {
        let _ = copy_kind;
        false
    }

    /// Records the result of a probe. If the copies do not work, all contexts of the device use another
    /// method for such copies from now on, which needs no probe.
    fn record_probe(&self, copy_kind: CopyKind, works: bool) {
        let _ = (copy_kind, works);
    }

    /// Puts one copy onto a stream.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The stream is alive. The spans stay valid as long as the copy runs.
    unsafe fn copy(
        &self,
        stream: StreamHandle,
        to: DevicePtr,
        from: DevicePtr,
        bytes: usize,
        copy_kind: CopyKind,
    ) -> Result<(), Self::Error>;

    /// Puts several copies onto a stream. No copy reads or writes bytes that another one writes.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    unsafe fn copy_together(
        &self,
        stream: StreamHandle,
        copies: CopyBatch<'_>,
    ) -> Result<(), Self::Error>;

    /// Sets bytes to 0 in a stream.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    unsafe fn clear(
        &self,
        stream: StreamHandle,
        address: DevicePtr,
        bytes: usize,
    ) -> Result<(), Self::Error>;
}

/// Captures and replays graphs, for the probe of captures.
pub trait GraphCalls: StreamCalls {
    /// Records all further work of the stream. Other threads are not affected.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The stream is alive.
    unsafe fn begin_capture(&self, stream: StreamHandle) -> Result<(), Self::Error>;

    /// Ends a capture and returns the recorded graph.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The stream is alive.
    unsafe fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle, Self::Error>;

    /// Instantiates a graph for replays.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The graph is alive.
    unsafe fn instantiate(&self, graph: GraphHandle) -> Result<ExecHandle, Self::Error>;

    /// Replays a graph once.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The graph and the stream are alive. The memory that the graph names stays valid as long as it runs.
    unsafe fn launch(&self, exec: ExecHandle, stream: StreamHandle) -> Result<(), Self::Error>;

    /// Destroys an instantiated graph.
    ///
    /// # Safety
    /// The graph is alive and is not used afterwards.
    unsafe fn destroy_exec(&self, exec: ExecHandle);

    /// Destroys a graph.
    ///
    /// # Safety
    /// The graph is alive and is not used afterwards.
    unsafe fn destroy_graph(&self, graph: GraphHandle);
}

/// A device that the stream engine can use.
pub trait StreamDevice: RegionDevice + WordCalls + GraphCalls {
    /// The type of the caller's streams, such as a wrapper of a `cudaStream_t`.
    type Stream: AsRef<Stream> + 'static;

    /// Returns the limits of the device's streams. The context is current.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn stream_limits(&self) -> Result<StreamLimits, Self::Error>;

    /// Opens a second context of the device, whose streams run while all streams of this context are blocked. The addresses of
    /// this context are valid there. Returns `None` if the driver has no second context.
    ///
    /// # Errors
    /// Returns the driver's error, such as too little memory.
    fn second_context(&self) -> Result<Option<Arc<Self>>, Self::Error>;

    /// Returns the process's cache of probe results. Each backend has one, since a generic type has no
    /// statics.
    fn probe_cache() -> &'static ProbeCache<Self::Error>;
}

/// Shares whole allocations with other processes by handles.
pub trait IpcCalls: MemoryCalls {
    /// Returns the handle of the allocation that begins at `base`.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn ipc_handle(&self, base: DevicePtr) -> Result<IpcHandle, Self::Error>;

    /// Opens a handle, once in a process. Returns the address of the allocation in this process.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn open_ipc(&self, handle: &IpcHandle) -> Result<DevicePtr, Self::Error>;

    /// Closes an opened handle. An error of the driver means that the device is lost, and is ignored.
    ///
    /// # Safety
    /// The handle was opened once, is closed once, and its memory is no longer in use.
    unsafe fn close_ipc(&self, base: DevicePtr);
}

/// Allocates physical memory and addresses separately.
pub trait VirtualCalls: MemoryCalls {
    /// Returns whether the driver and the device support virtual memory, including memory that other
    /// processes open by a descriptor. An allocation may be refused all the same.
    fn has_virtual_memory(&self) -> bool;

    /// Returns the number of bytes that lengths must be a multiple of.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn granularity(&self) -> Result<u64, Self::Error>;

    /// Allocates physical memory that can be exported as a descriptor.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn create_memory(&self, bytes: u64) -> Result<MemoryHandle, Self::Error>;

    /// Takes another reference to the memory that is mapped at `address`; `None` where it has no handle.
    ///
    /// # Errors
    /// Returns the driver's error if the device no longer works.
    fn retain_memory(&self, address: DevicePtr) -> Result<Option<MemoryHandle>, Self::Error>;

    /// Gives up a reference.
    ///
    /// # Safety
    /// The reference is given up once.
    unsafe fn release_memory(&self, handle: MemoryHandle);

    /// Returns whether the memory was created so that it can be exported as a descriptor.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The reference is held.
    unsafe fn is_exportable(&self, handle: MemoryHandle) -> Result<bool, Self::Error>;

    /// Creates a descriptor of the memory.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The reference is held.
    unsafe fn export_memory(&self, handle: MemoryHandle) -> Result<OwnedFd, Self::Error>;

    /// Takes a reference to the memory of a descriptor.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn import_memory(&self, fd: BorrowedFd<'_>) -> Result<MemoryHandle, Self::Error>;

    /// Reserves a range of addresses without memory.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn reserve(&self, bytes: u64) -> Result<DevicePtr, Self::Error>;

    /// Frees a reserved range of addresses.
    ///
    /// # Safety
    /// The range is a whole reserved range, and nothing is mapped in it.
    unsafe fn unreserve(&self, address: DevicePtr, bytes: u64);

    /// Maps memory at a reserved address.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The span is reserved, nothing is mapped there, and the reference is held.
    unsafe fn map(
        &self,
        address: DevicePtr,
        bytes: u64,
        handle: MemoryHandle,
    ) -> Result<(), Self::Error>;

    /// Removes a mapping.
    ///
    /// # Safety
    /// The span is exactly one mapping, which is no longer in use.
    unsafe fn unmap(&self, address: DevicePtr, bytes: u64);

    /// Permits this device to read and write whole mappings, including those of another context of the
    /// process.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The span consists of whole mappings.
    unsafe fn allow(&self, address: DevicePtr, bytes: u64) -> Result<(), Self::Error>;
}

/// The texts and numbers of a vendor.
pub trait Vendor: Copy + Debug + Eq + Hash + Send + Sync + 'static {
    /// The backend in keys and addresses.
    const BACKEND: BackendId;
    /// The vendor's plain allocator, such as `cudaMalloc`.
    const ALLOCATOR: &'static str;
    /// Reason why mapped memory without a handle cannot leave its process, and what to do.
    const NO_HANDLE: &'static str;
    /// Reason why memory of a stream-ordered pool cannot leave its process, and what to do.
    const POOL: &'static str;
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

    /// Creates the error of an allocation for which the device has too little memory.
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

/// The options of a backend's fabric that the toolkit reads.
pub trait PeerOptions: Debug + Clone + Send + Sync + 'static {
    /// Returns the default options for the device with this ordinal.
    fn on_device(ordinal: u32) -> Self;

    /// Returns whether a slower fallback is refused.
    fn is_strict(&self) -> bool;

    /// Returns the method by which signals reach peers; `None` for the method that a probe finds.
    fn signal(&self) -> Option<SignalBy>;
}

/// A device that reaches peers.
pub trait PeerDevice: RegionDevice {
    /// The description of the device that discovery returns.
    type DeviceInfo: Debug;
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
