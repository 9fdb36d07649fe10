//! `cargo xtask test`: the tests of one backend, or of all that this machine can run.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use clap::ValueEnum;

use crate::process::{self, Outcome};

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

const VENDORS: [Backend; 3] = [Backend::Cuda, Backend::Rocm, Backend::Rdma];

/// Runs the tests; `None` is whatever this machine can run, and says what was left out.
pub(crate) fn run(backend: Option<Backend>) -> Outcome {
    match backend {
        None => {
            host()?;
            VENDORS.iter().for_each(|vendor| println!("not run: {}", lacks(*vendor)));
            Ok(())
        }
        Some(Backend::Host) => host(),
        Some(Backend::All) => {
            host()?;
            Err(VENDORS.map(lacks).join("\n       ").into())
        }
        Some(vendor) => Err(format!("{}; run `cargo xtask test host`", lacks(vendor)).into()),
    }
}

fn lacks(vendor: Backend) -> String {
    let (name, crate_name) = match vendor {
        Backend::Cuda => ("cuda", "peerlane-cuda"),
        Backend::Rocm => ("rocm", "peerlane-rocm"),
        Backend::Rdma => ("rdma", "peerlane-rdma"),
        Backend::Host | Backend::All => unreachable!("the host backend is always there"),
    };
    format!("{name}: the backend is not built yet, {crate_name} holds only its skeleton")
}

fn host() -> Outcome {
    let mut command = process::cargo(["test", "--workspace", "--no-fail-fast"]);
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
            run(Some(Backend::Cuda)).unwrap_err().to_string(),
            "cuda: the backend is not built yet, peerlane-cuda holds only its skeleton; \
             run `cargo xtask test host`"
        );
    }
}
