//! Faults that no plan can have, because lanes are closed here: what if they were closed wrongly.

use insta::assert_snapshot;
use peerlane_hal::Rank;

use super::*;
use crate::collective::Collective;
use crate::plan::{Algorithm, Cell, FlagOrder, Lane, Source, Step};
use crate::schedule::{self, Shape};
use crate::topology::Topology;
use crate::verify::program::ClosedLane;

/// One rank that copies its shard in lane 1; `change` gets the closed lanes 0 and 1.
fn fault(change: impl FnOnce(&mut [ClosedLane])) -> Option<String> {
    let rank = Rank(0);
    let cell = Cell { shard: rank, chunk: 0 };
    let copy = Step::Put { peer: rank, cell, from: Source::Input };
    let lanes = vec![Lane::default(), Lane { steps: vec![copy], ..Lane::default() }];
    let algorithm = Algorithm::Direct;
    let (in_place, outputs) = (false, 1);
    let flags = FlagOrder::Prompt;
    let collective = Collective::AllGather;
    let plan =
        Plan { collective, algorithm, rank, ranks: 1, chunks: 1, in_place, outputs, flags, lanes };
    let mut program = Program::new(&[plan], Symmetry::none(1));
    change(&mut program.lanes);
    follow(&program).err().map(|fault| fault.to_string())
}

#[test]
fn a_closed_lane_is_right() {
    assert_eq!(fault(|_| {}), None);
}

#[test]
fn a_lane_that_ends_before_its_puts_is_a_fault() {
    let early = fault(|lanes| lanes[1].steps.swap(1, 2)).unwrap();
    assert_snapshot!(early, @"rank 0, end of lane 0 in start 1: lane 1 may still read its sources");
}

#[test]
fn a_lane_that_begins_before_the_caller_is_a_fault() {
    let early = fault(|lanes| lanes[1].steps.swap(0, 1)).unwrap();
    assert_snapshot!(early, @"rank 0, lane 1, entry (put 0.0 input to 0) in start 1: the source may not have arrived");
}

#[test]
fn a_caller_that_does_not_wait_for_a_lane_is_a_fault() {
    let unawaited = fault(|lanes| {
        for lane in lanes {
            lane.steps.pop();
        }
    });
    assert_snapshot!(unawaited.unwrap(), @"rank 0, end of lane 0 in start 1: lane 1 may still read its sources");
}

/// What a rank that stands for others is refused for, the plans of all ranks are refused for, and
/// what it is proven for, they are.
#[test]
fn a_turned_fault_is_a_fault_of_all() {
    let even = |nodes: u32, ranks: u32| {
        let of_rank: Vec<u32> = (0..nodes * ranks).map(|rank| rank / ranks).collect();
        Topology::of_nodes(&of_rank).unwrap()
    };
    let mut refused = 0;
    for topology in [even(1, 4), even(2, 2), even(3, 1)] {
        for &algorithm in Algorithm::ALL {
            for outputs in [1, 2] {
                let tiers = topology.nodes() == 2;
                let shape = Shape { outputs, tiers, ..Shape::default() };
                let plans = schedule::plans(algorithm, &topology, shape).unwrap();
                for symmetry in Symmetry::candidates(&topology, tiers) {
                    let standing = |rank| symmetry.representatives()[symmetry.number(rank)];
                    let matches =
                        |plan: &Plan| symmetry.matches(&plans[standing(plan.rank).index()], plan);
                    if plans.iter().all(matches) {
                        refused += check_turned(&plans, &symmetry);
                    }
                }
            }
        }
    }
    assert!(refused > 1000, "{refused}");
}

/// Drops each step of the first plan, and swaps it with the next; how many changes are refused.
fn check_turned(plans: &[Plan], symmetry: &Symmetry) -> usize {
    let standing = symmetry.representatives();
    let mut refused = 0;
    for lane in 0..plans[0].lanes.len() {
        for at in 0..plans[0].lanes[lane].steps.len() {
            for drops in [true, false] {
                let mut few: Vec<Plan> =
                    standing.iter().map(|rank| plans[rank.index()].clone()).collect();
                let steps = &mut few[0].lanes[lane].steps;
                if drops {
                    steps.remove(at);
                } else if at + 1 < steps.len() {
                    steps.swap(at, at + 1);
                }
                let all: Vec<Plan> = Rank::all(plans.len())
                    .map(|rank| symmetry.turned_plan(&few[symmetry.number(rank)], rank))
                    .collect();
                let turned = shape::check(&few, plans.len(), &standing)
                    .and_then(|_| follow(&Program::new(&few, symmetry.clone())).map(|_| ()));
                let whole = verify(&all).map(|_| ());
                let class = |verdict: &Result<(), Fault>| verdict.clone().map_err(|f| f.class());
                assert_eq!(class(&turned), class(&whole), "{turned:?} {whole:?} {}", few[0]);
                refused += usize::from(turned.is_err());
            }
        }
    }
    refused
}
