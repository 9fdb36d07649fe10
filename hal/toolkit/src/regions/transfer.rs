//! Copies bytes between the host and this rank's regions, for tests, tools and diagnosis.
//!
//! They use a stream of their own, so that they are not blocked by waits of engines, and pinned memory,
//! because only then does the call return before the copy is complete. Every copy has a deadline: a device
//! that makes no progress is an error.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use crate::Fault;
use crate::deferred_free;
use crate::device::{CopyKind, DevicePtr, EventHandle, RegionDevice, Relaxed, StreamHandle};

const STAGING_BYTES: usize = 1 << 20;
/// The time limit of a copy between the host and a region; the longest copies take a second.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The number of times that the event of a copy is queried before the thread sleeps between queries.
const SPIN_QUERIES: u32 = 200;
const QUERY_INTERVAL: Duration = Duration::from_micros(50);

#[derive(Debug)]
pub(super) struct Transfer<D: RegionDevice> {
    context: Arc<D>,
    queue: Mutex<TransferQueue<D>>,
}

#[derive(Debug)]
struct TransferQueue<D: RegionDevice> {
    context: Arc<D>,
    stream: StreamHandle,
    event: Option<EventHandle>,
    staging: Option<Staging>,
    /// Whether an earlier copy missed its deadline and may still access the memory.
    may_be_running: bool,
}

#[derive(Clone, Copy, Debug)]
struct Staging {
    host: NonNull<c_void>,
    device: DevicePtr,
}

// SAFETY: the memory is used by the holder of the queue's lock only.
unsafe impl Send for Staging {}

impl Staging {
    /// Copies bytes from the caller into the pinned memory.
    ///
    /// # Safety
    /// No copy of the device uses the memory now.
    unsafe fn fill(self, piece: &[u8]) {
        assert!(piece.len() <= STAGING_BYTES, "a piece fits");
        // SAFETY: the memory holds a piece, and is not used by others (the caller's promise).
        unsafe {
            std::ptr::copy_nonoverlapping(piece.as_ptr(), self.host.as_ptr().cast(), piece.len());
        }
    }

    /// Frees the pinned memory through which copies go.
    ///
    /// # Safety
    /// The memory is of this device's driver, is freed once, and no copy uses it.
    unsafe fn free<D: RegionDevice>(self, context: &D) {
        // SAFETY: the caller's.
        unsafe { context.free_host(self.host) };
    }

    /// Copies bytes from the pinned memory to the caller.
    ///
    /// # Safety
    /// As for [`fill`](Self::fill).
    unsafe fn drain(self, piece: &mut [u8]) {
        assert!(piece.len() <= STAGING_BYTES, "a piece fits");
        let from = self.host.as_ptr().cast_const().cast();
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from, piece.as_mut_ptr(), piece.len()) };
    }
}

impl<D: RegionDevice> TransferQueue<D> {
    fn open(context: &Arc<D>) -> Result<Self, D::Error> {
        let stream = context.create_stream(false)?;
        let (event, staging) = (None, None);
        // From here on, a drop undoes what is done.
        let mut queue =
            Self { context: Arc::clone(context), stream, event, staging, may_be_running: false };
        queue.event = Some(context.create_event(false)?);
        let host = context.allocate_host(STAGING_BYTES)?;
        let staging = queue.staging.insert(Staging { host, device: 0 });
        // SAFETY: it is pinned.
        staging.device = unsafe { context.host_pointer(host) }?;
        Ok(queue)
    }

    fn staging(&self) -> Staging {
        self.staging.expect("`open` allocates it")
    }

    fn event(&self) -> EventHandle {
        self.event.expect("`open` makes it")
    }
}

impl<D: RegionDevice> Drop for TransferQueue<D> {
    fn drop(&mut self) {
        // A copy that may still run keeps its memory. Errors mean that the device is lost.
        let Ok(_current) = self.context.enter_relaxed() else { return };
        if self.may_be_running {
            return;
        }
        if let Some(staging) = self.staging {
            // SAFETY: allocated by `open`, freed once, and no copy uses it.
            let free = move |context: &D| unsafe { staging.free(context) };
            deferred_free::free(&self.context, free);
        }
        let library = self.context.library();
        if let Some(event) = self.event {
            // SAFETY: made by `open`.
            unsafe { D::destroy_event(library, event) };
        }
        // SAFETY: created by `open`, and idle.
        unsafe { D::destroy_stream(library, self.stream) };
    }
}

impl<D: RegionDevice> Transfer<D> {
    pub(super) fn open(context: &Arc<D>) -> Result<Self, D::Error> {
        let _current = context.enter_relaxed()?;
        let queue = Mutex::new(TransferQueue::open(context)?);
        Ok(Self { context: Arc::clone(context), queue })
    }

    pub(super) fn zero(&self, address: DevicePtr, bytes: u64) -> Result<(), D::Error> {
        let mut call = self.begin(TIMEOUT, "clear memory")?;
        let stream = call.queue.stream;
        // SAFETY: the stream belongs to the queue, and the region to the caller, who has not shared it yet.
        call.run(unsafe { self.context.set(stream, address, 0, bytes as usize) })
    }

    pub(super) fn upload(&self, address: DevicePtr, bytes: &[u8]) -> Result<(), D::Error> {
        let mut call = self.begin(TIMEOUT, "copy to the device")?;
        let (stream, staging) = (call.queue.stream, call.queue.staging());
        let mut at = address;
        for piece in bytes.chunks(STAGING_BYTES) {
            // SAFETY: the previous copy is complete.
            unsafe { staging.fill(piece) };
            let (from, length) = (staging.device, piece.len());
            // SAFETY: the caller checked the span, and the staging memory holds the piece.
            call.run(unsafe { self.context.copy(stream, at, from, length, CopyKind::Host) })?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    pub(super) fn download(&self, address: DevicePtr, bytes: &mut [u8]) -> Result<(), D::Error> {
        self.download_within(address, bytes, TIMEOUT)
    }

    pub(super) fn download_within(
        &self,
        address: DevicePtr,
        bytes: &mut [u8],
        timeout: Duration,
    ) -> Result<(), D::Error> {
        let mut call = self.begin(timeout, "copy from the device")?;
        let (stream, staging) = (call.queue.stream, call.queue.staging());
        let mut at = address;
        for piece in bytes.chunks_mut(STAGING_BYTES) {
            let (to, length) = (staging.device, piece.len());
            // SAFETY: the caller checked the span, and the staging memory has room for a piece.
            call.run(unsafe { self.context.copy(stream, to, at, length, CopyKind::Host) })?;
            // SAFETY: the copy is complete.
            unsafe { staging.drain(piece) };
            at += length as u64;
        }
        Ok(())
    }

    fn begin(
        &self,
        timeout: Duration,
        what: &'static str,
    ) -> Result<TransferCall<'_, D>, D::Error> {
        let end = Instant::now() + timeout;
        let queue = self.lock_until(end).ok_or_else(|| self.late(what, timeout))?;
        let current = self.context.enter_relaxed()?;
        let mut call =
            TransferCall { transfer: self, queue, _current: current, end, timeout, what };
        if call.queue.may_be_running {
            // The staging memory is free once that copy is complete.
            call.finish()?;
        }
        Ok(call)
    }

    fn lock_until(&self, end: Instant) -> Option<MutexGuard<'_, TransferQueue<D>>> {
        loop {
            match self.queue.try_lock() {
                Ok(queue) => return Some(queue),
                Err(TryLockError::Poisoned(queue)) => return Some(queue.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() >= end => return None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(QUERY_INTERVAL),
            }
        }
    }

    fn late(&self, what: &str, timeout: Duration) -> Fault {
        Fault::Timeout { what: format!("{} did not {what}", self.context.label()), timeout }
    }
}

struct TransferCall<'a, D: RegionDevice> {
    transfer: &'a Transfer<D>,
    queue: MutexGuard<'a, TransferQueue<D>>,
    _current: Relaxed<'a, D>,
    end: Instant,
    timeout: Duration,
    what: &'static str,
}

impl<D: RegionDevice> TransferCall<'_, D> {
    fn run(&mut self, enqueued: Result<(), D::Error>) -> Result<(), D::Error> {
        enqueued?;
        // Until the command is known to be complete.
        self.queue.may_be_running = true;
        let (event, stream) = (self.queue.event(), self.queue.stream);
        // SAFETY: both belong to the queue.
        unsafe { self.transfer.context.record_event(event, stream) }?;
        self.finish()
    }

    fn finish(&mut self) -> Result<(), D::Error> {
        let event = self.queue.event();
        let mut queries = 0;
        loop {
            // SAFETY: the event belongs to the queue.
            if unsafe { self.transfer.context.has_passed(event) }? {
                self.queue.may_be_running = false;
                return Ok(());
            }
            queries += 1;
            if queries < SPIN_QUERIES {
                std::hint::spin_loop();
            } else if Instant::now() >= self.end {
                return Err(self.transfer.late(self.what, self.timeout).into());
            } else {
                std::thread::sleep(QUERY_INTERVAL);
            }
        }
    }
}
