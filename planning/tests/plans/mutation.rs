//! Mutates correct plans at random, and compares the verifier with an oracle that runs them.
//!
//! The verifier must refuse every plan for which the oracle finds harm, and no correct plan. It may refuse more: it demands
//! that a plan works with both kinds of flag values, and that every order of events is correct. Each test prints how many it
//! refuses without harm.
//!
//! Each test checks 100 mutants, and 1,000 if `PEERLANE_SEEDS` is set. Only the latter are expected to show every class of
//! fault, because the rarest are 5 in 1,000.

use std::collections::BTreeMap;

use fastrand::Rng;
use peerlane_planning::collective::Collective;
use peerlane_planning::plan::{Algorithm, Flag, FlagOrder, Plan, Step};
use peerlane_planning::schedule::algorithms;
use peerlane_planning::verify::{FaultClass, verify};

use crate::support::cases::number_of_cases;
use crate::support::mutants::{ORDERS, mutate};
use crate::support::oracle::{Harm, Oracle};
use crate::support::plans::{BROADCAST, Form, GATHER, SCATTER, edit};

const SOME_CASES: u64 = 100;
const ALL_CASES: u64 = 1000;
/// Oracle runs of a mutant that the verifier accepts.
const RUNS_ACCEPTED: u64 = 24;
/// Oracle runs of a refused mutant, for the statistics.
const RUNS_REFUSED: u64 = 6;

#[derive(Debug, Default)]
struct Counts {
    refused: BTreeMap<FaultClass, u64>,
    refused_without_harm: u64,
    accepted: u64,
}

#[test]
fn broken_direct_plans_are_refused() {
    check(Form::Direct);
}

#[test]
fn broken_ring_plans_are_refused() {
    check(Form::Ring);
}

#[test]
fn broken_plans_with_outputs_in_turn_are_refused() {
    check(Form::InTurn);
}

#[test]
fn broken_plans_with_batched_flags_are_refused() {
    check(Form::Batched);
    check(Form::BatchedInTurn);
}

#[test]
fn broken_plans_with_a_self_copy_lane_are_refused() {
    check(Form::SelfCopyLane);
}

#[test]
fn broken_plans_with_a_put_lane_are_refused() {
    check(Form::PutLane);
}

#[test]
fn broken_plans_of_one_fabric_are_refused() {
    check(Form::Flat(Algorithm::Pull));
    check(Form::Flat(Algorithm::DoubleRing));
    check(Form::Flat(Algorithm::RecursiveDoubling));
    check(Form::Flat(Algorithm::GetRing));
    check(Form::Nodes(Algorithm::Hierarchical));
}

#[test]
fn broken_plans_with_a_network_are_refused() {
    // The get ring has no plans for a network.
    let tiered = algorithms(Collective::AllGather).filter(|one| *one != Algorithm::GetRing);
    tiered.for_each(|algorithm| check(Form::Tiers(algorithm)));
}

#[test]
fn broken_plans_with_a_network_and_outputs_in_turn_are_refused() {
    check(Form::TiersInTurn(Algorithm::Ring));
    check(Form::TiersInTurn(Algorithm::HierarchicalRing));
    check(Form::TiersInTurn(Algorithm::RecursiveDoubling));
}

#[test]
fn broken_plans_whose_ranks_wait_for_the_network_first_are_refused() {
    check(Form::NetworkFirst(Collective::AllGather, Algorithm::Hierarchical));
    check(Form::NetworkFirst(Collective::AllGather, Algorithm::HierarchicalRing));
    check(Form::NetworkFirst(Collective::ReduceScatter, Algorithm::Direct));
}

#[test]
fn broken_broadcasts_in_two_steps_are_refused() {
    check(Form::Goal(BROADCAST, Algorithm::ScatterAllGather));
    check(Form::GoalInTurn(BROADCAST, Algorithm::ScatterAllGather));
}

#[test]
fn broken_gathers_are_refused() {
    check(Form::Goal(GATHER, Algorithm::Direct));
    check(Form::Goal(GATHER, Algorithm::Pull));
    check(Form::GoalOfTiers(GATHER, Algorithm::Direct));
}

#[test]
fn broken_scatters_are_refused() {
    check(Form::Goal(SCATTER, Algorithm::Direct));
    check(Form::Goal(SCATTER, Algorithm::Pull));
    check(Form::GoalOfTiers(SCATTER, Algorithm::Direct));
}

#[test]
fn broken_all_to_alls_are_refused() {
    check(Form::Goal(Collective::AllToAll, Algorithm::Direct));
    check(Form::Goal(Collective::AllToAll, Algorithm::Pull));
    check(Form::GoalInTurn(Collective::AllToAll, Algorithm::Direct));
    check(Form::GoalOfTiers(Collective::AllToAll, Algorithm::Direct));
}

#[test]
fn broken_broadcasts_are_refused() {
    check(Form::Goal(BROADCAST, Algorithm::Direct));
    check(Form::Goal(BROADCAST, Algorithm::Pull));
    check(Form::GoalOfTiers(BROADCAST, Algorithm::Ring));
    check(Form::Goal(BROADCAST, Algorithm::GetRing));
    check(Form::GoalInTurn(BROADCAST, Algorithm::GetRing));
}

#[test]
fn broken_reductions_are_refused() {
    let reductions = Collective::ALL.iter().filter(|one| one.is_reduction());
    for &collective in reductions {
        check(Form::Goal(collective, Algorithm::Direct));
        check(Form::GoalInTurn(collective, Algorithm::Direct));
        check(Form::GoalOfTiers(collective, Algorithm::Direct));
    }
}

#[test]
fn broken_reductions_with_inboxes_in_turn_are_refused() {
    let reductions = Collective::ALL.iter().filter(|one| one.is_reduction());
    for &collective in reductions {
        FlagOrder::ALL.iter().for_each(|&flags| check(Form::Inboxes(collective, flags)));
        check(Form::InboxesOfTiers(collective));
    }
}

#[test]
fn other_orders_of_additions_are_refused() {
    let reductions = || Collective::ALL.iter().copied().filter(|one| one.is_reduction());
    for (mutation, name) in ORDERS.iter().zip(["swap", "reverse", "delay", "own"]) {
        for collective in reductions() {
            let mut refused = 0;
            for seed in 0..200 {
                let mut rng = Rng::with_seed(seed);
                let (ranks, chunks) = (rng.u32(2..=5), rng.u32(1..=3));
                let form = Form::Goal(collective, Algorithm::Direct);
                let correct = form.plans(ranks, chunks, rng.bool());
                let mut plans = correct.clone();
                if mutation(&mut plans, &mut rng).is_none() || plans == correct {
                    continue;
                }

                let fault = verify(&plans).expect_err("the order is another one");
                let expected = match plans[0].in_place {
                    // In place, an own contribution that comes late is overwritten already.
                    true => [FaultClass::OutOfOrder, FaultClass::Overwritten].as_slice(),
                    false => &[FaultClass::OutOfOrder],
                };
                assert!(expected.contains(&fault.class()), "{name}, {collective}: {fault}");
                let oracle = oracle(&plans).unwrap();
                assert_eq!(oracle.run(seed), Err(Harm::WrongBytes), "{name}, {collective}");
                refused += 1;
            }
            // The own contribution to an exclusive scan is in no sum, so it cannot move.
            let moves = name != "own" || collective != Collective::Exscan;
            assert_eq!(refused > 10, moves, "{name}, {collective}: {refused}");
        }
    }
}

#[test]
fn broken_plans_with_flags_of_the_last_start_are_refused() {
    check(Form::GoalInTurn(GATHER, Algorithm::Direct));
    check(Form::GoalInTurn(SCATTER, Algorithm::Direct));
    check(Form::GoalInTurn(BROADCAST, Algorithm::Direct));
    check(Form::GoalInTurn(BROADCAST, Algorithm::Ring));
}

#[test]
fn correct_plans_do_no_harm_and_are_accepted() {
    for form in Form::ALL {
        for ranks in 1..=5 {
            for (chunks, in_place) in [(1, false), (2, true), (3, false)] {
                let plans = form.plans(ranks, chunks, in_place);
                let context = format!("{form:?}, {ranks} ranks, {chunks} chunks");
                verify(&plans).unwrap_or_else(|fault| panic!("{context}: {fault}"));
                let oracle = oracle(&plans).unwrap();
                for seed in 0..number_of_cases(4, 20) {
                    assert_eq!(oracle.run(seed), Ok(()), "{context}, seed {seed}");
                }
            }
        }
    }
}

/// A signal publishes only puts to the same peer.
#[test]
fn an_arrival_that_another_rank_announces_is_refused() {
    let mut plans = Form::Direct.plans(3, 1, false);
    edit(&mut plans[0], "signal arrived 0.0 to 2", "signal arrived 1.0 to 1");
    edit(
        &mut plans[1],
        "wait arrived 2.0",
        "wait arrived 1.0\n signal arrived 0.0 to 2\n wait arrived 2.0",
    );
    assert_eq!(verify(&plans).unwrap_err().class(), FaultClass::Missing);
    let oracle = oracle(&plans).unwrap();
    assert_eq!((0..200).find_map(|seed| oracle.run(seed).err()), Some(Harm::WrongBytes));
}

/// A signal to another rank does not say that a get is complete.
#[test]
fn a_get_that_the_getting_lane_announces_to_the_next_rank_is_refused() {
    let mut plans = Form::Flat(Algorithm::GetRing).plans(3, 1, false);
    edit(&mut plans[0], "wait arrived 2.0 for lane 1\n  signal arrived 2.0 to 1", "");
    edit(&mut plans[0], "signal arrived 2.0 for lane 1 to 0", "signal arrived 2.0 to 1");
    assert_eq!(verify(&plans).unwrap_err().class(), FaultClass::ReadEarly);
    let oracle = oracle(&plans).unwrap();
    assert_eq!((0..200).find_map(|seed| oracle.run(seed).err()), Some(Harm::WrongBytes));
}

#[test]
fn every_flag_of_a_get_ring_is_needed() {
    let forms = [
        Form::Flat(Algorithm::GetRing),
        Form::GoalInTurn(Collective::AllGather, Algorithm::GetRing),
        Form::Goal(BROADCAST, Algorithm::GetRing),
        Form::GoalInTurn(BROADCAST, Algorithm::GetRing),
    ];
    for (form, ranks, chunks) in
        forms.into_iter().flat_map(|form| [(form, 2, 2), (form, 3, 1), (form, 4, 3)])
    {
        for in_place in [false, true] {
            let correct = form.plans(ranks, chunks, in_place);
            for (rank, lane, at) in places(&correct) {
                let step = correct[rank].lanes[lane].steps[at];
                let mut plans = correct.clone();
                plans[rank].lanes[lane].steps.remove(at);
                let Step::Signal { peer, flag } = step else {
                    let is_wait = matches!(step, Step::Wait { .. });
                    let class = if is_wait { FaultClass::Unbalanced } else { FaultClass::Missing };
                    assert_eq!(verify(&plans).unwrap_err().class(), class, "{form:?}, {step:?}");
                    continue;
                };
                assert_eq!(verify(&plans).unwrap_err().class(), FaultClass::Unbalanced);

                // Without the signal and its wait, a rank relies on what it does not know.
                for lane in &mut plans[peer.index()].lanes {
                    lane.steps.retain(|step| *step != Step::Wait { flag });
                }
                let expected = match flag {
                    Flag::Taken { .. } => FaultClass::Overwritten,
                    _ => FaultClass::ReadEarly,
                };
                let fault = verify(&plans).unwrap_err();
                assert_eq!(fault.class(), expected, "{form:?}, {ranks} ranks, {flag:?}: {fault}");
            }
        }
    }
}

/// Returns the rank, the lane and the index of each step.
fn places(plans: &[Plan]) -> Vec<(usize, usize, usize)> {
    let lanes = plans.iter().enumerate().flat_map(|(rank, plan)| {
        plan.lanes.iter().enumerate().map(move |(number, lane)| (rank, number, lane))
    });
    let steps = lanes
        .flat_map(|(rank, number, lane)| (0..lane.steps.len()).map(move |at| (rank, number, at)));
    steps.collect()
}

/// Creates an oracle with blocks that every number of chunks up to 4 divides evenly.
fn oracle(plans: &[Plan]) -> Result<Oracle, Harm> {
    Oracle::new(plans, &vec![12; plans.len()], 5)
}

fn check(form: Form) {
    let mut counts = Counts::default();
    let cases = number_of_cases(SOME_CASES, ALL_CASES);
    for seed in 0..cases {
        check_mutant(form, seed, &mut counts);
    }
    let refused: u64 = counts.refused.values().sum();
    println!("{form:?}: {cases} mutants, {refused} refused, {counts:?}");
    // The test is worth nothing if the oracle finds no harm.
    assert!(counts.refused_without_harm * 2 < refused, "{form:?}: {counts:?}");
    if cases < ALL_CASES {
        return;
    }

    // Only a second lane that waits for peers can be out of reach.
    let single = |class: &&FaultClass| **class != FaultClass::Unreachable || form == Form::PutLane;
    // The only sources of a direct scatter or all-to-all are inputs, which nobody writes.
    let of_inputs = [Form::Goal, Form::GoalInTurn, Form::GoalOfTiers]
        .map(|form| [SCATTER, Collective::AllToAll].map(|goal| form(goal, Algorithm::Direct)));
    let of_inputs = of_inputs.concat();
    let reads =
        |class: &&FaultClass| **class != FaultClass::ReadEarly || !of_inputs.contains(&form);
    // Only reductions have an order of additions.
    let is_reduction = match form {
        Form::Goal(goal, _) | Form::GoalInTurn(goal, _) | Form::GoalOfTiers(goal, _) => {
            goal.is_reduction()
        }
        Form::Inboxes(..) | Form::InboxesOfTiers(_) => true,
        _ => false,
    };
    let orders = |class: &&FaultClass| **class != FaultClass::OutOfOrder || is_reduction;
    // With inboxes in turn, few changes make a flag or a put too early: each of them may come one start earlier than with one.
    let in_turn = matches!(form, Form::Inboxes(..) | Form::InboxesOfTiers(_));
    let rare = [FaultClass::Stale, FaultClass::Overwritten];
    let frequent = |class: &&FaultClass| !in_turn || !rare.contains(*class);
    let expected = FaultClass::ALL.iter().filter(single).filter(reads).filter(orders);
    for class in expected.filter(frequent) {
        assert!(counts.refused.contains_key(class), "{form:?}: no mutant is a {class}");
    }
}

fn check_mutant(form: Form, seed: u64, counts: &mut Counts) {
    let mut rng = Rng::with_seed(seed);
    let (ranks, chunks, in_place) = (rng.u32(1..=5), rng.u32(1..=3), rng.bool());
    let mut plans = form.plans(ranks, chunks, in_place);
    let mutations: Vec<String> = (0..rng.u8(1..=2)).map(|_| mutate(&mut plans, &mut rng)).collect();
    let verdict = verify(&plans);
    let runs = if verdict.is_ok() { RUNS_ACCEPTED } else { RUNS_REFUSED };
    let harm = match oracle(&plans) {
        Ok(oracle) => (0..runs).find_map(|run| oracle.run(seed * runs + run).err()),
        Err(harm) => Some(harm),
    };
    match (verdict, harm) {
        (Ok(_), Some(harm)) => panic!(
            "{form:?}, seed {seed}, {ranks} ranks, {chunks} chunks, in place {in_place}: accepted, \
             but {harm:?} after {mutations:?}"
        ),
        (Ok(_), None) => counts.accepted += 1,
        (Err(fault), harm) => {
            assert!(!fault.counterexample(&plans).end.is_empty());
            *counts.refused.entry(fault.class()).or_default() += 1;
            counts.refused_without_harm += u64::from(harm.is_none());
        }
    }
}
