//! One GPU as the measurement uses it: streams, events and memory, through the crate `cudarc`.
//!
//! No wait is without a deadline, and nothing is put on the legacy default stream. `cudarc` panics
//! where there is no driver, so a `Gpu` is opened only for a device that the backend has found.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUevent_flags, CUipcMem_flags, CUipcMemHandle, CUresult};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};
use peerlane::Deadline;

use crate::error::{Failure, Result};
use crate::size::Size;

/// How long a wait looks without a sleep: what is about to end is seen at once.
const SPIN: Duration = Duration::from_micros(200);
/// How long it sleeps between two looks after that.
const NAP: Duration = Duration::from_micros(50);

/// Bytes in the memory of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) address: u64,
    pub(super) bytes: u64,
}

/// An opened GPU.
#[derive(Clone)]
pub(super) struct Gpu {
    ordinal: u32,
    context: Arc<CudaContext>,
    timeout: Duration,
}

/// Memory of a GPU, freed when dropped.
pub(super) struct Memory {
    gpu: Gpu,
    address: u64,
    bytes: u64,
}

/// Another process's memory, closed when dropped.
pub(super) struct Opened {
    gpu: Gpu,
    address: u64,
}

impl Gpu {
    /// Opens a GPU that the backend has found; no wait on it is longer than `timeout`.
    ///
    /// # Errors
    /// The driver's refusal.
    pub(super) fn open(ordinal: u32, timeout: Duration) -> Result<Self> {
        let index = usize::try_from(ordinal).map_err(|error| Failure::usage(error.to_string()))?;
        let context = CudaContext::new(index).map_err(|error| refused(ordinal, "open", error))?;
        Ok(Self { ordinal, context, timeout })
    }

    /// The longest that a wait may take.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A result of the driver, as the failure of the run.
    pub(super) fn check<T>(
        &self,
        what: &str,
        result: std::result::Result<T, DriverError>,
    ) -> Result<T> {
        result.map_err(|error| refused(self.ordinal, what, error))
    }

    /// Makes this GPU current on this thread.
    pub(super) fn enter(&self) -> Result<()> {
        self.check("make the context current", self.context.bind_to_thread())
    }

    /// A new stream that does not wait for the default stream.
    pub(super) fn stream(&self) -> Result<Arc<CudaStream>> {
        self.check("create a stream", self.context.new_stream())
    }

    /// An event that takes the time.
    pub(super) fn event(&self) -> Result<CudaEvent> {
        let event = self.context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        self.check("create an event", event)
    }

    /// Copies that this GPU can make at a time.
    pub(super) fn copy_engines(&self) -> Result<usize> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT;
        let engines = self.check("count the copy engines", self.context.attribute(attribute))?;
        Ok(usize::try_from(engines).unwrap_or(1).max(1))
    }

    /// Bytes that are free now.
    pub(super) fn free_bytes(&self) -> Result<u64> {
        let (free, _) = self.check("read the free memory", self.context.mem_get_info())?;
        Ok(free as u64)
    }

    /// Waits until a stream has passed `event`.
    ///
    /// # Errors
    /// That of the driver, or that it takes longer than the timeout; `what` names the work.
    pub(super) fn wait(&self, event: &CudaEvent, what: &str) -> Result<()> {
        self.enter()?;
        let deadline = Deadline::after(self.timeout);
        let begun = Instant::now();
        while !self.check(what, event.try_is_complete())? {
            if deadline.has_passed() {
                let Self { ordinal, timeout, .. } = self;
                let text = format!("GPU {ordinal}: {what} took longer than {timeout:?}");
                return Err(Failure::failed(text)
                    .with_advice("see whether all ranks run; raise --timeout if they are slow"));
            }
            if begun.elapsed() < SPIN {
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAP);
            }
        }
        Ok(())
    }

    /// Waits until `stream` has done everything.
    pub(super) fn finish(&self, stream: &CudaStream, what: &str) -> Result<()> {
        let event = self.check(what, self.context.new_event(None))?;
        self.check(what, event.record(stream))?;
        self.wait(&event, what)
    }

    /// The time between two events that have passed.
    pub(super) fn elapsed(&self, begin: &CudaEvent, end: &CudaEvent) -> Result<Duration> {
        // Both have passed, so that cudarc's own wait inside of this returns at once.
        let milliseconds = self.check("read the time of an event", begin.elapsed_ms(end))?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1000.0).unwrap_or_default())
    }

    /// Milliseconds from `begin` to `end`, negative if `end` comes first.
    pub(super) fn milliseconds(&self, begin: &CudaEvent, end: &CudaEvent) -> Result<f32> {
        self.check("read the time of an event", begin.elapsed_ms(end))
    }

    /// Allocates.
    pub(super) fn allocate(&self, bytes: u64) -> Result<Memory> {
        self.enter()?;
        let length = usize::try_from(bytes).unwrap_or(usize::MAX).max(1);
        // SAFETY: the call has no preconditions; the bytes are written before they are read.
        let address = unsafe { result::malloc_sync(length) };
        let address = self.check(&format!("allocate {}", Size(bytes)), address)?;
        Ok(Memory { gpu: self.clone(), address, bytes })
    }

    /// Sets every byte of a span, on `stream`.
    pub(super) fn set(&self, stream: &CudaStream, span: Span, value: u8) -> Result<()> {
        self.enter()?;
        let bytes = span.bytes as usize;
        // SAFETY: the span is memory that whoever made it keeps until the stream is finished, which
        // every caller waits for.
        let set =
            unsafe { result::memset_d8_async(span.address, value, bytes, stream.cu_stream()) };
        self.check("set memory", set)
    }

    /// Copies `staging` to `address`, and gives it back.
    ///
    /// # Errors
    /// That of the driver; the staging is then leaked, because a copy may still read it.
    pub(super) fn upload(
        &self,
        stream: &CudaStream,
        address: u64,
        staging: Vec<u8>,
    ) -> Result<Vec<u8>> {
        self.pass(stream, "copy from the host", staging, |staging| {
            // SAFETY: the source lives, leaked, until the copy is complete; the destination is a
            // span that its maker keeps.
            unsafe { result::memcpy_htod_async(address, staging, stream.cu_stream()) }
        })
    }

    /// Copies from `address` over all of `staging`, and gives it back.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    pub(super) fn download(
        &self,
        stream: &CudaStream,
        address: u64,
        staging: Vec<u8>,
    ) -> Result<Vec<u8>> {
        self.pass(stream, "copy to the host", staging, |staging| {
            // SAFETY: as for `upload`, the other way.
            unsafe { result::memcpy_dtoh_async(staging, address, stream.cu_stream()) }
        })
    }

    /// Copies by way of `staging`, which lives until the copy is complete, and gives it back.
    fn pass(
        &self,
        stream: &CudaStream,
        what: &str,
        staging: Vec<u8>,
        copy: impl FnOnce(&mut [u8]) -> std::result::Result<(), DriverError>,
    ) -> Result<Vec<u8>> {
        self.enter()?;
        let staging = Box::leak(staging.into_boxed_slice());
        self.check(what, copy(staging))?;
        self.finish(stream, &format!("a {what}"))?;
        Ok(reclaim(staging))
    }

    /// Copies between two addresses, of which the first may be another GPU's, on `stream`.
    ///
    /// # Safety
    /// Both spans stay mapped, and nobody else touches what is written, until the stream has passed
    /// the copy.
    pub(super) unsafe fn copy(
        &self,
        stream: &CudaStream,
        to: u64,
        from: u64,
        bytes: u64,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        let copied =
            unsafe { result::memcpy_dtod_async(to, from, bytes as usize, stream.cu_stream()) };
        self.check("copy", copied)
    }

    /// Opens the memory of another process, as its [handle](Memory::handle) names it.
    pub(super) fn open_memory(&self, handle: &[u8]) -> Result<Opened> {
        self.enter()?;
        let mut raw = CUipcMemHandle { reserved: [0; 64] };
        let wanted = raw.reserved.len();
        if handle.len() != wanted {
            let text = format!("a memory handle of {} bytes, wanted {wanted}", handle.len());
            return Err(Failure::failed(text));
        }
        for (to, from) in raw.reserved.iter_mut().zip(handle) {
            *to = from.cast_signed();
        }
        let flags = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: the address is a local; the driver checks the handle.
        let code = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, raw, flags) };
        self.check("open a peer's memory (CUDA IPC)", code.result())?;
        Ok(Opened { gpu: self.clone(), address })
    }
}

impl Memory {
    /// All of it.
    pub(super) fn span(&self) -> Span {
        Span { address: self.address, bytes: self.bytes }
    }

    /// What lets another process open it.
    ///
    /// # Errors
    /// The driver's refusal.
    pub(super) fn handle(&self) -> Result<Vec<u8>> {
        self.gpu.enter()?;
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the handle is a local, and the memory is allocated.
        let code = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, self.address) };
        self.gpu.check("export memory (CUDA IPC)", code.result())?;
        Ok(handle.reserved.iter().map(|byte| byte.cast_unsigned()).collect())
    }
}

impl Opened {
    /// Where it lies here.
    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.gpu.enter().is_ok() {
            // SAFETY: it was allocated, and its user has waited for the streams. A refusal leaves
            // nothing to do.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if self.gpu.enter().is_ok() {
            // SAFETY: it was opened, and its user has waited for the streams.
            let _: CUresult = unsafe { sys::cuIpcCloseMemHandle(self.address) };
        }
    }
}

/// The box that was leaked as `staging`.
fn reclaim(staging: &'static mut [u8]) -> Vec<u8> {
    // SAFETY: the slice is that of the box that was leaked, and nobody else has it.
    unsafe { Box::from_raw(std::ptr::from_mut(staging)) }.into_vec()
}

fn refused(ordinal: u32, what: &str, error: DriverError) -> Failure {
    let DriverError(code) = error;
    let text = match error.error_string() {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => "the driver knows no text for it".to_owned(),
    };
    let number = code as u32;
    let failure = Failure::failed(format!("GPU {ordinal}: {what}: {code:?} ({number}), {text}"));
    match code {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            failure.with_advice("lower --max-bytes, or see with nvidia-smi who holds the memory")
        }
        _ => failure,
    }
}
