//! Estimates the bandwidths of the links between ranks if the caller has not supplied measured
//! ones.
//!
//! Every rank reports its own links, and the slowest of each tier counts, so all ranks choose by
//! the same figures.

use peerlane_hal::{DynFabric, ErrorKind, Fabric, Link as FabricLink, LinkKind, Rank};

use crate::cost::{Link, Links};
use crate::error::Error;
use crate::group::agreement::{self, Offer, decode};
use crate::topology::Topology;

pub(super) fn of_fabrics(
    local: &DynFabric,
    network: Option<&DynFabric>,
    topology: &Topology,
) -> Links {
    let me = local.rank();
    let node = topology.node(me);
    let others = || Rank::all(topology.ranks()).filter(|&rank| rank != me);
    let near = |&rank: &Rank| network.is_none() || topology.node(rank) == node;
    let here = slowest(local, others().filter(near)).unwrap_or(FabricLink {
        peer: me,
        kind: LinkKind::Local,
        bytes_per_second: None,
    });
    let away = network.and_then(|network| slowest(network, others().filter(|rank| !near(rank))));
    let mut links = Links::of_kinds(here.kind, away.map_or(LinkKind::Rdma, |link| link.kind));
    limit(&mut links.local, here.bytes_per_second);
    limit(&mut links.network, away.and_then(|link| link.bytes_per_second));
    links
}

fn slowest(fabric: &DynFabric, ranks: impl Iterator<Item = Rank>) -> Option<FabricLink> {
    let rate = |link: &FabricLink| {
        link.bytes_per_second.unwrap_or_else(|| Link::of_kind(link.kind).bytes_per_second)
    };
    ranks
        .filter_map(|rank| fabric.link(rank))
        .min_by(|one, other| rate(one).total_cmp(&rate(other)))
}

pub(super) fn limit(link: &mut Link, known: Option<f64>) {
    let Some(known) = known.filter(|rate| rate.is_finite() && *rate > 0.0) else { return };
    link.bytes_per_second = known;
    link.engine_bytes_per_second = known;
    link.send_bytes_per_second = known;
    link.receive_bytes_per_second = known;
}

pub(super) fn encode(links: &Links) -> Vec<u8> {
    agreement::encode(links)
}

pub(super) fn of_all(offers: &[Offer], index: usize) -> Result<Links, Error> {
    let mut slowest: Option<Links> = None;
    for (peer, offer) in Rank::all(offers.len()).zip(offers) {
        let links: Links = decode("links", offer, peer, index)?;
        links.check().map_err(|error| {
            let text = format!("invalid links of rank {peer}: {error}");
            Error::new(ErrorKind::Mismatch, text).with_peer(peer)
        })?;
        let Some(slowest) = &mut slowest else {
            slowest = Some(links);
            continue;
        };
        if links.local.bytes_per_second < slowest.local.bytes_per_second {
            (slowest.own, slowest.local) = (links.own, links.local);
            slowest.start_seconds = links.start_seconds;
            slowest.lane_seconds = links.lane_seconds;
        }
        if links.network.bytes_per_second < slowest.network.bytes_per_second {
            slowest.network = links.network;
        }
    }

    slowest.ok_or_else(|| Error::new(ErrorKind::Mismatch, "no rank reported its links"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agreed(all: &[Links]) -> Result<Links, Error> {
        let offers: Vec<_> = all.iter().map(|links| Offer::default().blob(encode(links))).collect();
        of_all(&offers, 0)
    }

    #[test]
    fn of_each_tier_the_slowest_counts() {
        let fast = Links::of_kinds(LinkKind::NvLink, LinkKind::Pcie);
        let slow = Links::of_kinds(LinkKind::HostStaged, LinkKind::Rdma);
        for order in [[fast.clone(), slow.clone()], [slow.clone(), fast.clone()]] {
            let agreed = agreed(&order).unwrap();
            assert_eq!(agreed.local, slow.local);
            assert_eq!(agreed.network, slow.network);
        }
        assert_eq!(agreed(&[fast.clone(), fast.clone()]).unwrap(), fast);
    }

    #[test]
    fn impossible_links_of_a_peer_are_named() {
        let good = Links::default();
        let mut bad = good.clone();
        bad.network.bytes_per_second = -1.0;
        let error = agreed(&[good, bad]).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Mismatch, Some(Rank(1))));
        assert!(error.to_string().starts_with("invalid links of rank 1: network.bytes_per_second"));
    }
}
