//! `cargo xtask test rdma`: the tests of the RDMA backend, on real verbs.
//!
//! A small virtual machine has what few machines have: a kernel with RDMA devices (soft RoCE), one
//! on each of several nodes. The code of the tests, of libibverbs and of the kernel is the real one;
//! only the wire is a bridge. The emulator, the kernel and the programs of the guest come as
//! packages that are unpacked below `target/rdma-vm`; nothing is installed. Removing that folder
//! fetches newer ones.

use std::fs;
use std::time::{Duration, Instant};

use clap::Args;

use peerlane_rxe_vm::{self as vm, Booted, Job, Nodes, Programs, Vm, perftest, quoted};

use super::rdma_programs as programs;
use crate::workspace;
use peerlane_rxe_vm::process::Outcome;

/// What a test program may take: minutes, as a busy machine emulates slowly.
const LIMIT_SECONDS: u64 = 300;
/// Where the kernel lists the RDMA devices of a machine.
const DEVICES: &str = "/sys/class/infiniband";
/// What the names of variables that tests read begin with.
const VARIABLES: &str = "PEERLANE_TEST_";
/// What the tests read the devices' names from.
const DEVICES_VARIABLE: &str = "PEERLANE_TEST_RDMA_DEVICES";

/// What is run, and where.
#[derive(Args, Clone, Debug, Default)]
#[group(skip)]
pub(crate) struct Options {
    /// rdma: on this machine's own RDMA devices instead of those of a virtual machine.
    #[arg(long, requires = "backend", conflicts_with_all = ["smoke", "perftest", "command", "stock_kernel"])]
    here: bool,
    /// rdma: boot, look at the devices and measure one latency, without the Rust tests.
    #[arg(long, requires = "backend")]
    smoke: bool,
    /// rdma: test and run optimised programs.
    #[arg(long, requires = "backend")]
    release: bool,
    /// rdma: measure with ib_write_bw and its like besides.
    #[arg(long, requires = "backend")]
    perftest: bool,
    /// rdma: run this line of shell in the virtual machine instead of the Rust tests, where the program
    /// `peerlane` is at hand; several are run one after another.
    #[arg(long, requires = "backend", value_name = "LINE")]
    command: Vec<String>,
    /// rdma: seconds that a test program or line of shell may take.
    #[arg(long, requires = "backend", value_name = "SECONDS", default_value_t = LIMIT_SECONDS)]
    limit: u64,
    /// rdma: boot the distribution's own kernel and not a newer one; one device stands for all nodes.
    #[arg(long, requires = "backend")]
    stock_kernel: bool,
    /// rdma: how many nodes the virtual machine stands for.
    #[arg(long, requires = "backend", default_value_t = 3, value_parser = clap::value_parser!(u32).range(2..=8))]
    nodes: u32,
    /// rdma: build the tests with the whole workspace, as the gate has done already.
    #[arg(long, requires = "backend", hide = true)]
    workspace: bool,
    /// rdma: what every Rust test program is called with, such as the name of a test.
    #[arg(last = true, requires = "backend")]
    arguments: Vec<String>,
}

impl Options {
    /// The first option that was given, for backends that have none of them.
    pub(crate) fn given(&self) -> Option<&'static str> {
        let named = [
            (self.here, "--here"),
            (self.smoke, "--smoke"),
            (self.release, "--release"),
            (self.perftest, "--perftest"),
            (!self.command.is_empty(), "--command"),
            (self.stock_kernel, "--stock-kernel"),
            (self.workspace, "--workspace"),
            (!self.arguments.is_empty(), "arguments of test programs"),
        ];
        named.iter().find(|(given, _)| *given).map(|(_, name)| *name)
    }

    /// For the gate: all tests, built as the step before has built them.
    pub(crate) fn for_gate() -> Self {
        Self { nodes: 3, limit: LIMIT_SECONDS, workspace: true, ..Self::default() }
    }

    /// Whether the Rust tests run.
    fn tests(&self) -> bool {
        !self.smoke && self.command.is_empty()
    }
}

/// Runs the tests.
pub(crate) fn run(options: &Options) -> Outcome {
    if options.here { here(options) } else { in_machine(options) }
}

/// On the devices of this machine; what needs several nodes is skipped by the tests themselves.
fn here(options: &Options) -> Outcome {
    let mut devices: Vec<String> = fs::read_dir(DEVICES)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    devices.sort();
    if devices.is_empty() {
        return Err(format!(
            "there is no RDMA device here: {DEVICES} is empty or missing; \
             without --here the tests run in a virtual machine"
        )
        .into());
    }
    let mut command = programs::command(&workspace::members()?).ok_or(NO_TESTS)?;
    if options.release {
        command.arg("--release");
    }
    if std::env::var_os(DEVICES_VARIABLE).is_none() {
        println!("rdma: on {}", devices.join(", "));
        command.env(DEVICES_VARIABLE, devices.join(","));
    }
    command.arg("--").args(&options.arguments);
    super::tests([command])
}

const NO_TESTS: &str = "there is no test of the RDMA backend in this workspace";

fn in_machine(options: &Options) -> Outcome {
    if let Some(reason) = vm::unavailable() {
        return Err(format!("{reason}; --here runs on this machine's own RDMA devices").into());
    }
    let begun = Instant::now();
    let metadata = workspace::members()?;
    let target = metadata.target_directory.as_std_path();
    let vm = Vm::obtain(target, Nodes::Namespaces(options.nodes), options.stock_kernel)?;
    let taken = begun.elapsed();

    let mut built = Programs::default();
    if options.tests() {
        built = programs::build(&metadata, options.workspace, options.release)?;
        if built.tests.is_empty() {
            return Err(format!("{NO_TESTS}; --smoke tries the virtual machine alone").into());
        }
    } else if !options.command.is_empty() {
        built.commands.push(programs::peerlane(&metadata, options.release)?);
    }
    let compiled = begun.elapsed();
    let variables = std::env::vars().filter(|(name, _)| name.starts_with(VARIABLES));
    let jobs = jobs(options, vm.nodes(), &built, &variables.collect::<Vec<_>>());
    let Booted { console, end, image_seconds, guest_seconds } = vm.boot(&jobs, &built)?;

    println!();
    for job in &console.ended {
        println!("{job}");
    }
    println!(
        "packages {:.1} s, build {:.1} s, image {image_seconds:.1} s, guest {guest_seconds:.1} s",
        taken.as_secs_f64(),
        (compiled - taken).as_secs_f64(),
    );
    if options.tests() {
        println!("\n{}", console.totals);
    }
    console.verdict(end, jobs.len())?;
    if options.tests() && console.totals.passed == 0 {
        return Err("no test ran".into());
    }
    Ok(())
}

/// What the guest does; its tests also see these variables.
fn jobs(
    options: &Options,
    nodes: Nodes,
    built: &Programs,
    variables: &[(String, String)],
) -> Vec<Job> {
    let word = |(name, value): &(String, String)| format!("{name}={}", quoted(value));
    let variables: Vec<String> = variables.iter().map(word).collect();
    let mut arguments: Vec<String> = options.arguments.iter().map(|word| quoted(word)).collect();
    if !options.arguments.iter().any(|word| word.starts_with("--test-threads")) {
        // A test has several threads that wait for each other, and the guest has two processors: two
        // tests at once take five times as long as one after the other.
        arguments.push("--test-threads=1".to_owned());
    }
    let limit = Duration::from_secs(options.limit);
    let mut jobs = if options.command.is_empty() { perftest::smoke(nodes) } else { Vec::new() };
    jobs.extend(options.command.iter().map(|line| Job {
        name: line.lines().next().unwrap_or_default().to_owned(),
        command: line.clone(),
        folder: "/".into(),
        limit,
    }));
    jobs.extend(built.tests.iter().map(|program| {
        let program_file = [quoted(&program.file.to_string_lossy())];
        let words = [&variables[..], &program_file, &arguments[..]].concat();
        Job {
            name: program.name.clone(),
            command: format!("exec env {}", words.join(" ")),
            folder: program.folder.to_string_lossy().into_owned(),
            limit,
        }
    }));
    if options.perftest {
        jobs.extend(perftest::measurements(nodes));
    }
    jobs
}

#[cfg(test)]
mod tests {
    use super::*;
    use peerlane_rxe_vm::Program;

    #[test]
    fn tests_see_the_variables_that_are_meant_for_them() {
        let tests = vec![Program { name: "it".into(), file: "/bin/it".into(), folder: "/".into() }];
        let built = Programs { tests, ..Programs::default() };
        let variables = [("PEERLANE_TEST_ROUNDS".to_owned(), "10 000".to_owned())];
        let jobs = jobs(&Options::default(), Nodes::Loopback, &built, &variables);
        let wanted = "exec env PEERLANE_TEST_ROUNDS='10 000' '/bin/it' --test-threads=1";
        assert_eq!(jobs.last().unwrap().command, wanted);
    }
}
