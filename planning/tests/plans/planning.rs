//! Tests properties of plans beyond correctness, and the time to make one.

use std::collections::BTreeMap;
use std::time::Duration;

use peerlane_hal::Rank;
use peerlane_planning::plan::{Algorithm, Cell, Lane, Plan, Source, Step, Tier};
use peerlane_planning::schedule::{self, Shape};
use peerlane_planning::topology::Topology;

use crate::support::processor_time::processor_time_of_thread;

const UNEVEN: &[&[u32]] = &[
    &[0, 0, 0, 1, 1, 2],
    &[2, 0, 1, 1, 1, 0, 0],
    &[0, 1, 2, 3],
    &[0, 0, 0, 0, 1, 1, 1, 1],
    &[0, 1, 0, 1, 0, 2, 2, 3, 3, 3, 3],
];

fn tiered(chunks: u32) -> Shape {
    Shape { chunks, tiers: true, ..Shape::default() }
}

/// Returns every put of a lane: the peer, the cell and the source.
fn puts(lane: &Lane) -> impl Iterator<Item = (Rank, Cell, Source)> {
    lane.steps.iter().filter_map(|step| match *step {
        Step::Put { peer, cell, from } => Some((peer, cell, from)),
        _ => None,
    })
}

/// Returns every put of a plan, with the tier of its lane.
fn all_puts(plan: &Plan) -> impl Iterator<Item = (Tier, Rank, Cell)> {
    plan.lanes.iter().flat_map(|lane| puts(lane).map(|(peer, cell, _)| (lane.tier, peer, cell)))
}

#[test]
fn a_block_enters_each_other_node_once() {
    for nodes in UNEVEN {
        let topology = Topology::of_nodes(nodes).unwrap();
        for algorithm in [Algorithm::Hierarchical, Algorithm::HierarchicalRing] {
            let plans = schedule::plans(algorithm, &topology, tiered(2)).unwrap();
            let mut entries = BTreeMap::new();
            for plan in &plans {
                for (tier, peer, cell) in all_puts(plan) {
                    let leaves = topology.node(plan.rank) != topology.node(peer);
                    assert_eq!(leaves, tier == Tier::Network, "{algorithm}: {cell} to {peer}");
                    if leaves {
                        *entries.entry((cell, topology.node(peer))).or_insert(0) += 1;
                    }
                }
            }
            let (ranks, others) = (topology.ranks(), topology.nodes() - 1);
            assert_eq!(entries.len(), ranks * 2 * others, "{algorithm}, nodes {nodes:?}");
            assert!(entries.values().all(|&times| times == 1), "{algorithm}, nodes {nodes:?}");
        }
    }
}

#[test]
fn rails_end_at_equal_local_indices() {
    let topology = Topology::of_nodes(&[0, 0, 0, 1, 1, 2]).unwrap();
    let plan = schedule::plan(Algorithm::Hierarchical, &topology, Rank(2), tiered(1)).unwrap();
    let rails: Vec<Rank> = puts(&plan.lanes[1]).map(|put| put.0).collect();
    assert_eq!(rails, [Rank(3), Rank(5)]);
}

#[test]
fn a_ring_puts_to_the_next_rank_only() {
    for ranks in 1..=9 {
        let topology = Topology::flat(ranks).unwrap();
        for plan in schedule::plans(Algorithm::Ring, &topology, Shape::default()).unwrap() {
            let of = |by: usize| Rank::at((plan.rank.index() + by) % ranks);
            let puts_of_lane: Vec<_> =
                puts(&plan.lanes[0]).map(|(peer, cell, from)| (peer, cell.block, from)).collect();
            let hop = |hop: usize| {
                let from = if hop == 0 { Source::Input } else { Source::Output };
                (of(1), of(ranks - hop), from)
            };
            let self_copy = [(plan.rank, plan.rank, Source::Input)];
            let expected: Vec<_> = self_copy.into_iter().chain((0..ranks - 1).map(hop)).collect();
            assert_eq!(puts_of_lane, expected);
        }
    }
}

#[test]
fn a_get_ring_gets_from_the_previous_rank_only() {
    for ranks in 1..=9 {
        let topology = Topology::flat(ranks).unwrap();
        for plan in schedule::plans(Algorithm::GetRing, &topology, Shape::default()).unwrap() {
            let steps = plan.lanes.iter().flat_map(|lane| &lane.steps);
            let gets = steps.filter_map(|step| match *step {
                Step::Get { peer, cell, from } => Some((peer, cell.block, from)),
                _ => None,
            });
            let before = |by: usize| Rank::at((plan.rank.index() + ranks - by) % ranks);
            let expected = (1..ranks).map(|hop| {
                let from = if hop == 1 { Source::Input } else { Source::Output };
                (before(1), before(hop), from)
            });
            assert_eq!(gets.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
            // The block that has come furthest goes no further.
            assert_eq!(plan.lanes[1].steps.len(), 2 * ranks.saturating_sub(2));
        }
    }
}

#[test]
fn a_ring_leaves_each_node_once() {
    let topology = Topology::of_nodes(&[0, 1, 0, 2, 1, 0]).unwrap();
    let plans = schedule::plans(Algorithm::Ring, &topology, tiered(1)).unwrap();
    let leaves = |plan: &&Plan| {
        all_puts(plan).any(|(_, peer, _)| topology.node(plan.rank) != topology.node(peer))
    };
    let leaving: Vec<Rank> = plans.iter().filter(leaves).map(|plan| plan.rank).collect();
    assert_eq!(leaving, [Rank(3), Rank(4), Rank(5)]);
}

#[test]
fn both_directions_of_a_double_ring_carry_half() {
    for ranks in 2..=9 {
        for chunks in [1, 2, 3, 4] {
            let topology = Topology::flat(ranks).unwrap();
            let shape = Shape { chunks, in_place: true, ..Shape::default() };
            let plans = schedule::plans(Algorithm::DoubleRing, &topology, shape).unwrap();
            for plan in &plans {
                let (forwards, backwards) =
                    (puts(&plan.lanes[0]).count(), puts(&plan.lanes[1]).count());
                assert_eq!(forwards + backwards, (ranks - 1) * chunks as usize);
                // An odd chunk cannot be halved.
                assert!(forwards - backwards <= 1, "{forwards} and {backwards}");
            }
        }
    }
}

#[test]
fn no_two_ranks_put_to_one_peer_at_once() {
    let topology = Topology::of_nodes(&[0, 0, 0, 1, 1, 1, 2, 2, 2]).unwrap();
    for shape in [Shape::default(), tiered(1)] {
        for algorithm in [Algorithm::Direct, Algorithm::Hierarchical] {
            let plans = schedule::plans(algorithm, &topology, shape).unwrap();
            for lane in 0..plans[0].lanes.len() {
                let peers = plans.iter().map(|plan| {
                    puts(&plan.lanes[lane]).map(|put| put.0).filter(|&peer| peer != plan.rank)
                });
                let peers: Vec<Vec<Rank>> = peers.map(Iterator::collect).collect();
                for turn in 0..peers[0].len() {
                    let mut at_once: Vec<Rank> = peers.iter().map(|peers| peers[turn]).collect();
                    at_once.sort_unstable();
                    at_once.dedup();
                    assert_eq!(at_once.len(), plans.len(), "{algorithm}, lane {lane}, {turn}");
                }
            }
        }
    }
}

/// 16,384 ranks on 2048 nodes of 8.
#[test]
fn one_plan_of_many_ranks_is_cheap() {
    let nodes: Vec<u32> = (0..2048).flat_map(|node| [node; 8]).collect();
    let topology = Topology::of_nodes(&nodes).unwrap();
    // A debug build takes several times as long.
    let limit = Duration::from_millis(if cfg!(debug_assertions) { 100 } else { 5 });
    for algorithm in schedule::fitting(&topology, tiered(1)) {
        let mut best = Duration::MAX;
        for rank in [0, 5000, 10_000, 16_383].map(Rank) {
            let start = processor_time_of_thread();
            let plan = schedule::plan(algorithm, &topology, rank, tiered(1)).unwrap();
            best = best.min(processor_time_of_thread() - start);
            let steps: usize = plan.lanes.iter().map(|lane| lane.steps.capacity()).sum();
            let bytes = steps * size_of::<Step>();
            assert!(bytes < 5 << 20, "{algorithm}: {bytes} bytes");
            println!("{algorithm}, rank {rank}: {best:?}, {bytes} bytes");
        }
        assert!(best < limit, "{algorithm}: {best:?}");
    }
}
