//! A device of this process: what every call of HIP needs to be current.
//!
//! HIP has no contexts of its own: what is current on a thread is a device, and its primary context,
//! which everything of the process uses. It is made current for each call and what was current before
//! is put back: a caller's thread keeps its own.

use std::ffi::c_int;
use std::sync::Arc;

use peerlane_toolkit::device::DeviceContext;

use super::{Device, visible};
use crate::error::Error;
use crate::sys::Hip;
use crate::sys::hip::{self, hipError_t, hipStreamCaptureMode};

/// A device that this rank uses.
#[derive(Debug)]
pub struct Context {
    pub(crate) hip: &'static Hip,
    /// As it was found when the context was opened.
    pub(crate) found: Device,
    /// HIP's number of it, which is its ordinal.
    number: c_int,
    label: Arc<str>,
}

impl Context {
    /// The device that this process knows by `ordinal`.
    pub(crate) fn open(ordinal: u32) -> Result<Arc<Self>, Error> {
        let hip = Hip::load()?;
        let found = visible::open(hip, ordinal)?;
        // `open` has refused what is no number of a device.
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        let label = found.label();
        Ok(Arc::new(Self { hip, found, number, label }))
    }

    /// A result of HIP as an error that names the call and the device.
    pub(crate) fn check(&self, call: &'static str, code: hipError_t) -> Result<(), Error> {
        if code == hipError_t::hipSuccess { Ok(()) } else { Err(self.refused(call, code)) }
    }

    #[cold]
    pub(crate) fn refused(&self, call: &'static str, code: hipError_t) -> Error {
        self.forget_error();
        Error::hip(self.hip, call, Some(&self.label), code)
    }

    /// HIP keeps a thread's last error until somebody asks. What was refused to us has taken the place
    /// of the caller's and is none of its kernels'.
    pub(crate) fn forget_error(&self) {
        // SAFETY: it only resets what the thread's last error is.
        let _ = unsafe { (self.hip.calls.get_last_error)() };
    }
}

impl DeviceContext for Context {
    type Error = Error;
    type Library = &'static hip::Library;
    type Current = c_int;
    type CaptureMode = hipStreamCaptureMode;

    fn library(&self) -> &'static hip::Library {
        self.hip.calls
    }

    fn label(&self) -> &Arc<str> {
        &self.label
    }

    fn device(&self) -> i32 {
        self.number
    }

    fn id(&self) -> usize {
        self.number.unsigned_abs() as usize
    }

    fn make_current(&self) -> Result<Option<c_int>, Error> {
        let mut before = 0;
        // SAFETY: the result is stored in a local.
        let code = unsafe { (self.hip.calls.get_device)(&raw mut before) };
        self.check("hipGetDevice", code)?;
        if before == self.number {
            return Ok(None);
        }
        // SAFETY: the number is that of a device; HIP checks it.
        let code = unsafe { (self.hip.calls.set_device)(self.number) };
        self.check("hipSetDevice", code)?;
        Ok(Some(before))
    }

    fn put_back(&self, before: c_int) {
        // SAFETY: as above; it was current before.
        let _ = unsafe { (self.hip.calls.set_device)(before) };
    }

    fn relax_captures(&self) -> Result<hipStreamCaptureMode, Error> {
        let mut mode = hipStreamCaptureMode::hipStreamCaptureModeRelaxed;
        // SAFETY: it swaps the mode of this thread with that in the local.
        let code = unsafe { (self.hip.calls.thread_exchange_stream_capture_mode)(&raw mut mode) };
        self.check("hipThreadExchangeStreamCaptureMode", code)?;
        Ok(mode)
    }

    fn put_back_captures(&self, mut before: hipStreamCaptureMode) {
        // SAFETY: it swaps back the mode that it gave out.
        let _ = unsafe { (self.hip.calls.thread_exchange_stream_capture_mode)(&raw mut before) };
    }
}
