//! What a report says of lanes, tiers and bytes.

use insta::assert_snapshot;
use peerlane_collectives::plan::{Algorithm, Tier};
use peerlane_collectives::topology::Topology;

use crate::support::{WAITS, in_tiers};

#[test]
fn lanes_and_bytes_of_both_tiers_are_named() {
    let topology: Topology = "2x2".parse().unwrap();
    let reports = in_tiers(&topology, WAITS[1], |group| {
        let builder = group.all_gather::<u8>(100).algorithm(Algorithm::Hierarchical).chunks(2);
        let report = builder.prepare()?.report().clone();
        assert_eq!(report.fallbacks, []);
        assert_eq!(report.lanes.len(), 2);
        // The own shard to the node's other rank, and what comes from the other node.
        let bytes = report.tiers.iter().map(|tier| (tier.tier, tier.put_bytes, tier.own_bytes));
        let wanted = [(Tier::Local, 200, 100), (Tier::Network, 100, 0)];
        assert!(bytes.eq(wanted), "{:?}", report.tiers);
        Ok(report.to_string())
    });
    assert_snapshot!(reports[0], @"hierarchical, 4 ranks, 100 bytes a shard in 2 chunk(s), 400 bytes in all, 2 output(s) in turn, flags prompt; lane 0 on host by processor, waits queued; lane 1 on host (network) by processor, waits polled; local: 200 bytes put, 0 got; network: 100 bytes put, 0 got");
}

/// One node needs no network, and a rank alone on its node no local copies to others.
#[test]
fn nothing_is_said_of_lanes_that_are_not_there() {
    in_tiers(&Topology::flat(2).unwrap(), WAITS[0], |group| {
        let report = group.all_gather::<u8>(8).prepare()?.report().clone();
        assert_eq!((report.lanes.len(), report.tiers.len()), (1, 1));
        Ok(())
    });
    in_tiers(&Topology::even(2, 1).unwrap(), WAITS[0], |group| {
        let report = group.all_gather::<u8>(8).prepare()?.report().clone();
        let put: Vec<u64> = report.tiers.iter().map(|tier| tier.put_bytes).collect();
        assert_eq!(put, [0, 8]);
        Ok(())
    });
}
