//! Implements the traits of the stream engine over HIP, and sets its limits for AMD devices.
//!
//! No limit in this file was measured on AMD devices yet.
//!
//! Kinds of copies:
//!
//! | ends of the copy | kind of `hipMemcpyAsync` |
//! | --- | --- |
//! | memory of this device; this device and a peer; a word and a flag | `hipMemcpyDeviceToDeviceNoCU`: SDMA engines and no compute units |
//! | the same, if a test shows that such a copy copies nothing (ROCm/rocm-systems#11318) or the runtime is older than 6.0 | `hipMemcpyDeviceToDevice` |
//! | a device and the host | `hipMemcpyDefault`, which uses SDMA engines |
//!
//! Memory operations: until the middle of 2026 runtimes ran the operations of one `hipStreamBatchMemOp`
//! concurrently and not in order (ROCm/rocm-systems#8911), and earlier ones rejected every such call (#2633,
//! #3099). A test therefore decides whether several operations go into one call. If it fails, each is a
//! `hipStreamWriteValue64` or a `hipStreamWaitValue64`. HIP compares values as unsigned numbers.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use peerlane_toolkit::Fault;
use peerlane_toolkit::device::{
    Batching, CaptureState, CopyBatch, CopyCalls, CopyKind, DeviceContext as _, DevicePtr,
    EventHandle, ExecHandle, FusedCalls, GraphCalls, GraphHandle, ReduceCalls, StreamCalls,
    StreamHandle, WordCalls,
};
use peerlane_toolkit::streams::{ProbeCache, StreamDevice, StreamLimits};

use crate::device::{Context, attribute, hardware_queues};
use crate::engine::Stream;
use crate::error::Error;
use crate::sys::Version;
use crate::sys::hip::{
    self, hipDeviceAttribute_t, hipError_t, hipEvent_t, hipMemcpyKind, hipStream_t,
    hipStreamBatchMemOpType as MemOpType, hipStreamCaptureMode, hipStreamCaptureStatus as Status,
};

/// The largest number of HIP streams that an engine uses for copies to peers.
///
/// In a node of eight devices every peer has its own link, and a copy uses one. If the device has fewer
/// SDMA engines, one of them is left for the self copy.
const PEER_STREAMS_MAX: usize = 7;
/// Longer copies are split, because one SDMA copy of 256 MiB stalled the engine, while pieces of 128 MiB did
/// not and took no longer (ROCm/rocm-systems#9927).
const PIECE_BYTES_MAX: u64 = 128 << 20;
/// The first HIP release that can copy without compute units.
const NO_CU_SINCE: Version = Version { major: 6, minor: 0, patch: 0 };

/// One bit for each device number, set if a test of copies without compute units failed on that device.
static NO_CU_FAILED: AtomicU64 = AtomicU64::new(0);

// SAFETY: a `Stream` wraps one stream of the toolkit, and there is no second context.
unsafe impl StreamDevice for Context {
    type Stream = Stream;

    fn stream_limits(&self) -> Result<StreamLimits, Error> {
        let engines = hipDeviceAttribute_t::hipDeviceAttributeAsyncEngineCount;
        let copy_engines = attribute(self.hip, self.device(), engines)?;
        let copy_engines = u32::try_from(copy_engines).unwrap_or(0);
        let peer_streams = PEER_STREAMS_MAX.min(copy_engines.saturating_sub(1).max(1) as usize);
        Ok(StreamLimits {
            copy_engines,
            peer_streams_max: peer_streams,
            // There is no call for several copies.
            one_stream_bytes_max: 0,
            // In a graph the self copy shares a branch with copies to peers.
            captured_sides_max: peer_streams.saturating_sub(1).max(1),
            piece_bytes_max: PIECE_BYTES_MAX,
            // The self copy uses an SDMA engine and no compute units, so it needs no other path.
            self_copy_link_bytes_max: None,
            self_copy_link_captured_bytes_max: None,
            shared_queues: hardware_queues(),
        })
    }

    /// Returns `None`, because with HIP a process has only one context of a device. Streams of the highest
    /// priority have hardware queues of their own.
    fn second_context(&self) -> Result<Option<Arc<Self>>, Error> {
        Ok(None)
    }

    fn probe_cache() -> &'static ProbeCache<Error> {
        static CACHE: ProbeCache<Error> = ProbeCache::new();
        &CACHE
    }
}

fn stream_of(stream: StreamHandle) -> hipStream_t {
    stream.0.cast()
}

fn event_of(event: EventHandle) -> hipEvent_t {
    event.0.cast()
}

fn is_complete(context: &Context, call: &'static str, code: hipError_t) -> Result<bool, Error> {
    if code == hipError_t::hipErrorNotReady {
        return Ok(false);
    }
    context.check(call, code).map(|()| true)
}

// SAFETY: the runtime runs a stream in order, and an event is complete after the work before it. A query is `true` only for
// `hipSuccess`, after which results are visible to the host. `hipStreamIsCapturing` and `hipStreamGetCaptureInfo_v2` report
// captures.
unsafe impl StreamCalls for Context {
    fn create_stream(&self, urgent: bool) -> Result<StreamHandle, Error> {
        let calls = self.hip.calls;
        let (mut stream, flags) = (std::ptr::null_mut(), hip::hipStreamNonBlocking);
        if urgent {
            let (mut least, mut greatest) = (0, 0);
            let range = calls.device_get_stream_priority_range;
            // SAFETY: the device is current; the results are stored in locals.
            let code = unsafe { range(&raw mut least, &raw mut greatest) };
            self.check("hipDeviceGetStreamPriorityRange", code)?;
            let create = calls.stream_create_with_priority;
            // SAFETY: as above.
            let code = unsafe { create(&raw mut stream, flags, greatest) };
            self.check("hipStreamCreateWithPriority", code)?;
        } else {
            // SAFETY: as above.
            let code = unsafe { (calls.stream_create_with_flags)(&raw mut stream, flags) };
            self.check("hipStreamCreateWithFlags", code)?;
        }
        Ok(StreamHandle(stream.cast()))
    }

    unsafe fn destroy_stream(calls: &'static hip::Library, stream: StreamHandle) {
        // SAFETY: the caller owns the stream. Work that it still holds is not cancelled, and HIP may wait
        // for it here.
        let _ = unsafe { (calls.stream_destroy)(stream_of(stream)) };
    }

    unsafe fn is_idle(&self, stream: StreamHandle) -> Result<bool, Error> {
        // SAFETY: the caller upholds the contract of this function.
        let code = unsafe { (self.hip.calls.stream_query)(stream_of(stream)) };
        is_complete(self, "hipStreamQuery", code)
    }

    unsafe fn check_stream(&self, stream: StreamHandle) -> Result<(), Error> {
        if let Some(name) = stream.default_stream() {
            return Err(Error::Fault(Fault::Argument(format!(
                "the stream is {name}, expected a stream that was created with hipStreamNonBlocking"
            ))));
        }
        let mut device = -1;
        // SAFETY: the caller upholds the contract; the result is stored in a local.
        let code =
            unsafe { (self.hip.calls.stream_get_device)(stream_of(stream), &raw mut device) };
        self.check("hipStreamGetDevice", code)?;
        if device == self.device() {
            return Ok(());
        }
        Err(Error::Fault(Fault::Mismatch(format!(
            "the stream {:?} belongs to device {device}, expected {}, the device of the engine",
            stream.0,
            self.label()
        ))))
    }

    unsafe fn is_capturing(&self, stream: StreamHandle) -> Result<bool, Error> {
        let mut status = Status::hipStreamCaptureStatusNone;
        // SAFETY: the caller upholds the contract; the result is stored in a local.
        let code =
            unsafe { (self.hip.calls.stream_is_capturing)(stream_of(stream), &raw mut status) };
        self.check("hipStreamIsCapturing", code)?;
        Ok(status != Status::hipStreamCaptureStatusNone)
    }

    unsafe fn capture_state(&self, stream: StreamHandle) -> Result<CaptureState, Error> {
        let (mut status, mut id) = (Status::hipStreamCaptureStatusNone, 0);
        let (graph, nodes) = (std::ptr::null_mut(), std::ptr::null_mut());
        let (info, count) = (self.hip.calls.stream_get_capture_info_v2, std::ptr::null_mut());
        // SAFETY: the caller upholds the contract; outputs that are not needed are null, the others are
        // stored in locals.
        let code =
            unsafe { info(stream_of(stream), &raw mut status, &raw mut id, graph, nodes, count) };
        self.check("hipStreamGetCaptureInfo_v2", code)?;
        Ok(match status {
            Status::hipStreamCaptureStatusNone => CaptureState::None,
            Status::hipStreamCaptureStatusActive => CaptureState::Active(id),
            _ => CaptureState::Unknown,
        })
    }

    fn create_event(&self, timed: bool) -> Result<EventHandle, Error> {
        let mut event = std::ptr::null_mut();
        let create = self.hip.calls.event_create_with_flags;
        let flags = if timed { hip::hipEventDefault } else { hip::hipEventDisableTiming };
        // SAFETY: the device is current; the result is stored in a local.
        let code = unsafe { create(&raw mut event, flags) };
        self.check("hipEventCreateWithFlags", code)?;
        Ok(EventHandle(event.cast()))
    }

    unsafe fn destroy_event(calls: &'static hip::Library, event: EventHandle) {
        // SAFETY: the caller upholds the contract of this function.
        let _ = unsafe { (calls.event_destroy)(event_of(event)) };
    }

    unsafe fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), Error> {
        // SAFETY: the caller upholds the contract of this function.
        let code = unsafe { (self.hip.calls.event_record)(event_of(event), stream_of(stream)) };
        self.check("hipEventRecord", code)
    }

    unsafe fn wait_for_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), Error> {
        // SAFETY: the caller upholds the contract of this function.
        let code =
            unsafe { (self.hip.calls.stream_wait_event)(stream_of(stream), event_of(event), 0) };
        self.check("hipStreamWaitEvent", code)
    }

    unsafe fn has_passed(&self, event: EventHandle) -> Result<bool, Error> {
        // SAFETY: the caller upholds the contract of this function.
        let code = unsafe { (self.hip.calls.event_query)(event_of(event)) };
        is_complete(self, "hipEventQuery", code)
    }

    unsafe fn milliseconds(&self, begin: EventHandle, end: EventHandle) -> Result<f32, Error> {
        let mut milliseconds = 0.0;
        let elapsed = self.hip.calls.event_elapsed_time;
        // SAFETY: the caller upholds the contract of this function; the result is stored in a local.
        let code = unsafe { elapsed(&raw mut milliseconds, event_of(begin), event_of(end)) };
        self.check("hipEventElapsedTime", code)?;
        Ok(milliseconds)
    }
}

impl Context {
    fn no_cu_bit(&self) -> Option<u64> {
        u32::try_from(self.device()).ok().and_then(|number| 1_u64.checked_shl(number))
    }

    fn copies_without_cu(&self) -> bool {
        let failed = NO_CU_FAILED.load(Ordering::Relaxed);
        self.no_cu_bit().is_some_and(|bit| failed & bit == 0) && self.hip.version >= NO_CU_SINCE
    }

    fn memcpy_kind(&self, copy_kind: CopyKind) -> hipMemcpyKind {
        match copy_kind {
            CopyKind::Host => hipMemcpyKind::hipMemcpyDefault,
            CopyKind::Local | CopyKind::Peer | CopyKind::Flag if self.copies_without_cu() => {
                hipMemcpyKind::hipMemcpyDeviceToDeviceNoCU
            }
            CopyKind::Local | CopyKind::Peer | CopyKind::Flag => {
                hipMemcpyKind::hipMemcpyDeviceToDevice
            }
        }
    }
}

// SAFETY: there is no code for reductions, and the default methods start none.
unsafe impl ReduceCalls for Context {}

// SAFETY: the default methods launch nothing.
unsafe impl FusedCalls for Context {}

// SAFETY: `hipMemcpyAsync` and `hipMemsetD8Async` access the given spans in the order of the stream.
unsafe impl CopyCalls for Context {
    /// Returns false, because `hipMemcpyBatchAsync` takes no kind of copy and may use compute units.
    fn may_copy_together(&self) -> bool {
        false
    }

    fn uses_compute_units(&self, copy_kind: CopyKind) -> bool {
        self.memcpy_kind(copy_kind) == hipMemcpyKind::hipMemcpyDeviceToDevice
    }

    fn needs_probe(&self, copy_kind: CopyKind) -> bool {
        self.memcpy_kind(copy_kind) == hipMemcpyKind::hipMemcpyDeviceToDeviceNoCU
    }

    fn record_probe(&self, _copy_kind: CopyKind, works: bool) {
        if let (false, Some(bit)) = (works, self.no_cu_bit()) {
            NO_CU_FAILED.fetch_or(bit, Ordering::Relaxed);
        }
    }

    unsafe fn copy(
        &self,
        stream: StreamHandle,
        to: DevicePtr,
        from: DevicePtr,
        bytes: usize,
        copy_kind: CopyKind,
    ) -> Result<(), Error> {
        let (to, from) = (to as *mut c_void, from as *const c_void);
        let (kind, stream) = (self.memcpy_kind(copy_kind), stream_of(stream));
        // SAFETY: the caller upholds the contract of this function.
        let code = unsafe { (self.hip.calls.memcpy_async)(to, from, bytes, kind, stream) };
        let call = match copy_kind {
            CopyKind::Flag => "hipMemcpyAsync of a signal",
            _ => "hipMemcpyAsync",
        };
        self.check(call, code)
    }

    /// Enqueues the copies one by one, but is never called, see [`may_copy_together`](Self::may_copy_together).
    unsafe fn copy_together(
        &self,
        stream: StreamHandle,
        copies: CopyBatch<'_>,
    ) -> Result<(), Error> {
        for ((to, from), bytes) in copies.to.iter().zip(&*copies.from).zip(&*copies.bytes) {
            // SAFETY: the caller upholds the contract of this function.
            unsafe { self.copy(stream, *to, *from, *bytes, CopyKind::Peer) }?;
        }
        Ok(())
    }

    unsafe fn set(
        &self,
        stream: StreamHandle,
        address: DevicePtr,
        value: u8,
        bytes: usize,
    ) -> Result<(), Error> {
        let address = address as *mut c_void;
        // SAFETY: the caller upholds the contract of this function.
        let code =
            unsafe { (self.hip.calls.memset_d8_async)(address, value, bytes, stream_of(stream)) };
        self.check("hipMemsetD8Async", code)
    }
}

/// A memory operation of a HIP stream, in the layout of `hipStreamBatchMemOp`.
///
/// Its layout equals that of the union which the batched call takes, for the two operations that are used.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MemOp {
    kind: MemOpType,
    address: *mut c_void,
    value: u64,
    /// For a wait, the flags 0 mean "at least"; for a write, 0 means no option.
    flags: u32,
    /// A field for the runtime's own use, which must be null.
    alias: *mut c_void,
    /// Pads the operation to the size of the union, which is six 64-bit words.
    padding: u64,
}

// SAFETY: the pointers are addresses of a device, which this crate never dereferences.
unsafe impl Send for MemOp {}

const _: () = {
    use hip::{
        hipStreamBatchMemOpParams as Params,
        hipStreamBatchMemOpParams_union_hipStreamMemOpWaitValueParams_t as Wait,
        hipStreamBatchMemOpParams_union_hipStreamMemOpWriteValueParams_t as Write,
    };
    use std::mem::offset_of;
    assert!(size_of::<MemOp>() == size_of::<Params>());
    assert!(offset_of!(MemOp, address) == offset_of!(Wait, address));
    assert!(offset_of!(MemOp, address) == offset_of!(Write, address));
    assert!(offset_of!(MemOp, value) == offset_of!(Wait, __bindgen_anon_1));
    assert!(offset_of!(MemOp, value) == offset_of!(Write, __bindgen_anon_1));
    assert!(offset_of!(MemOp, flags) == offset_of!(Wait, flags));
    assert!(offset_of!(MemOp, flags) == offset_of!(Write, flags));
    assert!(offset_of!(MemOp, alias) == offset_of!(Wait, alias));
    assert!(offset_of!(MemOp, alias) == offset_of!(Write, alias));
    assert!(hip::hipStreamWaitValueGte == 0);
};

impl MemOp {
    const fn new(kind: MemOpType, address: DevicePtr, value: u64) -> Self {
        let alias = std::ptr::null_mut();
        Self { kind, address: address as *mut c_void, value, flags: 0, alias, padding: 0 }
    }
}

// SAFETY: a word operation is one write or wait of `hipStreamBatchMemOp`, or a call of its own, of one address and in
// the order of the stream. `batching` says whether the runtime keeps the order inside one call.
unsafe impl WordCalls for Context {
    type WordOp = MemOp;

    /// The largest number of operations in a batch that CUDA documents, since HIP documents none.
    const WORD_OPS_MAX: usize = 255;

    fn check_words(&self) -> Result<(), Error> {
        let supported = hipDeviceAttribute_t::hipDeviceAttributeCanUseStreamWaitValue;
        if attribute(self.hip, self.device(), supported)? != 0 {
            return Ok(());
        }
        Err(Error::Fault(Fault::Unavailable(format!(
            "{} cannot wait for memory values on streams (hipDeviceAttributeCanUseStreamWaitValue \
             is 0), which signals and waits need; use a GPU of gfx9 or newer on Linux",
            self.label()
        ))))
    }

    fn batching(&self) -> Batching {
        match self.hip.calls.stream_batch_mem_op {
            Some(_) => Batching::Probe,
            None => Batching::Never,
        }
    }

    fn word_write(address: DevicePtr, value: u64) -> MemOp {
        MemOp::new(MemOpType::hipStreamMemOpWriteValue64, address, value)
    }

    fn word_wait(address: DevicePtr, value: u64) -> MemOp {
        MemOp::new(MemOpType::hipStreamMemOpWaitValue64, address, value)
    }

    fn half_write(address: DevicePtr, value: u32) -> MemOp {
        MemOp::new(MemOpType::hipStreamMemOpWriteValue32, address, value.into())
    }

    fn bits_wait(address: DevicePtr, bits: u64) -> MemOp {
        let wait = MemOp::new(MemOpType::hipStreamMemOpWaitValue64, address, bits);
        MemOp { flags: hip::hipStreamWaitValueAnd, ..wait }
    }

    unsafe fn put_words(&self, stream: StreamHandle, ops: &mut [MemOp]) -> Result<(), Error> {
        let calls = self.hip.calls;
        if let ([_, _, ..], Some(batch)) = (&*ops, calls.stream_batch_mem_op) {
            let (count, params) = (ops.len() as u32, ops.as_mut_ptr().cast());
            // SAFETY: the array holds `count` operations in the layout of the union, as the assertions
            // above show, and the runtime reads it before it returns; the caller vouches for the rest.
            let code = unsafe { batch(stream_of(stream), count, params, 0) };
            return self.check("hipStreamBatchMemOp", code);
        }
        for op in ops {
            let (stream, address) = (stream_of(stream), op.address);
            let (call, code) = match op.kind {
                MemOpType::hipStreamMemOpWaitValue64 => {
                    let (wait, all) = (calls.stream_wait_value_64, u64::MAX);
                    // SAFETY: the caller upholds the contract of this function.
                    let code = unsafe { wait(stream, address, op.value, op.flags, all) };
                    ("hipStreamWaitValue64", code)
                }
                MemOpType::hipStreamMemOpWriteValue32 => {
                    let write = calls.stream_write_value_32;
                    // SAFETY: the caller upholds the contract of this function. The value was 32 bits
                    // (`half_write`).
                    let code = unsafe { write(stream, address, op.value as u32, op.flags) };
                    ("hipStreamWriteValue32", code)
                }
                _ => {
                    let write = calls.stream_write_value_64;
                    // SAFETY: the caller upholds the contract of this function.
                    let code = unsafe { write(stream, address, op.value, op.flags) };
                    ("hipStreamWriteValue64", code)
                }
            };
            self.check(call, code)?;
        }
        Ok(())
    }

    fn is_write_refused(error: &Error) -> bool {
        let refusals = [
            hipError_t::hipErrorInvalidValue,
            hipError_t::hipErrorNotSupported,
            hipError_t::hipErrorInvalidDevicePointer,
        ];
        matches!(error, Error::Driver { result, .. }
            if refusals.iter().any(|refusal| refusal.0 == result.code))
    }
}

// SAFETY: `hipStreamEndCapture` returns what the stream has recorded since `hipStreamBeginCapture`, and `hipGraphLaunch` runs
// it in the order of the stream.
unsafe impl GraphCalls for Context {
    unsafe fn begin_capture(&self, stream: StreamHandle) -> Result<(), Error> {
        let mode = hipStreamCaptureMode::hipStreamCaptureModeRelaxed;
        // SAFETY: the caller upholds the contract of this function.
        let code = unsafe { (self.hip.calls.stream_begin_capture)(stream_of(stream), mode) };
        self.check("hipStreamBeginCapture", code)
    }

    unsafe fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle, Error> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the caller upholds the contract; the result is stored in a local.
        let code =
            unsafe { (self.hip.calls.stream_end_capture)(stream_of(stream), &raw mut graph) };
        self.check("hipStreamEndCapture", code)?;
        Ok(GraphHandle(graph.cast()))
    }

    unsafe fn instantiate(&self, graph: GraphHandle) -> Result<ExecHandle, Error> {
        let mut executable = std::ptr::null_mut();
        let make = self.hip.calls.graph_instantiate_with_flags;
        // SAFETY: the caller upholds the contract; the result is stored in a local.
        let code = unsafe { make(&raw mut executable, graph.0.cast(), 0) };
        self.check("hipGraphInstantiateWithFlags", code)?;
        Ok(ExecHandle(executable.cast()))
    }

    unsafe fn launch(&self, exec: ExecHandle, stream: StreamHandle) -> Result<(), Error> {
        // SAFETY: the caller upholds the contract of this function.
        let code = unsafe { (self.hip.calls.graph_launch)(exec.0.cast(), stream_of(stream)) };
        self.check("hipGraphLaunch", code)
    }

    unsafe fn destroy_exec(&self, exec: ExecHandle) {
        // SAFETY: the caller upholds the contract of this function.
        let _ = unsafe { (self.hip.calls.graph_exec_destroy)(exec.0.cast()) };
    }

    unsafe fn destroy_graph(&self, graph: GraphHandle) {
        // SAFETY: the caller upholds the contract of this function.
        let _ = unsafe { (self.hip.calls.graph_destroy)(graph.0.cast()) };
    }
}
