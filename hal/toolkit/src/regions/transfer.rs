//! Bytes between the host and this rank's regions, for tests, tools and diagnosis.
//!
//! They go over a stream that nothing else uses, so that they pass by waits that engines hold, and
//! through pinned memory, because only then does the call come back before the copy is done. Every
//! copy has a deadline: a device that is stuck is an error.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use super::device::RegionDevice;
use crate::device::{Between, DevicePtr, EventHandle, Fault, Relaxed, StreamHandle};
use crate::retire;

const STAGING_BYTES: usize = 1 << 20;
/// For a copy of any length; the longest take a second.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Looks at the event before the processor is given away in between.
const SPINS: u32 = 200;
const NAP: Duration = Duration::from_micros(50);

/// A stream for copies between the host and one device.
#[derive(Debug)]
pub(super) struct Transfer<D: RegionDevice> {
    context: Arc<D>,
    line: Mutex<Line<D>>,
}

/// What is made for the copies; given back when dropped.
#[derive(Debug)]
struct Line<D: RegionDevice> {
    context: Arc<D>,
    stream: StreamHandle,
    event: Option<EventHandle>,
    staging: Option<Staging>,
    /// A copy was given up on and may still run.
    stuck: bool,
}

/// Pinned memory of the host, as host and device find it.
#[derive(Clone, Copy, Debug)]
struct Staging {
    host: NonNull<c_void>,
    device: DevicePtr,
}

// SAFETY: the memory is used by who holds the lock of the line.
unsafe impl Send for Staging {}

impl Staging {
    /// Copies a piece into it.
    ///
    /// # Safety
    /// No copy of the device uses it now.
    unsafe fn fill(self, piece: &[u8]) {
        assert!(piece.len() <= STAGING_BYTES, "a piece fits");
        // SAFETY: the memory holds a piece, and nobody else uses it by the caller's word.
        unsafe {
            std::ptr::copy_nonoverlapping(piece.as_ptr(), self.host.as_ptr().cast(), piece.len());
        }
    }

    /// # Safety
    /// It is of this device's driver, freed once, and no copy uses it.
    unsafe fn free<D: RegionDevice>(self, context: &D) {
        // SAFETY: the caller's.
        unsafe { context.free_host(self.host) };
    }

    /// Copies a piece out of it.
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

impl<D: RegionDevice> Line<D> {
    /// The context is current.
    fn open(context: &Arc<D>) -> Result<Self, D::Error> {
        let stream = context.create_stream(false)?;
        let (event, staging) = (None, None);
        // From here on, dropping it undoes what is done.
        let mut line = Self { context: Arc::clone(context), stream, event, staging, stuck: false };
        line.event = Some(context.create_event()?);
        let host = context.allocate_host(STAGING_BYTES)?;
        let staging = line.staging.insert(Staging { host, device: 0 });
        // SAFETY: it is pinned.
        staging.device = unsafe { context.host_pointer(host) }?;
        Ok(line)
    }

    fn staging(&self) -> Staging {
        self.staging.expect("`open` allocates it")
    }

    fn event(&self) -> EventHandle {
        self.event.expect("`open` makes it")
    }
}

impl<D: RegionDevice> Drop for Line<D> {
    fn drop(&mut self) {
        // A copy that may still run keeps its memory; failures mean that the device is gone.
        let Ok(_current) = self.context.enter_relaxed() else { return };
        if self.stuck {
            return;
        }
        if let Some(staging) = self.staging {
            // SAFETY: allocated by `open`, freed once; no copy uses it.
            let free = move |context: &D| unsafe { staging.free(context) };
            retire::free(&self.context, free);
        }
        let library = self.context.library();
        if let Some(event) = self.event {
            // SAFETY: made by `open`.
            unsafe { D::destroy_event(library, event) };
        }
        // SAFETY: made by `open`; it is idle.
        unsafe { D::destroy_stream(library, self.stream) };
    }
}

impl<D: RegionDevice> Transfer<D> {
    pub(super) fn open(context: &Arc<D>) -> Result<Self, D::Error> {
        let _current = context.enter_relaxed()?;
        let line = Mutex::new(Line::open(context)?);
        Ok(Self { context: Arc::clone(context), line })
    }

    /// Sets bytes to 0.
    pub(super) fn zero(&self, address: DevicePtr, bytes: u64) -> Result<(), D::Error> {
        let mut work = self.begin(TIMEOUT, "clear memory")?;
        let stream = work.line.stream;
        // SAFETY: the stream belongs to the line, the region to the caller, who alone knows it.
        work.run(unsafe { self.context.clear(stream, address, bytes as usize) })
    }

    pub(super) fn upload(&self, address: DevicePtr, bytes: &[u8]) -> Result<(), D::Error> {
        let mut work = self.begin(TIMEOUT, "copy to the device")?;
        let (stream, staging) = (work.line.stream, work.line.staging());
        let mut at = address;
        for piece in bytes.chunks(STAGING_BYTES) {
            // SAFETY: the copy before is over.
            unsafe { staging.fill(piece) };
            let (from, length) = (staging.device, piece.len());
            // SAFETY: the caller checked the span; the staging memory holds the piece.
            work.run(unsafe { self.context.copy(stream, at, from, length, Between::Host) })?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    pub(super) fn download(&self, address: DevicePtr, bytes: &mut [u8]) -> Result<(), D::Error> {
        self.download_within(address, bytes, TIMEOUT)
    }

    /// The same, with a bound of one's own.
    pub(super) fn download_within(
        &self,
        address: DevicePtr,
        bytes: &mut [u8],
        timeout: Duration,
    ) -> Result<(), D::Error> {
        let mut work = self.begin(timeout, "copy from the device")?;
        let (stream, staging) = (work.line.stream, work.line.staging());
        let mut at = address;
        for piece in bytes.chunks_mut(STAGING_BYTES) {
            let (to, length) = (staging.device, piece.len());
            // SAFETY: the caller checked the span; the staging memory has room for a piece.
            work.run(unsafe { self.context.copy(stream, to, at, length, Between::Host) })?;
            // SAFETY: the copy is over.
            unsafe { staging.drain(piece) };
            at += length as u64;
        }
        Ok(())
    }

    fn begin(&self, timeout: Duration, what: &'static str) -> Result<Work<'_, D>, D::Error> {
        let end = Instant::now() + timeout;
        let line = self.lock_until(end).ok_or_else(|| self.late(what, timeout))?;
        let current = self.context.enter_relaxed()?;
        let mut work = Work { transfer: self, line, _current: current, end, timeout, what };
        if work.line.stuck {
            // The staging memory is free once that copy is over.
            work.finish()?;
        }
        Ok(work)
    }

    fn lock_until(&self, end: Instant) -> Option<MutexGuard<'_, Line<D>>> {
        loop {
            match self.line.try_lock() {
                Ok(line) => return Some(line),
                Err(TryLockError::Poisoned(line)) => return Some(line.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() >= end => return None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(NAP),
            }
        }
    }

    fn late(&self, what: &str, timeout: Duration) -> Fault {
        Fault::Timeout { what: format!("{} did not {what}", self.context.label()), timeout }
    }
}

/// The line while one caller has it.
struct Work<'a, D: RegionDevice> {
    transfer: &'a Transfer<D>,
    line: MutexGuard<'a, Line<D>>,
    _current: Relaxed<'a, D>,
    end: Instant,
    timeout: Duration,
    what: &'static str,
}

impl<D: RegionDevice> Work<'_, D> {
    /// Waits for a command that was just enqueued.
    fn run(&mut self, enqueued: Result<(), D::Error>) -> Result<(), D::Error> {
        enqueued?;
        // Until it is known to be over.
        self.line.stuck = true;
        let (event, stream) = (self.line.event(), self.line.stream);
        // SAFETY: both belong to the line.
        unsafe { self.transfer.context.record_event(event, stream) }?;
        self.finish()
    }

    fn finish(&mut self) -> Result<(), D::Error> {
        let event = self.line.event();
        let mut looks = 0;
        loop {
            // SAFETY: the event belongs to the line.
            if unsafe { self.transfer.context.has_passed(event) }? {
                self.line.stuck = false;
                return Ok(());
            }
            looks += 1;
            if looks < SPINS {
                std::hint::spin_loop();
            } else if Instant::now() >= self.end {
                return Err(self.transfer.late(self.what, self.timeout).into());
            } else {
                std::thread::sleep(NAP);
            }
        }
    }
}
