//! Defines local and imported regions of a device, and how NICs access their memory.

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::WORD_BYTES;
use super::registration::Registration;
use super::transfer::Transfer;
use crate::Fault;
use crate::device::{DevicePtr, RegionDevice};
use crate::handover::Entry;
use crate::{EngineRegion, RegionBounds};
use peerlane_hal::{DmaBuf, Flush, Region, Role, Space};

/// The time limit for reading one flag for diagnosis, because a rank that reports what it waits for must answer
/// within 250 ms.
const FLAG_READ_TIMEOUT: Duration = Duration::from_millis(150);

/// A registered region of this rank, in device memory or pinned host memory.
#[derive(Debug)]
pub struct Local<D: RegionDevice> {
    pub(super) registration: Arc<Registration<D>>,
    pub(super) transfer: Arc<Transfer<D>>,
    pub(super) nic_access: Arc<NicAccess<D>>,
    pub(super) entry: Entry,
}

impl<D: RegionDevice> Local<D> {
    /// Returns whether the region is pinned host memory instead of device memory.
    pub fn is_on_host(&self) -> bool {
        self.registration.host().is_some()
    }

    /// Returns the device address of the first byte, as the calls of the driver take it.
    pub fn device_ptr(&self) -> DevicePtr {
        self.registration.address
    }

    /// Returns the role with which the memory was registered.
    pub fn role(&self) -> Role {
        self.registration.role
    }

    /// Copies bytes from the host to the region, without order against engines and streams. The copy is
    /// complete when this returns. It is slow, for tests and tools.
    ///
    /// # Errors
    /// Returns an error of kind [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if the span
    /// leaves the region, [`Timeout`](peerlane_hal::ErrorKind::Timeout) if the device makes no progress, and
    /// the driver's error.
    ///
    /// # Safety
    /// Nobody else accesses these bytes meanwhile: no engine, no peer, no stream and no reference of the host.
    pub unsafe fn upload(&self, offset: u64, bytes: &[u8]) -> Result<(), D::Error> {
        let address = self.span(offset, bytes.len())?;
        match self.registration.host() {
            // SAFETY: `span` has checked that the bytes are in the region; the caller keeps others away.
            Some(host) => unsafe { host.write(offset, bytes) },
            None => self.transfer.upload(address, bytes)?,
        }
        Ok(())
    }

    /// Copies bytes from the region to the host, without order against engines and streams.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    ///
    /// # Safety
    /// Nobody writes these bytes meanwhile.
    pub unsafe fn download(&self, offset: u64, bytes: &mut [u8]) -> Result<(), D::Error> {
        let address = self.span(offset, bytes.len())?;
        match self.registration.host() {
            // SAFETY: `span` has checked that the bytes are in the region; the caller keeps writers away.
            Some(host) => unsafe { host.read(offset, bytes) },
            None => self.transfer.download(address, bytes)?,
        }
        Ok(())
    }

    /// Copies adjacent flags from the device, whose words are in the byte order of the host. Returns `None` if they leave the region
    /// or the device does not answer in time.
    fn download_flags(&self, first: u64, values: &mut [[u8; 8]]) -> Option<()> {
        let bytes = values.as_flattened_mut();
        let address = self.span(first.checked_mul(WORD_BYTES)?, bytes.len()).ok()?;
        self.transfer.download_within(address, bytes, FLAG_READ_TIMEOUT).ok()
    }

    fn span(&self, offset: u64, length: usize) -> Result<DevicePtr, Fault> {
        let all = self.registration.bytes;
        if offset.checked_add(length as u64).is_none_or(|end| end > all) {
            return Err(Fault::Argument(format!(
                "access out of range: {length} bytes from offset {offset}, but the region has \
                 {all} bytes"
            )));
        }
        Ok(self.device_ptr() + offset)
    }
}

// SAFETY: the region keeps its memory allocated until it is dropped.
unsafe impl<D: RegionDevice> Region for Local<D> {
    fn base(&self) -> NonNull<u8> {
        NonNull::new(self.device_ptr() as *mut u8).expect("the driver allocates nothing at 0")
    }

    fn bytes(&self) -> u64 {
        self.registration.bytes
    }

    /// Returns `Space::Host` only if host and device use the same address, so that the base is valid for
    /// both.
    fn space(&self) -> Space {
        match self.registration.host() {
            Some(host) if host.is_unified() => Space::Host,
            _ => Space::Device,
        }
    }

    fn dma_buf(&self) -> Result<DmaBuf, String> {
        if self.is_on_host() {
            return Err(
                "the region is host memory, which has no dma-buf; register it by its address"
                    .to_owned(),
            );
        }
        self.nic_access.dma_buf(self.device_ptr(), self.registration.bytes)
    }

    fn flush(&self) -> Option<Arc<dyn Flush>> {
        self.nic_access.flush().filter(|_| !self.is_on_host())
    }

    unsafe fn allow_reuse(&self) {
        // SAFETY: the caller guarantees that no peer writes to the region any more.
        unsafe { self.registration.allow_reuse() };
    }

    fn flags(&self) -> Option<&[AtomicU64]> {
        self.registration.words()
    }

    fn flag_value(&self, word: u64) -> Option<u64> {
        if self.role() != Role::Flags {
            return None;
        }
        if let Some(flags) = self.flags() {
            return Some(flags.get(usize::try_from(word).ok()?)?.load(Ordering::Acquire));
        }
        let mut value = [[0; 8]];
        self.download_flags(word, &mut value)?;
        Some(u64::from_ne_bytes(value[0]))
    }

    fn flag_values(&self, first: u64, values: &mut [[u8; 8]]) -> bool {
        let Some(flags) = self.flags() else {
            return self.role() == Role::Flags && self.download_flags(first, values).is_some();
        };
        let words = usize::try_from(first).ok().and_then(|first| flags.get(first..));
        let Some(words) = words.and_then(|words| words.get(..values.len())) else { return false };
        for (value, word) in values.iter_mut().zip(words) {
            *value = word.load(Ordering::Acquire).to_ne_bytes();
        }
        true
    }
}

// SAFETY: length and role are those of the registration, which `self` keeps. `Memory::register` refuses flags that are not
// aligned.
unsafe impl<D: RegionDevice> RegionBounds for Local<D> {
    fn bytes(&self) -> u64 {
        Region::bytes(self)
    }

    fn role(&self) -> Role {
        Self::role(self)
    }
}

// SAFETY: both addresses are those of the registration, which keeps its memory allocated and, on the host, mapped.
unsafe impl<D: RegionDevice> EngineRegion for Local<D> {
    fn address(&self) -> DevicePtr {
        self.device_ptr()
    }

    fn host_address(&self) -> Option<u64> {
        self.registration.host().map(|host| host.base.as_ptr() as u64)
    }
}

/// Exports device memory to NICs as dma-bufs, and flushes the writes of NICs. All regions of a fabric share it.
#[derive(Debug)]
pub(super) struct NicAccess<D: RegionDevice> {
    context: Arc<D>,
    flushing: OnceLock<NicFlush>,
}

#[derive(Clone, Debug)]
enum NicFlush {
    NotNeeded,
    Needed(Arc<dyn Flush>),
    /// The driver does not report whether a flush is needed, so the memory must not receive data from NICs.
    Unknown(Arc<Unknown>),
}

impl<D: RegionDevice> NicAccess<D> {
    pub(super) fn new(context: &Arc<D>) -> Self {
        Self { context: Arc::clone(context), flushing: OnceLock::new() }
    }

    pub(super) fn dma_buf(&self, address: DevicePtr, bytes: u64) -> Result<DmaBuf, String> {
        if let NicFlush::Unknown(unknown) = self.flushing() {
            return Err(unknown.0.clone());
        }
        let _current = self.context.enter_relaxed().map_err(|error| error.to_string())?;
        self.context.dma_buf(address, bytes).map_err(|error| error.to_string())
    }

    pub(super) fn flush(&self) -> Option<Arc<dyn Flush>> {
        match self.flushing() {
            NicFlush::NotNeeded => None,
            NicFlush::Needed(flush) => Some(flush),
            NicFlush::Unknown(unknown) => Some(unknown),
        }
    }

    fn flushing(&self) -> NicFlush {
        let ask = || match D::nic_flush(&self.context) {
            Ok(None) => NicFlush::NotNeeded,
            Ok(Some(flush)) => NicFlush::Needed(flush),
            Err(error) => NicFlush::Unknown(Arc::new(Unknown(error.to_string()))),
        };
        self.flushing.get_or_init(ask).clone()
    }
}

/// A flush that always fails, with the reason why NIC writes cannot be made visible.
struct Unknown(String);

impl fmt::Debug for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Flush for Unknown {
    fn flush(&self) -> Result<(), String> {
        Err(self.0.clone())
    }
}
