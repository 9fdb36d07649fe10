//! Whole all-gathers on engines that delay, fall short and differ from rank to rank, drawn from a
//! seed.
//!
//! Ranks are threads of this process. Each fills its shard anew for every start, poisons the output,
//! starts, and looks at every byte; nothing but the all-gather itself keeps ranks in step. A seed
//! decides everything but the scheduling of threads, so that it finds a fault again in a few runs.

mod memory;
mod operation;
mod overlap;
mod rank;
mod scenario;

use std::panic::{AssertUnwindSafe, catch_unwind};

use peerlane_collectives::bootstrap::in_process::{self, InProcess};
use peerlane_collectives::error::Error;
use peerlane_hal::Rank;

use crate::failure::{Failure, Outcome};
use memory::Guarded;

pub use overlap::without;
pub use scenario::{Engine, Phase, RANKS, SHARD_BYTES, Scenario};

/// Runs a scenario; the failure names it, so that it can be run again.
///
/// # Errors
/// What every rank that did not end well has to say.
pub fn run(scenario: &Scenario) -> Outcome {
    let lives = set(scenario).map_err(|failure| failure.within(scenario))?;
    let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        let threads: Vec<_> = lives
            .into_iter()
            .map(|mut life| scope.spawn(move || (bounded(scenario, &mut life), life)))
            .collect();
        // Own memory stays until every rank has ended: a rank that failed is no reason to free
        // what another may still write.
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        ended.into_iter().map(|end| end.expect("panics are caught inside").0).collect()
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
struct Life {
    rank: Rank,
    bootstraps: Vec<InProcess>,
    /// An input and an output for every operation, where the rank brings its own.
    memory: Vec<Guarded>,
}

fn set(scenario: &Scenario) -> Outcome<Vec<Life>> {
    let mut lives: Vec<_> = Rank::all(scenario.ranks)
        .map(|rank| Life { rank, bootstraps: Vec::new(), memory: scenario.own_memory(rank) })
        .collect();
    for _ in 0..scenario.groups {
        let group = in_process::group(scenario.ranks).map_err(failed)?;
        lives.iter_mut().zip(group).for_each(|(life, handle)| life.bootstraps.push(handle));
    }
    Ok(lives)
}

fn bounded(scenario: &Scenario, life: &mut Life) -> Outcome {
    let bootstraps = std::mem::take(&mut life.bootstraps);
    let lived = || rank::live(scenario, life.rank, bootstraps, &mut life.memory);
    catch_unwind(AssertUnwindSafe(lived)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text");
        Err(Failure::new(format!("panicked: {text}")))
    })
}

fn failed(error: Error) -> Failure {
    Failure::new(format!("{error} ({})", error.kind()))
}
