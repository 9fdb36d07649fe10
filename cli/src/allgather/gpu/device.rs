//! One GPU as the measurement uses it: streams, events, graphs and memory.
//!
//! No wait is without a deadline, and nothing is put on the legacy default stream.

use std::ffi::c_void;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use peerlane::Deadline;

use super::driver::{CallError, Cuda, Direction, Driver, Handle, Hip, Transfer};
use crate::allgather::backend::Backend;
use crate::error::{Failure, Result};
use crate::units::Size;

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
    backend: Backend,
    driver: Arc<dyn Driver>,
    timeout: Duration,
}

/// A stream, destroyed when dropped.
pub(super) struct Stream {
    gpu: Gpu,
    raw: Handle,
}

/// A place in a stream, destroyed when dropped.
pub(super) struct Event {
    gpu: Gpu,
    raw: Handle,
}

/// What was recorded from a stream, destroyed when dropped.
pub(super) struct Graph {
    gpu: Gpu,
    raw: Handle,
}

/// Memory of a GPU, freed when dropped.
pub(super) struct Memory {
    gpu: Gpu,
    address: u64,
    bytes: u64,
}

/// Another process's memory, closed when dropped.
pub(super) struct ImportedMemory {
    gpu: Gpu,
    address: u64,
}

impl Gpu {
    /// Opens a GPU that the backend has found; no wait on it is longer than `timeout`.
    ///
    /// # Errors
    /// The driver's refusal.
    pub(super) fn open(backend: Backend, ordinal: u32, timeout: Duration) -> Result<Self> {
        let opened: std::result::Result<Arc<dyn Driver>, CallError> = match backend {
            Backend::Rocm => Hip::open(ordinal).map(|driver| Arc::new(driver) as _),
            _ => Cuda::open(ordinal).map(|driver| Arc::new(driver) as _),
        };
        let driver = opened.map_err(|error| refused(ordinal, "open", error))?;
        Ok(Self { ordinal, backend, driver, timeout })
    }

    /// The longest that a wait may take.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A result of the driver, as the failure of the run.
    fn check<T>(&self, what: &str, result: std::result::Result<T, CallError>) -> Result<T> {
        result.map_err(|error| refused(self.ordinal, what, error))
    }

    /// Whose it is.
    pub(super) fn backend(&self) -> Backend {
        self.backend
    }

    /// Makes this GPU current on this thread.
    pub(super) fn enter(&self) -> Result<()> {
        self.check("make the GPU current", self.driver.enter())
    }

    /// A new stream that does not wait for the default stream.
    pub(super) fn stream(&self) -> Result<Rc<Stream>> {
        self.enter()?;
        let raw = self.check("create a stream", self.driver.create_stream())?;
        Ok(Rc::new(Stream { gpu: self.clone(), raw }))
    }

    /// An event that takes the time.
    pub(super) fn event(&self) -> Result<Event> {
        self.event_of(true)
    }

    fn event_of(&self, timed: bool) -> Result<Event> {
        self.enter()?;
        let raw = self.check("create an event", self.driver.create_event(timed))?;
        Ok(Event { gpu: self.clone(), raw })
    }

    /// Copies that this GPU can make at a time.
    pub(super) fn copy_engines(&self) -> Result<usize> {
        self.enter()?;
        let engines = self.check("count the copy engines", self.driver.copy_engines())?;
        Ok(usize::try_from(engines).unwrap_or(1).max(1))
    }

    /// Bytes that are free now.
    pub(super) fn free_bytes(&self) -> Result<u64> {
        self.enter()?;
        Ok(self.check("read the free memory", self.driver.free_bytes())? as u64)
    }

    /// Puts an event behind what a stream holds.
    pub(super) fn record(&self, event: &Event, stream: &Stream) -> Result<()> {
        // SAFETY: both live.
        self.check("record an event", unsafe { self.driver.record(event.raw, stream.raw) })
    }

    /// Lets what a stream gets from now on come after an event.
    pub(super) fn stream_wait_event(&self, stream: &Stream, event: &Event) -> Result<()> {
        // SAFETY: both live.
        self.check("wait for an event", unsafe {
            self.driver.stream_wait_event(stream.raw, event.raw)
        })
    }

    /// Waits until a stream has passed `event`.
    ///
    /// # Errors
    /// That of the driver, or that it takes longer than the timeout; `what` names the work.
    pub(super) fn wait(&self, event: &Event, what: &str) -> Result<()> {
        self.enter()?;
        let deadline = Deadline::after(self.timeout);
        let begun = Instant::now();
        // SAFETY: it lives.
        while !self.check(what, unsafe { self.driver.has_passed(event.raw) })? {
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
    pub(super) fn finish(&self, stream: &Stream, what: &str) -> Result<()> {
        let event = self.event_of(false)?;
        self.record(&event, stream)?;
        self.wait(&event, what)
    }

    /// The time between two events that have passed.
    pub(super) fn elapsed(&self, begin: &Event, end: &Event) -> Result<Duration> {
        let milliseconds = self.milliseconds(begin, end)?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1000.0).unwrap_or_default())
    }

    /// Milliseconds from `begin` to `end`, negative if `end` comes first; both have passed.
    pub(super) fn milliseconds(&self, begin: &Event, end: &Event) -> Result<f32> {
        // SAFETY: both live.
        let milliseconds = unsafe { self.driver.milliseconds(begin.raw, end.raw) };
        self.check("read the time of an event", milliseconds)
    }

    /// Allocates.
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
        // SAFETY: the span is memory that whoever made it keeps until the stream is finished, which
        // every caller waits for.
        let set = unsafe { self.driver.set(stream.raw, span.address, value, bytes) };
        self.check("set memory", set)
    }

    /// Copies `staging` to `address`, and gives it back.
    ///
    /// # Errors
    /// That of the driver; the staging is then leaked, because a copy may still read it.
    pub(super) fn upload(
        &self,
        stream: &Stream,
        address: u64,
        staging: Vec<u8>,
    ) -> Result<Vec<u8>> {
        self.pass(stream, address, staging, Direction::ToDevice)
    }

    /// Copies from `address` over all of `staging`, and gives it back.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    pub(super) fn download(
        &self,
        stream: &Stream,
        address: u64,
        staging: Vec<u8>,
    ) -> Result<Vec<u8>> {
        self.pass(stream, address, staging, Direction::ToHost)
    }

    /// Copies by way of `staging`, which lives until the copy is complete, and gives it back.
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
        // SAFETY: the staging lives, leaked, until the copy is complete; the rest is a span that its
        // maker keeps.
        let copied = unsafe { self.driver.copy(stream.raw, transfer) };
        self.check(what, copied)?;
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
        stream: &Stream,
        to: u64,
        from: u64,
        bytes: u64,
    ) -> Result<()> {
        let (bytes, direction) = (bytes as usize, Direction::Devices);
        let transfer = Transfer { to, from, bytes, direction };
        // SAFETY: the caller's promise.
        let copied = unsafe { self.driver.copy(stream.raw, transfer) };
        self.check("copy", copied)
    }

    /// Opens the memory of another process, as its [handle](Memory::handle) names it.
    pub(super) fn open_memory(&self, handle: &[u8]) -> Result<ImportedMemory> {
        self.enter()?;
        let handle: [u8; 64] = handle.try_into().map_err(|_| {
            let length = handle.len();
            Failure::failed(format!("a memory handle of {length} bytes, wanted 64"))
        })?;
        let address = self.driver.open_ipc(handle);
        let address = self.check("open a peer's memory (IPC)", address)?;
        Ok(ImportedMemory { gpu: self.clone(), address })
    }

    /// Begins to record what this thread puts on `stream`.
    pub(super) fn begin_capture(&self, stream: &Stream) -> Result<()> {
        // SAFETY: it lives.
        self.check("begin a capture", unsafe { self.driver.begin_capture(stream.raw) })
    }

    /// Ends it; `what` was recorded.
    pub(super) fn end_capture(&self, stream: &Stream, what: &str) -> Result<Graph> {
        // SAFETY: it lives.
        let raw = unsafe { self.driver.end_capture(stream.raw) };
        let raw = self.check(&format!("capture {what}"), raw)?;
        Ok(Graph { gpu: self.clone(), raw })
    }

    /// Puts on `stream` what was recorded.
    pub(super) fn launch(&self, graph: &Graph, stream: &Stream) -> Result<()> {
        // SAFETY: both live.
        self.check("launch a graph", unsafe { self.driver.launch(graph.raw, stream.raw) })
    }
}

impl Stream {
    /// Whose it is.
    pub(super) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// As the vendor's other libraries take it.
    pub(super) fn raw(&self) -> *mut c_void {
        self.raw
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
        // SAFETY: the memory is allocated.
        let handle = unsafe { self.gpu.driver.ipc_handle(self.address) };
        Ok(self.gpu.check("export memory (IPC)", handle)?.to_vec())
    }
}

impl ImportedMemory {
    /// Where it lies here.
    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

/// Destroys with the GPU current; where it cannot be, it is gone with all that it had.
macro_rules! dropped {
    ($($owner:ident: $destroy:ident($raw:ident);)*) => {$(
        impl Drop for $owner {
            fn drop(&mut self) {
                if self.gpu.enter().is_ok() {
                    // SAFETY: it was made by this driver, and its user has waited for the streams.
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

/// The box that was leaked as `staging`.
fn reclaim(staging: &'static mut [u8]) -> Vec<u8> {
    // SAFETY: the slice is that of the box that was leaked, and nobody else has it.
    unsafe { Box::from_raw(std::ptr::from_mut(staging)) }.into_vec()
}

fn refused(ordinal: u32, what: &str, refusal: CallError) -> Failure {
    let failure = Failure::failed(format!("GPU {ordinal}: {what}: {}", refusal.text));
    if refusal.out_of_memory {
        failure.with_advice(
            "lower --max-bytes, or see with nvidia-smi or rocm-smi who holds the memory",
        )
    } else {
        failure
    }
}
