//! Whether two devices reach each other, and what to do where they do not.
//!
//! Both ranks of a pair must come to the same answer, because each allocates what the other one
//! imports. So it is not enough that one direction works.

use super::address::DeviceId;
use super::device::{PeerDevice, PeerOptions as _, Way};
use super::{Fabric, unreachable_peer};
use crate::device::Fault;
use crate::regions::{Key, Remote};
use peerlane_hal::Deadline;
use peerlane_hal::Rank;
use peerlane_hal::{Fabric as _, LinkKind};

/// How a peer is reached.
#[derive(Debug)]
pub(super) struct Found<D: PeerDevice> {
    pub(super) kind: LinkKind,
    pub(super) bytes_per_second: Option<f64>,
    /// The flags at its address.
    pub(super) flags: Option<Remote<D>>,
    /// Why the devices do not reach each other.
    pub(super) apart: Option<String>,
}

impl<D: PeerDevice> Fabric<D> {
    pub(super) fn way_to(
        &self,
        peer: Rank,
        place: &DeviceId,
        probe: &Key<D::Vendor>,
        deadline: Deadline,
    ) -> Result<Found<D>, D::Error> {
        let import = || self.memory.open_key(peer, probe, deadline);
        let direct = |kind, bytes_per_second, flags| {
            Ok(Found { kind, bytes_per_second, flags: Some(flags), apart: None })
        };
        let way = match place.uuid == self.context.uuid() {
            true => Way::Reached { kind: LinkKind::Own, bytes_per_second: None },
            false => self.context.way_to(place)?,
        };
        match way {
            Way::Reached { kind, bytes_per_second } => {
                let flags = import().map_err(|error| refused::<D>(peer, place, error))?;
                direct(kind, bytes_per_second, flags)
            }
            // The import tells whether there is access, and nothing tells what carries the bytes.
            Way::Hidden => match import() {
                Ok(flags) => direct(LinkKind::Pcie, None, flags),
                Err(error) if D::is_no_access(&error) => Ok(self.around(
                    peer,
                    place,
                    "the driver refuses to map the one's memory on the other",
                )?),
                Err(error) => Err(refused::<D>(peer, place, error)),
            },
            Way::Apart(why) => {
                // Nothing is imported; a process that is gone shows all the same.
                self.memory.ask(peer, probe, deadline).map_err(|fault| closed(peer, fault))?;
                Ok(self.around(peer, place, why)?)
            }
        }
    }

    /// The way through memory of the host.
    fn around(&self, peer: Rank, place: &DeviceId, why: &str) -> Result<Found<D>, Fault> {
        let own = self.context.device_id();
        let apart = format!(
            "rank {} on {} does not reach rank {peer} on {}: {why}",
            self.rank(),
            own.label(),
            place.label()
        );
        if self.options.is_strict() {
            return Err(Fault::Unavailable(format!(
                "{apart}; `strict` refuses the way through host memory: use devices that reach \
                 each other, or do without `strict`"
            )));
        }
        let (kind, bytes_per_second) = (LinkKind::HostStaged, None);
        Ok(Found { kind, bytes_per_second, flags: None, apart: Some(apart) })
    }
}

/// A process that has closed its fabric is gone for this one.
fn closed(peer: Rank, fault: Fault) -> Fault {
    match fault {
        Fault::Freed { .. } => {
            let how = "the process at its address has closed this fabric".to_owned();
            Fault::PeerLost { peer, how }
        }
        fault => fault,
    }
}

fn refused<D: PeerDevice>(peer: Rank, place: &DeviceId, error: D::Error) -> D::Error {
    match D::fault(&error) {
        Some(fault @ Fault::Freed { .. }) => closed(peer, fault.clone()).into(),
        _ => unreachable_peer::<D>(peer, place, error),
    }
}
