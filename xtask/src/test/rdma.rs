//! `cargo xtask test rdma`: runs the tests of the RDMA backend on real verbs.
//!
//! A small virtual machine has a kernel with RDMA devices (soft RoCE), one on each of several
//! nodes. The tests, libibverbs and the kernel driver are real; only the wire is a bridge. The
//! emulator, the kernel and the guest's programs are packages that are unpacked below
//! `target/rdma-vm`, not installed. Removing that folder fetches newer ones.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use cargo_metadata::{Artifact, Metadata, TargetKind};
use clap::Args;

use peerlane_rxe_vm::{self as vm, Booted, Job, Nodes, Program, Programs, Vm, perftest, quoted};

use super::programs::artifacts;
use crate::workspace;
use peerlane_rxe_vm::process::{Outcome, cargo};

/// Time limit of a test program, after which it counts as hung. The slowest takes 2 minutes on two
/// idle cores, and took 13 minutes on a busy machine.
const LIMIT_SECONDS: u64 = 1800;
/// Number of nodes of the virtual machine.
const NODES: u32 = 3;
/// The folder in which the kernel lists RDMA devices.
const DEVICES: &str = "/sys/class/infiniband";
/// Prefix of the variables that tests read.
const VARIABLES: &str = "PEERLANE_TEST_";
/// Packages all of whose tests are about RDMA.
const PACKAGES: [&str; 2] = ["peerlane-rdma", "peerlane-ibverbs-sys"];
/// The package whose tests are about RDMA if their names begin with [`PREFIX`].
const TESTS: &str = "peerlane-tests";
const PREFIX: &str = "rdma";
/// The test program of [`TESTS`] that needs huge pages, which a machine seldom has reserved.
const OF_HUGE_PAGES: &str = "caller_files";
/// The line of shell that reserves huge pages and mounts their file system, and the one that gives
/// them back.
const RESERVE: &str = "echo 112 >/proc/sys/vm/nr_hugepages && mkdir -p /run/huge && \
     mount -t hugetlbfs huge /run/huge";
const UNRESERVE: &str = "umount /run/huge && echo 0 >/proc/sys/vm/nr_hugepages";
/// The library that test programs open by its file.
const LIBRARY: &str = "peerlane_simulated_driver";
/// The variable with the names of the devices to test.
const DEVICES_VARIABLE: &str = "PEERLANE_TEST_RDMA_DEVICES";

/// Options of `cargo xtask test rdma`.
#[derive(Args, Debug, Default)]
pub(super) struct Options {
    /// Use this machine's own RDMA devices instead of those of a virtual machine.
    #[arg(long, conflicts_with_all = ["smoke", "perftest", "command", "stock_kernel"])]
    here: bool,
    /// Boot, look at the devices and measure one latency, without the Rust tests.
    #[arg(long)]
    smoke: bool,
    /// Test and run optimised programs.
    #[arg(long)]
    release: bool,
    /// Also measure with ib_write_bw and other perftest programs.
    #[arg(long)]
    perftest: bool,
    /// Run this line of shell in the virtual machine instead of the Rust tests, with the program
    /// `peerlane` in the path; can be repeated.
    #[arg(long, value_name = "LINE")]
    command: Vec<String>,
    /// Time limit of a test program or line of shell, in seconds; by default 1800.
    #[arg(long, value_name = "SECONDS")]
    limit: Option<u64>,
    /// Boot the distribution's own kernel instead of a newer one; all nodes then share one device.
    #[arg(long)]
    stock_kernel: bool,
    /// Number of nodes of the virtual machine; by default 3.
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..=8))]
    nodes: Option<u32>,
    /// Build the tests with the whole workspace, which `cargo xtask test --all` has built already.
    #[arg(long, hide = true)]
    workspace: bool,
    /// Arguments of every Rust test program, such as the name of a test.
    #[arg(last = true)]
    arguments: Vec<String>,
}

impl Options {
    /// Returns whether the Rust tests run.
    fn tests(&self) -> bool {
        !self.smoke && self.command.is_empty()
    }
}

/// Runs the tests.
pub(super) fn run(options: &Options) -> Outcome {
    if options.here { here(options) } else { in_machine(options) }
}

/// Runs the tests on the devices of this machine. Tests that need several nodes skip themselves.
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

    let mut commands = commands(options);
    for command in &mut commands {
        if std::env::var_os(DEVICES_VARIABLE).is_none() {
            println!("rdma: on {}", devices.join(", "));
            command.env(DEVICES_VARIABLE, devices.join(","));
        }
        command.arg("--").args(&options.arguments);
    }
    super::tests(commands)
}

/// Returns the commands that run the tests.
fn commands(options: &Options) -> [Command; 2] {
    let mut backend = cargo(["test", "--tests"]);
    backend.args(PACKAGES.iter().flat_map(|package| ["--package", package]));
    let mut tests = cargo(["test", "--package", TESTS]);
    tests.args(["--test", &format!("{PREFIX}*"), "--test", OF_HUGE_PAGES]);
    if options.release {
        backend.arg("--release");
        tests.arg("--release");
    }
    [backend, tests]
}

/// Builds the test programs and adds them to the files of the guest.
fn build(metadata: &Metadata, options: &Options, built: &mut Programs) -> Outcome {
    let commands = if options.workspace {
        vec![super::workspace_programs()]
    } else {
        Vec::from(commands(options))
    };
    for mut command in commands {
        for artifact in artifacts(&mut command)? {
            add(metadata, &artifact, built)?;
        }
    }
    built.tests.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(())
}

/// Adds a test program of RDMA, a program that these start, or the library that they open by its
/// file.
fn add(metadata: &Metadata, artifact: &Artifact, built: &mut Programs) -> Outcome {
    let name = &artifact.target.name;
    let is_test = artifact.profile.test;
    if name == LIBRARY && !is_test {
        let libraries = artifact.filenames.iter().filter(|it| it.extension() == Some("so"));
        built.helpers.extend(libraries.map(Into::into));
    }
    let Some(file) = &artifact.executable else { return Ok(()) };
    let package = metadata.packages.iter().find(|package| package.id == artifact.package_id);
    let package = package.ok_or("an artifact is of no package")?;
    // Unit tests open no device, and run outside of the machine.
    if is_test && !artifact.target.kind.contains(&TargetKind::Test) {
        return Ok(());
    }
    let of_backend = PACKAGES.contains(&package.name.as_str());
    let of_tests = package.name.as_str() == TESTS;
    let runs_here = name.starts_with(PREFIX) || name == OF_HUGE_PAGES;
    if is_test && (of_backend || of_tests && runs_here) {
        built.tests.push(Program {
            name: format!("{} {name}", package.name),
            file: file.into(),
            folder: package.manifest_path.parent().ok_or("a package has a folder")?.into(),
        });
    } else if !is_test && (of_backend || of_tests) {
        built.helpers.push(file.into());
    }
    Ok(())
}

fn in_machine(options: &Options) -> Outcome {
    if let Some(reason) = vm::unavailable() {
        return Err(format!("{reason}; --here runs on this machine's own RDMA devices").into());
    }
    let begun = Instant::now();
    let metadata = workspace::members()?;
    let target = metadata.target_directory.as_std_path();
    let nodes = Nodes::Namespaces(options.nodes.unwrap_or(NODES));
    let vm = Vm::obtain(target, nodes, options.stock_kernel)?;
    let taken = begun.elapsed();

    let mut built = Programs::default();
    if options.tests() {
        build(&metadata, options, &mut built)?;
    } else if !options.command.is_empty() {
        // Lines of shell can call it.
        built.commands.push(workspace::build_program(target, options.release)?);
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

/// Returns the jobs of the guest. Its tests see these variables.
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
        // A test has several threads that wait for each other, and the guest has two processors:
        // two tests at once take five times as long as one after the other.
        arguments.push("--test-threads=1".to_owned());
    }
    let limit = Duration::from_secs(options.limit.unwrap_or(LIMIT_SECONDS));
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
        let run = format!("env {}", words.join(" "));
        let command = match program.name.ends_with(OF_HUGE_PAGES) {
            true => format!("{RESERVE} && {run} && {UNRESERVE}"),
            false => format!("exec {run}"),
        };
        Job {
            name: program.name.clone(),
            command,
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

    #[test]
    fn tests_see_the_variables_that_are_meant_for_them() {
        let tests = vec![Program { name: "it".into(), file: "/bin/it".into(), folder: "/".into() }];
        let built = Programs { tests, ..Programs::default() };
        let variables = [("PEERLANE_TEST_ROUNDS".to_owned(), "10 000".to_owned())];
        let jobs = jobs(&Options::default(), Nodes::Loopback, &built, &variables);
        let expected = "exec env PEERLANE_TEST_ROUNDS='10 000' '/bin/it' --test-threads=1";
        assert_eq!(jobs.last().unwrap().command, expected);
    }

    #[test]
    fn a_program_of_huge_pages_has_them_while_it_runs() {
        let name = format!("{TESTS} {OF_HUGE_PAGES}");
        let tests = vec![Program { name, file: "/bin/it".into(), folder: "/".into() }];
        let built = Programs { tests, ..Programs::default() };
        let jobs = jobs(&Options::default(), Nodes::Loopback, &built, &[]);
        let expected = format!("{RESERVE} && env '/bin/it' --test-threads=1 && {UNRESERVE}");
        assert_eq!(jobs.last().unwrap().command, expected);
    }
}
