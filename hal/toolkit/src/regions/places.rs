//! Regions as engines see them.

use super::device::RegionDevice;
use super::{Local, Remote};
use crate::device::DevicePtr;
use crate::places::{PeerPlace, Place};
use peerlane_hal::Rank;
use peerlane_hal::{Region, Role};

impl<D: RegionDevice> Place for Local<D> {
    fn address(&self) -> DevicePtr {
        self.device_ptr()
    }

    fn bytes(&self) -> u64 {
        Region::bytes(self)
    }

    fn role(&self) -> Role {
        Self::role(self)
    }

    fn host_address(&self) -> Option<u64> {
        self.registration.host().map(|host| host.base.as_ptr() as u64)
    }
}

impl<D: RegionDevice> Place for Remote<D> {
    fn address(&self) -> DevicePtr {
        self.device_ptr()
    }

    fn bytes(&self) -> u64 {
        Self::bytes(self)
    }

    fn role(&self) -> Role {
        Self::role(self)
    }

    fn host_address(&self) -> Option<u64> {
        self.host
    }
}

impl<D: RegionDevice> PeerPlace for Remote<D> {
    fn peer(&self) -> Rank {
        Self::peer(self)
    }
}
