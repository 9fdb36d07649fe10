//! Tests the verifier with faults that no plan can have.

use insta::assert_snapshot;
use peerlane_hal::Rank;

use super::*;
use crate::collective::Collective;
use crate::plan::{Algorithm, Cell, FlagOrder, Lane, Source, Step};
use crate::schedule::{self, Shape};
use crate::topology::Topology;
use crate::verify::plan_set::ClosedLane;

fn fault(change: impl FnOnce(&mut [ClosedLane])) -> Option<String> {
    let rank = Rank(0);
    let cell = Cell { block: rank, chunk: 0 };
    let copy = Step::Put { peer: rank, cell, from: Source::Input };
    let lanes = vec![Lane::default(), Lane { steps: vec![copy], ..Lane::default() }];
    let plan = Plan {
        collective: Collective::AllGather,
        algorithm: Algorithm::Direct,
        rank,
        ranks: 1,
        chunks: 1,
        in_place: false,
        outputs: 1,
        flags: FlagOrder::Prompt,
        lanes,
    };
    let mut set = PlanSet::new(&[plan], Symmetry::none(1));
    change(&mut set.lanes);
    follow(&set).err().map(|fault| fault.to_string())
}

#[test]
fn a_closed_lane_is_right() {
    assert_eq!(fault(|_| {}), None);
}

#[test]
fn a_lane_that_ends_before_its_puts_is_a_fault() {
    let early = fault(|lanes| lanes[1].steps.swap(1, 2)).unwrap();
    assert_snapshot!(early, @"rank 0: start 1 may end while lane 1 still reads its sources");
}

#[test]
fn a_lane_that_begins_before_the_caller_is_a_fault() {
    let early = fault(|lanes| lanes[1].steps.swap(0, 1)).unwrap();
    assert_snapshot!(early, @"rank 0, lane 1, entry (put 0.0 input to 0): in start 1, the step may read its source before the data has arrived");
}

#[test]
fn a_caller_that_does_not_wait_for_a_lane_is_a_fault() {
    let unawaited = fault(|lanes| {
        for lane in lanes {
            lane.steps.pop();
        }
    });
    assert_snapshot!(unawaited.unwrap(), @"rank 0: start 1 may end while lane 1 still reads its sources");
}

#[test]
fn a_fault_of_a_representative_is_a_fault_of_all() {
    let even = |nodes: u32, ranks: u32| {
        let node_of_rank: Vec<u32> = (0..nodes * ranks).map(|rank| rank / ranks).collect();
        Topology::of_nodes(&node_of_rank).unwrap()
    };
    let mut refused = 0;
    for topology in [even(1, 4), even(2, 2), even(3, 1)] {
        for &algorithm in Algorithm::ALL {
            for outputs in [1, 2] {
                let tiers = topology.nodes() == 2;
                let shape = Shape { outputs, tiers, ..Shape::default() };
                let plans = schedule::plans(algorithm, &topology, shape).unwrap();
                for symmetry in Symmetry::candidates(&topology, tiers) {
                    let representative =
                        |rank| symmetry.representatives()[symmetry.representative_index(rank)];
                    let matches = |plan: &Plan| {
                        symmetry.matches(&plans[representative(plan.rank).index()], plan)
                    };
                    if plans.iter().all(matches) {
                        refused += check_changes(&plans, &symmetry);
                    }
                }
            }
        }
    }
    assert!(refused > 1000, "{refused}");
}

fn check_changes(plans: &[Plan], symmetry: &Symmetry) -> usize {
    let representatives = symmetry.representatives();
    let mut refused = 0;
    for lane in 0..plans[0].lanes.len() {
        for at in 0..plans[0].lanes[lane].steps.len() {
            for drops in [true, false] {
                let mut few: Vec<Plan> =
                    representatives.iter().map(|rank| plans[rank.index()].clone()).collect();
                let steps = &mut few[0].lanes[lane].steps;
                if drops {
                    steps.remove(at);
                } else if at + 1 < steps.len() {
                    steps.swap(at, at + 1);
                }
                let all: Vec<Plan> = Rank::all(plans.len())
                    .map(|rank| {
                        symmetry.rotated_plan(&few[symmetry.representative_index(rank)], rank)
                    })
                    .collect();
                let by_symmetry = plan_set::check(&few, plans.len(), &representatives)
                    .and_then(|_| follow(&PlanSet::new(&few, symmetry.clone())).map(|_| ()));
                let exhaustive = verify(&all).map(|_| ());
                let class =
                    |verdict: &Result<(), Fault>| verdict.clone().map_err(|fault| fault.class());
                assert_eq!(
                    class(&by_symmetry),
                    class(&exhaustive),
                    "{by_symmetry:?} {exhaustive:?} {}",
                    few[0]
                );
                refused += usize::from(by_symmetry.is_err());
            }
        }
    }
    refused
}
