//! Tests the verifier with faults that no plan can have.

use insta::assert_snapshot;
use peerlane_hal::Rank;

use super::*;
use crate::collective::Collective;
use crate::plan::{Algorithm, Cell, Flag, FlagOrder, Lane, LaneId, Source, Step};
use crate::schedule::{self, Shape};
use crate::topology::Topology;
use crate::verify::plan_set::ClosedLane;

/// Returns the shape to which the fewest algorithms fit.
fn tiered() -> Shape {
    Shape { tiers: true, ..Shape::default() }
}

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
        inboxes: 1,
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
        for algorithm in schedule::fitting(&topology, tiered()) {
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

fn plans_of(collective: Collective, ranks: usize, outputs: u32) -> Vec<Plan> {
    let topology = Topology::flat(ranks).unwrap();
    let shape = Shape { collective, outputs, ..Shape::default() };
    schedule::plans(Algorithm::Direct, &topology, shape).unwrap()
}

fn refusal(plans: &[Plan]) -> String {
    verify(plans).unwrap_err().to_string()
}

/// Plans that would be right if every rank heard from every other one.
#[test]
fn a_scan_without_flags_of_the_last_start_is_refused() {
    for collective in [Collective::Scan, Collective::Exscan] {
        let mut plans = plans_of(collective, 3, 2);
        verify(&plans).unwrap();
        for step in plans.iter_mut().flat_map(|plan| &mut plan.lanes) {
            let is_free = |step: &Step| {
                matches!(
                    step,
                    Step::Signal { flag: Flag::Free { .. }, .. }
                        | Step::Wait { flag: Flag::Free { .. } }
                )
            };
            step.steps.retain(|step| !is_free(step));
        }
        let fault = verify(&plans).unwrap_err();
        assert!(matches!(fault, Fault::PeerInUse { .. } | Fault::NotConsumed { .. }), "{fault}");
    }
}

/// Plans that would be right if other ranks contributed.
#[test]
fn a_sum_of_other_contributions_is_refused() {
    let as_if = |planned, collective| {
        let mut plans = plans_of(planned, 3, 1);
        plans.iter_mut().for_each(|plan| plan.collective = collective);
        refusal(&plans)
    };
    let [scan, exscan, all] = [Collective::Scan, Collective::Exscan, Collective::ReduceScatter];
    assert_snapshot!(as_if(all, scan), @"rank 0, lane 0, step 12 (reduce 0.0 of 1): contribution of rank 1 does not exist, expected a rank that contributes to block 0 in a scan");
    assert_snapshot!(as_if(scan, all), @"rank 0: no step copies cell 1.0 into the output of rank 0");
    assert_snapshot!(as_if(exscan, scan), @"rank 0: no step adds the contribution of rank 0 to cell 0.0");
    assert_snapshot!(as_if(scan, exscan), @"rank 0, lane 0, step 7 (reduce 0.0 of 0): cell 0.0 to reduce does not exist, expected no addition on rank 0");
}

/// Plans that are rotated plans of each other, although the collective is not the same for all
/// ranks.
#[test]
fn a_representative_does_not_stand_for_ranks_with_another_goal() {
    let topology = Topology::flat(4).unwrap();
    let [ref symmetry] = Symmetry::candidates(&topology, false)[..] else {
        panic!("one node has one symmetry")
    };
    for collective in Collective::ALL {
        let representative = &plans_of(*collective, 4, 1)[0];
        let keeps = Rank::all(4).all(|rank| symmetry.keeps_goal(representative, rank));
        let is_even = [Collective::AllGather, Collective::AllToAll].contains(collective);
        assert_eq!(keeps, is_even, "{collective}");
    }

    // Every rank begins with its own contribution, so only rank 0 adds in the order of ranks.
    let representative = plans_of(Collective::ReduceScatter, 4, 1).swap_remove(0);
    let rotated = |rank| symmetry.rotated_plan(&representative, rank);
    let plans: Vec<Plan> = Rank::all(4).map(rotated).collect();
    assert!(plans.iter().all(|plan| symmetry.matches(&representative, plan)));
    let fault = verify(&plans).unwrap_err();
    assert_eq!(fault.class(), FaultClass::OutOfOrder, "{fault}");
}

/// A put into an output needs more than a put into an inbox, although a start has one set of flags.
#[test]
fn only_contributions_alternate_with_inboxes() {
    let ages = |outputs, inboxes| {
        let topology = Topology::flat(3).unwrap();
        let collective = Collective::AllReduce;
        let shape = Shape { collective, outputs, inboxes, ..Shape::default() };
        let plans = schedule::plans(Algorithm::Direct, &topology, shape).unwrap();
        let set = PlanSet::new(&plans, Symmetry::none(3));
        let put = |from| Step::Put { peer: Rank(1), cell: Cell { block: Rank(0), chunk: 0 }, from };
        let ages = [Source::Input, Source::Output].map(|from| set.age_of_target(&put(from)));
        (ages, set.flag_sets)
    };
    assert_eq!(ages(1, 1), ([0, 0], 1));
    assert_eq!(ages(1, 2), ([1, 0], 2));
    assert_eq!(ages(2, 1), ([1, 1], 2));
    assert_eq!(ages(2, 2), ([1, 1], 2));
}

/// Plans that differ in nothing but the memory that they use in turn.
#[test]
fn a_representative_does_not_stand_for_ranks_with_other_inboxes() {
    let symmetry = Symmetry::none(2);
    let plan = plans_of(Collective::ReduceScatter, 2, 2).swap_remove(0);
    assert!(symmetry.matches(&plan, &plan));
    assert!(!symmetry.matches(&plan, &Plan { inboxes: 2, ..plan.clone() }));
    assert!(!symmetry.matches(&plan, &Plan { outputs: 1, ..plan.clone() }));
}

/// A lane would wait for a signal of its own last start, which the race check does not follow.
#[test]
fn a_free_flag_of_the_own_rank_is_refused() {
    let mut plans = plans_of(Collective::AllGather, 2, 2);
    let flag = Flag::Free { from: Rank(0), lane: LaneId::HOME };
    let steps = &mut plans[0].lanes[0].steps;
    steps.insert(0, Step::Wait { flag });
    steps.push(Step::Signal { peer: Rank(0), flag });
    assert_snapshot!(refusal(&plans), @"rank 0, lane 0, step 6 (signal free to 0): flag free from 0 of rank 0 does not exist, expected another reader, because a rank knows its own last start");
}

/// A flag of the last start is awaited one start later than it is signalled.
#[test]
fn a_counterexample_names_the_start_of_a_wait_for_the_last_start() {
    let mut explained = 0;
    let correct = plans_of(Collective::Gather { root: Rank(0) }, 3, 2);
    for rank in 0..correct.len() {
        let steps = correct[rank].lanes[0].steps.len();
        for (from, to) in (0..steps).flat_map(|from| (0..steps).map(move |to| (from, to))) {
            let mut plans = correct.clone();
            let steps = &mut plans[rank].lanes[0].steps;
            let step = steps.remove(from);
            steps.insert(to, step);

            let Err(fault @ Fault::NotConsumed { location, .. }) = verify(&plans) else { continue };
            if matches!(location.step, Step::Signal { flag: Flag::Free { .. }, .. }) {
                let text = fault.counterexample(&plans).to_string();
                assert!(text.ends_with("may not have passed in start 1"), "{text}");
                explained += 1;
            }
        }
    }
    assert!(explained > 0);
}

/// The flags of an all-gather have no words for contributions.
#[test]
fn a_flag_of_a_contribution_outside_of_a_reduction_is_refused() {
    let mut plans = plans_of(Collective::AllGather, 2, 1);
    for step in plans.iter_mut().flat_map(|plan| &mut plan.lanes[0].steps) {
        if let Step::Signal { flag, .. } | Step::Wait { flag } = step
            && let Flag::Arrived { cell, lane } = *flag
        {
            *flag = Flag::Contributed { cell, lane };
        }
    }
    assert_snapshot!(refusal(&plans), @"rank 0, lane 0, step 5 (signal contributed 0.0 to 1): flag contributed 0.0 in an all-gather does not exist, expected a flag of a copy");
}
