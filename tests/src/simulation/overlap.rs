//! Checks how far the other ranks proceed while one rank is late.
//!
//! A slow rank may delay only what waits for it. Bytes cannot show that, because they arrive sooner
//! or later. So each op gets its own ticket, and the trace shows how far every engine has come
//! while the slow rank sleeps.

use std::sync::Barrier;
use std::time::Duration;

use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::in_process::{self, InProcessBootstrap};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::Group;
use peerlane_collectives::plan::{Algorithm, Flag, Step};
use peerlane_collectives::schedule::{self, Shape};
use peerlane_collectives::topology::Topology;
use peerlane_hal::{Deadline, Rank, Ticket};
use peerlane_host as host;

use super::failed;
use peerlane_conformance::middleware::{TraceLayer, TraceLog, Wrapped};
use peerlane_conformance::{Failure, Outcome};

const BLOCK_LEN: usize = 100;
/// Limits how long the ranks may take to reach their first wait for the slow one.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time after which a rank that continues although it must wait has continued.
const REST: Duration = Duration::from_millis(20);

/// Runs one start in which `slow` comes last, and checks how far the other ranks proceed without
/// it.
///
/// # Errors
/// If a rank did not do everything that needs nothing from the slow one, or did more.
pub fn check_without(slow: Rank, ranks: usize, outputs: u32) -> Outcome {
    let log = TraceLog::new();
    let ready = Barrier::new(ranks);
    let case = format!("rank {slow} of {ranks} is slow, {outputs} output(s)");
    let lived = in_process::run(ranks, |bootstrap| {
        let rank = bootstrap.rank();
        let prepared = open(bootstrap, &log).and_then(|mut group| {
            let gather = group.all_gather::<u8>(BLOCK_LEN).outputs(outputs).prepare()?;
            Ok((group, gather))
        });
        // Reached with an error too, because the other ranks wait here.
        ready.wait();
        let (group, mut gather) = prepared?;
        if rank == slow {
            let seen = check_progress(&log, slow, ranks, outputs);
            gather.run()?;
            group.close()?;
            return Ok(seen);
        }
        gather.run()?;
        group.close()?;
        Ok(Ok(()))
    });
    let seen: Outcome = lived.map_err(failed)?.into_iter().collect();
    seen.map_err(|failure| failure.within(case))
}

/// Opens a group on an engine with one op in each slice, so that the tickets count ops.
fn open(bootstrap: InProcessBootstrap, log: &TraceLog) -> Result<Group, Error> {
    let mut options = host::Options::default();
    options.caps.slice_ops_max = 1;
    let fabric = host::Fabric::open_with(bootstrap.rank(), bootstrap.ranks(), options)?;
    Group::open(bootstrap, Wrapped::new(fabric, TraceLayer::new(log.clone())))
}

/// Returns when the other ranks have come as far as they can without `slow`, and no farther.
fn check_progress(log: &TraceLog, slow: Rank, ranks: usize, outputs: u32) -> Outcome {
    let expected = expected(slow, ranks, outputs)?;
    let deadline = Deadline::after(TIMEOUT);
    while seen(log, slow, ranks) != expected {
        if deadline.has_passed() {
            let seen = seen(log, slow, ranks);
            let text = format!(
                "completed ops of each rank are {seen:?}, expected {expected:?} within {TIMEOUT:?}"
            );
            return Err(Failure::new(format!("{text}\n{log}")));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(REST);
    let seen = seen(log, slow, ranks);
    if seen == expected {
        return Ok(());
    }
    Err(Failure::new(format!(
        "a rank did not wait for the slow rank: completed ops of each rank are {seen:?}, expected \
         {expected:?}\n{log}"
    )))
}

/// Returns for each rank the number of ops in front of its first wait for the slow one; 0 for the
/// slow rank itself.
fn expected(slow: Rank, ranks: usize, outputs: u32) -> Outcome<Vec<Ticket>> {
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
        Step::Wait { flag: Flag::Arrived { cell, .. } } => cell.block == slow,
        _ => false,
    }
}

/// Returns the last ticket that each rank's engine has completed.
fn seen(log: &TraceLog, slow: Rank, ranks: usize) -> Vec<Ticket> {
    let mut seen = vec![Ticket::NONE; ranks];
    for event in log.events() {
        if event.text == "complete" && event.rank != slow {
            seen[event.rank.index()] = event.ticket;
        }
    }
    seen
}
