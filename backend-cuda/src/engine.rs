//! Implements the driver calls of the stream engine with CUDA streams, events, copies and graphs.
//!
//! The engine itself is `peerlane_toolkit::streams`, which ROCm uses too. This file holds the CUDA calls
//! that it makes, and the limits that were measured on NVIDIA devices.
//!
//! | contract | CUDA |
//! | --- | --- |
//! | put, get | on the main stream or a side stream; four or more with a constant stride in one `cuMemcpy2DAsync`; other adjacent copies of one stream in one `cuMemcpyBatchAsync`, else a `cuMemcpyAsync` each |
//! | adjacent signals, waits, resets | one `cuStreamBatchMemOp` on the main stream |
//! | ticket | an event on the main stream at the end of a slice |
//! | `completed` | queries these events, in a mode that captures of other threads tolerate |
//! | `fork` | the caller's stream becomes the main stream until `join` |
//! | a slice while that stream captures | the same calls with separate streams and events, and no ticket |
//! | `release` | a dedicated stream writes the awaited values |

use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use peerlane_hal::Rows;
use peerlane_toolkit::Fault;
use peerlane_toolkit::device::{
    Batching, CaptureState, CopyBatch, CopyCalls, CopyKind, DevicePtr, EventHandle, ExecHandle,
    GraphCalls, GraphHandle, StreamCalls, StreamHandle, WordCalls,
};
use peerlane_toolkit::streams::{self, ProbeCache, StreamDevice, StreamLimits};
pub(crate) use peerlane_toolkit::streams::{EngineSetup, probe_signal};
pub use peerlane_toolkit::streams::{SelfCopy, SignalBy};

use crate::device::{Context, connections};
use crate::error::Error;
use crate::sys::{
    self, CUmemcpy2D, CUmemcpy2DSide, CUmemcpyAttributes, CUresult,
    CUstreamBatchMemOpParams as MemOp, Driver,
};

/// With two CUDA streams per engine, copies to peers were the fastest for all sizes from 4 KiB up; a third
/// stream was slower from 64 MiB up (docs/perf/cuda-streams.md).
const PEER_STREAMS_MAX: usize = 2;
/// Copies of up to this many bytes are faster on one stream than on several (docs/perf/cuda-submission.md).
const ONE_STREAM_BYTES_MAX: u64 = 512 << 10;
/// Self copies of up to this many bytes go over the link, because launching a copy kernel costs the host more time than
/// the transfer (docs/perf/cuda-submission.md).
const SELF_COPY_LINK_BYTES_MAX: u64 = 256 << 10;
/// Self copies of up to this many bytes go over the link in a captured graph, where a separate self copy adds a branch.
const SELF_COPY_LINK_CAPTURED_BYTES_MAX: u64 = 512 << 10;
/// The number of side streams in a captured graph, because a graph with a third branch for the self copy ran
/// its branches one after the other.
const CAPTURED_SIDES_MAX: usize = 1;

/// A graph runs copies and memory operations as nodes, with branches for copies at the same time. A start of 64 MiB took 9 µs
/// longer in a graph on 2 × H200, and 20 µs on 4 × H200 (docs/perf/beside-nccl.md).
const CAPTURED_SECONDS: f64 = 12e-6;

/// The largest pitch that devices accept (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`).
const ROW_PITCH_MAX: u64 = i32::MAX as u64;

// SAFETY: a `Stream` wraps one stream of the toolkit, and a second context of a device shares its unified addresses.
unsafe impl StreamDevice for Context {
    type Stream = Stream;

    fn stream_limits(&self) -> Result<StreamLimits, Error> {
        Ok(StreamLimits {
            copy_engines: self.info.copy_engines,
            peer_streams_max: PEER_STREAMS_MAX,
            one_stream_bytes_max: ONE_STREAM_BYTES_MAX,
            captured_sides_max: CAPTURED_SIDES_MAX,
            piece_bytes_max: u64::MAX,
            self_copy_link_bytes_max: Some(SELF_COPY_LINK_BYTES_MAX),
            self_copy_link_captured_bytes_max: Some(SELF_COPY_LINK_CAPTURED_BYTES_MAX),
            shared_queues: connections(),
        })
    }

    fn captured_seconds(&self) -> f64 {
        CAPTURED_SECONDS
    }

    fn second_context(&self) -> Result<Option<Arc<Self>>, Error> {
        self.second()
    }

    fn probe_cache() -> &'static ProbeCache<Error> {
        static CACHE: ProbeCache<Error> = ProbeCache::new();
        &CACHE
    }
}

/// An in-order queue of ops that runs on CUDA streams.
pub type Engine = streams::Engine<Context>;

/// A CUDA stream of the caller, on which an engine can enqueue its work.
///
/// It wraps a `CUstream`, which is the same as a `cudaStream_t`.
#[derive(Clone, Debug)]
pub struct Stream(streams::Stream);

impl Stream {
    /// Wraps a stream handle of the CUDA driver or the CUDA runtime.
    ///
    /// Default streams are rejected when they are used. The legacy default stream would make the caller's
    /// blocking streams wait for peers, and a per-thread default stream differs from thread to thread.
    ///
    /// # Safety
    /// The stream must live until every engine that was forked from it has been forked from another stream or
    /// dropped.
    pub unsafe fn from_raw(raw: *mut c_void) -> Self {
        // SAFETY: the caller keeps the stream alive as required.
        Self(unsafe { streams::Stream::new(StreamHandle(raw), None) })
    }
}

impl peerlane_hal::Stream for Stream {}

impl AsRef<streams::Stream> for Stream {
    fn as_ref(&self) -> &streams::Stream {
        &self.0
    }
}

#[cfg(feature = "cudarc")]
impl From<&Arc<cudarc::driver::CudaStream>> for Stream {
    /// Wraps a CUDA stream of the crate cudarc and keeps the stream alive.
    fn from(stream: &Arc<cudarc::driver::CudaStream>) -> Self {
        let raw = StreamHandle(stream.cu_stream().cast());
        // SAFETY: the clone keeps the stream alive.
        Self(unsafe { streams::Stream::new(raw, Some(stream.clone())) })
    }
}

fn is_done(context: &Context, call: &'static str, code: CUresult) -> Result<bool, Error> {
    if code == sys::CUDA_ERROR_NOT_READY {
        return Ok(false);
    }
    context.check(call, code).map(|()| true)
}

// SAFETY: the driver runs a stream in order, and an event is complete after the work before it. A query is `true` only for
// `CUDA_SUCCESS`, after which results are visible to the host. `cuStreamIsCapturing` and `cuStreamGetCaptureInfo` report
// captures.
unsafe impl StreamCalls for Context {
    fn create_stream(&self, urgent: bool) -> Result<StreamHandle, Error> {
        let driver = self.driver;
        let mut raw = std::ptr::null_mut();
        if urgent
            && let (Some(range), Some(create)) =
                (driver.ctx_get_stream_priority_range, driver.stream_create_with_priority)
        {
            let (mut least, mut greatest) = (0, 0);
            // SAFETY: the context is current; the results are stored in locals.
            let code = unsafe { range(&raw mut least, &raw mut greatest) };
            self.check("cuCtxGetStreamPriorityRange", code)?;
            // SAFETY: as above.
            let code = unsafe { create(&raw mut raw, sys::STREAM_NON_BLOCKING, greatest) };
            self.check("cuStreamCreateWithPriority", code)?;
            return Ok(StreamHandle(raw));
        }
        // SAFETY: as above.
        let code = unsafe { (driver.stream_create)(&raw mut raw, sys::STREAM_NON_BLOCKING) };
        self.check("cuStreamCreate", code)?;
        Ok(StreamHandle(raw))
    }

    unsafe fn destroy_stream(driver: &'static Driver, stream: StreamHandle) {
        // SAFETY: the caller owns the stream. Work that it still holds is not cancelled.
        let _ = unsafe { (driver.stream_destroy)(stream.0) };
    }

    unsafe fn is_idle(&self, stream: StreamHandle) -> Result<bool, Error> {
        // SAFETY: the caller upholds the contract of this method.
        let code = unsafe { (self.driver.stream_query)(stream.0) };
        is_done(self, "cuStreamQuery", code)
    }

    unsafe fn check_stream(&self, stream: StreamHandle) -> Result<(), Error> {
        if let Some(name) = stream.default_stream() {
            return Err(Fault::Argument(format!(
                "the stream is {name}, expected a stream that was created with \
                 CU_STREAM_NON_BLOCKING or cudaStreamNonBlocking"
            ))
            .into());
        }
        let mut found = std::ptr::null_mut();
        // SAFETY: the caller vouches for the handle; the result is stored in a local.
        let code = unsafe { (self.driver.stream_get_ctx)(stream.0, &raw mut found) };
        self.check("cuStreamGetCtx", code)?;
        if found == self.raw() {
            return Ok(());
        }
        Err(Fault::Mismatch(format!(
            "the stream {:?} belongs to the CUDA context {found:?}, expected the context {:?} of \
             the engine on {}",
            stream.0,
            self.raw(),
            self.label()
        ))
        .into())
    }

    unsafe fn is_capturing(&self, stream: StreamHandle) -> Result<bool, Error> {
        let mut status = sys::STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the caller vouches for the handle; the result is stored in a local.
        let code = unsafe { (self.driver.stream_is_capturing)(stream.0, &raw mut status) };
        self.check("cuStreamIsCapturing", code)?;
        Ok(status != sys::STREAM_CAPTURE_STATUS_NONE)
    }

    unsafe fn capture_state(&self, stream: StreamHandle) -> Result<CaptureState, Error> {
        let Some(info) = self.driver.stream_get_capture_info else {
            // SAFETY: the caller upholds the contract of this method.
            let capturing = unsafe { self.is_capturing(stream) }?;
            return Ok(if capturing { CaptureState::Unknown } else { CaptureState::None });
        };
        let (mut status, mut id) = (sys::STREAM_CAPTURE_STATUS_NONE, 0);
        let (graph, nodes) = (std::ptr::null_mut(), std::ptr::null_mut());
        let count = std::ptr::null_mut();
        // SAFETY: the caller passes a live stream; unused outputs are null, the others are locals.
        let code = unsafe { info(stream.0, &raw mut status, &raw mut id, graph, nodes, count) };
        self.check("cuStreamGetCaptureInfo", code)?;
        Ok(match status {
            sys::STREAM_CAPTURE_STATUS_NONE => CaptureState::None,
            sys::STREAM_CAPTURE_STATUS_ACTIVE => CaptureState::Active(id),
            _ => CaptureState::Unknown,
        })
    }

    fn create_event(&self, timed: bool) -> Result<EventHandle, Error> {
        let mut raw = std::ptr::null_mut();
        let flags = if timed { sys::EVENT_DEFAULT } else { sys::EVENT_DISABLE_TIMING };
        // SAFETY: the context is current; the result is stored in a local.
        let code = unsafe { (self.driver.event_create)(&raw mut raw, flags) };
        self.check("cuEventCreate", code)?;
        Ok(EventHandle(raw))
    }

    unsafe fn destroy_event(driver: &'static Driver, event: EventHandle) {
        // SAFETY: the caller upholds the contract of this method.
        let _ = unsafe { (driver.event_destroy)(event.0) };
    }

    unsafe fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), Error> {
        // SAFETY: the caller upholds the contract of this method.
        let code = unsafe { (self.driver.event_record)(event.0, stream.0) };
        self.check("cuEventRecord", code)
    }

    unsafe fn wait_for_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), Error> {
        // SAFETY: the caller upholds the contract of this method.
        let code = unsafe { (self.driver.stream_wait_event)(stream.0, event.0, 0) };
        self.check("cuStreamWaitEvent", code)
    }

    unsafe fn has_passed(&self, event: EventHandle) -> Result<bool, Error> {
        // SAFETY: the caller upholds the contract of this method.
        let code = unsafe { (self.driver.event_query)(event.0) };
        is_done(self, "cuEventQuery", code)
    }

    unsafe fn milliseconds(&self, begin: EventHandle, end: EventHandle) -> Result<f32, Error> {
        let mut milliseconds = 0.0;
        let elapsed = self.driver.event_elapsed_time;
        // SAFETY: the caller upholds the contract of this method; the result is stored in a local.
        let code = unsafe { elapsed(&raw mut milliseconds, begin.0, end.0) };
        self.check("cuEventElapsedTime", code)?;
        Ok(milliseconds)
    }
}

// SAFETY: `cuMemcpyAsync`, `cuMemcpy2DAsync`, `cuMemcpyBatchAsync` and `cuMemsetD8Async` access the given spans in the order of
// the stream.
unsafe impl CopyCalls for Context {
    fn may_copy_together(&self) -> bool {
        self.driver.memcpy_batch_async_v2.is_some() || self.driver.memcpy_batch_async.is_some()
    }

    /// Returns true for copies inside a device, which the driver makes with kernels (docs/perf/cuda-local-copies.md).
    fn uses_compute_units(&self, copy_kind: CopyKind) -> bool {
        copy_kind == CopyKind::Local
    }

    unsafe fn copy(
        &self,
        stream: StreamHandle,
        to: DevicePtr,
        from: DevicePtr,
        bytes: usize,
        copy_kind: CopyKind,
    ) -> Result<(), Error> {
        // SAFETY: the caller upholds the contract of this method.
        let code = unsafe { (self.driver.memcpy_async)(to, from, bytes, stream.0) };
        let call = match copy_kind {
            CopyKind::Flag => "cuMemcpyAsync of a signal",
            _ => "cuMemcpyAsync",
        };
        self.check(call, code)
    }

    unsafe fn copy_together(
        &self,
        stream: StreamHandle,
        copies: CopyBatch<'_>,
    ) -> Result<(), Error> {
        let driver = self.driver;
        let count = copies.to.len();
        let mut attributes = CUmemcpyAttributes {
            src_access_order: sys::MEMCPY_SRC_ACCESS_ORDER_STREAM,
            ..CUmemcpyAttributes::default()
        };
        // The attributes apply from copy 0 on, so to all.
        let mut first = 0;
        let (to, from) = (copies.to.as_mut_ptr(), copies.from.as_mut_ptr());
        let bytes = copies.bytes.as_mut_ptr();
        let (attributes, first) = (&raw mut attributes, &raw mut first);
        if let Some(call) = driver.memcpy_batch_async_v2 {
            // SAFETY: the arrays hold `count` copies and one attribute, which the driver reads before it
            // returns; the caller vouches for the spans.
            let code = unsafe { call(to, from, bytes, count, attributes, first, 1, stream.0) };
            return self.check("cuMemcpyBatchAsync_v2", code);
        }
        let call = self.require("cuMemcpyBatchAsync", driver.memcpy_batch_async)?;
        let mut failed = 0;
        let failed = &raw mut failed;
        // SAFETY: as above; the index of a failed copy is stored in a local.
        let code = unsafe { call(to, from, bytes, count, attributes, first, 1, failed, stream.0) };
        self.check("cuMemcpyBatchAsync", code)
    }

    fn row_pitch_max(&self) -> u64 {
        if self.driver.memcpy_2d_async.is_some() { ROW_PITCH_MAX } else { 0 }
    }

    unsafe fn copy_rows(
        &self,
        stream: StreamHandle,
        to: DevicePtr,
        from: DevicePtr,
        row_bytes: usize,
        rows: Rows,
        _copy_kind: CopyKind,
    ) -> Result<(), Error> {
        let side = |device, pitch| CUmemcpy2DSide {
            x_bytes: 0,
            y: 0,
            memory_type: sys::MEMORYTYPE_DEVICE,
            host: std::ptr::null(),
            device,
            array: std::ptr::null_mut(),
            pitch: pitch as usize,
        };
        let copy = CUmemcpy2D {
            src: side(from, rows.src_pitch),
            dst: side(to, rows.dst_pitch),
            width_bytes: row_bytes,
            height: rows.count as usize,
        };
        let call = self.require("cuMemcpy2DAsync_v2", self.driver.memcpy_2d_async)?;
        // SAFETY: the driver reads the parameters before it returns; the caller vouches for the rows.
        let code = unsafe { call(&raw const copy, stream.0) };
        self.check("cuMemcpy2DAsync_v2", code)
    }

    unsafe fn set(
        &self,
        stream: StreamHandle,
        address: DevicePtr,
        value: u8,
        bytes: usize,
    ) -> Result<(), Error> {
        // SAFETY: the caller upholds the contract of this method.
        let code = unsafe { (self.driver.memset_d8_async)(address, value, bytes, stream.0) };
        self.check("cuMemsetD8Async", code)
    }
}

// SAFETY: a word operation is one write or wait of `cuStreamBatchMemOp`, of one address. A write has a memory barrier before
// it, because no operation sets the flag that leaves it out. `batching` says whether the driver keeps the order inside one
// call.
unsafe impl WordCalls for Context {
    type WordOp = MemOp;

    const WORD_OPS_MAX: usize = sys::STREAM_BATCH_OPS_MAX;

    fn check_words(&self) -> Result<(), Error> {
        let Driver { stream_batch_mem_op, stream_write_value_64, stream_wait_value_64, .. } =
            self.driver;
        let single = stream_write_value_64.is_some() && stream_wait_value_64.is_some();
        if stream_batch_mem_op.is_none() && !single {
            return Err(Error::unavailable(format!(
                "the driver of {} lacks cuStreamBatchMemOp_v2 and cuStreamWaitValue64_v2, which \
                 signals and waits need; install a driver for CUDA 12.0 or newer",
                self.label()
            )));
        }
        let mut supported = 0;
        let attribute = sys::ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS;
        // SAFETY: the result is stored in a local.
        let code = unsafe {
            (self.driver.device_get_attribute)(&raw mut supported, attribute, self.device)
        };
        self.check("cuDeviceGetAttribute", code)?;
        if supported == 0 {
            return Err(Error::unavailable(format!(
                "{} does not support 64-bit memory operations on streams, which signals and waits \
                 need; use a GPU of compute capability 7.0 or newer",
                self.label()
            )));
        }
        Ok(())
    }

    /// Returns `Trusted` for every driver, because plans depend on the value and must be equal on all ranks.
    fn batching(&self) -> Batching {
        Batching::Trusted
    }

    fn word_write(address: DevicePtr, value: u64) -> MemOp {
        let (operation, flags) =
            (sys::STREAM_MEM_OP_WRITE_VALUE_64, sys::STREAM_WRITE_VALUE_DEFAULT);
        MemOp { operation, address, value, flags, ..MemOp::default() }
    }

    fn word_wait(address: DevicePtr, value: u64) -> MemOp {
        let (operation, flags) = (sys::STREAM_MEM_OP_WAIT_VALUE_64, sys::STREAM_WAIT_VALUE_GEQ);
        MemOp { operation, address, value, flags, ..MemOp::default() }
    }

    fn half_write(address: DevicePtr, value: u32) -> MemOp {
        let (operation, flags) =
            (sys::STREAM_MEM_OP_WRITE_VALUE_32, sys::STREAM_WRITE_VALUE_DEFAULT);
        MemOp { operation, address, value: value.into(), flags, ..MemOp::default() }
    }

    fn bits_wait(address: DevicePtr, bits: u64) -> MemOp {
        let (operation, flags) = (sys::STREAM_MEM_OP_WAIT_VALUE_64, sys::STREAM_WAIT_VALUE_AND);
        MemOp { operation, address, value: bits, flags, ..MemOp::default() }
    }

    unsafe fn put_words(&self, stream: StreamHandle, ops: &mut [MemOp]) -> Result<(), Error> {
        let Some(call) = self.driver.stream_batch_mem_op else {
            // SAFETY: the caller upholds the contract of this method.
            return ops.iter().try_for_each(|op| unsafe { issue_word_op(self, stream, op) });
        };
        let count = ops.len() as c_uint;
        // SAFETY: the array holds `count` operations and the driver reads it before it returns; the caller
        // vouches for the stream and the addresses.
        let code = unsafe { call(stream.0, count, ops.as_mut_ptr(), 0) };
        self.check("cuStreamBatchMemOp", code)
    }

    fn is_write_refused(error: &Error) -> bool {
        let refusals = [
            sys::CUDA_ERROR_INVALID_VALUE,
            sys::CUDA_ERROR_NOT_PERMITTED,
            sys::CUDA_ERROR_NOT_SUPPORTED,
        ];
        matches!(error, Error::Driver { result, .. } if refusals.contains(&result.code))
    }
}

/// Enqueues one stream memory operation, for drivers that do not take several in one call.
///
/// # Safety
/// The requirements are those of [`WordCalls::put_words`].
unsafe fn issue_word_op(context: &Context, stream: StreamHandle, op: &MemOp) -> Result<(), Error> {
    let (name, call) = match op.operation {
        sys::STREAM_MEM_OP_WRITE_VALUE_32 => {
            let name = "cuStreamWriteValue32_v2";
            let call = context.require(name, context.driver.stream_write_value_32)?;
            // SAFETY: the caller upholds the contract of this method. The value was 32 bits (`half_write`).
            let code = unsafe { call(stream.0, op.address, op.value as u32, op.flags) };
            return context.check(name, code);
        }
        sys::STREAM_MEM_OP_WAIT_VALUE_64 => {
            ("cuStreamWaitValue64_v2", context.driver.stream_wait_value_64)
        }
        _ => ("cuStreamWriteValue64_v2", context.driver.stream_write_value_64),
    };
    let call = context.require(name, call)?;
    // SAFETY: the caller upholds the contract of this method.
    let code = unsafe { call(stream.0, op.address, op.value, op.flags) };
    context.check(name, code)
}

// SAFETY: `cuStreamEndCapture` returns what the stream has recorded since `cuStreamBeginCapture`, and `cuGraphLaunch` runs it
// in the order of the stream.
unsafe impl GraphCalls for Context {
    unsafe fn begin_capture(&self, stream: StreamHandle) -> Result<(), Error> {
        let mode = sys::STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the caller upholds the contract of this method.
        let code = unsafe { (self.driver.stream_begin_capture)(stream.0, mode) };
        self.check("cuStreamBeginCapture", code)
    }

    unsafe fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle, Error> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the caller vouches for the handle; the result is stored in a local.
        let code = unsafe { (self.driver.stream_end_capture)(stream.0, &raw mut graph) };
        self.check("cuStreamEndCapture", code)?;
        Ok(GraphHandle(graph))
    }

    unsafe fn instantiate(&self, graph: GraphHandle) -> Result<ExecHandle, Error> {
        let mut executable = std::ptr::null_mut();
        // SAFETY: the caller vouches for the handle; the result is stored in a local.
        let code = unsafe { (self.driver.graph_instantiate)(&raw mut executable, graph.0, 0) };
        self.check("cuGraphInstantiateWithFlags", code)?;
        Ok(ExecHandle(executable))
    }

    unsafe fn launch(&self, exec: ExecHandle, stream: StreamHandle) -> Result<(), Error> {
        // SAFETY: the caller upholds the contract of this method.
        let code = unsafe { (self.driver.graph_launch)(exec.0, stream.0) };
        self.check("cuGraphLaunch", code)
    }

    unsafe fn destroy_exec(&self, exec: ExecHandle) {
        // SAFETY: the caller upholds the contract of this method.
        let _ = unsafe { (self.driver.graph_exec_destroy)(exec.0) };
    }

    unsafe fn destroy_graph(&self, graph: GraphHandle) {
        // SAFETY: the caller upholds the contract of this method.
        let _ = unsafe { (self.driver.graph_destroy)(graph.0) };
    }
}
