//! Runs ranks as processes, one of them traced.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use libtest_mimic::Failed;
use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::tcp::{Hub, TcpBootstrap};
use peerlane_collectives::error::Error;
use peerlane_hal::{Deadline, Rank};
use peerlane_tests::processes::{Child, Parent};

use crate::{STARTS, repeat, warm};
use peerlane_tests::steady::come_to_rest;

/// A call that nobody else makes, easily found in a trace.
const MARK: &str = "getpriority";

/// The calls with which a rank waits, and with which it moves to another core.
const WAITS: [&str; 4] = ["futex", "sched_yield", "sched_getaffinity", "sched_setaffinity"];

/// Traces rank 1, which holds no hub.
const TRACED: usize = 1;

/// Why system calls cannot be counted here, if they cannot and need not.
pub(crate) fn reason_to_skip() -> Option<String> {
    let required = std::env::var("PEERLANE_REQUIRE_STRACE").is_ok_and(|required| required == "1");
    if required { None } else { can_trace().err() }
}

pub(crate) fn only_waits(ranks: usize, outputs: u32) -> Result<(), Failed> {
    can_trace()?;
    let file = Trace::new(ranks, outputs);
    let hub = Hub::bind("127.0.0.1:0", ranks)?;
    let mut children = Vec::new();
    for rank in 0..ranks {
        let program = std::env::current_exe()?;
        let mut command = match rank {
            TRACED => traced(&program, &file.0),
            _ => Command::new(program),
        };
        command.env("PEERLANE_TEST_ROLE", "gather").env("PEERLANE_TEST_RANK", rank.to_string());
        command.env("PEERLANE_TEST_RANKS", ranks.to_string());
        command.env("PEERLANE_TEST_OUTPUTS", outputs.to_string());
        command.env("PEERLANE_TEST_HUB", hub.address().to_string());
        children.push(Child::spawn("gather", command).map_err(|failure| failure.to_string())?);
    }
    let patience = Deadline::after(Duration::from_secs(120));
    for mut child in children {
        child.finish(patience).map_err(|failure| failure.to_string())?;
    }
    let trace = std::fs::read_to_string(&file.0)?;
    let calls = between_marks(&trace)?;
    let others: Vec<_> = calls.into_iter().filter(|(name, _)| !WAITS.contains(&&**name)).collect();
    match others.is_empty() {
        true => Ok(()),
        false => Err(format!("{STARTS} starts made these calls: {others:#?}").into()),
    }
}

/// A file that is gone when the test is over.
struct Trace(PathBuf);

impl Trace {
    fn new(ranks: usize, outputs: u32) -> Self {
        let name = format!("peerlane-trace-{}-{ranks}-{outputs}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // Without strace it was never made.
        let _ = std::fs::remove_file(&self.0);
    }
}

fn traced(program: &Path, trace: &Path) -> Command {
    let mut command = Command::new("strace");
    command.arg("-f").arg("-o").arg(trace).arg("--").arg(program);
    command
}

/// Whether strace is there and the system lets it trace.
fn can_trace() -> Result<(), String> {
    let mut command = Command::new("strace");
    command.args(["-o", "/dev/null", "true"]).stdout(Stdio::null()).stderr(Stdio::null());
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err("strace is installed but may not trace here".to_owned()),
        Err(_) => Err("strace is not installed".to_owned()),
    }
}

/// The lines of each system call between the two marks, by all threads of the process.
fn between_marks(trace: &str) -> Result<BTreeMap<&str, Vec<&str>>, String> {
    let mark = format!("{MARK}(");
    let marks = trace.lines().filter(|line| line.contains(&mark)).count();
    if marks != 2 {
        return Err(format!("the trace has {marks} marks, expected 2"));
    }
    let mut calls = BTreeMap::<_, Vec<_>>::new();
    let behind_first = trace.lines().skip_while(|line| !line.contains(&mark)).skip(1);
    for line in behind_first.take_while(|line| !line.contains(&mark)) {
        // The end of the first mark may stand on a line of its own.
        if let Some(name) = name(line).filter(|name| *name != MARK) {
            calls.entry(name).or_default().push(line);
        }
    }
    Ok(calls)
}

/// The call of a line such as `1234 futex(0x55, …) = 0` or `1234 <... futex resumed>) = 0`.
fn name(line: &str) -> Option<&str> {
    let call = line.trim_start_matches(|letter: char| letter.is_ascii_digit()).trim_start();
    match call.strip_prefix("<... ") {
        Some(resumed) => resumed.split(' ').next(),
        None => call.split_once('(').map(|(name, _)| name),
    }
}

fn mark() {
    // Its answer does not matter.
    let _ = rustix::process::getpriority_user(rustix::process::Uid::ROOT);
}

/// A rank that gathers, between two marks.
pub(crate) fn run_rank(parent: &Parent) -> ExitCode {
    match gather(parent) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("a rank failed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn gather(parent: &Parent) -> Result<(), Error> {
    let value = |name| parent.value::<u32>(name).expect("the parent gave a number");
    let (rank, ranks) = (Rank(value("RANK")), Rank(value("RANKS")).index());
    let hub: String = parent.value("HUB").expect("the parent gave an address");
    let deadline = Deadline::after(Duration::from_secs(60));
    let bootstrap = TcpBootstrap::join(&Environment::at_hub(hub, rank, ranks), deadline)?;
    let (group, mut gather) = warm(bootstrap, value("OUTPUTS"))?;
    come_to_rest();
    mark();
    repeat(&mut gather, STARTS)?;
    mark();
    // No rank comes to the close, and talks, before the traced one has passed its mark.
    repeat(&mut gather, 1)?;
    drop(gather);
    group.close()
}
