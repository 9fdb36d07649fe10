//! The driver's calls: memory, streams, words, copies, graphs, IPC handles and virtual memory.
//!
//! The context is current in every call.

use std::ffi::c_void;
use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use super::{DeviceContext, DevicePtr};

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

/// Support of a driver for calls with several memory operations that run in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batching {
    /// One call takes several operations, runs them in order, and costs about as much as one operation.
    Trusted,
    /// A probe decides whether such a call runs its operations in order.
    Probe,
    /// The driver has no such call.
    Never,
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

/// The kind of a copy by its two ends. A driver may have a call for each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyKind {
    /// Two addresses of this device.
    Local,
    /// This device and a peer.
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

/// Copies memory in a stream.
pub trait CopyCalls: StreamCalls {
    /// Returns whether one call may take several copies, without order. A probe decides whether it does.
    fn may_copy_together(&self) -> bool;

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

/// The handle by which another process opens an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IpcHandle(pub [u8; 64]);

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

/// A reference to physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryHandle(pub u64);

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
