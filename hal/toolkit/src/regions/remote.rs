//! Imported memory of a peer.

use std::sync::Arc;

use super::device::RegionDevice;
use super::import::Import;
use super::registration::Registration;
use crate::device::DevicePtr;
use peerlane_hal::Rank;
use peerlane_hal::Role;

/// Imported memory of a peer.
#[derive(Debug)]
pub struct Remote<D: RegionDevice> {
    pub(super) peer: Rank,
    pub(super) role: Role,
    pub(super) address: DevicePtr,
    pub(super) bytes: u64,
    /// Where this process finds it, if it is host memory.
    pub(super) host: Option<u64>,
    pub(super) _hold: Hold<D>,
}

/// What keeps imported memory where it is.
#[derive(Debug)]
pub(super) enum Hold<D: RegionDevice> {
    SameProcess { _registration: Arc<Registration<D>> },
    OtherProcess { _import: Import },
    Nothing,
}

impl<D: RegionDevice> Remote<D> {
    /// The first byte, as this rank's device reaches it.
    pub fn device_ptr(&self) -> DevicePtr {
        self.address
    }

    /// Whether it is host memory.
    pub fn is_on_host(&self) -> bool {
        self.host.is_some()
    }

    /// The length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What it was registered as.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Whose memory it is.
    pub fn peer(&self) -> Rank {
        self.peer
    }
}
