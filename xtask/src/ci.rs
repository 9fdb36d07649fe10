//! `cargo xtask ci`: runs everything that must pass before a merge.
//!
//! Two lists of steps run beside each other, because tests sleep and builds do not. Most steps share one target folder, which
//! cargo locks while it builds, so that two builds take turns. The steps behind one that fails run as well.

use std::fmt;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;

use crate::deps::{self, Verdict};
use crate::{book, examples, header, miri, new_backend, package, tidy, workspace};
use peerlane_rxe_vm::process::{self, Outcome, cargo};

/// Options of `cargo xtask ci`.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Run only the step of this name, as the table at the end lists it.
    #[arg(long, value_name = "NAME")]
    step: Option<String>,
}

struct Step {
    name: &'static str,
    run: fn() -> Outcome<Verdict>,
}

const TEST: &str = "test, all programs";

/// The steps whose output is shown as they run.
const FIRST: &[Step] = &[
    Step { name: "format", run: || passed(process::run(&mut cargo(["fmt", "--all", "--check"]))) },
    Step { name: "tidy", run: || passed(tidy::run()) },
    Step { name: "clippy", run: || passed(clippy()) },
    Step { name: TEST, run: || passed(process::run(&mut cargo(["xtask", "test", "--all"]))) },
];

/// The steps that run beside those, each in a process of its own whose output is shown when it has ended.
const BESIDE: &[Step] = &[
    Step { name: "bans, licences, sources", run: || passed(deps::deny()) },
    Step { name: "advisories", run: deps::advisories },
    Step { name: "C header", run: || with_tool("cbindgen", || header::run(true)) },
    Step { name: "book", run: || with_tool("mdbook", book::run) },
    Step { name: "Miri", run: miri::run },
    Step { name: "documentation", run: || passed(documentation()) },
    Step { name: "feature powerset", run: || passed(feature_powerset()) },
    Step { name: "Python", run: crate::test::python::run_if_possible },
    Step { name: "examples", run: || passed(examples::run()) },
    Step { name: "new backend", run: || passed(new_backend::check()) },
    Step { name: "packages", run: || passed(package::run()) },
    Step { name: "API since the release", run: deps::semver },
    Step { name: "oldest Rust, aarch64", run: deps::oldest_rust },
];

/// Runs every step and prints a table of them, or runs one step.
pub(crate) fn run(options: &Options) -> Outcome {
    if let Some(name) = &options.step {
        let step = FIRST.iter().chain(BESIDE).find(|step| step.name == name);
        return (step.ok_or_else(|| format!("there is no step {name:?}"))?.run)()
            .map(Verdict::print);
    }

    // Found before a build replaces the file.
    let program = std::env::current_exe()?;
    let start = Instant::now();
    let logs = workspace::members()?.target_directory.join("ci").into_std_path_buf();
    fs::create_dir_all(&logs)?;
    let (mut rows, beside) = thread::scope(|scope| {
        let beside = scope.spawn(|| -> Vec<Row> {
            BESIDE.iter().map(|step| run_beside(step, &program, &logs)).collect()
        });
        let first: Vec<Row> = FIRST.iter().map(run_step).collect();
        (first, beside.join())
    });
    rows.extend(beside.map_err(|_| "the thread of the steps beside the tests panicked")?);

    println!("\n{}", table(&rows, start.elapsed()));
    if rows.iter().any(|row| row.name == TEST && row.verdict.is_err())
        && let Ok(names) = fs::read_to_string(crate::test::FAILURES)
    {
        println!("\nfailed tests:\n{names}");
    }
    println!("\nnot covered on this machine:");
    not_covered(&rows).iter().for_each(|line| println!("    {line}"));
    match rows.iter().filter(|row| row.verdict.is_err()).count() {
        0 => Ok(()),
        failed => Err(format!("{failed} of {} steps failed", rows.len()).into()),
    }
}

/// Returns the skipped steps and what the tests did not cover, each with its reason.
fn not_covered(rows: &[Row]) -> Vec<String> {
    let skipped = |row: &Row| match &row.verdict {
        Ok(Verdict::Skipped(why)) => Some(format!("{}: {why}", row.name)),
        _ => None,
    };
    let mut lines: Vec<String> = rows.iter().filter_map(skipped).collect();
    lines.extend(crate::test::not_covered());
    lines
}

fn run_step(step: &Step) -> Row {
    println!("\n=== {} ===", step.name);
    let start = Instant::now();
    let verdict = (step.run)().map_err(|error| error.to_string());
    let row = Row { name: step.name, took: start.elapsed(), verdict };
    println!("--- {row}");
    row
}

/// Runs a step in a process of its own, so that its output is not mixed with that of others.
fn run_beside(step: &Step, program: &Path, logs: &Path) -> Row {
    let log = logs.join(format!("{}.log", step.name));
    let start = Instant::now();
    let status = File::create(&log).and_then(|out| {
        let mut command = Command::new(program);
        command.args(["ci", "--step", step.name]).stdin(Stdio::null());
        command.stdout(out.try_clone()?).stderr(out).status()
    });
    let took = start.elapsed();
    let output = String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()).into_owned();
    let last = output.lines().rfind(|line| !line.is_empty()).unwrap_or_default();

    let verdict = match status {
        Err(error) => Err(error.to_string()),
        Ok(status) if !status.success() => Err(last.trim_start_matches("error: ").to_owned()),
        Ok(_) => Ok(match last.strip_prefix(deps::SKIPPED) {
            Some(why) => Verdict::Skipped(why.to_owned()),
            None => Verdict::Passed,
        }),
    };
    let row = Row { name: step.name, took, verdict };
    println!("\n=== {} ===\n{output}--- {row}", step.name);
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

/// Lists the steps, and the time that all of them took together.
fn table(rows: &[Row], took: Duration) -> String {
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
        assert_eq!(table(&rows, Duration::from_millis(62_240)), expected);
    }
}
