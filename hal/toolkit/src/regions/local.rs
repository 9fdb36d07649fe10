//! Registered memory of this rank.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::WORD_BYTES;
use super::cards::Cards;
use super::device::RegionDevice;
use super::registration::Registration;
use super::transfer::Transfer;
use crate::device::{DevicePtr, Fault};
use crate::handover::Entry;
use peerlane_hal::{DmaBuf, Flush};
use peerlane_hal::{Region, Role, Space};

/// How long a look at one flag may take.
const LOOK: Duration = Duration::from_secs(1);

/// Registered memory of this rank.
#[derive(Debug)]
pub struct Local<D: RegionDevice> {
    pub(super) registration: Arc<Registration<D>>,
    pub(super) transfer: Arc<Transfer<D>>,
    pub(super) cards: Arc<Cards<D>>,
    /// Taken out of the process's registrations when this is dropped.
    pub(super) entry: Entry,
}

impl<D: RegionDevice> Local<D> {
    /// Whether it is host memory.
    pub fn is_on_host(&self) -> bool {
        self.registration.host().is_some()
    }

    /// The first byte, as the driver's and the runtime's calls take it.
    pub fn device_ptr(&self) -> DevicePtr {
        self.registration.address
    }

    /// What it was registered as.
    pub fn role(&self) -> Role {
        self.registration.role
    }

    /// Copies to the region, beside all engines and streams; complete when it returns. For tests and
    /// tools: it orders nothing, and is slow.
    ///
    /// # Errors
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument): the span leaves the region.
    /// [`Timeout`](peerlane_hal::ErrorKind::Timeout): the device is stuck. The driver's refusal.
    pub fn upload(&self, offset: u64, bytes: &[u8]) -> Result<(), D::Error> {
        let address = self.span(offset, bytes.len())?;
        match self.registration.host() {
            Some(host) => host.write(offset, bytes),
            None => self.transfer.upload(address, bytes)?,
        }
        Ok(())
    }

    /// Copies from the region, in the same way.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    pub fn download(&self, offset: u64, bytes: &mut [u8]) -> Result<(), D::Error> {
        let address = self.span(offset, bytes.len())?;
        match self.registration.host() {
            Some(host) => host.read(offset, bytes),
            None => self.transfer.download(address, bytes)?,
        }
        Ok(())
    }

    fn span(&self, offset: u64, length: usize) -> Result<DevicePtr, Fault> {
        let all = self.registration.bytes;
        if offset.checked_add(length as u64).is_none_or(|end| end > all) {
            return Err(Fault::Argument(format!(
                "{length} bytes from offset {offset} on leave the region of {all} bytes"
            )));
        }
        Ok(self.device_ptr() + offset)
    }
}

impl<D: RegionDevice> Region for Local<D> {
    fn base(&self) -> NonNull<u8> {
        NonNull::new(self.device_ptr() as *mut u8).expect("the driver allocates nothing at 0")
    }

    fn bytes(&self) -> u64 {
        self.registration.bytes
    }

    /// The host, where it reaches the memory at the address that the device has for it: whoever
    /// has the base may take it for either.
    fn space(&self) -> Space {
        match self.registration.host() {
            Some(host) if host.is_unified() => Space::Host,
            _ => Space::Device,
        }
    }

    fn dma_buf(&self) -> Result<DmaBuf, String> {
        if self.is_on_host() {
            return Err("it is memory of the host, which its address names".to_owned());
        }
        self.cards.dma_buf(self.device_ptr(), self.registration.bytes)
    }

    fn flush(&self) -> Option<Arc<dyn Flush>> {
        self.cards.flush().filter(|_| !self.is_on_host())
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
        let mut value = [0; 8];
        let address = self.span(word.checked_mul(WORD_BYTES)?, value.len()).ok()?;
        self.transfer.download_within(address, &mut value, LOOK).ok()?;
        Some(u64::from_le_bytes(value))
    }
}
