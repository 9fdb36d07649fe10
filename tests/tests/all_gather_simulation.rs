//! Runs whole all-gathers on delayed, limited and mixed engines; see `peerlane_tests::simulation`.
//!
//! A failure prints its seed; `SEED=17 cargo test -p peerlane-conformance --test
//! all_gather_simulation` runs that one scenario alone. `PEERLANE_SIMULATION_ROUNDS=10` draws ten
//! scenarios for each number of ranks and bytes, instead of three.

use peerlane_collectives::topology::Topology;
use peerlane_hal::Rank;
use peerlane_tests::simulation::{self, BLOCK_BYTES, Elements, Engine, Phase, RANKS, Scenario};

/// So many take well below 40 s in a debug build on two cores.
const DEFAULT_ROUNDS: u64 = 3;
const SEEDS_A_ROUND: u64 = (RANKS.len() * BLOCK_BYTES.len()) as u64;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, expected a number")))
}

fn run(scenario: &Scenario) {
    if let Err(failure) = simulation::run(scenario) {
        panic!("{failure}");
    }
}

/// Half of the seeds each, so that both halves run at once.
fn run_seeds(half: u64) {
    if let Some(seed) = number("SEED") {
        if seed % 2 == half {
            run(&Scenario::draw(seed));
        }
        return;
    }
    let rounds = number("PEERLANE_SIMULATION_ROUNDS").unwrap_or(DEFAULT_ROUNDS);
    (0..SEEDS_A_ROUND * rounds)
        .filter(|seed| seed % 2 == half)
        .for_each(|seed| run(&Scenario::draw(seed)));
}

#[test]
fn every_number_of_ranks_with_every_number_of_bytes_even_seeds() {
    run_seeds(0);
}

#[test]
fn every_number_of_ranks_with_every_number_of_bytes_odd_seeds() {
    run_seeds(1);
}

#[test]
fn a_rank_may_be_slow_in_every_phase() {
    for (seed, phase) in (1000..).zip(Phase::ALL) {
        for ranks in [2, 5] {
            let drawn = Scenario::draw(seed);
            let engines = drawn.engines.iter().cycle().take(ranks).copied().collect();
            let slow = Some((Rank::at(seed as usize % ranks), phase));
            let topology = Topology::of_nodes(&(0..ranks as u32).collect::<Vec<_>>()).unwrap();
            let networks = drawn.networks.map(|_| vec![Engine::plain(); ranks]);
            let barrier_every = None;
            let scenario =
                Scenario { ranks, engines, slow, barrier_every, topology, networks, ..drawn };
            run(&scenario.with_fitting_algorithm());
        }
    }
}

#[test]
fn blocks_around_the_streaming_threshold_arrive_whole() {
    const STREAMING_BYTES_MIN: usize = 4 << 20;
    for block_bytes in [STREAMING_BYTES_MIN - 1, STREAMING_BYTES_MIN, STREAMING_BYTES_MIN + 1] {
        for (ranks, in_place) in [(2, false), (3, true)] {
            let engines = vec![Engine::plain(); ranks];
            let elements = Elements::U8;
            let (starts, groups, operations) = (2, 1, 1);
            let drawn = Scenario {
                ranks,
                topology: Topology::flat(ranks).unwrap(),
                networks: None,
                in_place,
                block_bytes,
                elements,
                engines,
                starts,
                ..Scenario::draw(0)
            };
            let scenario =
                Scenario { chunks: 1, groups, operations, own_memory: false, slow: None, ..drawn };
            run(&scenario.with_fitting_algorithm());
        }
    }
}

#[test]
fn a_slow_rank_holds_up_only_what_waits_for_it() {
    for ranks in 2..=5 {
        for (slow, outputs) in Rank::all(ranks).flat_map(|slow| [(slow, 1), (slow, 2)]) {
            if let Err(failure) = simulation::check_without(slow, ranks, outputs) {
                panic!("{failure}");
            }
        }
    }
}
