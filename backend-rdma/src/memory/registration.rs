//! A registration of memory with all NICs of a rank.

use std::ptr::NonNull;
use std::sync::Arc;

use peerlane_hal::{DynRegion, Generation, Rank, Region as _, Role};
use peerlane_toolkit::handover::{self, Handover};
use peerlane_toolkit::mapping::Mapping;
use rustix::fd::OwnedFd;

use crate::error::Error;
use crate::fabric::Card;
use crate::key::{CardKeys, Key};
use crate::sys::Mr;

/// A registration with all NICs of a rank. Aliases in this process share it.
#[derive(Debug)]
pub(crate) struct Registration {
    /// One memory region per NIC, dropped before the memory is freed. Empty for a region without bytes, which NICs refuse.
    mrs: Vec<Mr>,
    cards: u16,
    _mapping: Option<Mapping>,
    /// The device memory, if the region is device memory.
    device: Option<DynRegion>,
    pub(crate) base: NonNull<u8>,
    pub(crate) bytes: u64,
    pub(crate) owner: Rank,
    pub(crate) role: Role,
}

// SAFETY: a registration only names memory; who may touch which byte when is the contract of the
// ops and of `register`.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// Registers memory with all NICs.
    ///
    /// # Safety
    /// The memory must stay allocated as long as the registration, which keeps the mapping if there is one.
    pub(super) unsafe fn new(
        cards: &[Card],
        base: NonNull<u8>,
        bytes: u64,
        owner: Rank,
        role: Role,
        mapping: Option<Mapping>,
    ) -> Result<Self, Error> {
        let length = usize::try_from(bytes)
            .ok()
            .filter(|length| (base.as_ptr() as usize).checked_add(*length).is_some())
            .ok_or_else(|| {
                Error::argument(format!("a region of {bytes} bytes at {base:p} has no end"))
            })?;
        let with = if length == 0 { &[] } else { cards };
        // SAFETY: the caller's.
        let mrs = with.iter().map(|card| unsafe { card.domain.register(base, length) });
        let mrs = mrs.collect::<Result<_, _>>()?;
        let cards = cards.len() as u16;
        Ok(Self { mrs, cards, _mapping: mapping, device: None, base, bytes, owner, role })
    }

    /// Creates the registration of device memory, with one memory region per NIC, or none for a region without bytes.
    pub(super) fn of_device(mrs: Vec<Mr>, cards: usize, region: DynRegion, owner: Rank) -> Self {
        let (base, bytes) = (region.base(), region.bytes());
        let (cards, device, role) = (cards as u16, Some(region), Role::Data);
        Self { mrs, cards, _mapping: None, device, base, bytes, owner, role }
    }

    /// Returns whether only a device can load and store the memory.
    pub(crate) fn is_of_device(&self) -> bool {
        self.device.is_some()
    }

    /// Returns the device memory that is registered, if it is such memory.
    pub(super) fn device(&self) -> Option<&DynRegion> {
        self.device.as_ref()
    }

    /// Returns the local key for each NIC.
    pub(crate) fn local_keys(&self) -> CardKeys {
        self.keys(Mr::local_key)
    }

    fn keys(&self, key: impl Fn(&Mr) -> u32) -> CardKeys {
        let mut keys = CardKeys::default();
        keys.iter_mut().zip(&self.mrs).for_each(|(place, mr)| *place = key(mr));
        keys
    }

    pub(super) fn key(&self, generation: Generation) -> Key {
        Key {
            generation,
            rank: self.owner,
            role: self.role,
            address: self.base.as_ptr() as u64,
            bytes: self.bytes,
            cards: self.cards,
            remote_keys: self.keys(Mr::remote_key),
        }
    }
}

/// Returns the registration of this process that a key names, if it exists and the key is valid.
pub(crate) fn find(key: &Key) -> Option<Arc<Registration>> {
    let found = handover::find::<Registration>(&super::claim(key))?;
    (found.key(key.generation) == *key).then_some(found)
}

impl Handover for Registration {
    /// Returns no descriptors, because the NIC accesses the memory.
    fn descriptors(&self) -> Option<u32> {
        None
    }

    fn descriptor(&self, _index: u32) -> Result<OwnedFd, String> {
        Err("memory registered for RDMA is reached by the card".to_owned())
    }
}
