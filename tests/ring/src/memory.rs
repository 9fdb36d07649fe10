//! Registers memory of this rank and imports memory of peers.
//!
//! Data is in the memory of the device. Flags are in host memory that the device can write to, because an engine without queued
//! waits leaves it to the executor to poll them.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use peerlane_hal::{
    Deadline, DmaBuf, DynError, DynRegion, Flush, PeerMemory, Rank, Region, Role, Space,
};
use peerlane_toolkit::RegionBounds;
use peerlane_toolkit::handover::{self, Claim, Entry, Handover};

use crate::model::{Address, Device, PINNED};
use crate::{BACKEND, Error, Key};

/// The [base](Region::base) of a region of the device is this number plus its address on the device, because a `NonNull` cannot be 0.
/// No pointer of the host is that large.
pub const WINDOW: u64 = 1 << 62;

/// The memory of a fabric.
#[derive(Debug)]
pub struct Memory {
    pub(crate) rank: Rank,
    pub(crate) device: Device,
    /// By rank, whether the peer is connected.
    pub(crate) connected: Vec<bool>,
}

#[derive(Debug)]
pub(crate) struct Registration {
    at: Address,
    /// The number that `Region::base` returns as a pointer.
    base: u64,
    bytes: u64,
    owner: Rank,
    role: Role,
    /// Whether the vendor's allocation or pin ends with the registration.
    frees: bool,
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.frees {
            self.at.device.free(self.at.address);
        }
    }
}

impl Handover for Registration {
    fn descriptors(&self) -> Option<u32> {
        None
    }

    fn descriptor(&self, _index: u32) -> Result<OwnedFd, DynError> {
        let text = "memory of this device cannot leave its process".to_owned();
        Err(DynError::new(Error::Unavailable(text)))
    }
}

impl Registration {
    /// Returns the registration that a key names, or `None` if it was dropped.
    pub(crate) fn find(key: &Key) -> Option<Arc<Self>> {
        let Key { generation, rank: owner, role, bytes } = *key;
        let found = handover::find::<Self>(&Claim { backend: BACKEND, generation, owner, role });
        found.filter(|found| found.bytes == bytes)
    }
}

/// A registered region of this rank.
#[derive(Debug)]
pub struct Local {
    registration: Arc<Registration>,
    entry: Entry,
}

/// An imported region of a peer, which keeps the memory as long as its engine may write to it.
#[derive(Debug)]
pub struct Remote(Arc<Registration>);

impl Local {
    fn publish(registration: Registration) -> Self {
        let (owner, role) = (registration.owner, registration.role);
        let registration = Arc::new(registration);
        let entry = handover::enter(BACKEND, owner, role, Arc::clone(&registration) as _);
        Self { registration, entry }
    }

    pub(crate) fn key(&self) -> Key {
        let Registration { owner: rank, role, bytes, .. } = *self.registration;
        Key { generation: self.entry.generation(), rank, role, bytes }
    }
}

/// Implements what an engine asks of both kinds of regions.
macro_rules! region_of_engine {
    ($region:ty, $field:tt) => {
        impl $region {
            /// Returns the address of a byte for the device.
            pub fn address_at(&self, offset: u64) -> Address {
                let Address { device, address } = self.$field.at;
                Address { device, address: address + offset }
            }
        }

        // SAFETY: length and role are those of the registration, which `self` keeps and which has checked the alignment
        // of flags.
        unsafe impl RegionBounds for $region {
            fn bytes(&self) -> u64 {
                self.$field.bytes
            }

            fn role(&self) -> Role {
                self.$field.role
            }
        }
    };
}
region_of_engine!(Local, registration);
region_of_engine!(Remote, 0);

// SAFETY: the registration keeps the memory, or the caller of `register` does.
unsafe impl Region for Local {
    fn base(&self) -> NonNull<u8> {
        let base = std::ptr::with_exposed_provenance_mut(self.registration.base as usize);
        NonNull::new(base).unwrap_or(NonNull::dangling())
    }

    fn bytes(&self) -> u64 {
        self.registration.bytes
    }

    fn space(&self) -> Space {
        if self.registration.at.address < PINNED { Space::Device } else { Space::Host }
    }

    fn flags(&self) -> Option<&[AtomicU64]> {
        let words = (self.registration.bytes / 8) as usize;
        // SAFETY: flags are aligned words of the host (`register`), live as long as the region, and are accessed as atomics only.
        (self.registration.role == Role::Flags)
            .then(|| unsafe { std::slice::from_raw_parts(self.base().as_ptr().cast(), words) })
    }

    fn flag_value(&self, word: u64) -> Option<u64> {
        let word = usize::try_from(word).ok()?;
        Some(self.flags()?.get(word)?.load(Ordering::Acquire))
    }

    fn dma_buf(&self) -> Result<DmaBuf, String> {
        Err("the vendor has no dma-bufs".to_owned())
    }

    fn flush(&self) -> Option<Arc<dyn Flush>> {
        None
    }

    unsafe fn allow_reuse(&self) {}
}

impl Memory {
    fn registration(&self, (address, base): (u64, u64), bytes: u64, role: Role) -> Registration {
        let (at, owner) = (Address { device: self.device, address }, self.rank);
        Registration { at, base, bytes, owner, role, frees: true }
    }
}

// SAFETY: allocations are new, and a key is compared with the registration that it names.
unsafe impl PeerMemory for Memory {
    type Error = Error;
    type Key = Key;
    type Local = Local;
    type Remote = Remote;

    fn allocate(&self, bytes: u64, role: Role) -> Result<Local, Error> {
        let place = match role {
            Role::Data => self.device.allocate(bytes).map(|address| (address, WINDOW + address)),
            Role::Flags => self
                .device
                .allocate_host(bytes)
                .map(|(address, base)| (address, base.as_ptr().expose_provenance() as u64)),
        };
        let what = format!("cannot allocate {bytes} bytes on device {}", self.device.number());
        let registration = self.registration(place.map_err(Error::io(what))?, bytes, role);
        // The vendor's memory holds what its previous owner wrote.
        let (Address { device, address }, zeros) = (registration.at, [0; 4096]);
        for offset in (0..bytes).step_by(zeros.len()) {
            let rest = (bytes - offset).min(zeros.len() as u64) as usize;
            let written = device.write(address + offset, &zeros[..rest]);
            written.map_err(Error::io("cannot clear new memory"))?;
        }
        Ok(Local::publish(registration))
    }

    fn allocate_polled_flags(&self, bytes: u64) -> Result<Local, Error> {
        self.allocate(bytes, Role::Flags)
    }

    unsafe fn register(&self, base: NonNull<u8>, bytes: u64, role: Role) -> Result<Local, Error> {
        let number = base.as_ptr().expose_provenance() as u64;
        if role == Role::Flags && (number >= WINDOW || !number.is_multiple_of(8)) {
            let text = format!(
                "flags begin at {base:p}, expected a multiple of 8 bytes in host memory, where the executor polls them"
            );
            return Err(Error::Argument(text));
        }
        let Some(address) = number.checked_sub(WINDOW) else {
            // SAFETY: the caller keeps the memory until the region and all imports have been dropped.
            let address = unsafe { self.device.pin(base.as_ptr(), bytes) };
            return Ok(Local::publish(self.registration((address, number), bytes, role)));
        };
        if !self.device.contains(address, bytes) {
            let device = self.device.number();
            let text = format!("device {device} has not allocated {bytes} bytes at {address:#x}");
            return Err(Error::Argument(text));
        }
        let mut registration = self.registration((address, number), bytes, role);
        registration.frees = false;
        Ok(Local::publish(registration))
    }

    unsafe fn adopt(&self, region: &DynRegion, role: Role) -> Result<Local, Error> {
        // The same address is valid on every device, so the type of the region must tell the device.
        let own = region.downcast::<Local>();
        let is_own = own.is_some_and(|own| own.registration.at.device == self.device);
        if region.space() == Space::Device && !is_own {
            let number = self.device.number();
            let text = format!("cannot adopt {region:?}: it is not memory of device {number}");
            return Err(Error::Argument(text));
        }
        // SAFETY: the caller's.
        unsafe { self.register(region.base(), region.bytes(), role) }
    }

    fn export(&self, local: &Local) -> Result<Key, Error> {
        Ok(local.key())
    }

    fn import(&self, peer: Rank, key: &Key, _deadline: Deadline) -> Result<Remote, Error> {
        if self.connected.get(peer.index()) != Some(&true) {
            return Err(Error::NotConnected { peer });
        }
        if key.rank != peer {
            let (expected, found) = (format!("a key of rank {peer}"), format!("rank {}", key.rank));
            return Err(Error::ForeignKey { expected, found });
        }
        Registration::find(key)
            .map(Remote)
            .ok_or(Error::Freed { peer, generation: key.generation.0 })
    }
}
