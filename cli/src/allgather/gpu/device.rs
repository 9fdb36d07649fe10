//! Streams, events, graphs and memory of one GPU, as the measurement uses them.
//!
//! Every wait has a deadline, and nothing uses the legacy default stream.

use std::ffi::c_void;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use peerlane::Deadline;

use super::driver::{CallError, Cuda, Direction, Driver, Handle, Hip, Transfer};
use crate::allgather::target::Backend;
use crate::error::{Failure, Result};
use crate::units::Size;

/// Time that a wait polls without sleeping, to see an early completion at once.
const SPIN: Duration = Duration::from_micros(200);
/// Time between two polls after that.
const NAP: Duration = Duration::from_micros(50);

/// A range of GPU memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) address: u64,
    pub(super) bytes: u64,
}

/// An open GPU.
#[derive(Clone)]
pub(super) struct Gpu {
    ordinal: u32,
    backend: Backend,
    driver: Arc<dyn Driver>,
    timeout: Duration,
}

/// A stream, destroyed on drop.
pub(super) struct Stream {
    gpu: Gpu,
    raw: Handle,
}

/// An event, destroyed on drop.
pub(super) struct Event {
    gpu: Gpu,
    raw: Handle,
}

/// An executable graph, destroyed on drop.
pub(super) struct Graph {
    gpu: Gpu,
    raw: Handle,
}

/// GPU memory, freed on drop.
pub(super) struct Memory {
    gpu: Gpu,
    address: u64,
    bytes: u64,
}

/// Memory of another process, closed on drop.
pub(super) struct ImportedMemory {
    gpu: Gpu,
    address: u64,
}

impl Gpu {
    /// Opens a GPU that the backend has found; waits on it end after `timeout`.
    pub(super) fn open(backend: Backend, ordinal: u32, timeout: Duration) -> Result<Self> {
        let opened: std::result::Result<Arc<dyn Driver>, CallError> = match backend {
            Backend::Rocm => Hip::open(ordinal).map(|driver| Arc::new(driver) as _),
            _ => Cuda::open(ordinal).map(|driver| Arc::new(driver) as _),
        };
        let driver = opened.map_err(|error| refused(ordinal, "open", error))?;
        Ok(Self { ordinal, backend, driver, timeout })
    }

    /// Returns the longest duration of a wait.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Converts an error of the driver to a failure of the run.
    fn check<T>(&self, what: &str, result: std::result::Result<T, CallError>) -> Result<T> {
        result.map_err(|error| refused(self.ordinal, what, error))
    }

    /// Returns the backend of the GPU.
    pub(super) fn backend(&self) -> Backend {
        self.backend
    }

    /// Makes this GPU current on this thread.
    pub(super) fn enter(&self) -> Result<()> {
        self.check("make the GPU current", self.driver.enter())
    }

    /// Creates a stream that does not synchronise with the default stream.
    pub(super) fn stream(&self) -> Result<Rc<Stream>> {
        self.enter()?;
        let raw = self.check("create a stream", self.driver.create_stream())?;
        Ok(Rc::new(Stream { gpu: self.clone(), raw }))
    }

    /// Creates an event with a timestamp.
    pub(super) fn event(&self) -> Result<Event> {
        self.event_of(true)
    }

    fn event_of(&self, timed: bool) -> Result<Event> {
        self.enter()?;
        let raw = self.check("create an event", self.driver.create_event(timed))?;
        Ok(Event { gpu: self.clone(), raw })
    }

    /// Returns the number of copies that this GPU can make at the same time, at least 1.
    pub(super) fn copy_engines(&self) -> Result<usize> {
        self.enter()?;
        let engines = self.check("count the copy engines", self.driver.copy_engines())?;
        Ok(usize::try_from(engines).unwrap_or(1).max(1))
    }

    /// Returns the free memory in bytes.
    pub(super) fn free_bytes(&self) -> Result<u64> {
        self.enter()?;
        Ok(self.check("read the free memory", self.driver.free_bytes())? as u64)
    }

    /// Records an event on a stream.
    pub(super) fn record(&self, event: &Event, stream: &Stream) -> Result<()> {
        // SAFETY: event and stream are borrowed, so they are not destroyed.
        self.check("record an event", unsafe { self.driver.record(event.raw, stream.raw) })
    }

    /// Makes later work on a stream wait for an event.
    pub(super) fn stream_wait_event(&self, stream: &Stream, event: &Event) -> Result<()> {
        // SAFETY: event and stream are borrowed, so they are not destroyed.
        self.check("wait for an event", unsafe {
            self.driver.stream_wait_event(stream.raw, event.raw)
        })
    }

    /// Waits until an event is complete.
    pub(super) fn wait(&self, event: &Event, what: &str) -> Result<()> {
        self.enter()?;
        let deadline = Deadline::after(self.timeout);
        let started_at = Instant::now();
        loop {
            // SAFETY: the event is borrowed, so it is not destroyed.
            let is_complete = unsafe { self.driver.is_complete(event.raw) };
            let failed = |error| self.check(&format!("complete {what}"), Err(error));
            if is_complete.or_else(failed)? {
                break;
            }
            if deadline.has_passed() {
                let Self { ordinal, timeout, .. } = self;
                let text = format!("GPU {ordinal}: {what} did not complete within {timeout:?}");
                return Err(Failure::timeout(text));
            }
            if started_at.elapsed() < SPIN {
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAP);
            }
        }
        Ok(())
    }

    /// Waits until all work on `stream` is complete.
    pub(super) fn finish(&self, stream: &Stream, what: &str) -> Result<()> {
        let event = self.event_of(false)?;
        self.record(&event, stream)?;
        self.wait(&event, what)
    }

    /// Returns the time between two complete events.
    pub(super) fn elapsed(&self, begin: &Event, end: &Event) -> Result<Duration> {
        let milliseconds = self.milliseconds(begin, end)?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1000.0).unwrap_or_default())
    }

    /// Returns the milliseconds from `begin` to `end`, both complete; negative if `end` came first.
    pub(super) fn milliseconds(&self, begin: &Event, end: &Event) -> Result<f32> {
        // SAFETY: both events are borrowed, so they are not destroyed.
        let milliseconds = unsafe { self.driver.milliseconds(begin.raw, end.raw) };
        self.check("read the time of an event", milliseconds)
    }

    /// Allocates memory.
    pub(super) fn allocate(&self, bytes: u64) -> Result<Memory> {
        self.enter()?;
        let length = usize::try_from(bytes).unwrap_or(usize::MAX).max(1);
        let address = self.driver.allocate(length);
        let address = self.check(&format!("allocate {}", Size(bytes)), address)?;
        Ok(Memory { gpu: self.clone(), address, bytes })
    }

    /// Sets every byte of a span, on `stream`.
    pub(super) fn set(&self, stream: &Stream, span: Span, value: u8) -> Result<()> {
        self.enter()?;
        let bytes = span.bytes as usize;
        // SAFETY: the owner of the span keeps it until the stream is finished; every caller waits for
        // that.
        let set = unsafe { self.driver.set(stream.raw, span.address, value, bytes) };
        self.check("set memory", set)
    }

    /// Copies `staging` to `address`, waits, and returns `staging`.
    pub(super) fn upload(
        &self,
        stream: &Stream,
        address: u64,
        staging: Vec<u8>,
    ) -> Result<Vec<u8>> {
        self.pass(stream, address, staging, Direction::ToDevice)
    }

    /// Copies from `address` into all of `staging`, waits, and returns `staging`.
    pub(super) fn download(
        &self,
        stream: &Stream,
        address: u64,
        staging: Vec<u8>,
    ) -> Result<Vec<u8>> {
        self.pass(stream, address, staging, Direction::ToHost)
    }

    /// Copies between the device and `staging`, which lives until the copy is complete.
    fn pass(
        &self,
        stream: &Stream,
        address: u64,
        staging: Vec<u8>,
        direction: Direction,
    ) -> Result<Vec<u8>> {
        self.enter()?;
        let staging = Box::leak(staging.into_boxed_slice());
        let (host, bytes) = (staging.as_mut_ptr() as u64, staging.len());
        let (to, from, what) = match direction {
            Direction::ToHost => (host, address, "copy to the host"),
            _ => (address, host, "copy from the host"),
        };
        let transfer = Transfer { to, from, bytes, direction };
        // SAFETY: `staging` is leaked until the copy is complete; the owner of the device memory keeps
        // it until then.
        let copied = unsafe { self.driver.copy(stream.raw, transfer) };
        self.check(what, copied)?;
        self.finish(stream, &format!("a {what}"))?;
        Ok(reclaim(staging))
    }

    /// Copies between two addresses on `stream`; the destination may be on another GPU.
    ///
    /// # Safety
    /// Both ranges stay mapped, and nothing else accesses the destination, until the stream has
    /// completed the copy.
    pub(super) unsafe fn copy(
        &self,
        stream: &Stream,
        to: u64,
        from: u64,
        bytes: u64,
    ) -> Result<()> {
        let (bytes, direction) = (bytes as usize, Direction::Devices);
        let transfer = Transfer { to, from, bytes, direction };
        // SAFETY: the caller guarantees both ranges.
        let copied = unsafe { self.driver.copy(stream.raw, transfer) };
        self.check("copy", copied)
    }

    /// Opens memory of another process from its [handle](Memory::handle).
    pub(super) fn open_memory(&self, handle: &[u8]) -> Result<ImportedMemory> {
        self.enter()?;
        let handle: [u8; 64] = handle.try_into().map_err(|_| {
            let length = handle.len();
            Failure::failed(format!(
                "the IPC memory handle of a peer has {length} bytes, expected 64"
            ))
        })?;
        let address = self.driver.open_ipc(handle);
        let address = self.check("open a peer's memory (IPC)", address)?;
        Ok(ImportedMemory { gpu: self.clone(), address })
    }

    /// Starts to capture the work of this thread on `stream`.
    pub(super) fn begin_capture(&self, stream: &Stream) -> Result<()> {
        // SAFETY: the stream is borrowed, so it is not destroyed.
        self.check("begin a capture", unsafe { self.driver.begin_capture(stream.raw) })
    }

    /// Ends the capture and returns the graph; `what` names the captured work.
    pub(super) fn end_capture(&self, stream: &Stream, what: &str) -> Result<Graph> {
        // SAFETY: the stream is borrowed, so it is not destroyed.
        let raw = unsafe { self.driver.end_capture(stream.raw) };
        let raw = self.check(&format!("capture {what}"), raw)?;
        Ok(Graph { gpu: self.clone(), raw })
    }

    /// Launches a graph on `stream`.
    pub(super) fn launch(&self, graph: &Graph, stream: &Stream) -> Result<()> {
        // SAFETY: graph and stream are borrowed, so they are not destroyed.
        self.check("launch a graph", unsafe { self.driver.launch(graph.raw, stream.raw) })
    }
}

impl Stream {
    /// Returns the GPU of the stream.
    pub(super) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Returns the handle for other libraries of the vendor.
    pub(super) fn raw(&self) -> *mut c_void {
        self.raw
    }
}

impl Memory {
    /// Returns the whole range.
    pub(super) fn span(&self) -> Span {
        Span { address: self.address, bytes: self.bytes }
    }

    /// Returns the IPC handle with which another process can open the memory.
    pub(super) fn handle(&self) -> Result<Vec<u8>> {
        self.gpu.enter()?;
        // SAFETY: the memory is allocated until `self` is dropped.
        let handle = unsafe { self.gpu.driver.ipc_handle(self.address) };
        Ok(self.gpu.check("export memory (IPC)", handle)?.to_vec())
    }
}

impl ImportedMemory {
    /// Returns the address in this process.
    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

/// Implements `Drop` with the GPU made current. If it cannot be made current, its context is gone
/// with all its resources.
macro_rules! dropped {
    ($($owner:ident: $destroy:ident($raw:ident);)*) => {$(
        impl Drop for $owner {
            fn drop(&mut self) {
                if self.gpu.enter().is_ok() {
                    // SAFETY: the resource was created by this driver, and its user has waited for the
                    // streams.
                    unsafe { self.gpu.driver.$destroy(self.$raw) };
                }
            }
        }
    )*};
}

dropped! {
    Stream: destroy_stream(raw);
    Event: destroy_event(raw);
    Graph: destroy_graph(raw);
    Memory: free(address);
    ImportedMemory: close_ipc(address);
}

/// Returns the box that was leaked as `staging`.
fn reclaim(staging: &'static mut [u8]) -> Vec<u8> {
    // SAFETY: `staging` is the slice of a leaked box, and this is its only reference.
    unsafe { Box::from_raw(std::ptr::from_mut(staging)) }.into_vec()
}

fn refused(ordinal: u32, what: &str, refusal: CallError) -> Failure {
    let failure = Failure::failed(format!("GPU {ordinal}: cannot {what}: {}", refusal.text));
    if refusal.out_of_memory {
        failure.with_advice(
            "lower --max-bytes, or run nvidia-smi or rocm-smi to see which process uses the memory",
        )
    } else {
        failure
    }
}
