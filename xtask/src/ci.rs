//! `cargo xtask ci`: runs everything that must pass before a merge.
//!
//! All steps share one target folder. Dependencies are built in three ways only: for checks (clippy, the feature
//! powerset, the oldest Rust), for tests and for Miri. The steps behind one that fails run as well.

use std::fmt;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::deps::{self, Verdict};
use crate::{book, examples, header, miri, new_backend, package, tidy, workspace};
use peerlane_rxe_vm::process::{self, Outcome, cargo};

struct Step {
    name: &'static str,
    run: fn() -> Outcome<Verdict>,
}

const TEST: &str = "test, all programs";

const STEPS: &[Step] = &[
    Step { name: "format", run: || passed(process::run(&mut cargo(["fmt", "--all", "--check"]))) },
    Step { name: "tidy", run: || passed(tidy::run()) },
    Step { name: "clippy", run: || passed(clippy()) },
    Step { name: "documentation", run: || passed(documentation()) },
    Step { name: TEST, run: || passed(process::run(&mut cargo(["xtask", "test", "--all"]))) },
    Step { name: "Miri", run: miri::run },
    Step { name: "feature powerset", run: || passed(feature_powerset()) },
    Step { name: "bans, licences, sources", run: || passed(deps::deny()) },
    Step { name: "advisories", run: deps::advisories },
    Step { name: "C header", run: || with_tool("cbindgen", || header::run(true)) },
    Step { name: "book", run: || with_tool("mdbook", book::run) },
    Step { name: "examples", run: || passed(examples::run()) },
    Step { name: "new backend", run: || passed(new_backend::check()) },
    Step { name: "Python", run: crate::test::python::run_if_possible },
    Step { name: "packages", run: || passed(package::run()) },
    Step { name: "API since the release", run: deps::semver },
    Step { name: "oldest Rust", run: deps::oldest_rust },
    Step { name: "aarch64", run: deps::aarch64 },
];

/// Runs every step and prints a table of them.
pub(crate) fn run() -> Outcome {
    let rows: Vec<Row> = STEPS.iter().map(run_step).collect();
    println!("\n{}", table(&rows));
    if rows.iter().any(|row| row.name == TEST && row.verdict.is_err())
        && let Ok(names) = std::fs::read_to_string(crate::test::FAILURES)
    {
        println!("\nfailed tests:\n{names}");
    }
    match rows.iter().filter(|row| row.verdict.is_err()).count() {
        0 => Ok(()),
        failed => Err(format!("{failed} of {} steps failed", rows.len()).into()),
    }
}

fn run_step(step: &Step) -> Row {
    println!("\n=== {} ===", step.name);
    let start = Instant::now();
    let verdict = (step.run)().map_err(|error| error.to_string());
    let took = start.elapsed();
    let row = Row { name: step.name, took, verdict };
    println!("--- {row}");
    row
}

fn passed(outcome: Outcome) -> Outcome<Verdict> {
    outcome.map(|()| Verdict::Passed)
}

/// Runs a step that needs a program, or skips it where that is not installed.
fn with_tool(tool: &str, run: impl Fn() -> Outcome) -> Outcome<Verdict> {
    match process::answers(Command::new(tool).arg("--version")) {
        true => passed(run()),
        false => Ok(Verdict::Skipped(format!("to check it: cargo install --locked {tool}"))),
    }
}

/// Checks all targets. Other sets of features differ only in the crates of [`feature_powerset`].
fn clippy() -> Outcome {
    let mut command = cargo(["clippy", "--workspace", "--all-targets", "--all-features"]);
    process::run(command.args(["--", "-D", "warnings"]))
}

fn documentation() -> Outcome {
    let mut command = cargo(["doc", "--workspace", "--no-deps", "--all-features"]);
    process::run(command.env("RUSTDOCFLAGS", "-D warnings"))
}

fn feature_powerset() -> Outcome {
    if !process::answers(&mut cargo(["hack", "--version"])) {
        return Err("cargo-hack is missing; run `cargo install --locked cargo-hack`".into());
    }
    // Clippy instead of check, because it accepts `-D warnings` without rebuilding the dependencies.
    let mut command = cargo(["hack", "clippy", "--feature-powerset"]);
    for package in workspace::members()?.packages {
        if !package.features.is_empty() {
            command.args(["--package", &package.name]);
        }
    }
    process::run(command.args(["--exclude-features", "default", "--", "-D", "warnings"]))
}

struct Row {
    name: &'static str,
    took: Duration,
    verdict: Result<Verdict, String>,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<26}{:>7.1} s  ", self.name, self.took.as_secs_f64())?;
        match &self.verdict {
            Ok(Verdict::Passed) => f.write_str("ok"),
            Ok(Verdict::Skipped(why)) => write!(f, "skipped: {why}"),
            Err(error) => write!(f, "FAILED: {}", error.lines().next().unwrap_or_default()),
        }
    }
}

fn table(rows: &[Row]) -> String {
    let took: Duration = rows.iter().map(|row| row.took).sum();
    let lines: Vec<String> = rows.iter().map(Row::to_string).collect();
    format!("{}\n{:<26}{:>7.1} s", lines.join("\n"), "total", took.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_shows_what_was_skipped_and_what_failed() {
        let row =
            |name, millis, verdict| Row { name, took: Duration::from_millis(millis), verdict };
        let rows = [
            row("format", 1200, Ok(Verdict::Passed)),
            row("advisories", 0, Ok(Verdict::Skipped("no database".into()))),
            row("test", 61_040, Err("cargo test failed\nand more".into())),
        ];
        let expected = "\
            format                        1.2 s  ok\n\
            advisories                    0.0 s  skipped: no database\n\
            test                         61.0 s  FAILED: cargo test failed\n\
            total                        62.2 s";
        assert_eq!(table(&rows), expected);
    }
}
