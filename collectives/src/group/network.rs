//! Tests whether the NIC can register device memory, and otherwise copies the data through host
//! memory.

use peerlane_hal::{Deadline, DynFabric, ErrorKind, Fabric, PeerMemory, Rank, Region, Role, Space};
use peerlane_staged::Staged;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::group::agreement::{Offer, decode, encode};
use crate::topology::Topology;

const REPORT: usize = 3;
const PROBE_BYTES: u64 = 4096;

pub(super) fn refusal(network: &DynFabric, local: &DynFabric) -> Result<Option<String>, Error> {
    let region = local.memory().allocate(PROBE_BYTES, Role::Data);
    let region = region.map_err(|error| Error::of_fabric("allocate a page of memory", error))?;
    if region.space() == Space::Host {
        return Ok(None);
    }
    // SAFETY: `region` outlives the registration, which no peer imports.
    let registered = unsafe { network.memory().adopt(&region, Role::Data) };
    Ok(registered.err().map(|error| error.to_string()))
}

pub(super) fn staged(
    network: DynFabric,
    local: &DynFabric,
    ranks: usize,
    refused: bool,
    deadline: Deadline,
) -> Result<DynFabric, Error> {
    Ok(DynFabric::new(Staged::open(local, network, ranks, refused, deadline)?))
}

pub(super) fn wrapper(network: &DynFabric) -> Option<&Staged<DynFabric, DynFabric>> {
    network.downcast_ref()
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FabricReport {
    pub(super) backend: String,
    pub(super) refusal: Option<String>,
}

impl FabricReport {
    pub(super) fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    pub(super) fn all(offers: &[Offer]) -> Result<Vec<Self>, Error> {
        let reports = |(peer, offer)| decode("fabric report", offer, peer, REPORT);
        Rank::all(offers.len()).zip(offers).map(reports).collect()
    }
}

pub(super) fn check_backends(topology: &Topology, reports: &[FabricReport]) -> Result<(), Error> {
    for node in 0..topology.nodes() {
        let members = topology.members(Rank::at(node).0);
        let first = members[0];
        let expected = &reports[first.index()].backend;
        let other = members.iter().find(|rank| reports[rank.index()].backend != *expected);
        if let Some(&rank) = other {
            let seen = &reports[rank.index()].backend;
            let text = format!(
                "open: ranks of one node disagree: backend is {seen} on rank {rank}, {expected} on \
                 rank {first}; open the same backend on both"
            );
            return Err(Error::new(ErrorKind::Mismatch, text).with_peer(rank));
        }
    }

    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reports(backends: &[&str]) -> Vec<FabricReport> {
        let reports =
            |backend: &&str| FabricReport { backend: (*backend).to_owned(), refusal: None };
        backends.iter().map(reports).collect()
    }

    #[test]
    fn nodes_may_differ_and_ranks_of_a_node_may_not() {
        let topology: Topology = "2+1".parse().unwrap();
        check_backends(&topology, &reports(&["cuda", "cuda", "host"])).unwrap();
        let error = check_backends(&topology, &reports(&["cuda", "rocm", "host"])).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Mismatch, Some(Rank(1))));
        assert_eq!(
            error.to_string(),
            "open: ranks of one node disagree: backend is rocm on rank 1, cuda on rank 0; open the \
             same backend on both"
        );
    }

    #[test]
    fn what_is_said_survives_the_wire_and_nonsense_is_named() {
        let one = FabricReport { backend: "cuda".into(), refusal: Some("no dma-bufs".into()) };
        let offer = |bytes: Vec<u8>| {
            let empty = Offer::default().blob(Vec::new()).blob(Vec::new()).blob(Vec::new());
            empty.blob(bytes)
        };
        assert_eq!(FabricReport::all(&[offer(one.encode())]).unwrap(), std::slice::from_ref(&one));
        for bytes in [Vec::new(), vec![0xff; 3]] {
            let error = FabricReport::all(&[offer(one.encode()), offer(bytes)]).unwrap_err();
            assert_eq!((error.kind(), error.peer()), (ErrorKind::Mismatch, Some(Rank(1))));
        }
        let error = FabricReport::all(&[Offer::default()]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "rank 0 sent 0 items, expected more than 3; run the same Peerlane on all ranks"
        );
    }
}
