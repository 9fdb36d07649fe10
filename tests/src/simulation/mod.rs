//! Runs whole all-gathers, drawn from a seed, on engines that are delayed, limited and different on
//! each rank.
//!
//! Ranks are threads of this process. Before every start, each rank fills its block with new data
//! and poisons the output; after it, each rank checks every byte. Only the all-gather itself keeps
//! the ranks in step. A seed decides everything except the scheduling of threads, so that it finds
//! a fault again in a few runs.

mod operation;
mod overlap;
mod rank;
mod scenario;

use std::panic::{AssertUnwindSafe, catch_unwind};

use peerlane_collectives::bootstrap::in_process::{self, InProcessBootstrap};
use peerlane_collectives::error::Error;
use peerlane_hal::Rank;

use operation::Guarded;
use peerlane_conformance::{Failure, Outcome};

pub use overlap::check_without;
pub use scenario::{BLOCK_BYTES, Elements, Engine, Phase, RANKS, Scenario};

/// Runs a scenario. A failure names the scenario, so that it can be run again.
///
/// # Errors
/// The failure of every rank that failed.
pub fn run(scenario: &Scenario) -> Outcome {
    let states = open_bootstraps(scenario).map_err(|failure| failure.within(scenario))?;
    let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        let threads: Vec<_> = states
            .into_iter()
            .map(|mut state| scope.spawn(move || (run_rank(scenario, &mut state), state)))
            .collect();
        // Keeps own memory until every rank has ended: after a failure of one rank, another may still
        // write to its memory.
        let joined: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        joined.into_iter().map(|end| end.expect("panics are caught inside").0).collect()
    });
    let failures: Vec<_> = outcomes
        .into_iter()
        .zip(Rank::all(scenario.ranks))
        .filter_map(|(outcome, rank)| Some(format!("\n  rank {rank}: {}", outcome.err()?)))
        .collect();
    if failures.is_empty() {
        return Ok(());
    }
    Err(Failure::new(format!("{scenario}{}", failures.concat())))
}

/// What one rank's thread owns.
struct RankState {
    rank: Rank,
    bootstraps: Vec<InProcessBootstrap>,
    /// An input and an output for every operation, if the rank brings its own.
    memory: Vec<Guarded>,
}

fn open_bootstraps(scenario: &Scenario) -> Outcome<Vec<RankState>> {
    let mut states: Vec<_> = Rank::all(scenario.ranks)
        .map(|rank| RankState { rank, bootstraps: Vec::new(), memory: scenario.own_memory(rank) })
        .collect();
    for _ in 0..scenario.groups {
        let group = in_process::group(scenario.ranks).map_err(failed)?;
        states.iter_mut().zip(group).for_each(|(state, handle)| state.bootstraps.push(handle));
    }
    Ok(states)
}

fn run_rank(scenario: &Scenario, state: &mut RankState) -> Outcome {
    let bootstraps = std::mem::take(&mut state.bootstraps);
    let run = || rank::run(scenario, state.rank, bootstraps, &mut state.memory);
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("panic without a text");
        Err(Failure::new(format!("panicked: {text}")))
    })
}

fn failed(error: Error) -> Failure {
    Failure::new(format!("{error} ({})", error.kind()))
}
