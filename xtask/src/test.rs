//! `cargo xtask test`: the tests of one backend, or of all that this machine can run.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use clap::ValueEnum;

use crate::process::{self, Outcome};

pub(crate) mod rdma;

/// Whose tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    /// The reference backend over host memory.
    Host,
    /// NVLink copy engines.
    Cuda,
    /// XGMI SDMA engines.
    Rocm,
    /// RDMA network cards.
    Rdma,
    /// Every backend; one that cannot be tested here is a failure.
    All,
}

/// What the tests of the CUDA backend read: `device` or `simulated`.
const CUDA_DRIVER: &str = "PEERLANE_TEST_CUDA";
/// What the kernel module of the NVIDIA driver makes.
const CUDA_DEVICE: &str = "/dev/nvidiactl";

/// Runs the tests; `None` is whatever this machine can run, and says what was left out.
pub(crate) fn run(
    backend: Option<Backend>,
    require_device: bool,
    options: &rdma::Options,
) -> Outcome {
    if let Some(option) = options.given().filter(|_| backend != Some(Backend::Rdma)) {
        return Err(format!("{option}: for rdma alone; run `cargo xtask test rdma`").into());
    }
    match backend {
        None => {
            everything()?;
            println!("{}", cuda_driver());
            println!("not run: {ROCM}");
            println!("not run: rdma in a virtual machine; run `cargo xtask test rdma`");
            Ok(())
        }
        Some(Backend::Host | Backend::All) if require_device => {
            Err("--require-device is for a vendor's backend, such as cuda".into())
        }
        Some(Backend::Host) => everything(),
        Some(Backend::Cuda) => cuda(require_device),
        Some(Backend::Rdma) if require_device => {
            Err("--require-device is for cuda; --here runs on this machine's RDMA devices".into())
        }
        Some(Backend::Rdma) => rdma::run(options),
        Some(Backend::All) => {
            everything()?;
            rdma::run(options)?;
            Err(ROCM.into())
        }
        Some(Backend::Rocm) => Err(format!("{ROCM}; run `cargo xtask test host`").into()),
    }
}

/// A backend that cannot be tested yet.
const ROCM: &str = "rocm: the backend is not built yet, peerlane-rocm holds only its skeleton";

/// On what the tests of the CUDA backend run here.
fn cuda_driver() -> &'static str {
    if Path::new(CUDA_DEVICE).exists() {
        "cuda: tested on the GPUs of this machine"
    } else {
        "cuda: tested on the simulated driver; there is no NVIDIA GPU here"
    }
}

/// The contract and the processes of the CUDA backend alone.
fn cuda(require_device: bool) -> Outcome {
    if require_device && !Path::new(CUDA_DEVICE).exists() {
        return Err(format!("there is no NVIDIA GPU here: {CUDA_DEVICE} is missing").into());
    }
    println!("{}", cuda_driver());
    let mut command = process::cargo(["test", "--no-fail-fast"]);
    command.args(["--package", "peerlane-cuda", "--package", "peerlane-simulated-driver"]);
    command.args(["--package", "peerlane-conformance", "--lib", "--test", "cuda*"]);
    if require_device {
        command.env(CUDA_DRIVER, "device");
    }
    if Path::new(CUDA_DEVICE).exists() {
        // Streams of one process share the channels of a device: the waits of one test would hold up
        // the streams of another.
        command.args(["--", "--test-threads=1"]);
    }
    tests(command)
}

fn everything() -> Outcome {
    tests(process::cargo(["test", "--workspace", "--no-fail-fast"]))
}

/// With arguments for every test program.
fn tests_with(mut command: Command, arguments: &[String]) -> Outcome {
    command.arg("--").args(arguments);
    tests(command)
}

fn tests(mut command: Command) -> Outcome {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{}: {error}", process::line(&command)))?;
    let printed = BufReader::new(child.stdout.take().expect("standard output is piped"));
    let totals = pass_on(printed, std::io::stdout())?;
    let status = child.wait()?;

    println!("\n{totals}");
    if !status.success() {
        return Err(format!("{} failed: {status}", process::line(&command)).into());
    }
    if totals.passed == 0 { Err("no test ran".into()) } else { Ok(()) }
}

/// Copies what the tests print, and adds up their results.
fn pass_on(printed: impl BufRead, mut out: impl Write) -> Outcome<Totals> {
    let mut totals = Totals::default();
    for line in printed.split(b'\n') {
        let line = line?;
        out.write_all(&line)?;
        out.write_all(b"\n")?;
        totals.add(&String::from_utf8_lossy(&line));
    }
    Ok(totals)
}

/// The sum over all test programs.
#[derive(Debug, Default, PartialEq, Eq)]
struct Totals {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Totals {
    /// Adds a line such as `test result: ok. 4 passed; 0 failed; 1 ignored; …`; ignores any other.
    fn add(&mut self, line: &str) {
        let Some(counts) = line.strip_prefix("test result: ") else { return };
        let words: Vec<&str> =
            counts.split([' ', ';', '.']).filter(|word| !word.is_empty()).collect();
        for pair in words.windows(2) {
            let Ok(count) = pair[0].parse::<u64>() else { continue };
            match pair[1] {
                "passed" => self.passed += count,
                "failed" => self.failed += count,
                "ignored" => self.ignored += count,
                _ => {}
            }
        }
    }
}

impl std::fmt::Display for Totals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { passed, failed, ignored } = self;
        write!(f, "tests: {passed} passed, {failed} failed, {ignored} skipped")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_add_up_over_programs() {
        let printed = "running 2 tests\n\
            test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s\n\
            other words: 7 passed\n\
            test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out\n";
        let mut out = Vec::new();
        let totals = pass_on(printed.as_bytes(), &mut out).unwrap();
        assert_eq!(totals, Totals { passed: 15, failed: 2, ignored: 1 });
        assert_eq!(totals.to_string(), "tests: 15 passed, 2 failed, 1 skipped");
        assert_eq!(String::from_utf8(out).unwrap(), printed);
    }

    #[test]
    fn a_vendor_says_what_it_lacks() {
        assert_eq!(
            run(Some(Backend::Rocm), false, &rdma::Options::default()).unwrap_err().to_string(),
            "rocm: the backend is not built yet, peerlane-rocm holds only its skeleton; \
             run `cargo xtask test host`"
        );
    }
}
