//! The context of one device: what every call of the driver needs to be current.
//!
//! It is the primary context, which the CUDA runtime, PyTorch and cudarc use too, so that their
//! pointers and streams are valid here. It is made current for each call and what was current before
//! is put back: a caller's thread keeps its own.

use std::ffi::c_int;
use std::sync::Arc;

use peerlane_toolkit::device::DeviceContext;

use crate::device::{Device, visible};
use crate::error::Error;
use crate::sys::{self, CUcontext, CUdevice, CUresult, Driver};

/// The retained primary context of a device; released when dropped.
#[derive(Debug)]
pub struct Context {
    pub(crate) driver: &'static Driver,
    pub(crate) device: CUdevice,
    /// As it was found when the context was opened.
    pub(crate) found: Device,
    pub(crate) copy_engines: u32,
    raw: CUcontext,
    label: Arc<str>,
}

// SAFETY: a context may be made current on several threads at once (cuCtxSetCurrent); the handle
// itself is never dereferenced here.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of the device that this process knows by `ordinal`.
    pub(crate) fn open(ordinal: u32) -> Result<Arc<Self>, Error> {
        let driver = Driver::load()?;
        let (device, found) = visible::open(driver, ordinal)?;
        let label = found.label();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the device is one that the driver gave out; the result is stored in a local.
        let code = unsafe { (driver.primary_ctx_retain)(&raw mut raw, device) };
        if code != sys::CUDA_SUCCESS {
            return Err(Error::driver(driver, "cuDevicePrimaryCtxRetain", Some(&label), code));
        }
        let copy_engines = found.copy_engines;
        Ok(Arc::new(Self { driver, device, found, copy_engines, raw, label }))
    }

    /// The context's handle, to compare with that of a stream.
    pub(crate) fn raw(&self) -> CUcontext {
        self.raw
    }

    /// The device in texts, such as `device 2 (NVIDIA H200)`.
    pub(crate) fn label(&self) -> &Arc<str> {
        &self.label
    }

    /// A result of the driver as an error that names the call and the device.
    pub(crate) fn check(&self, call: &'static str, code: CUresult) -> Result<(), Error> {
        if code == sys::CUDA_SUCCESS { Ok(()) } else { Err(self.refused(call, code)) }
    }

    #[cold]
    fn refused(&self, call: &'static str, code: CUresult) -> Error {
        Error::driver(self.driver, call, Some(&self.label), code)
    }

    /// An entry point that older drivers lack.
    pub(crate) fn need<F: Copy>(&self, symbol: &'static str, found: Option<F>) -> Result<F, Error> {
        found.ok_or_else(|| Error::no_symbol(sys::LIBRARY, symbol))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`. A failure means that the context is gone already.
        let _ = unsafe { (self.driver.primary_ctx_release)(self.device) };
    }
}

/// What was current on a thread; a handle that is put back and never followed.
#[derive(Clone, Copy, Debug)]
pub struct Current(CUcontext);

impl DeviceContext for Context {
    type Error = Error;
    type Library = &'static Driver;
    type Current = Current;
    type CaptureMode = c_int;

    fn library(&self) -> &'static Driver {
        self.driver
    }

    fn label(&self) -> &Arc<str> {
        &self.label
    }

    fn device(&self) -> i32 {
        self.device
    }

    fn id(&self) -> usize {
        self.raw as usize
    }

    fn make_current(&self) -> Result<Option<Current>, Error> {
        let mut before = std::ptr::null_mut();
        // SAFETY: the result is stored in a local.
        let code = unsafe { (self.driver.ctx_get_current)(&raw mut before) };
        self.check("cuCtxGetCurrent", code)?;
        if before == self.raw {
            return Ok(None);
        }
        // SAFETY: the context is retained as long as `self` lives.
        let code = unsafe { (self.driver.ctx_set_current)(self.raw) };
        self.check("cuCtxSetCurrent", code)?;
        Ok(Some(Current(before)))
    }

    fn put_back(&self, Current(before): Current) {
        // SAFETY: it was current before. A failure means that its owner has destroyed it since;
        // there is then nothing to put back.
        let _ = unsafe { (self.driver.ctx_set_current)(before) };
    }

    fn relax_captures(&self) -> Result<c_int, Error> {
        let mut mode = sys::STREAM_CAPTURE_MODE_RELAXED;
        if let Some(exchange) = self.driver.thread_exchange_stream_capture_mode {
            // SAFETY: it swaps the mode of this thread with that in the local.
            let code = unsafe { exchange(&raw mut mode) };
            self.check("cuThreadExchangeStreamCaptureMode", code)?;
        }
        Ok(mode)
    }

    fn put_back_captures(&self, mut before: c_int) {
        if let Some(exchange) = self.driver.thread_exchange_stream_capture_mode {
            // SAFETY: it swaps back the mode that it gave out.
            let _ = unsafe { exchange(&raw mut before) };
        }
    }
}
