//! Wraps the streams, events, graphs and memory of one GPU, over the device traits of the toolkit.
//!
//! Every wait has a deadline, and nothing uses the legacy default stream. No thread captures while another thread of the
//! rank calls the driver, so that no call must be kept out of captures.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use peerlane::hal::{Error, ErrorKind};
use peerlane::open::Backend;
use peerlane::{Deadline, Element, Operation, cuda, rocm};
use peerlane_toolkit::device::{
    CopyCalls, CopyKind, DeviceContext, EventHandle, ExecHandle, GraphCalls, IpcCalls, IpcHandle,
    MemoryCalls, PeerDevice, PeerOptions, StreamCalls, StreamDevice, StreamHandle,
};

use crate::error::{Failure, Result};
use crate::units::Size;

/// The time for which a wait polls without sleeping, to notice an early completion at once.
const SPIN: Duration = Duration::from_micros(200);
/// The time for which a wait sleeps between two polls, once it no longer spins.
const NAP: Duration = Duration::from_micros(50);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

#[derive(Clone)]
pub(crate) struct Gpu {
    ordinal: u32,
    context: Context,
    pub(crate) timeout: Duration,
}

#[derive(Clone)]
enum Context {
    Cuda(Arc<cuda::Context>),
    Rocm(Arc<rocm::Context>),
}

/// A stream, event, graph or allocation that is given back to the driver on drop.
pub(crate) struct Owned<T: Resource> {
    gpu: Gpu,
    raw: T,
}

pub(crate) type Stream = Owned<StreamHandle>;
pub(crate) type Event = Owned<EventHandle>;
pub(crate) type Graph = Owned<ExecHandle>;
pub(crate) type Memory = Owned<Allocated>;
pub(crate) type ImportedMemory = Owned<Imported>;

pub(crate) struct Allocated(Span);

pub(crate) struct Imported(u64);

/// Calls a method of the CUDA or HIP context, and turns its error into a failure that names the
/// GPU.
macro_rules! call {
    ($gpu:expr, $what:expr, $context:ident => $call:expr) => {
        match &$gpu.context {
            Context::Cuda($context) => $call.map_err(|error| $gpu.refused($what, &error)),
            Context::Rocm($context) => $call.map_err(|error| $gpu.refused($what, &error)),
        }
    };
}

impl Gpu {
    /// Opens the context of a GPU; waits on the GPU end after `timeout`.
    pub(crate) fn open(backend: Backend, ordinal: u32, timeout: Duration) -> Result<Self> {
        let cannot = |error: &dyn std::fmt::Display| {
            Failure::failed(format!("GPU {ordinal}: cannot open: {error}"))
        };
        let context = match backend {
            Backend::Rocm => <rocm::Context as PeerDevice>::open(&PeerOptions::on_device(ordinal))
                .map(Context::Rocm)
                .map_err(|error| cannot(&error))?,
            _ => <cuda::Context as PeerDevice>::open(&PeerOptions::on_device(ordinal))
                .map(Context::Cuda)
                .map_err(|error| cannot(&error))?,
        };
        Ok(Self { ordinal, context, timeout })
    }

    fn refused(&self, what: impl std::fmt::Display, error: &impl Error) -> Failure {
        let ordinal = self.ordinal;
        let failure = Failure::failed(format!("GPU {ordinal}: cannot {what}: {error}"));
        match error.kind() {
            ErrorKind::OutOfMemory => failure.with_advice(
                "lower --max-bytes, or run nvidia-smi or rocm-smi to see which process uses the memory",
            ),
            _ => failure,
        }
    }

    pub(crate) fn enter(&self) -> Result<()> {
        call!(self, "make the GPU current", context => context.make_current().map(drop))
    }

    fn own<T: Resource>(&self, raw: T) -> Owned<T> {
        Owned { gpu: self.clone(), raw }
    }

    /// Creates a stream that does not synchronize with the default stream.
    pub(crate) fn stream(&self) -> Result<Rc<Stream>> {
        self.enter()?;
        let raw = call!(self, "create a stream", context => context.create_stream(false))?;
        Ok(Rc::new(self.own(raw)))
    }

    pub(crate) fn event(&self) -> Result<Event> {
        self.event_of(true)
    }

    fn event_of(&self, timed: bool) -> Result<Event> {
        self.enter()?;
        Ok(self.own(call!(self, "create an event", context => context.create_event(timed))?))
    }

    /// Returns the number of copies that this GPU can run at the same time, at least 1.
    pub(crate) fn copy_engines(&self) -> Result<usize> {
        self.enter()?;
        let limits = call!(self, "count the copy engines", context => context.stream_limits())?;
        Ok(limits.copy_engines.max(1) as usize)
    }

    pub(crate) fn free_bytes(&self) -> Result<u64> {
        self.enter()?;
        Ok(match &self.context {
            Context::Cuda(context) => context.free_bytes().free,
            Context::Rocm(context) => context.free_bytes().free,
        })
    }

    pub(crate) fn record(&self, event: &Event, stream: &Stream) -> Result<()> {
        call!(self, "record an event", context => {
            // SAFETY: event and stream are borrowed, so they are not destroyed.
            unsafe { context.record_event(event.raw, stream.raw) }
        })
    }

    /// Makes later work on a stream wait for an event.
    pub(crate) fn stream_wait_event(&self, stream: &Stream, event: &Event) -> Result<()> {
        call!(self, "wait for an event", context => {
            // SAFETY: event and stream are borrowed, so they are not destroyed.
            unsafe { context.wait_for_event(stream.raw, event.raw) }
        })
    }

    pub(crate) fn wait(&self, event: &Event, what: &str) -> Result<()> {
        self.enter()?;
        let deadline = Deadline::after(self.timeout);
        let started_at = Instant::now();
        let has_passed = || {
            call!(self, format_args!("complete {what}"), context => {
                // SAFETY: the event is borrowed, so it is not destroyed.
                unsafe { context.has_passed(event.raw) }
            })
        };
        while !has_passed()? {
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

    pub(crate) fn finish(&self, stream: &Stream, what: &str) -> Result<()> {
        let event = self.event_of(false)?;
        self.record(&event, stream)?;
        self.wait(&event, what)
    }

    pub(crate) fn elapsed(&self, begin: &Event, end: &Event) -> Result<Duration> {
        let milliseconds = self.milliseconds(begin, end)?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1000.0).unwrap_or_default())
    }

    /// Returns the milliseconds from `begin` to `end`, both completed; negative if `end` completed
    /// first.
    pub(crate) fn milliseconds(&self, begin: &Event, end: &Event) -> Result<f32> {
        call!(self, "read the time of an event", context => {
            // SAFETY: both events are borrowed, so they are not destroyed.
            unsafe { context.milliseconds(begin.raw, end.raw) }
        })
    }

    pub(crate) fn allocate(&self, bytes: u64) -> Result<Memory> {
        self.enter()?;
        let length = usize::try_from(bytes).unwrap_or(usize::MAX).max(1);
        let what = format!("allocate {}", Size(bytes));
        let address = call!(self, format_args!("{what}"), context => context.allocate(length))?;
        Ok(self.own(Allocated(Span { address, bytes })))
    }

    pub(crate) fn set(&self, stream: &Stream, span: Span, value: u8) -> Result<()> {
        self.enter()?;
        let bytes = span.bytes as usize;
        call!(self, "set memory", context => {
            // SAFETY: the owner of the span keeps it until the stream is finished; every caller waits for
            // that.
            unsafe { context.set(stream.raw, span.address, value, bytes) }
        })
    }

    /// Copies a host buffer to the GPU, waits for the copy, and returns the buffer.
    pub(crate) fn upload(&self, stream: &Stream, to: u64, staging: Vec<u8>) -> Result<Vec<u8>> {
        self.pass(stream, staging, "copy from the host", |host| (to, host))
    }

    /// Fills a host buffer from the GPU, waits for the copy, and returns the buffer.
    pub(crate) fn download(&self, stream: &Stream, from: u64, staging: Vec<u8>) -> Result<Vec<u8>> {
        self.pass(stream, staging, "copy to the host", |host| (host, from))
    }

    /// Copies between the GPU and a host buffer, which is leaked until the copy is complete. `ends`
    /// returns the destination and the source.
    fn pass(
        &self,
        stream: &Stream,
        staging: Vec<u8>,
        what: &str,
        ends: impl FnOnce(u64) -> (u64, u64),
    ) -> Result<Vec<u8>> {
        self.enter()?;
        let staging = Box::leak(staging.into_boxed_slice());
        let ((to, from), bytes) = (ends(staging.as_mut_ptr() as u64), staging.len());
        call!(self, what, context => {
            // SAFETY: `staging` is leaked until the copy is complete; the owner of the device memory keeps
            // it until then.
            unsafe { context.copy(stream.raw, to, from, bytes, CopyKind::Host) }
        })?;
        self.finish(stream, &format!("a {what}"))?;
        // SAFETY: `staging` is the slice of a leaked box, and this is its only reference.
        Ok(unsafe { Box::from_raw(std::ptr::from_mut(staging)) }.into_vec())
    }

    /// Enqueues a copy between two addresses on `stream`; the destination may be on another GPU.
    ///
    /// # Safety
    /// Both ranges stay mapped, and nothing else accesses the destination, until the stream has
    /// completed the copy.
    pub(crate) unsafe fn copy(
        &self,
        stream: &Stream,
        to: u64,
        from: u64,
        bytes: u64,
    ) -> Result<()> {
        call!(self, "copy", context => {
            // SAFETY: the caller guarantees both ranges.
            unsafe { context.copy(stream.raw, to, from, bytes as usize, CopyKind::Peer) }
        })
    }

    /// Maps GPU memory of another process from its IPC [handle](Memory::handle).
    pub(crate) fn open_memory(&self, handle: &[u8]) -> Result<ImportedMemory> {
        self.enter()?;
        let handle = handle.try_into().map(IpcHandle).map_err(|_| {
            let length = handle.len();
            Failure::failed(format!(
                "the IPC memory handle of a peer has {length} bytes, expected 64"
            ))
        })?;
        let what = "open a peer's memory (IPC)";
        Ok(self.own(Imported(call!(self, what, context => context.open_ipc(&handle))?)))
    }

    /// Begins to capture this thread's work on `stream` into a graph.
    pub(crate) fn begin_capture(&self, stream: &Stream) -> Result<()> {
        call!(self, "begin a capture", context => {
            // SAFETY: the stream is borrowed, so it is not destroyed.
            unsafe { context.begin_capture(stream.raw) }
        })
    }

    /// Ends a capture and returns the graph; `what` names the captured work in errors.
    pub(crate) fn end_capture(&self, stream: &Stream, what: &str) -> Result<Graph> {
        let captured = call!(self, format_args!("capture {what}"), context => {
            // SAFETY: the stream is borrowed, so it is not destroyed.
            unsafe { end_capture(&**context, stream.raw) }
        });
        Ok(self.own(captured?))
    }

    pub(crate) fn launch(&self, graph: &Graph, stream: &Stream) -> Result<()> {
        call!(self, "launch a graph", context => {
            // SAFETY: graph and stream are borrowed, so they are not destroyed.
            unsafe { context.launch(graph.raw, stream.raw) }
        })
    }
}

/// Ends a capture and instantiates the recorded graph for replays.
///
/// # Safety
/// The stream is alive.
unsafe fn end_capture<D: GraphCalls>(
    context: &D,
    stream: StreamHandle,
) -> std::result::Result<ExecHandle, D::Error> {
    // SAFETY: the caller guarantees the stream.
    let graph = unsafe { context.end_capture(stream) }?;
    // SAFETY: the graph was just captured.
    let exec = unsafe { context.instantiate(graph) };
    // SAFETY: this is the only handle of the captured graph; the executable graph does not need it.
    unsafe { context.destroy_graph(graph) };
    exec
}

impl Stream {
    pub(crate) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Returns the driver's stream handle for NCCL and cuBLAS.
    pub(crate) fn raw(&self) -> *mut std::ffi::c_void {
        self.raw.0
    }

    /// Enqueues a run of the operation on the stream. The lease on the result can end at once:
    /// nothing on the device reads the output between two runs, and the host reads it only after it
    /// has waited for the stream. The caller keeps the stream for as long as the operation.
    pub(crate) fn start<T: Element>(&self, operation: &mut Operation<T>) -> Result<()> {
        match &self.gpu.context {
            Context::Cuda(_) => {
                // SAFETY: the stream belongs to the primary context of this GPU, and the caller keeps it.
                let stream = unsafe { cuda::Stream::from_raw(self.raw.0) };
                drop(operation.start_on(&stream)?);
            }
            Context::Rocm(_) => {
                // SAFETY: as for CUDA.
                let stream = unsafe { rocm::Stream::from_raw(self.raw.0) };
                drop(operation.start_on(&stream)?);
            }
        }
        Ok(())
    }

    /// Orders a run of the operation behind the present work of the stream. If the host drives the
    /// engines, waits for that work and for the completion of the run.
    pub(crate) fn start_after<T: Element>(&self, operation: &mut Operation<T>) -> Result<()> {
        if operation.report().takes_streams() {
            return self.start(operation);
        }
        self.gpu.finish(self, "earlier work on the stream")?;
        Ok(operation.run()?)
    }
}

impl Memory {
    pub(crate) fn span(&self) -> Span {
        self.raw.0
    }

    /// Returns the IPC handle with which another process maps the memory.
    pub(crate) fn handle(&self) -> Result<Vec<u8>> {
        let (gpu, Span { address, .. }) = (&self.gpu, self.span());
        gpu.enter()?;
        let handle = call!(gpu, "export memory (IPC)", context => context.ipc_handle(address))?;
        Ok(handle.0.to_vec())
    }
}

impl ImportedMemory {
    pub(crate) fn address(&self) -> u64 {
        self.raw.0
    }
}

/// A driver resource that must be destroyed, such as a stream handle or an allocation.
pub(crate) trait Resource {
    /// Destroys the driver resource; an error of the driver has no remedy.
    ///
    /// # Safety
    /// The resource was created by this context, is not used afterwards, and its user has waited for the streams.
    unsafe fn destroy<D: StreamDevice>(&self, context: &D);
}

macro_rules! destroyed {
    ($($resource:ident: |$raw:ident, $context:ident| $destroy:expr;)*) => {$(
        impl Resource for $resource {
            unsafe fn destroy<D: StreamDevice>(&self, $context: &D) {
                let $raw = self;
                // SAFETY: the caller upholds the rules of the trait, which are those of this call.
                unsafe { $destroy }
            }
        }
    )*};
}

destroyed! {
    StreamHandle: |stream, context| D::destroy_stream(context.library(), *stream);
    EventHandle: |event, context| D::destroy_event(context.library(), *event);
    ExecHandle: |graph, context| context.destroy_exec(*graph);
    Allocated: |memory, context| context.free(memory.0.address);
    Imported: |memory, context| context.close_ipc(memory.0);
}

impl<T: Resource> Drop for Owned<T> {
    /// Destroys the resource with its GPU made current; if that fails, the context is gone with all its resources.
    fn drop(&mut self) {
        if self.gpu.enter().is_err() {
            return;
        }
        match &self.gpu.context {
            // SAFETY: the resource was created by this context, and its user has waited for the streams.
            Context::Cuda(context) => unsafe { self.raw.destroy(&**context) },
            // SAFETY: as for CUDA.
            Context::Rocm(context) => unsafe { self.raw.destroy(&**context) },
        }
    }
}
