//! `cargo xtask test`: runs the tests of all backends, of one, of the Python package, or for
//! AArch64.

use std::fmt;
use std::fs;
use std::path::Path;
use std::process::Command;

use cargo_metadata::{Metadata, TargetKind};
use clap::{Args, Subcommand};

use self::programs::{Program, Results};
use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome, cargo};

mod aarch64;
mod changed;
mod programs;
pub(crate) mod python;
mod rdma;
mod rocm;
mod times;
mod ucx;

/// Options of `cargo xtask test`.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Options {
    /// The backend or package to test; without it, all that this machine can run.
    #[command(subcommand)]
    backend: Option<Backend>,
    /// Also run the test programs that take long, and the RDMA tests in the virtual machine.
    #[arg(long)]
    all: bool,
    /// Run only the tests of crates that differ from a commit, by default HEAD, and of those that
    /// depend on them.
    #[arg(long, value_name = "REV", num_args = 0..=1, default_missing_value = "HEAD", conflicts_with = "all")]
    changed: Option<String>,
}

/// The backend or package whose tests run.
#[derive(Debug, Subcommand)]
enum Backend {
    /// The reference backend over host memory.
    Host,
    /// NVLink copy engines.
    Cuda {
        /// Fail if there is no NVIDIA GPU; without it, a simulated driver replaces a missing GPU.
        #[arg(long)]
        require_device: bool,
    },
    /// XGMI SDMA engines.
    Rocm(rocm::Options),
    /// NICs with RDMA.
    Rdma(rdma::Options),
    /// UCX between network namespaces.
    Ucx(ucx::Options),
    /// The Python package.
    Python(python::Options),
    /// The host backend and the crates that it uses, built for AArch64 and run by QEMU.
    Aarch64,
    /// Every backend; one that cannot be tested here is a failure.
    All,
}

/// The test programs that only `cargo xtask test --all` runs, and what each adds to the others.
/// They take three quarters of the time of all tests.
const LONG: [(&str, &str); 16] = [
    ("all_gather_simulation", "all-gathers under many seeds"),
    ("checks_can_fail", "every check against a broken backend"),
    ("cuda", "the contract on CUDA; the tests of its engine run in any case"),
    (
        "cuda_ranks",
        "ranks that are processes on CUDA, faults of every call, and the calls of each start",
    ),
    ("kill", "ranks that are killed in every phase"),
    ("mixed_processes", "processes with memory of several kinds"),
    ("program_gpu", "the program on GPUs"),
    ("rdma", "needs RDMA devices"),
    ("rdma_faults", "needs RDMA devices"),
    ("rdma_mixed", "needs RDMA devices"),
    ("rdma_processes", "needs RDMA devices"),
    ("rocm", "the contract on ROCm, whose engine is that of CUDA"),
    ("rocm_ranks", "ranks that are processes on ROCm, and faults of every call"),
    ("rocm_sdma", "the contract and processes on SDMA engines"),
    ("sdma", "SDMA engines on a simulated HSA runtime"),
    ("staged", "memory of devices on networks that do not reach it"),
];
/// The packages that only `cargo xtask test --all` tests: tools for the tests of others.
const LONG_PACKAGES: [&str; 3] =
    ["peerlane-simulated-driver", "peerlane-hip-on-cuda", "peerlane-rxe-vm"];
/// The package of this program.
const XTASK: &str = env!("CARGO_PKG_NAME");

/// The file with the names of the tests that failed last, which `cargo xtask ci` prints at its end.
pub(crate) const FAILURES: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../target/failed-tests.txt");

/// The file with what the tests did not cover on this machine, each with its reason.
const NOT_COVERED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/not-covered.txt");

/// How the names of the tests begin that run in the virtual machine, because they need RDMA devices
/// or huge pages.
const OF_MACHINE: [&str; 2] = ["rdma", "files_of_huge_pages"];

fn is_of_machine(line: &str) -> bool {
    OF_MACHINE.iter().any(|begin| line.starts_with(begin))
}

/// The GPUs of a vendor and the tests of their backend.
struct Gpu {
    backend: &'static str,
    vendor: &'static str,
    /// The file that the kernel module of the driver creates.
    device: &'static str,
    /// The variable that selects the driver of the tests: `device` or `simulated`.
    driver: &'static str,
    /// The packages that are tested, without `peerlane-`.
    packages: &'static [&'static str],
    /// The test programs of these packages, and those of `peerlane-tests` that are of this backend.
    programs: &'static [&'static str],
}

const CUDA: Gpu = Gpu {
    backend: "cuda",
    vendor: "NVIDIA",
    device: "/dev/nvidiactl",
    driver: "PEERLANE_TEST_CUDA",
    packages: &["cuda", "simulated-driver"],
    programs: &["simulated", "driver", "cuda*"],
};

/// Runs the tests and prints which did not run, and at the end what this machine could not cover.
pub(crate) fn run(options: &Options) -> Outcome {
    // Those of an earlier run; there may be none.
    let _ = fs::remove_file(NOT_COVERED);
    let _ = fs::remove_file(FAILURES);
    let outcome = run_backend(options);
    println!("\nnot covered on this machine:");
    not_covered().iter().for_each(|line| println!("    {line}"));
    outcome
}

/// Returns what the last run of the tests did not cover, each with its reason.
pub(crate) fn not_covered() -> Vec<String> {
    let text = fs::read_to_string(NOT_COVERED).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// Adds lines to what [`not_covered`] returns.
fn add_not_covered(added: impl IntoIterator<Item = String>) -> Outcome {
    let mut lines = not_covered();
    lines.extend(added);
    lines.sort_unstable();
    lines.dedup();
    Ok(fs::write(NOT_COVERED, lines.join("\n"))?)
}

/// Removes the tests of the virtual machine from what [`not_covered`] returns, because they have
/// run in it.
fn forget_of_machine() -> Outcome {
    let lines = not_covered().into_iter().filter(|line| !is_of_machine(line));
    Ok(fs::write(NOT_COVERED, lines.collect::<Vec<_>>().join("\n"))?)
}

fn run_backend(options: &Options) -> Outcome {
    match &options.backend {
        None if options.all => long(),
        None => short(options.changed.as_deref()),
        Some(Backend::Host) => workspace_tests(),
        Some(Backend::Cuda { require_device }) => CUDA.test(*require_device),
        Some(Backend::Rocm(options)) => rocm::run(options),
        Some(Backend::Rdma(options)) => rdma::run(options),
        Some(Backend::Ucx(options)) => ucx::run(options),
        Some(Backend::Python(options)) => python::run(options),
        Some(Backend::Aarch64) => aarch64::run(),
        Some(Backend::All) => {
            // Fetched first, because the tests of the bindings skip what is missing.
            crate::rocm::releases()?;
            workspace_tests()?;
            rdma::run(&rdma::Options::default())?;
            ucx::run(&ucx::Options::default())?;
            forget_of_machine()
        }
    }
}

/// Runs the test programs that take little time; if `since` is a commit, only those of crates that
/// changed since then.
fn short(since: Option<&str>) -> Outcome {
    let metadata = workspace::members()?;
    let names = short_programs(&metadata);
    // Tests load examples, which cargo builds by itself only if no program is selected.
    let mut examples = cargo(["build", "--workspace", "--examples"]);
    let mut command = cargo(["test", "--workspace", "--lib", "--bins"]);
    command.args(names.iter().flat_map(|name| ["--test", name]));
    let mut documentation = cargo(["test", "--workspace", "--doc"]);
    for command in [&mut examples, &mut command, &mut documentation] {
        // The packages are the same in all commands, also for few changes, so that cargo builds
        // dependencies once. Those of the Python module would be built with other features than
        // `cargo run -p peerlane-cli` builds them.
        let excluded = LONG_PACKAGES.iter().chain(&[XTASK, "peerlane-python"]);
        command.args(excluded.flat_map(|package| ["--exclude", package]));
    }
    process::run(&mut examples)?;
    let mut programs = programs([command, own_tests(), documentation])?;
    let mut left_out = Vec::new();
    if let Some(since) = since {
        let packages = changed::packages(&metadata, since)?;
        if packages.is_empty() {
            println!("no crate differs from {since}");
            return Ok(());
        }
        left_out = programs::keep(&mut programs, &packages);
    }
    let outcome = run_programs(programs, at_once());
    note_drivers()?;
    println!("not run; `cargo xtask test --all` runs these too:");
    LONG.iter().for_each(|(name, adds)| println!("    {name}: {adds}"));
    LONG_PACKAGES.iter().for_each(|package| println!("    the tests of {package}"));
    println!(
        "    most seeds of the simulation, random plans and mutants: also with PEERLANE_SEEDS=20000"
    );
    println!("    rdma in a virtual machine: also by `cargo xtask test rdma`");
    println!("    ucx between namespaces: also by `cargo xtask test ucx`");
    if !left_out.is_empty() {
        println!("not run, because no change reaches them; `cargo xtask test` runs these too:");
        left_out.iter().for_each(|name| println!("    {name}"));
    }
    outcome
}

/// Runs all test programs, and then those of RDMA in a virtual machine if this machine can boot
/// one: emulated processors need all real ones.
fn long() -> Outcome {
    let mut programs = programs(workspace_commands())?;

    let no_namespaces = ucx::unavailable();
    if no_namespaces.is_none() {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["test", "ucx", "--workspace"]);
        programs.push(Program::of_command("ucx between namespaces", command));
    }
    let unavailable = peerlane_rxe_vm::unavailable();
    if unavailable.is_none() {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["test", "rdma", "--workspace"]);
        let mut program = Program::of_command("rdma in a virtual machine", command);
        program.alone = true;
        programs.push(program);
    }

    let outcome = run_programs(programs, at_once());
    note_drivers()?;
    add_not_covered(no_namespaces.map(|reason| format!("ucx between namespaces: {reason}")))?;
    match unavailable {
        Some(reason) => add_not_covered([format!("rdma in a virtual machine: {reason}")])?,
        None if outcome.is_ok() => forget_of_machine()?,
        None => {}
    }
    outcome
}

/// Prints the drivers that the tests ran on, and notes the GPUs that they did not run on.
fn note_drivers() -> Outcome {
    println!("{CUDA}\n{}", rocm::ROCM);
    let absent = [CUDA, rocm::ROCM].into_iter().filter(|gpu| !gpu.exists());
    add_not_covered(absent.map(|gpu| {
        let Gpu { backend, vendor, device, .. } = gpu;
        format!("{backend} on {vendor} GPUs: there is no {device}")
    }))
}

/// Returns the names of the test programs that [`LONG`] and [`LONG_PACKAGES`] leave.
fn short_programs(metadata: &Metadata) -> Vec<String> {
    let packages = metadata.packages.iter();
    let packages = packages.filter(|package| !LONG_PACKAGES.contains(&package.name.as_str()));
    let targets = packages.flat_map(|package| &package.targets);
    let mut names: Vec<String> = targets
        .filter(|target| target.kind.contains(&TargetKind::Test))
        .map(|target| target.name.clone())
        .filter(|name| LONG.iter().all(|(long, _)| long != name))
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

impl fmt::Display for Gpu {
    /// Says which driver the tests run on.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { backend, vendor, .. } = self;
        if self.exists() {
            write!(f, "{backend}: tested on the GPUs of this machine")
        } else {
            write!(f, "{backend}: tested on the simulated driver; there is no {vendor} GPU here")
        }
    }
}

impl Gpu {
    fn exists(&self) -> bool {
        Path::new(self.device).exists()
    }

    /// Fails if a GPU is required and missing.
    fn check(&self, require_device: bool) -> Outcome {
        let Self { vendor, device, .. } = self;
        if require_device && !self.exists() {
            return Err(format!("there is no {vendor} GPU here: {device} is missing").into());
        }
        Ok(())
    }

    /// Runs the tests of the backend: its own, the contract and the processes.
    fn test(&self, require_device: bool) -> Outcome {
        self.check(require_device)?;
        println!("{self}");
        let mut command = cargo(["test"]);
        for package in self.packages {
            command.args(["--package", &format!("peerlane-{package}")]);
        }
        command.args(["--package", "peerlane-tests", "--lib"]);
        command.args(self.programs.iter().flat_map(|name| ["--test", name]));
        if require_device {
            command.env(self.driver, "device");
        }
        if self.exists() {
            // Streams of one process share the hardware queues of a device: the waits of one test
            // delay the streams of another. The conformance programs decide themselves.
            command.env("RUST_TEST_THREADS", "1");
        }
        // Programs that share a GPU take turns on it.
        run_programs(programs([command])?, if self.exists() { 1 } else { at_once() })
    }
}

/// Runs all tests of the workspace.
fn workspace_tests() -> Outcome {
    tests(workspace_commands())
}

/// Returns the commands for all tests of the workspace, with more seeds and random plans than the
/// short tests have.
fn workspace_commands() -> [Command; 3] {
    let mut programs = workspace_programs();
    programs.env("PEERLANE_SEEDS", "20000");
    let documentation = cargo(["test", "--workspace", "--exclude", XTASK, "--doc"]);
    [programs, own_tests(), documentation]
}

/// Returns the command that builds and runs all test programs but those of this program.
fn workspace_programs() -> Command {
    cargo(["test", "--workspace", "--exclude", XTASK])
}

/// Returns the command for the tests of this program, whose dependencies are built as for the
/// program itself. In one command with the others, cargo would build theirs with the features that
/// these need, and once more without.
fn own_tests() -> Command {
    cargo(["test", "--package", XTASK])
}

/// Returns the number of test programs that run at once: more than there are cores, because many
/// tests sleep.
fn at_once() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    cores + cores.div_ceil(2)
}

/// Runs the programs of `cargo test` commands, several at once.
fn tests<const N: usize>(commands: [Command; N]) -> Outcome {
    run_programs(programs(commands)?, at_once())
}

/// Builds the programs of `cargo test` commands. Documentation tests are one program.
fn programs<const N: usize>(commands: [Command; N]) -> Outcome<Vec<Program>> {
    let mut programs = Vec::new();
    for command in commands {
        if command.get_args().any(|argument| argument == "--doc") {
            programs.push(Program::of_command("documentation", command));
        } else {
            programs.extend(programs::build(&command)?);
        }
    }
    Ok(programs)
}

/// Runs test programs, and prints the totals and what failed.
fn run_programs(programs: Vec<Program>, at_once: usize) -> Outcome {
    let Results { totals, failures, not_covered, slowest } = programs::run(programs, at_once)?;
    println!("\nthe slowest tests:");
    for (took, test) in slowest {
        println!("{:>8.1} s  {test}", took.as_secs_f64());
    }
    add_not_covered(not_covered)?;
    let list: Vec<String> = failures.iter().map(|failure| format!("FAILED: {failure}")).collect();
    println!("\n{totals}");
    fs::write(FAILURES, list.join("\n"))?;
    if !list.is_empty() {
        return Err(format!("{} tests or programs failed\n{}", list.len(), list.join("\n")).into());
    }
    if totals.passed == 0 { Err("no test ran".into()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_programs_exist() {
        let metadata = workspace::members().unwrap();
        let targets = || metadata.packages.iter().flat_map(|package| &package.targets);
        for (name, _) in LONG {
            assert!(targets().any(|target| target.name == name), "there is no test program {name}");
        }
        for name in LONG_PACKAGES {
            let mut packages = metadata.packages.iter();
            assert!(packages.any(|package| package.name.as_str() == name), "no package {name}");
        }
        assert!(short_programs(&metadata).contains(&"host".to_owned()));
    }
}
