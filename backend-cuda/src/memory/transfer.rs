//! Bytes between the host and this rank's regions, for tests, tools and diagnosis.
//!
//! They go over a stream that nothing else uses, so that they pass by waits that engines hold, and
//! through pinned memory, because only then does the call come back before the copy is done. Every
//! copy has a deadline: a device that is stuck is an error.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::device::{Context, Relaxed};
use crate::error::Error;
use crate::sys::{self, CUdeviceptr, CUevent, CUresult, CUstream};

const STAGING_BYTES: usize = 1 << 20;
/// For a copy of any length; the longest take a second.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Looks at the event before the processor is given away in between.
const SPINS: u32 = 200;
const NAP: Duration = Duration::from_micros(50);

/// A stream for copies between the host and one device.
#[derive(Debug)]
pub(super) struct Transfer {
    context: Arc<Context>,
    line: Mutex<Line>,
}

#[derive(Debug)]
struct Line {
    stream: CUstream,
    event: CUevent,
    staging: *mut u8,
    /// A copy was given up on and may still run.
    stuck: bool,
}

// SAFETY: stream and event may be used from any thread; the staging memory is used under the lock.
unsafe impl Send for Line {}

impl Transfer {
    pub(super) fn open(context: &Arc<Context>) -> Result<Self, Error> {
        let driver = context.driver;
        let _current = context.enter_relaxed()?;
        let null = std::ptr::null_mut;
        let line = Line { stream: null(), event: null(), staging: null().cast(), stuck: false };
        // From here on, dropping it undoes what is done.
        let mut transfer = Self { context: Arc::clone(context), line: Mutex::new(line) };
        let line = transfer.line.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the context is current; the result is stored in a local.
        let code =
            unsafe { (driver.stream_create)(&raw mut line.stream, sys::STREAM_NON_BLOCKING) };
        context.check("cuStreamCreate", code)?;
        // SAFETY: as above.
        let code = unsafe { (driver.event_create)(&raw mut line.event, sys::EVENT_DISABLE_TIMING) };
        context.check("cuEventCreate", code)?;
        let staging: *mut *mut c_void = (&raw mut line.staging).cast();
        // SAFETY: as above.
        let code =
            unsafe { (driver.mem_host_alloc)(staging, STAGING_BYTES, sys::MEMHOSTALLOC_PORTABLE) };
        context.check("cuMemHostAlloc", code)?;
        Ok(transfer)
    }

    /// Sets bytes to 0.
    pub(super) fn zero(&self, address: CUdeviceptr, bytes: u64) -> Result<(), Error> {
        let mut work = self.begin(TIMEOUT, "clear memory")?;
        let stream = work.line.stream;
        work.run("cuMemsetD8Async", || {
            // SAFETY: the caller's region, which nobody else knows yet.
            unsafe { (self.context.driver.memset_d8_async)(address, 0, bytes as usize, stream) }
        })
    }

    pub(super) fn upload(&self, address: CUdeviceptr, bytes: &[u8]) -> Result<(), Error> {
        let mut work = self.begin(TIMEOUT, "copy to the device")?;
        let (stream, staging) = (work.line.stream, work.line.staging);
        let mut at = address;
        for piece in bytes.chunks(STAGING_BYTES) {
            // SAFETY: the staging memory holds a piece, and no copy uses it now.
            unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), staging, piece.len()) };
            work.run("cuMemcpyHtoDAsync_v2", || {
                let from = staging.cast_const().cast();
                // SAFETY: the caller checked the span; the staging memory holds the piece.
                unsafe { (self.context.driver.memcpy_htod_async)(at, from, piece.len(), stream) }
            })?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    pub(super) fn download(&self, address: CUdeviceptr, bytes: &mut [u8]) -> Result<(), Error> {
        self.download_within(address, bytes, TIMEOUT)
    }

    /// The same, with a bound of one's own.
    pub(super) fn download_within(
        &self,
        address: CUdeviceptr,
        bytes: &mut [u8],
        timeout: Duration,
    ) -> Result<(), Error> {
        let mut work = self.begin(timeout, "copy from the device")?;
        let (stream, staging) = (work.line.stream, work.line.staging);
        let mut at = address;
        for piece in bytes.chunks_mut(STAGING_BYTES) {
            work.run("cuMemcpyDtoHAsync_v2", || {
                // SAFETY: the caller checked the span; the staging memory has room for a piece.
                unsafe {
                    (self.context.driver.memcpy_dtoh_async)(staging.cast(), at, piece.len(), stream)
                }
            })?;
            // SAFETY: the copy is complete, and no other one uses the staging memory now.
            unsafe { std::ptr::copy_nonoverlapping(staging, piece.as_mut_ptr(), piece.len()) };
            at += piece.len() as u64;
        }
        Ok(())
    }

    fn begin(&self, timeout: Duration, what: &'static str) -> Result<Work<'_>, Error> {
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

    fn lock_until(&self, end: Instant) -> Option<MutexGuard<'_, Line>> {
        loop {
            match self.line.try_lock() {
                Ok(line) => return Some(line),
                Err(TryLockError::Poisoned(line)) => return Some(line.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() >= end => return None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(NAP),
            }
        }
    }

    fn late(&self, what: &str, timeout: Duration) -> Error {
        Error::Timeout { what: format!("{} did not {what}", self.context.label()), timeout }
    }
}

/// The line while one caller has it.
struct Work<'a> {
    transfer: &'a Transfer,
    line: MutexGuard<'a, Line>,
    _current: Relaxed<'a>,
    end: Instant,
    timeout: Duration,
    what: &'static str,
}

impl Work<'_> {
    /// Enqueues one command and waits for it.
    fn run(&mut self, call: &'static str, enqueue: impl FnOnce() -> CUresult) -> Result<(), Error> {
        let context = &self.transfer.context;
        context.check(call, enqueue())?;
        // Until it is known to be over.
        self.line.stuck = true;
        // SAFETY: both belong to the line.
        let code = unsafe { (context.driver.event_record)(self.line.event, self.line.stream) };
        context.check("cuEventRecord", code)?;
        self.finish()
    }

    fn finish(&mut self) -> Result<(), Error> {
        let context = &self.transfer.context;
        let mut looks = 0;
        loop {
            // SAFETY: the event belongs to the line.
            match unsafe { (context.driver.event_query)(self.line.event) } {
                sys::CUDA_ERROR_NOT_READY => {}
                code => {
                    context.check("cuEventQuery", code)?;
                    self.line.stuck = false;
                    return Ok(());
                }
            }
            looks += 1;
            if looks < SPINS {
                std::hint::spin_loop();
            } else if Instant::now() >= self.end {
                return Err(self.transfer.late(self.what, self.timeout));
            } else {
                std::thread::sleep(NAP);
            }
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        let line = self.line.get_mut().unwrap_or_else(PoisonError::into_inner);
        // A copy that may still run keeps its memory; failures mean that the device is gone.
        let Ok(_current) = self.context.enter_relaxed() else { return };
        if line.stuck {
            return;
        }
        let driver = self.context.driver;
        if !line.staging.is_null() {
            // SAFETY: allocated by `open`; no copy uses it.
            let _ = unsafe { (driver.mem_free_host)(line.staging.cast()) };
        }
        if !line.event.is_null() {
            // SAFETY: made by `open`.
            let _ = unsafe { (driver.event_destroy)(line.event) };
        }
        if !line.stream.is_null() {
            // SAFETY: made by `open`; it is idle.
            let _ = unsafe { (driver.stream_destroy)(line.stream) };
        }
    }
}
