//! Breaks right plans in random ways and asks the verifier and an oracle about them.
//!
//! What must hold: the verifier refuses whatever the oracle shows to do harm, and refuses no right
//! plan. The counts that each test prints say how much more it refuses: it demands that both kinds
//! of flag values work and that what arrives is known to, not lucky to.

use std::collections::BTreeMap;

use fastrand::Rng;
use peerlane_collectives::plan::{Algorithm, Plan};
use peerlane_collectives::verify::{FaultClass, verify};

use edit::edit;
use mutants::mutate;
use oracle::{Harm, Oracle};
use shapes::Shape;

#[path = "support/edit.rs"]
mod edit;
#[path = "support/mutants.rs"]
mod mutants;
#[path = "support/oracle.rs"]
mod oracle;
#[path = "support/shapes.rs"]
mod shapes;

const CASES: u64 = 1000;
/// Looks for harm that would prove an accepted mutant wrong.
const RUNS_ACCEPTED: u64 = 24;
/// Looks only for the statistics.
const RUNS_REFUSED: u64 = 6;

#[derive(Debug, Default)]
struct Counts {
    refused: BTreeMap<FaultClass, u64>,
    refused_without_harm: u64,
    accepted: u64,
}

#[test]
fn broken_direct_plans_are_refused() {
    check(Shape::Direct);
}

#[test]
fn broken_ring_plans_are_refused() {
    check(Shape::Ring);
}

#[test]
fn broken_plans_with_outputs_in_turn_are_refused() {
    check(Shape::InTurn);
}

#[test]
fn broken_plans_with_batched_flags_are_refused() {
    check(Shape::Batched);
    check(Shape::BatchedInTurn);
}

#[test]
fn broken_plans_with_an_own_copy_aside_are_refused() {
    check(Shape::Aside);
}

#[test]
fn broken_plans_with_pushes_away_are_refused() {
    check(Shape::Away);
}

#[test]
fn broken_plans_of_one_fabric_are_refused() {
    check(Shape::Flat(Algorithm::Pull));
    check(Shape::Flat(Algorithm::DoubleRing));
    check(Shape::Nodes(Algorithm::Hierarchical));
}

#[test]
fn broken_plans_with_a_network_are_refused() {
    Algorithm::ALL.iter().for_each(|&algorithm| check(Shape::Tiers(algorithm)));
}

#[test]
fn broken_plans_with_a_network_and_outputs_in_turn_are_refused() {
    check(Shape::TiersInTurn(Algorithm::Ring));
    check(Shape::TiersInTurn(Algorithm::HierarchicalRing));
}

#[test]
fn right_plans_do_no_harm_and_are_accepted() {
    for shape in Shape::ALL {
        for ranks in 1..=5 {
            for (chunks, in_place) in [(1, false), (2, true), (3, false)] {
                let plans = shape.plans(ranks, chunks, in_place);
                let context = format!("{shape:?}, {ranks} ranks, {chunks} chunks");
                verify(&plans).unwrap_or_else(|fault| panic!("{context}: {fault}"));
                let oracle = oracle(&plans).unwrap();
                for seed in 0..20 {
                    assert_eq!(oracle.run(seed), Ok(()), "{context}, seed {seed}");
                }
            }
        }
    }
}

/// A signal publishes what was put to the same peer, and to nobody else.
#[test]
fn an_arrival_that_another_rank_announces_is_refused() {
    let mut plans = Shape::Direct.plans(3, 1, false);
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

/// For shards that every number of chunks up to 4 splits evenly.
fn oracle(plans: &[Plan]) -> Result<Oracle, Harm> {
    Oracle::new(plans, &vec![12; plans.len()], 5)
}

fn check(shape: Shape) {
    let mut counts = Counts::default();
    for seed in 0..CASES {
        check_mutant(shape, seed, &mut counts);
    }
    let refused: u64 = counts.refused.values().sum();
    println!("{shape:?}: {CASES} mutants, {refused} refused, {counts:?}");
    // To be out of reach takes a second lane that waits for peers.
    let single = |class: &&FaultClass| **class != FaultClass::Unreachable || shape == Shape::Away;
    for class in FaultClass::ALL.iter().filter(single) {
        assert!(counts.refused.contains_key(class), "{shape:?}: no mutant is a {class}");
    }
    // An oracle that sees nothing would prove nothing.
    assert!(counts.refused_without_harm * 2 < refused, "{shape:?}: {counts:?}");
}

fn check_mutant(shape: Shape, seed: u64, counts: &mut Counts) {
    let mut rng = Rng::with_seed(seed);
    let (ranks, chunks, in_place) = (rng.u32(1..=5), rng.u32(1..=3), rng.bool());
    let mut plans = shape.plans(ranks, chunks, in_place);
    let mutations: Vec<String> = (0..rng.u8(1..=2)).map(|_| mutate(&mut plans, &mut rng)).collect();
    let verdict = verify(&plans);
    let runs = if verdict.is_ok() { RUNS_ACCEPTED } else { RUNS_REFUSED };
    let harm = match oracle(&plans) {
        Ok(oracle) => (0..runs).find_map(|run| oracle.run(seed * runs + run).err()),
        Err(harm) => Some(harm),
    };
    match (verdict, harm) {
        (Ok(_), Some(harm)) => panic!(
            "{shape:?}, seed {seed}, {ranks} ranks, {chunks} chunks, in place {in_place}: accepted, \
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
