//! `cargo xtask test`: the tests of one backend, or of all that this machine can run.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use clap::{Args, ValueEnum};

use peerlane_rxe_vm::Totals;
use peerlane_rxe_vm::process::{self, Outcome};

pub(crate) mod rdma;
pub(crate) mod rdma_programs;
pub(crate) mod rocm;

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
/// The file with the names of the tests that failed last; `cargo xtask ci` prints it at its end.
pub(crate) const FAILURES: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../target/failed-tests.txt");
/// What the kernel module of the NVIDIA driver makes.
const CUDA_DEVICE: &str = "/dev/nvidiactl";

/// Runs the tests; `None` is whatever this machine can run, and says what was left out.
pub(crate) fn run(backend: Option<Backend>, require_device: bool, options: &Options) -> Outcome {
    let Options { rdma, rocm } = options;
    if let Some(option) = rdma.given().filter(|_| backend != Some(Backend::Rdma)) {
        return Err(format!("{option}: for rdma alone; run `cargo xtask test rdma`").into());
    }
    if let Some(option) = rocm.given().filter(|_| backend != Some(Backend::Rocm)) {
        return Err(format!("{option}: for rocm alone; run `cargo xtask test rocm`").into());
    }
    match backend {
        None => {
            everything()?;
            println!("{}", cuda_driver());
            println!("{}", rocm::driver());
            println!(
                "not run: bindings of ROCm against real libraries, unless they are fetched; run `cargo \
                 xtask test rocm`"
            );
            println!("not run: rdma in a virtual machine; run `cargo xtask test rdma`");
            Ok(())
        }
        Some(Backend::Host | Backend::All) if require_device => {
            Err("--require-device is for a vendor's backend, such as cuda".into())
        }
        Some(Backend::Host) => everything(),
        Some(Backend::Cuda) => cuda(require_device),
        Some(Backend::Rdma) if require_device => {
            Err("--require-device is for cuda and rocm; --here runs on this machine's RDMA devices"
                .into())
        }
        Some(Backend::Rdma) => rdma::run(rdma),
        Some(Backend::Rocm) => rocm::run(require_device, rocm),
        Some(Backend::All) => {
            // Fetched first, so that the tests find them.
            crate::rocm::releases()?;
            everything()?;
            rdma::run(rdma)
        }
    }
}

/// What single backends have of their own.
#[derive(Args, Clone, Debug, Default)]
#[group(skip)]
pub(crate) struct Options {
    #[command(flatten)]
    rdma: rdma::Options,
    #[command(flatten)]
    rocm: rocm::Options,
}

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
    fs::write(FAILURES, totals.failures.join("\n"))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_add_up_over_programs() {
        let printed = "running 2 tests\n\
            test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s\n\
            other words: 7 passed\n\
            test kill::rank_3     ... FAILED\n\
            test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out\n";
        let mut out = Vec::new();
        let totals = pass_on(printed.as_bytes(), &mut out).unwrap();
        let failures = vec!["kill::rank_3".to_owned()];
        assert_eq!(totals, Totals { passed: 15, failed: 2, ignored: 1, failures });
        let text = "tests: 15 passed, 2 failed, 1 skipped\nFAILED: kill::rank_3";
        assert_eq!(totals.to_string(), text);
        assert_eq!(String::from_utf8(out).unwrap(), printed);
    }

    #[test]
    fn an_option_is_for_its_backend_alone() {
        let rocm = rocm::Options { hip_on_cuda: true };
        let options = Options { rocm, ..Options::default() };
        assert_eq!(
            run(Some(Backend::Cuda), false, &options).unwrap_err().to_string(),
            "--hip-on-cuda: for rocm alone; run `cargo xtask test rocm`"
        );
    }
}
