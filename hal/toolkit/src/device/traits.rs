//! Defines the traits that a GPU backend implements, in the order in which a port to a new GPU needs them.
//!
//! | trait | covers |
//! | --- | --- |
//! | [`DeviceContext`] | the context: errors, labels, the context that is current on a thread |
//! | [`MemoryCalls`] | allocations, and pinned host memory |
//! | [`StreamCalls`] | streams, events, and the capture state of a stream |
//! | [`WordCalls`] | writes of 64-bit words and waits for them in a stream |
//! | [`CopyCalls`] | copies in a stream |
//! | [`ReduceCalls`] | reductions in a stream, if the device has code for them |
//! | [`FusedCalls`] | launches of whole starts, if the device has code for them |
//! | [`GraphCalls`] | captures and replays |
//! | [`StreamDevice`] | the limits of the streams; with the traits above, the [engine](crate::streams) works |
//! | [`IpcCalls`] | allocations that another process opens by a handle |
//! | [`VirtualCalls`] | physical memory apart from addresses, and its descriptors |
//! | [`Vendor`], [`RegionDevice`] | texts and queries; with them, [regions](crate::regions) work |
//! | [`PeerOptions`](super::PeerOptions), [`PeerDevice`](super::PeerDevice) | options and links; with them, the [fabric](crate::peers) works |
//!
//! The context is current in every call, except in those of [`DeviceContext`] and where a method says so.

use std::ffi::c_void;
use std::fmt::Debug;
use std::hash::Hash;
use std::marker::PhantomData;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use peerlane_hal::{BackendId, DmaBuf, Flush, FusedLimits, Reducer, Reduction, Rows};

use super::types::{
    Batching, CaptureState, CopyBatch, CopyKind, EventHandle, ExecHandle, Extent, FreeBytes,
    FusedKernel, GraphHandle, IpcHandle, MemoryHandle, Pointee, StreamHandle, StreamLimits,
};
use super::{DevicePtr, Entered, Relaxed};
use crate::Fault;
use crate::fused::Program;
use crate::streams::{ProbeCache, Stream};

/// The driver context of one device of this process, with the calls to make it current.
///
/// # Safety
/// After [`make_current`](Self::make_current) succeeds, the context is current on the thread until
/// [`put_back`](Self::put_back). Two contexts have the same [`id`](Self::id) only if every address, stream and event of one is valid in
/// the other. The [entry points](Self::library) stay valid until the process ends. An error that a [`Fault`] becomes has the kind of
/// that fault, and no other error has the kind [`QueueFull`](peerlane_hal::ErrorKind::QueueFull).
pub unsafe trait DeviceContext: Debug + Send + Sync + Sized + 'static {
    /// The error type of the backend.
    type Error: peerlane_hal::Error + Clone + From<Fault>;
    /// The type that holds the entry points of the vendor's driver library. The owner of a handle keeps them to destroy
    /// the handle.
    type Library: Copy + Debug + Send + Sync + 'static;
    /// The driver's reference to the context that was current on a thread.
    type Current: Copy + Debug;
    /// The driver's capture mode of a thread, which decides how its calls affect captures of other threads.
    type CaptureMode: Copy + Debug;

    /// Returns the entry points of the vendor's driver library.
    fn library(&self) -> Self::Library;

    /// Returns the name of the device for error texts, such as `device 2 (NVIDIA H200)`.
    fn label(&self) -> &Arc<str>;

    /// Returns the ordinal of the device in this process.
    fn device(&self) -> i32;

    /// Returns a number that distinguishes the device contexts of one backend in this process. Two ranks on one device
    /// have the same number.
    fn id(&self) -> usize;

    /// Makes the context current on this thread, and returns the previous context if it was another one.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn make_current(&self) -> Result<Option<Self::Current>, Self::Error>;

    /// Restores the context `before`, which [`make_current`](Self::make_current) returned. A context that was destroyed
    /// since is not restored.
    fn put_back(&self, before: Self::Current);

    /// Keeps all further calls of this thread out of captures that other threads began. Returns the mode to restore.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn relax_captures(&self) -> Result<Self::CaptureMode, Self::Error>;

    /// Restores the capture mode `before`, which [`relax_captures`](Self::relax_captures) returned.
    fn put_back_captures(&self, before: Self::CaptureMode);

    /// Makes the device context current on this thread until the returned guard is dropped.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn enter(&self) -> Result<Entered<'_, Self>, Self::Error> {
        Ok(Entered { context: self, before: self.make_current()?, not_send: PhantomData })
    }

    /// Makes the context current and keeps this thread's calls out of other threads' captures, until the guard is
    /// dropped.
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

/// Allocates, registers and frees device memory and pinned host memory.
///
/// # Safety
/// Memory that a method allocates has at least the requested length, belongs to no one else, and stays allocated until it is
/// freed here; host memory is aligned to 8 bytes. [`host_pointer`](Self::host_pointer) returns the address at which the device accesses exactly that
/// memory. [`extent`](Self::extent) and [`allocation_number`](Self::allocation_number) describe the allocation that holds the address.
pub unsafe trait MemoryCalls: DeviceContext {
    /// Returns whether an error means that the device has no free memory left.
    fn is_out_of_memory(error: &Self::Error) -> bool;

    /// Returns the free and the total memory of the device, or zeros where the driver does not say.
    fn free_bytes(&self) -> FreeBytes;

    /// Allocates `bytes` bytes of device memory, at least 1.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn allocate(&self, bytes: usize) -> Result<DevicePtr, Self::Error>;

    /// Allocates device memory for flags that streams wait for, where the device needs a special kind of memory.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn allocate_flags(&self, bytes: usize) -> Result<DevicePtr, Self::Error> {
        self.allocate(bytes)
    }

    /// Frees device memory that this trait has allocated. An error of the driver means that the device is lost, and is
    /// ignored.
    ///
    /// # Safety
    /// The memory was allocated by [`allocate`](Self::allocate) or
    /// [`allocate_flags`](Self::allocate_flags), is freed once, and is no longer in use.
    unsafe fn free(&self, address: DevicePtr);

    /// Returns whether freeing memory blocks until every stream of the device is idle.
    fn frees_wait(&self) -> bool {
        false
    }

    /// Returns a number that identifies an allocation and is never reused in this process, or `None` if the driver
    /// knows no allocation at `address`.
    fn allocation_number(&self, address: DevicePtr) -> Option<u64>;

    /// Returns the address range of the allocation that holds `address`, which for mapped memory is one mapping.
    /// Returns `None` where the driver knows no allocation.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn extent(&self, address: DevicePtr) -> Result<Option<Extent>, Self::Error>;

    /// Allocates pinned host memory that all devices of the process can access.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn allocate_host(&self, bytes: usize) -> Result<NonNull<c_void>, Self::Error>;

    /// Frees pinned host memory that this trait has allocated.
    ///
    /// # Safety
    /// The memory was allocated by [`allocate_host`](Self::allocate_host), is freed once, and is no longer
    /// in use.
    unsafe fn free_host(&self, host: NonNull<c_void>);

    /// Pins host memory of this process, so that all devices of the process can access it.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The range consists of whole pages, which stay mapped until they are unregistered.
    unsafe fn register_host(&self, host: NonNull<c_void>, bytes: usize) -> Result<(), Self::Error>;

    /// Unpins host memory that [`register_host`](Self::register_host) has pinned. An error of the driver means that the
    /// device is lost, and is ignored.
    ///
    /// # Safety
    /// The memory was registered once, is unregistered once, and is no longer in use.
    unsafe fn unregister_host(&self, host: NonNull<c_void>);

    /// Returns the address at which this device accesses pinned host memory.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The memory is pinned.
    unsafe fn host_pointer(&self, host: NonNull<c_void>) -> Result<DevicePtr, Self::Error>;
}

/// Creates, queries and destroys streams and events of a device.
///
/// Streams do not synchronize with the default stream. Streams and events are queried under [`DeviceContext::enter_relaxed`].
///
/// # Safety
/// A stream runs its work in order, and an event passes only after the work before it. Handles that a method creates are valid
/// until they are destroyed here. [`is_idle`](Self::is_idle) and [`has_passed`](Self::has_passed) return `true` only if all that work is
/// complete and its results are visible to the host. [`is_capturing`](Self::is_capturing) and [`capture_state`](Self::capture_state) say
/// whether work is recorded instead of run.
pub unsafe trait StreamCalls: DeviceContext {
    /// Creates a stream, which has the highest priority if `urgent` is set. With that priority, it need not share a
    /// hardware queue with streams that wait.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn create_stream(&self, urgent: bool) -> Result<StreamHandle, Self::Error>;

    /// Destroys a stream, whose remaining work still runs. Some drivers wait for that work. An error of the driver
    /// means that the device is lost, and is ignored.
    ///
    /// # Safety
    /// The stream is alive and is not used afterwards.
    unsafe fn destroy_stream(library: Self::Library, stream: StreamHandle);

    /// Returns whether all work of a stream is complete. Must not be called for a stream that captures.
    ///
    /// # Errors
    /// Returns the driver's error, which is usually that of earlier work.
    ///
    /// # Safety
    /// The stream is alive.
    unsafe fn is_idle(&self, stream: StreamHandle) -> Result<bool, Self::Error>;

    /// Rejects a stream on which an engine cannot work, namely a default stream or one of another context.
    ///
    /// # Errors
    /// Returns an error of kind `InvalidArgument` or `Mismatch`, or the driver's error.
    ///
    /// # Safety
    /// The stream is alive or is the number of a default stream.
    unsafe fn check_stream(&self, stream: StreamHandle) -> Result<(), Self::Error>;

    /// Returns whether a stream is capturing, so that its work is recorded into a graph. An invalidated capture lasts
    /// until it is ended.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The stream is alive.
    unsafe fn is_capturing(&self, stream: StreamHandle) -> Result<bool, Self::Error>;

    /// Returns which capture a stream belongs to, if any.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The stream is alive.
    unsafe fn capture_state(&self, stream: StreamHandle) -> Result<CaptureState, Self::Error>;

    /// Creates an event. A timed event also records when the work in front of it was complete, which takes
    /// the device longer.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn create_event(&self, timed: bool) -> Result<EventHandle, Self::Error>;

    /// Destroys an event of the driver. Queued waits for it are not affected.
    ///
    /// # Safety
    /// The event is alive and is not used afterwards.
    unsafe fn destroy_event(library: Self::Library, event: EventHandle);

    /// Records an event on a stream, after all work that was enqueued so far.
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

    /// Makes the later work of a stream wait for the event as it is recorded now. The event can be recorded again at
    /// once.
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

    /// Returns whether all work before a recorded event is complete.
    ///
    /// # Errors
    /// Returns the driver's error, or that of earlier work.
    ///
    /// # Safety
    /// The event is alive.
    unsafe fn has_passed(&self, event: EventHandle) -> Result<bool, Self::Error>;

    /// Returns the milliseconds from one timed event to another; negative if `end` passed first.
    ///
    /// # Errors
    /// Returns the driver's error, also if one of the events has not passed.
    ///
    /// # Safety
    /// Both events are alive.
    unsafe fn milliseconds(&self, begin: EventHandle, end: EventHandle)
    -> Result<f32, Self::Error>;
}

/// Enqueues writes of 64-bit words and waits for them on a stream.
///
/// # Safety
/// A [`WordOp`](Self::WordOp) accesses only the word of its address, as its constructor says. Word operations take effect in the order of
/// the stream, and those of one call in the order that [`batching`](Self::batching) returns. What the stream wrote before a word is
/// visible to whoever sees the word.
pub unsafe trait WordCalls: StreamCalls {
    /// A write of a 64-bit word or a wait for one, in the format of the driver's call.
    type WordOp: Copy + Debug + Send;

    /// The largest number of word operations in one call of the driver.
    const WORD_OPS_MAX: usize;

    /// Rejects a driver or a device without stream memory operations. The error text says what to do.
    ///
    /// # Errors
    /// Returns an error of kind `Unavailable`.
    fn check_words(&self) -> Result<(), Self::Error>;

    /// Returns whether the driver runs several word operations of one call in order.
    fn batching(&self) -> Batching;

    /// Creates a word operation that stores a value after all earlier work of the stream.
    fn word_write(address: DevicePtr, value: u64) -> Self::WordOp;

    /// Creates a word operation that blocks the stream until the word is at least `value`. At most one of the word and
    /// the value may be 2^63 or more: drivers differ in how they compare two such values.
    fn word_wait(address: DevicePtr, value: u64) -> Self::WordOp;

    /// Creates a word operation that stores the lower 32 bits of a word after all earlier work of the stream. The upper
    /// half stays.
    fn half_write(address: DevicePtr, value: u32) -> Self::WordOp;

    /// Creates a word operation that blocks the stream until any bit of `bits` is set in the word.
    fn bits_wait(address: DevicePtr, bits: u64) -> Self::WordOp;

    /// Enqueues word operations on a stream in one call of the driver. There is at least one operation and at most
    /// [`WORD_OPS_MAX`](Self::WORD_OPS_MAX), and more than one only where [`batching`](Self::batching) permits it. The
    /// driver has read the operations when this returns.
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

    /// Returns whether an error only means that a stream cannot write to an address.
    fn is_write_refused(error: &Self::Error) -> bool;
}

/// Enqueues copies of memory on a stream.
///
/// # Safety
/// A copy or a fill accesses only the spans that it is given, after the earlier work of the stream and before the later work.
pub unsafe trait CopyCalls: StreamCalls {
    /// Returns whether one call of the driver may take several unordered copies. A probe decides whether it does.
    fn may_copy_together(&self) -> bool;

    /// Returns whether the device makes copies of a kind with compute units instead of copy engines.
    fn uses_compute_units(&self, copy_kind: CopyKind) -> bool;

    /// Returns whether copies of a kind must be probed first, because the driver may report success without copying. A
    /// probe of one pair of devices is not valid for another pair.
    fn needs_probe(&self, copy_kind: CopyKind) -> bool {
        let _ = copy_kind;
        false
    }

    /// Records whether a probe found that copies of a kind work. If the copies do not work, all contexts of the device
    /// use another method for such copies from now on, which needs no probe.
    fn record_probe(&self, copy_kind: CopyKind, works: bool) {
        let _ = (copy_kind, works);
    }

    /// Enqueues one copy on a stream.
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

    /// Enqueues several unordered copies on a stream in one call. No copy reads or writes bytes that another one
    /// writes.
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

    /// Returns the largest pitch in bytes that [`copy_rows`](Self::copy_rows) accepts, or 0 if each row needs a call.
    fn row_pitch_max(&self) -> u64 {
        0
    }

    /// Enqueues one copy of several rows on a stream. No row of the destination overlaps another one or the source.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The requirements of [`copy`](Self::copy) hold for each row. A region holds all rows of the destination, or of the source.
    unsafe fn copy_rows(
        &self,
        stream: StreamHandle,
        to: DevicePtr,
        from: DevicePtr,
        row_bytes: usize,
        rows: Rows,
        copy_kind: CopyKind,
    ) -> Result<(), Self::Error> {
        rows.offsets().try_for_each(|(to_offset, from_offset)| {
            // SAFETY: the caller's.
            unsafe { self.copy(stream, to + to_offset, from + from_offset, row_bytes, copy_kind) }
        })
    }

    /// Enqueues a fill on a stream, which sets every byte of an address range to `value`.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    unsafe fn set(
        &self,
        stream: StreamHandle,
        address: DevicePtr,
        value: u8,
        bytes: usize,
    ) -> Result<(), Self::Error>;
}

/// Enqueues reductions of device memory on a stream. The default methods are for a device without code for them.
///
/// # Safety
/// A reduction accesses only the spans that it is given, in the order of the stream. At most as many sources as the reducer of
/// [`prepare_reduce`](Self::prepare_reduce) names are accepted.
pub unsafe trait ReduceCalls: StreamCalls {
    /// Loads the code for reductions, and returns what runs it.
    ///
    /// # Errors
    /// Returns an error of kind `Unavailable` if the driver refuses the code, or the driver's error.
    fn prepare_reduce(&self) -> Result<Option<Reducer>, Self::Error> {
        Ok(None)
    }

    /// Enqueues a reduction on a stream, which at most `blocks` blocks of threads run.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The stream is alive. [`prepare_reduce`](Self::prepare_reduce) has returned a reducer, which takes so many sources. The
    /// spans are aligned to the elements, and stay valid as long as the reduction runs.
    unsafe fn reduce(
        &self,
        stream: StreamHandle,
        to: DevicePtr,
        from: &[DevicePtr],
        bytes: u64,
        reduction: Reduction,
        blocks: u32,
    ) -> Result<(), Self::Error> {
        let _ = (stream, to, from, bytes, reduction, blocks);
        Err(Fault::Argument("the device has no code for reductions".to_owned()).into())
    }
}

/// Launches the kernel that runs the program of a start. The default methods are for a device without such a kernel.
///
/// # Safety
/// A launch has the effects of its program and accesses nothing else, in the order of the stream.
pub unsafe trait FusedCalls: StreamCalls {
    /// Returns the limits of launches, or `None` if the device has no such kernel.
    fn fused_limits(&self) -> Option<FusedLimits> {
        None
    }

    /// Returns how many blocks of threads of the kernel the device runs at the same time.
    fn resident_blocks_max(&self) -> u32 {
        0
    }

    /// Loads the kernel for a reduction, or that for copies only.
    ///
    /// # Errors
    /// Returns an error of kind `Unavailable` if the driver refuses the code, or the driver's error.
    fn prepare_fused(&self, reduction: Option<Reduction>) -> Result<FusedKernel, Self::Error> {
        let _ = reduction;
        Err(Fault::Unavailable("the device has no kernel for fused starts".to_owned()).into())
    }

    /// Enqueues a launch of a program with `blocks` blocks of threads.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The stream is alive. The kernel is one of [`prepare_fused`](Self::prepare_fused) for the reduction of the program. The
    /// memory that the program names stays valid as long as the launch runs, and no other launch of the program runs meanwhile.
    unsafe fn launch_fused(
        &self,
        stream: StreamHandle,
        kernel: FusedKernel,
        program: &Program,
        blocks: u32,
    ) -> Result<(), Self::Error> {
        let _ = (stream, kernel, program, blocks);
        Err(Fault::Unavailable("the device has no kernel for fused starts".to_owned()).into())
    }
}

/// Captures and replays graphs, with which a probe tests that captures work on the device.
///
/// # Safety
/// A graph holds the work that was enqueued on the stream during its capture and nothing else, and a replay runs it in the order of the
/// stream. Handles that a method returns are valid until they are destroyed here.
pub unsafe trait GraphCalls: StreamCalls {
    /// Begins a capture of the stream's further work into a graph. Other threads are not affected.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The stream is alive.
    unsafe fn begin_capture(&self, stream: StreamHandle) -> Result<(), Self::Error>;

    /// Ends the capture of a stream and returns the recorded graph.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The stream is alive.
    unsafe fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle, Self::Error>;

    /// Instantiates a graph, so that it can be replayed.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The graph is alive.
    unsafe fn instantiate(&self, graph: GraphHandle) -> Result<ExecHandle, Self::Error>;

    /// Replays an instantiated graph once on a stream.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The graph and the stream are alive. The memory that the graph names stays valid as long as it runs.
    unsafe fn launch(&self, exec: ExecHandle, stream: StreamHandle) -> Result<(), Self::Error>;

    /// Destroys an instantiated graph of the driver.
    ///
    /// # Safety
    /// The graph is alive and is not used afterwards.
    unsafe fn destroy_exec(&self, exec: ExecHandle);

    /// Destroys a captured graph of the driver.
    ///
    /// # Safety
    /// The graph is alive and is not used afterwards.
    unsafe fn destroy_graph(&self, graph: GraphHandle);
}

/// A GPU on whose streams the toolkit's engine can run.
///
/// # Safety
/// A [`Stream`](Self::Stream) always returns the same stream by [`AsRef`]. Addresses of this context are valid in the
/// [`second_context`](Self::second_context).
pub unsafe trait StreamDevice:
    RegionDevice + WordCalls + GraphCalls + ReduceCalls + FusedCalls
{
    /// The stream type of the backend's users, such as a wrapper of a `cudaStream_t`.
    type Stream: AsRef<Stream> + peerlane_hal::Stream;

    /// Returns limits of the device's streams, such as the number of copies that run at the same time. The context is
    /// current.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn stream_limits(&self) -> Result<StreamLimits, Self::Error>;

    /// Returns the time in seconds that the copies and flags of a start take longer in a graph, by
    /// which a caller compares them with fused starts.
    fn captured_seconds(&self) -> f64 {
        0.0
    }

    /// Opens a second context of the device, whose streams run even if all streams of this context are blocked. The
    /// addresses of this context are valid there. Returns `None` if the driver has no second context.
    ///
    /// # Errors
    /// Returns the driver's error, such as too little memory.
    fn second_context(&self) -> Result<Option<Arc<Self>>, Self::Error>;

    /// Returns the cache in which this process keeps the probe results of the backend. Each backend has one, since a
    /// generic type has no statics.
    fn probe_cache() -> &'static ProbeCache<Self::Error>;
}

/// Shares whole allocations with other processes by IPC handles.
///
/// # Safety
/// An opened handle gives the whole allocation whose handle it is, which stays accessible at the returned address until
/// [`close_ipc`](Self::close_ipc).
pub unsafe trait IpcCalls: MemoryCalls {
    /// Returns the IPC handle of the allocation that begins at `base`.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn ipc_handle(&self, base: DevicePtr) -> Result<IpcHandle, Self::Error>;

    /// Opens an IPC handle of another process, and returns the address of the allocation in this process.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn open_ipc(&self, handle: &IpcHandle) -> Result<DevicePtr, Self::Error>;

    /// Closes an IPC handle that [`open_ipc`](Self::open_ipc) has opened. An error of the driver means that the device
    /// is lost, and is ignored.
    ///
    /// # Safety
    /// The handle was opened once, is closed once, and its memory is no longer in use.
    unsafe fn close_ipc(&self, base: DevicePtr);
}

/// Allocates physical device memory and address ranges separately, and maps one to the other.
///
/// # Safety
/// A handle that a method returns is a reference, which keeps its physical memory allocated until it is released. A reserved range overlaps
/// nothing and stays reserved until it is freed here. A mapping accesses the memory of its handle, of which lengths are multiples of
/// [`granularity`](Self::granularity), and no other memory.
pub unsafe trait VirtualCalls: MemoryCalls {
    /// Returns whether driver and device support virtual memory whose allocations can be exported as descriptors. An
    /// allocation may be refused all the same.
    fn has_virtual_memory(&self) -> bool;

    /// Returns the granularity of physical allocations in bytes, of which every length must be a multiple.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn granularity(&self) -> Result<u64, Self::Error>;

    /// Allocates physical memory that can be exported as a file descriptor.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn create_memory(&self, bytes: u64) -> Result<MemoryHandle, Self::Error>;

    /// Takes another reference to the physical memory that is mapped at `address`, or returns `None` if the memory has
    /// no handle.
    ///
    /// # Errors
    /// Returns the driver's error if the device no longer works.
    fn retain_memory(&self, address: DevicePtr) -> Result<Option<MemoryHandle>, Self::Error>;

    /// Releases a reference to physical memory.
    ///
    /// # Safety
    /// The reference is given up once.
    unsafe fn release_memory(&self, handle: MemoryHandle);

    /// Returns whether physical memory can be exported as a file descriptor.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The reference is held.
    unsafe fn is_exportable(&self, handle: MemoryHandle) -> Result<bool, Self::Error>;

    /// Exports physical memory as a file descriptor.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The reference is held.
    unsafe fn export_memory(&self, handle: MemoryHandle) -> Result<OwnedFd, Self::Error>;

    /// Imports physical memory from a file descriptor and returns a reference to it.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn import_memory(&self, fd: BorrowedFd<'_>) -> Result<MemoryHandle, Self::Error>;

    /// Reserves a range of device addresses without memory behind it.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn reserve(&self, bytes: u64) -> Result<DevicePtr, Self::Error>;

    /// Frees a reserved range of device addresses.
    ///
    /// # Safety
    /// The range is a whole reserved range, and nothing is mapped in it.
    unsafe fn unreserve(&self, address: DevicePtr, bytes: u64);

    /// Maps physical memory at a reserved device address.
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

    /// Unmaps physical memory from a device address.
    ///
    /// # Safety
    /// The span is exactly one mapping, which is no longer in use.
    unsafe fn unmap(&self, address: DevicePtr, bytes: u64);

    /// Permits this device to read and write whole mappings of any context of this process.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The span consists of whole mappings.
    unsafe fn allow(&self, address: DevicePtr, bytes: u64) -> Result<(), Self::Error>;
}

/// The constants of a GPU vendor, which appear in error texts and remote keys.
pub trait Vendor: Copy + Debug + Eq + Hash + Send + Sync + 'static {
    /// The number of the backend in remote keys and addresses.
    const BACKEND: BackendId;
    /// The name of the vendor's plain allocator for error texts, such as `cudaMalloc`.
    const ALLOCATOR: &'static str;
    /// The error text for mapped memory that cannot leave its process, because it has no exportable handle.
    const NO_HANDLE: &'static str;
    /// The error text for memory of a stream-ordered pool, which cannot be shared with other processes.
    const POOL: &'static str;
}

/// A GPU whose memory can be registered, exported and imported as regions. The context is current in every call.
///
/// # Safety
/// [`pointee`](Self::pointee) never takes memory of the host or of another device for memory of this one. Memory that
/// [`check_flags`](Self::check_flags) accepts works with [`WordCalls`]. A [`dma_buf`](Self::dma_buf) holds the span and no memory of
/// others at its place.
pub unsafe trait RegionDevice: CopyCalls + IpcCalls + VirtualCalls {
    /// The vendor of the device, with its names for keys and errors.
    type Vendor: Vendor;

    /// Returns the UUID of the device, which is the same in all processes.
    fn uuid(&self) -> [u8; 16];

    /// Rejects caller memory for flags if streams would not see changes of a flag in it.
    ///
    /// # Errors
    /// Returns an error of kind [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) that names
    /// the memory to use.
    fn check_flags(&self, address: DevicePtr) -> Result<(), Self::Error> {
        let _ = address;
        Ok(())
    }

    /// Returns whether flags need the special memory that
    /// [`allocate_flags`](crate::device::MemoryCalls::allocate_flags) allocates. A stream that polls other memory need
    /// not see the writes of peers.
    fn has_flag_memory(&self) -> bool {
        false
    }

    /// Creates the error for an allocation of `requested` bytes that exceeds the free memory of the device.
    fn out_of_memory(&self, requested: u64) -> Self::Error;

    /// Returns what kind of memory the driver knows at an address.
    ///
    /// # Errors
    /// Returns the driver's error. An unknown address is not an error.
    fn pointee(&self, address: DevicePtr) -> Result<Pointee, Self::Error>;

    /// Returns whether other processes can open the allocation at `base` by an IPC handle.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn has_ipc_handle(&self, base: DevicePtr) -> Result<bool, Self::Error>;

    /// Permits this device to access plain allocations of `owner`, a device of the same process. A second call is not
    /// an error.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn enable_peer(&self, owner: &Self) -> Result<(), Self::Error>;

    /// Exports a span of device memory as a dma-buf, with the span's offset in it.
    ///
    /// # Errors
    /// Returns the driver's error, also where the driver exports no dma-buf.
    fn dma_buf(&self, address: DevicePtr, bytes: u64) -> Result<DmaBuf, Self::Error>;

    /// Returns the flush that makes writes of a NIC visible to the device, or `None` if a write is visible as soon as
    /// the NIC reports it.
    ///
    /// # Errors
    /// Returns an error if the driver does not say which, or if there is no such flush.
    fn nic_flush(context: &Arc<Self>) -> Result<Option<Arc<dyn Flush>>, Self::Error>;

    /// Returns whether the driver refused a method with this error, so that another method may work.
    fn is_refusal(error: &Self::Error) -> bool;
}
