//! `cargo xtask bench rdma`: measures RDMA in the virtual machine of `cargo xtask test rdma`, all in one boot, with
//! the sides in turns.
//!
//! The wire is a cable between two network namespaces with soft RoCE, and the guest's processors handle every
//! packet. So only ratios within a boot count, never the figures themselves.

use super::build_program;
use super::report::{self, Machine};
use crate::workspace;
use peerlane_rxe_vm::process::Outcome;
use peerlane_rxe_vm::{self as vm, Job, Nodes, Programs, Vm};

mod openmpi;
mod page;
mod record;
mod steps;

use record::Record;
use steps::{NODES, steps};

/// Options of `cargo xtask bench rdma`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Number of measurements of everything, in turns.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=20))]
    rounds: u16,
}

/// Measures everything and writes docs/perf/rdma.
pub(super) fn run(options: &Options) -> Outcome {
    if let Some(reason) = vm::unavailable() {
        return Err(reason.into());
    }
    let metadata = workspace::members()?;
    let (root, target) = (metadata.workspace_root.as_std_path(), &metadata.target_directory);
    let machine = Machine::ask()?;
    let vm = Vm::obtain(target.as_std_path(), NODES, false)?;
    if vm.nodes() == Nodes::Loopback {
        let reason = "the kernel has no RDMA device in a namespace, so it cannot be two nodes";
        return Err(reason.into());
    }
    let program = build_program(target.as_std_path())?;
    let mut built = Programs { commands: vec![program], ..Programs::default() };
    openmpi::add(root, vm.folder(), target.join("peers").as_std_path(), &mut built)?;

    let steps = steps(options.rounds);
    let jobs: Vec<Job> = steps.iter().map(|step| step.job.clone()).collect();
    let load = std::fs::read_to_string("/proc/loadavg")?;
    let booted = vm.boot(&jobs, &built)?;
    let mut record = Record {
        machine,
        emulator: vm.emulator().to_owned(),
        kernel: vm.kernel().to_owned(),
        load: load.split(' ').take(3).collect::<Vec<_>>().join(", "),
        rounds: options.rounds,
        ..Record::default()
    };
    for (step, ended) in steps.iter().zip(&booted.console.ended) {
        if ended.is_well() {
            let entered = (step.enter)(&mut record, &ended.printed);
            entered.map_err(|error| format!("{}: {error}", ended.name))?;
        }
    }
    booted.console.verdict(booted.end, jobs.len())?;
    report::save("rdma", &record, &record.page(), record.goals())
}
