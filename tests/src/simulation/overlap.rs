//! What goes on while one rank does not come.
//!
//! A slow rank may hold up what waits for it and nothing else. Bytes cannot show that, since they
//! arrive sooner or later; so each op gets a ticket of its own, and the trace says how far every
//! engine has come while the slow rank sleeps.

use std::sync::Barrier;
use std::time::Duration;

use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::in_process::{self, InProcess};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::Group;
use peerlane_collectives::plan::{Algorithm, Flag, Step};
use peerlane_collectives::schedule::{self, Shape};
use peerlane_collectives::topology::Topology;
use peerlane_hal::{Deadline, Rank, Ticket};
use peerlane_host as host;

use super::failed;
use crate::failure::{Failure, Outcome};
use crate::middleware::{TraceLayer, TraceLog, Wrapped};

const SHARD_LEN: usize = 100;
const PATIENCE: Duration = Duration::from_secs(10);
/// Long enough that somebody who goes on although he must not has gone on.
const REST: Duration = Duration::from_millis(20);

/// Runs one start in which `slow` comes last, and looks how far the others come without it.
///
/// # Errors
/// If a rank did not do all that needs nothing from the slow one, or did more.
pub fn without(slow: Rank, ranks: usize, outputs: u32) -> Outcome {
    let log = TraceLog::new();
    let ready = Barrier::new(ranks);
    let here = format!("rank {slow} of {ranks} is slow, {outputs} output(s)");
    let lived = in_process::run(ranks, |bootstrap| {
        let rank = bootstrap.rank();
        let prepared = open(bootstrap, &log).and_then(|mut group| {
            let gather = group.all_gather::<u8>(SHARD_LEN).outputs(outputs).prepare()?;
            Ok((group, gather))
        });
        // Also with an error: the others wait.
        ready.wait();
        let (group, mut gather) = prepared?;
        if rank == slow {
            let seen = look(&log, slow, ranks, outputs);
            gather.run()?;
            group.close()?;
            return Ok(seen);
        }
        gather.run()?;
        group.close()?;
        Ok(Ok(()))
    });
    let seen: Outcome = lived.map_err(failed)?.into_iter().collect();
    seen.map_err(|failure| failure.within(here))
}

/// Every op is a slice, so that the tickets count ops.
fn open(bootstrap: InProcess, log: &TraceLog) -> Result<Group, Error> {
    let mut options = host::Options::default();
    options.caps.slice_ops_max = 1;
    let fabric = host::Fabric::open_with(bootstrap.rank(), bootstrap.ranks(), options)?;
    Group::open(bootstrap, Wrapped::new(fabric, TraceLayer::new(log.clone())))
}

/// Returns when the others have come as far as they can without `slow`, and no further.
fn look(log: &TraceLog, slow: Rank, ranks: usize, outputs: u32) -> Outcome {
    let wanted = wanted(slow, ranks, outputs)?;
    let deadline = Deadline::after(PATIENCE);
    while seen(log, slow, ranks) != wanted {
        if deadline.has_passed() {
            let seen = seen(log, slow, ranks);
            return Err(Failure::new(format!("ops done {seen:?}, wanted {wanted:?}\n{log}")));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(REST);
    let seen = seen(log, slow, ranks);
    if seen == wanted {
        return Ok(());
    }
    Err(Failure::new(format!("somebody went on: ops done {seen:?}, wanted {wanted:?}\n{log}")))
}

/// The ops of each rank's lane in front of the first wait for the slow one; nothing of that itself.
fn wanted(slow: Rank, ranks: usize, outputs: u32) -> Outcome<Vec<Ticket>> {
    let topology = Topology::flat(ranks).map_err(failed)?;
    let shape = Shape { outputs, ..Shape::default() };
    let plans = schedule::plans(Algorithm::Direct, &topology, shape).map_err(failed)?;
    let ops = plans.iter().map(|plan| {
        let steps = &plan.lanes[0].steps;
        let free = steps.iter().take_while(|step| !waits_for(step, slow)).count();
        Ticket(if plan.rank == slow { 0 } else { free as u64 })
    });
    Ok(ops.collect())
}

fn waits_for(step: &Step, slow: Rank) -> bool {
    match *step {
        Step::Wait { flag: Flag::Ready { from, .. } } => from == slow,
        Step::Wait { flag: Flag::Arrived { cell, .. } } => cell.shard == slow,
        _ => false,
    }
}

/// The last ticket that each rank's engine has completed.
fn seen(log: &TraceLog, slow: Rank, ranks: usize) -> Vec<Ticket> {
    let mut seen = vec![Ticket::NONE; ranks];
    for event in log.events() {
        if event.text == "complete" && event.rank != slow {
            seen[event.rank.index()] = event.ticket;
        }
    }
    seen
}
