//! Whether two devices reach each other, and what to do where they do not.
//!
//! Both ranks of a pair must come to the same answer, because each allocates what the other one
//! imports. So it is not enough that one direction works.

use peerlane_hal::{Deadline, Fabric as _, LinkKind, Rank};

use super::address::Place;
use super::{Fabric, unreachable_peer};
use crate::device::{self, DeviceLink};
use crate::error::Error;
use crate::key::Key;
use crate::memory::Remote;

/// How a peer is reached.
#[derive(Debug)]
pub(super) struct Way {
    pub(super) kind: LinkKind,
    /// The flags at its address.
    pub(super) flags: Option<Remote>,
    /// Why the devices do not reach each other.
    pub(super) apart: Option<String>,
}

/// What the driver says.
#[derive(Debug)]
enum Said {
    Reached(LinkKind),
    Apart(&'static str),
    /// `CUDA_VISIBLE_DEVICES` hides the other device.
    Nothing,
}

impl Fabric {
    pub(super) fn way_to(
        &self,
        peer: Rank,
        place: &Place,
        probe: &Key,
        deadline: Deadline,
    ) -> Result<Way, Error> {
        let import = || self.memory.open_key(peer, probe, deadline);
        let direct = |kind, flags| Ok(Way { kind, flags: Some(flags), apart: None });
        match self.ask_driver(place)? {
            Said::Reached(kind) => {
                direct(kind, import().map_err(|error| refused(peer, place, error))?)
            }
            // The import tells whether there is access, and nothing tells what carries the bytes.
            Said::Nothing => match import() {
                Ok(flags) => direct(LinkKind::Pcie, flags),
                Err(error) if error.is_no_access() => self.around(
                    peer,
                    place,
                    "the driver refuses to map the one's memory on the other",
                ),
                Err(error) => Err(refused(peer, place, error)),
            },
            Said::Apart(why) => {
                // Nothing is imported; a process that is gone shows all the same.
                let lives = self.memory.ask(peer, probe, deadline);
                lives.map_err(|error| refused(peer, place, error))?;
                self.around(peer, place, why)
            }
        }
    }

    /// The way through memory of the host.
    fn around(&self, peer: Rank, place: &Place, why: &str) -> Result<Way, Error> {
        let own = Place::of(&self.context.found);
        let apart = format!(
            "rank {} on {} does not reach rank {peer} on {}: {why}",
            self.rank(),
            own.text(),
            place.text()
        );
        if self.options.strict {
            return Err(Error::unavailable(format!(
                "{apart}; `strict` refuses the way through host memory: use devices that reach \
                 each other, or do without `strict`"
            )));
        }
        Ok(Way { kind: LinkKind::HostStaged, flags: None, apart: Some(apart) })
    }

    fn ask_driver(&self, place: &Place) -> Result<Said, Error> {
        let (driver, own) = (self.context.driver, &self.context.found);
        if place.uuid == own.uuid {
            return Ok(Said::Reached(LinkKind::Own));
        }
        if place.mig || own.mig {
            let why = "instances of a divided GPU (MIG) have no access to other devices";
            return Ok(Said::Apart(why));
        }
        let Some((other, _)) = device::find(driver, &place.uuid)? else {
            return Ok(Said::Nothing);
        };
        let there = device::between(driver, self.context.device, other)?;
        let back = device::between(driver, other, self.context.device)?;
        match there {
            DeviceLink { peer_access: true, kind, .. } if back.peer_access => {
                Ok(Said::Reached(kind))
            }
            _ => Ok(Said::Apart(
                "the driver gives no peer access between them (see nvidia-smi topo -p2p r; it is \
                 off across PCIe roots, under some IOMMUs, and on consumer GPUs)",
            )),
        }
    }
}

fn refused(peer: Rank, place: &Place, error: Error) -> Error {
    match error {
        Error::Freed { .. } => {
            let how = "the process at its address has closed this fabric".to_owned();
            Error::PeerLost { peer, how }
        }
        error => unreachable_peer(peer, place, error),
    }
}
