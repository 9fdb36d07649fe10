//! Lets a driver call fail, or a device fail, during a start on one rank.

use std::time::Duration;

use peerlane_test_support::Stopwatch;
use peerlane_tests::processes::Child;
use peerlane_tests::{GpuDriver, Outcome};

use super::Fault;
use super::processes::{finish, patience, ranks, says, words};
use crate::driver::{FAILING, LOST, RECORDED, UNKNOWN};
use crate::support::data::check;

const RANKS: usize = 3;
/// The rank on which it happens.
const BROKEN: usize = 1;
/// The rank that starts once the device of the other one is broken.
const LATE: usize = 0;
/// How long the ranks may take to end and to use their devices again, once the start has failed on all of them.
const SOON: Duration = Duration::from_secs(1);

pub(crate) fn faults() -> Vec<Fault> {
    let mut faults = Vec::new();
    for &(call, after, named) in FAILING {
        faults.push(Fault::simulated(format!("unknown_code::{call}_{after}"), move |driver| {
            let holds = [named, "device 1 (", "9999", UNKNOWN, "engine of rank 1 failed"];
            broken(driver, &format!("fail:{call}:{after}:9999"), &holds, ["aborted"; 2])
        }));
    }
    faults.push(Fault::simulated("unknown_code::while_it_captures", in_a_capture));
    for &(name, inject, holds) in LOST {
        faults.push(Fault::simulated(format!("device_lost::{name}"), move |driver| {
            let holds = ["device 1 (", holds, "engine of rank 1 failed"];
            broken(driver, inject, &holds, ["device lost", "peer lost"])
        }));
    }
    faults
}

/// A call fails while a start is recorded: the group ends, and nothing comes of the capture.
fn in_a_capture(driver: GpuDriver) -> Outcome {
    let (call, after, named) = RECORDED;
    let inject = format!("fail:{call}:{after}:9999");
    let (_hub, mut children) = ranks(driver, "capture", 2, |rank, player| {
        player.value("INJECT", if rank == 1 { inject.as_str() } else { "" })
    })?;
    let named = format!("{named} failed on device 1 (");
    let holds = ["engine of rank 1 failed", &named, "9999"];
    let recorded = words(&mut children)?;
    // It may have heard of the end before it recorded anything.
    if !recorded[0].starts_with("Lease ") {
        says("rank 0", &recorded[0], "aborted: ", &holds)?;
    }
    says("rank 1", &recorded[1], "aborted: ", &holds)?;
    let ended = words(&mut children)?;
    says("rank 0", &ended[0], "broken: ", &holds)?;
    says("rank 1", &ended[1], "broken: ", &[])
}

/// One rank fails; all say so, with the driver's own words, and live on. `kinds` are those of the
/// errors there and on the others.
fn broken(driver: GpuDriver, inject: &str, holds: &[&str], kinds: [&str; 2]) -> Outcome {
    let breaks = !inject.starts_with("fail");
    let (_hub, mut children) = ranks(driver, "gather", RANKS, |rank, player| {
        // A rank that comes late lets the device break while the others are waited for.
        let late = if rank == LATE && breaks { "late" } else { "" };
        player.value("INJECT", if rank == BROKEN { inject } else { late })
    })?;
    if breaks {
        children[BROKEN].expect("broken", patience())?;
        children[LATE].send_line("the device is broken")?;
    }
    let fallen = words(&mut children)?;
    let watch = Stopwatch::start_with(children.iter().map(Child::id));
    for (rank, text) in fallen.iter().enumerate() {
        let kind = kinds[usize::from(rank != BROKEN)];
        says(&format!("rank {rank}"), text, &format!("fell in start: {kind}, rank 1: "), &[])?;
        says(&format!("rank {rank}"), text, "fell in start: ", holds)?;
    }
    let later = words(&mut children)?;
    for (rank, (text, first)) in later.iter().zip(&fallen).enumerate() {
        let wanted = first.replace("fell in start", "fell in barrier");
        says(&format!("rank {rank}, later,"), text, &wanted, &[])?;
    }
    for (rank, text) in words(&mut children)?.iter().enumerate() {
        says(&format!("rank {rank}"), text, "alive", &[])?;
    }
    let took = watch.elapsed();
    check(took.is_within(SOON), || format!("the end took {took}, expected {SOON:?}"))?;
    finish(children)
}
