//! Runs one rank of a scenario.

use std::time::Duration;

use peerlane_collectives::bootstrap::in_process::InProcessBootstrap;
use peerlane_collectives::element::Element;
use peerlane_collectives::group::{Group, GroupOptions, Started};
use peerlane_hal::{DynFabric, Fabric, Rank};
use peerlane_host as host;

use super::operation::{Guarded, Operation};
use super::{Elements, Phase, Scenario, failed};
use peerlane_conformance::Outcome;
use peerlane_conformance::middleware::{DelayLayer, Wrapped};

/// Timeout of the group. No operation takes this long; a fault that loses a flag shows as this
/// timeout.
const TIMEOUT: Duration = Duration::from_secs(20);
const POLLS_BETWEEN_NAPS: u32 = 8;

/// Opens the rank's fabrics and runs the scenario on them.
pub(super) fn run(
    scenario: &Scenario,
    rank: Rank,
    bootstraps: Vec<InProcessBootstrap>,
    memory: &mut [Guarded],
) -> Outcome {
    let engine = &scenario.engines[rank.index()];
    let open = || host::Fabric::open_with(rank, scenario.ranks, engine.options);
    let mut fabrics = Vec::new();
    for (number, _) in (1..).zip(&bootstraps) {
        let fabric = open()?;
        fabrics.push(match engine.delay {
            None => DynFabric::new(fabric),
            Some(longest) => {
                let seed = scenario.seed ^ number << 48;
                let delayed = Wrapped::new(fabric, DelayLayer::new(seed, longest));
                DynFabric::new(Wrapped::new(delayed, engine.downgrade))
            }
        });
    }
    match scenario.elements {
        Elements::U8 => gather::<u8>(scenario, bootstraps, fabrics, memory),
        Elements::F32 => gather::<f32>(scenario, bootstraps, fabrics, memory),
        Elements::I64 => gather::<i64>(scenario, bootstraps, fabrics, memory),
    }
}

/// Opens a group, over a second fabric too if the scenario has one.
fn join(
    scenario: &Scenario,
    bootstrap: InProcessBootstrap,
    local: DynFabric,
    number: usize,
) -> Outcome<Group> {
    let options = GroupOptions::default().timeout(TIMEOUT).topology(scenario.topology.clone());
    let Some(networks) = &scenario.networks else {
        return options.open(bootstrap, local).map_err(failed);
    };
    let engine = &networks[local.rank().index()];
    let network = host::Fabric::open_with(local.rank(), scenario.ranks, engine.options)?;
    let Some(longest) = engine.delay else {
        return options.open_tiers(bootstrap, local, network).map_err(failed);
    };
    let seed = scenario.seed ^ (number as u64 + 1) << 52;
    let delayed = Wrapped::new(network, DelayLayer::new(seed, longest));
    let network = Wrapped::new(delayed, engine.downgrade);
    options.open_tiers(bootstrap, local, network).map_err(failed)
}

fn gather<T: Element>(
    scenario: &Scenario,
    bootstraps: Vec<InProcessBootstrap>,
    fabrics: Vec<DynFabric>,
    memory: &mut [Guarded],
) -> Outcome {
    let mut groups = Vec::new();
    for (number, (bootstrap, fabric)) in bootstraps.into_iter().zip(fabrics).enumerate() {
        groups.push(join(scenario, bootstrap, fabric, number)?);
    }
    let rank = groups[0].rank();
    let mut run = Run { scenario, rank, random: scenario.random(rank), operations: Vec::new() };
    for _ in 0..scenario.operations {
        for group in &mut groups {
            run.pause(Phase::Prepare);
            let number = run.operations.len();
            run.operations.push(Operation::<T>::prepare(scenario, group, number, memory)?);
        }
    }
    for start in 1..=scenario.starts {
        run.start(start)?;
        run.meet(start, &mut groups)?;
    }
    drop(run);
    for group in groups {
        group.close().map_err(failed)?;
    }
    memory.iter().try_for_each(Guarded::check)
}

struct Run<'s, T> {
    scenario: &'s Scenario,
    rank: Rank,
    random: fastrand::Rng,
    operations: Vec<Operation<'s, T>>,
}

impl<T: Element> Run<'_, T> {
    /// Runs one start of every operation: one after the other, or all at once.
    fn start(&mut self, start: u64) -> Outcome {
        let several = self.operations.len();
        let at_once = if self.scenario.overlap { several } else { 1 };
        for first in (0..several).step_by(at_once) {
            let turn = first..first + at_once;
            self.pause(Phase::Fill);
            for operation in &mut self.operations[turn.clone()] {
                operation.fill(start)?;
            }
            self.pause(Phase::Start);
            let mut open = Vec::new();
            for operation in &mut self.operations[turn.clone()] {
                open.push(operation.gather.start().map_err(failed)?);
            }
            pause(self.scenario, self.rank, &mut self.random, Phase::Drive);
            for started in open {
                finish(self.scenario, self.rank, &mut self.random, started)?;
            }
            self.pause(Phase::Read);
            for operation in &mut self.operations[turn] {
                operation.check(start)?;
            }
        }
        Ok(())
    }

    fn meet(&self, start: u64, groups: &mut [Group]) -> Outcome {
        if self.scenario.barrier_every.is_some_and(|every| start.is_multiple_of(every)) {
            for group in groups {
                group.barrier().map_err(failed)?;
            }
        }
        Ok(())
    }

    fn pause(&mut self, phase: Phase) {
        pause(self.scenario, self.rank, &mut self.random, phase);
    }
}

/// Waits, polls, or drops the handle; in the last case the access to the output waits.
fn finish<T: Element>(
    scenario: &Scenario,
    rank: Rank,
    random: &mut fastrand::Rng,
    mut started: Started<'_, T>,
) -> Outcome {
    // Operations that are started at once are waited for in the same order on all ranks: an engine of
    // the host backend progresses only when its caller waits for that operation.
    let choices = if scenario.overlap { 2 } else { 3 };
    match random.u32(..choices) {
        0 => {
            for poll in 1_u32.. {
                pause(scenario, rank, random, Phase::Poll);
                if started.poll().map_err(failed)? {
                    break;
                }
                if poll.is_multiple_of(POLLS_BETWEEN_NAPS) {
                    std::thread::sleep(Duration::from_micros(50));
                }
                std::thread::yield_now();
            }
            Ok(())
        }
        2 => {
            drop(started);
            Ok(())
        }
        _ => started.wait().map_err(failed),
    }
}

/// Sleeps if this rank is the slow one in this phase.
fn pause(scenario: &Scenario, rank: Rank, random: &mut fastrand::Rng, phase: Phase) {
    if scenario.slow == Some((rank, phase)) {
        std::thread::sleep(phase.pause().mul_f64(random.f64()));
    }
}
