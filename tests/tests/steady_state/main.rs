//! Checks that a start allocates nothing, frees nothing, and makes no system call but those with which a rank
//! waits.
//!
//! This program's allocator counts the allocations of all threads. `strace` counts system calls, if
//! it is installed and permitted; `PEERLANE_REQUIRE_STRACE=1` makes its absence a failure. The
//! traced rank marks the interval by two system calls that are not used otherwise, and only gathers
//! between them.

mod channels;
mod resized;
mod system_calls;
mod windows;

use std::process::ExitCode;
use std::sync::Barrier;

use libtest_mimic::{Arguments, Failed, Trial};
use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::in_process;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, Operation};
use peerlane_hal::Rank;
use peerlane_host as host;
use peerlane_tests::processes::{Parent, leftovers};
use peerlane_tests::steady::{Counting, Counts, come_to_rest};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const WARM_UP: u32 = 100;
const STARTS: u32 = 1000;
const BLOCK_LEN: usize = 1000;

fn main() -> ExitCode {
    if let Some(parent) = Parent::find() {
        return system_calls::run_rank(&parent);
    }
    let mut arguments = Arguments::from_args();
    // The allocator counts for the whole process.
    arguments.test_threads = Some(1);
    let mut trials = Vec::new();
    for ranks in 1..=4 {
        for outputs in [1, 2] {
            let name = format!("a_start_allocates_nothing::{ranks}_ranks::{outputs}_outputs");
            trials.push(Trial::test(name, move || allocates_nothing(ranks, outputs)));
        }
    }
    for ranks in [1, 3] {
        let name = format!("a_start_over_a_window_allocates_nothing::{ranks}_ranks");
        trials.push(Trial::test(name, move || windows::allocates_nothing(ranks)));
    }
    for ranks in [1, 3] {
        let name = format!("a_start_of_any_length_allocates_nothing::{ranks}_ranks");
        trials.push(Trial::test(name, move || resized::allocates_nothing(ranks)));
    }
    for ranks in [1, 3] {
        let name = format!("messages_of_a_channel_allocate_nothing::{ranks}_ranks");
        trials.push(Trial::test(name, move || channels::allocates_nothing(ranks)));
    }
    let skipped = system_calls::reason_to_skip();
    for ranks in [2, 4] {
        for outputs in [1, 2] {
            let name =
                format!("a_start_only_waits_in_the_kernel::{ranks}_ranks::{outputs}_outputs");
            let trial = Trial::test(name, move || system_calls::only_waits(ranks, outputs));
            trials.push(trial.with_ignored_flag(skipped.is_some()));
        }
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    if let Some(reason) = skipped {
        eprintln!("not covered: a_start_only_waits_in_the_kernel: {reason}");
    }
    conclusion.exit_code()
}

fn allocates_nothing(ranks: usize, outputs: u32) -> Result<(), Failed> {
    count(ranks, |bootstrap| warm(bootstrap, outputs), |gather| repeat(gather, STARTS))
}

/// Counts what `measured` allocates on any rank, after `warm` has run.
fn count<G>(
    ranks: usize,
    warm: impl Fn(in_process::InProcessBootstrap) -> Result<(Group, G), Error> + Sync,
    measured: impl Fn(&mut G) -> Result<(), Error> + Sync,
) -> Result<(), Failed> {
    // Threads of the trial before, which may still be ending, are counted too.
    let left = leftovers();
    if !left.is_empty() {
        return Err(format!("the trial before has left {left:?}").into());
    }
    let gate = Barrier::new(ranks);
    let counts = in_process::run(ranks, |bootstrap| {
        let warm = warm(bootstrap);
        // Also with an error: the others wait.
        gate.wait();
        let (group, mut gather) = warm?;
        if group.rank() == Rank(0) {
            come_to_rest();
        }
        gate.wait();
        let before = Counts::now();
        gate.wait();
        let gathered = measured(&mut gather);
        gate.wait();
        let during = Counts::now().since(before);
        gate.wait();
        gathered?;
        drop(gather);
        group.close()?;
        Ok(during)
    });
    for (rank, during) in counts?.into_iter().enumerate() {
        if during != Counts::default() {
            return Err(format!("{STARTS} starts: {during:?}, seen by rank {rank}").into());
        }
    }
    Ok(())
}

/// A group and an operation that has run for a while.
fn warm(
    bootstrap: impl Bootstrap + 'static,
    outputs: u32,
) -> Result<(Group, Operation<i64>), Error> {
    let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    let mut group = Group::open(bootstrap, fabric)?;
    let mut gather = group.all_gather::<i64>(BLOCK_LEN).outputs(outputs).prepare()?;
    repeat(&mut gather, WARM_UP)?;
    Ok((group, gather))
}

/// Starts with data that changes, and looks at some of the result.
fn repeat(gather: &mut Operation<i64>, starts: u32) -> Result<(), Error> {
    for start in 0..starts {
        let value = i64::from(start);
        gather.input_mut()?.fill(value);
        gather.run()?;
        let output = gather.output()?;
        assert!(output.iter().step_by(BLOCK_LEN / 2).all(|seen| *seen == value), "start {start}");
    }
    Ok(())
}
