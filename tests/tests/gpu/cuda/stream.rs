//! Wraps a stream of the caller, and the work that a caller submits to it.

use std::sync::Arc;

use cudarc::driver::{CudaGraph, CudaStream, result, sys};
use peerlane_cuda::Stream;
use peerlane_tests::{Failure, Outcome};

use super::gpu::{Gpu, refused};
use super::memory::Pinned;
use crate::support::test_rank::CaptureMode;

/// A stream that does not wait for the default stream.
pub(crate) struct CallerStream {
    pub(crate) raw: Arc<CudaStream>,
}

impl CallerStream {
    pub(super) fn new(gpu: &Gpu) -> Outcome<Self> {
        Ok(Self { raw: gpu.context.new_stream().map_err(refused("make a stream"))? })
    }

    /// As Peerlane takes it.
    pub(crate) fn for_starts(&self) -> Stream {
        Stream::from(&self.raw)
    }

    /// Copies to the device what the pinned memory holds by then.
    pub(crate) fn copy_in(
        &self,
        address: u64,
        from: &Pinned,
        offset: usize,
        bytes: usize,
    ) -> Outcome {
        let place = from.at(offset, bytes);
        // SAFETY: the place holds so many bytes, and lives until the stream is finished.
        let source = unsafe { std::slice::from_raw_parts(place.as_ptr(), bytes) };
        // SAFETY: the tests give addresses that live until the stream is finished.
        let copied = unsafe { result::memcpy_htod_async(address, source, self.raw.cu_stream()) };
        if bytes == 0 { Ok(()) } else { copied.map_err(refused("copy to the device")) }
    }

    /// Copies from the device.
    pub(crate) fn copy_out(
        &self,
        to: &Pinned,
        offset: usize,
        address: u64,
        bytes: usize,
    ) -> Outcome {
        let place = to.at(offset, bytes);
        // SAFETY: as in `copy_in`; nobody looks at it before the stream is finished.
        let target = unsafe { std::slice::from_raw_parts_mut(place.as_ptr(), bytes) };
        // SAFETY: as in `copy_in`.
        let copied = unsafe { result::memcpy_dtoh_async(target, address, self.raw.cu_stream()) };
        if bytes == 0 { Ok(()) } else { copied.map_err(refused("copy from the device")) }
    }

    /// Copies inside the device.
    pub(crate) fn copy(&self, to: u64, from: u64, bytes: usize) -> Outcome {
        // SAFETY: the tests give addresses that live until the stream is finished.
        let copied = unsafe { result::memcpy_dtod_async(to, from, bytes, self.raw.cu_stream()) };
        copied.map_err(refused("copy inside the device"))
    }

    pub(crate) fn fill(&self, address: u64, byte: u8, bytes: usize) -> Outcome {
        // SAFETY: as in `copy`.
        let filled = unsafe { result::memset_d8_async(address, byte, bytes, self.raw.cu_stream()) };
        if bytes == 0 { Ok(()) } else { filled.map_err(refused("fill")) }
    }

    /// What it gets next waits until the host writes a 1 to the first byte of the gate, which held 0.
    pub(crate) fn hold(&self, gate: &Pinned) -> Outcome {
        let flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the gate lives until the stream is finished.
        let code =
            unsafe { sys::cuStreamWaitValue32_v2(self.raw.cu_stream(), gate.address(), 1, flags) };
        match code {
            sys::CUresult::CUDA_SUCCESS => Ok(()),
            other => Err(Failure::new(format!("hold a stream: {other:?}"))),
        }
    }

    /// What it gets next comes after what `other` holds now.
    pub(crate) fn follow(&self, other: &Self) -> Outcome {
        self.raw.join(&other.raw).map_err(refused("wait for a stream"))
    }

    /// Whether everything on it is done.
    pub(crate) fn is_done(&self) -> Outcome<bool> {
        // SAFETY: the stream lives.
        match unsafe { sys::cuStreamQuery(self.raw.cu_stream()) } {
            sys::CUresult::CUDA_SUCCESS => Ok(true),
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => Err(Failure::new(format!("a stream has failed: {other:?}"))),
        }
    }

    /// Records what `work` puts onto it.
    pub(crate) fn record(
        &self,
        mode: CaptureMode,
        work: impl FnOnce() -> Outcome,
    ) -> Outcome<Graph> {
        let mode = match mode {
            CaptureMode::Global => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
            CaptureMode::ThreadLocal => {
                sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            }
        };
        self.raw.begin_capture(mode).map_err(refused("begin a capture"))?;
        let worked = work();
        let graph = self.raw.end_capture(sys::CUgraphInstantiate_flags(0));
        worked?;
        let graph = graph.map_err(refused("end a capture"))?;
        graph.map(Graph).ok_or_else(|| Failure::new("a capture gave no graph"))
    }
}

/// What was recorded, to be replayed on the stream that recorded it.
pub(crate) struct Graph(CudaGraph);

impl Graph {
    pub(crate) fn replay(&self) -> Outcome {
        self.0.launch().map_err(refused("replay a graph"))
    }
}
