//! Runs whole groups over the CUDA backend, one process for each rank: what they do, what goes wrong, and what they cost.
//!
//! It runs on GPUs if there are any, otherwise on the simulated driver. The modules are shared with the other programs
//! of this folder, as far as these use them; `vendor` is what differs between vendors.

mod costs;
mod cuda;
mod cuda_faults;
mod faults;
mod processes;
mod support;

use std::process::ExitCode;

use libtest_mimic::Arguments;
use peerlane_tests::GpuDriver;
use peerlane_tests::processes::Parent;
use peerlane_tests::steady::Counting;

use self::cuda as vendor;
use self::cuda_faults::{driver, opening};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() -> ExitCode {
    if let Some(parent) = Parent::find() {
        let outcome = match parent.role() {
            processes::ROLE => processes::run_rank(&parent),
            costs::ROLE => costs::run_rank(&parent),
            _ => faults::run_rank(&parent),
        };
        return parent.exit_code(outcome);
    }
    let driver = GpuDriver::load::<vendor::Context>();
    eprintln!("running on: {driver:?}");
    let mut arguments = Arguments::from_args();
    // Ranks share the processors already, and several cases say how soon something must be over.
    arguments.test_threads.get_or_insert(1);
    let trials = [processes::trials(driver), faults::trials(driver), costs::trials(driver)];
    libtest_mimic::run(&arguments, trials.into_iter().flatten().collect()).exit_code()
}
