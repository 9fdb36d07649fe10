//! What is left of a run when one of its processes is killed, stopped, or loses its parent.

use std::fs;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::command;

const RANKS: usize = 3;
const PATIENCE: Duration = Duration::from_secs(20);

/// A run that lasts until it is disturbed, and the processes of its ranks in rank order.
fn endless(timeout: &str) -> (Child, Vec<u32>) {
    let line = "allgather --ranks 3 --min-bytes 64K --max-bytes 64K --iterations 1000000";
    let program = command(&format!("{line} --timeout {timeout}"));
    let child = interruptible(&program).spawn().unwrap();
    let ranks = until("all ranks run", || {
        let ranks = ranks_of(child.id());
        (ranks.len() == RANKS && ranks.iter().all(|rank| has_moved_bytes(*rank))).then_some(ranks)
    });
    (child, ranks)
}

/// The same command, with SIGINT as a terminal leaves it: who runs these tests in the background may
/// ignore it, and children inherit that. The program takes the place of `env` and keeps its number.
fn interruptible(program: &Command) -> Command {
    let mut command = Command::new("env");
    command.arg("--default-signal=INT").arg(program.get_program()).args(program.get_args());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The children of `parent`, by the rank that their environment says.
pub(crate) fn ranks_of(parent: u32) -> Vec<u32> {
    let mut ranks: Vec<(String, u32)> = fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|process| parent_of(*process) == Some(parent))
        .filter_map(|process| Some((variable(process, "RANK=")?, process)))
        .collect();
    ranks.sort();
    ranks.into_iter().map(|(_, process)| process).collect()
}

fn parent_of(process: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name, in brackets, may hold anything.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

fn variable(process: u32, name: &str) -> Option<String> {
    let environment = fs::read(format!("/proc/{process}/environ")).ok()?;
    let environment = String::from_utf8(environment).ok()?;
    environment.split('\0').find_map(|pair| pair.strip_prefix(name)).map(str::to_owned)
}

/// Half a second of work in a run whose beginning takes far less.
pub(crate) fn has_moved_bytes(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let ticks = |index| fields.split_whitespace().nth(index).and_then(|ticks| ticks.parse().ok());
    ticks(11).unwrap_or(0_u64) + ticks(12).unwrap_or(0) >= 15
}

/// Whether the process runs; one that only waits to be collected does not.
fn lives(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').and_then(|(_, fields)| fields.split_whitespace().next());
    state.is_some_and(|state| state != "Z" && state != "X")
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(start.elapsed() < PATIENCE, "in {PATIENCE:?} it was never so that {what}");
        sleep(Duration::from_millis(20));
    }
}

pub(crate) fn signal(process: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(process).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

/// The exit code and the standard error output, once the program has ended.
fn end(mut child: Child) -> (Option<i32>, String) {
    let status = until("the program ends", || child.try_wait().unwrap());
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    (status.code(), stderr)
}

#[test]
fn a_killed_rank_is_named_and_nothing_is_left() {
    for victim in 0..RANKS {
        let (child, ranks) = endless("10");
        let start = Instant::now();
        signal(ranks[victim], Signal::KILL);
        let (code, stderr) = end(child);
        assert_eq!(code, Some(1), "{stderr}");
        let expected = format!("error: rank {victim} was killed by signal 9 (SIGKILL)");
        assert!(stderr.contains(&expected), "{stderr}");
        assert!(stderr.contains(&format!("rank {victim} is lost")), "{stderr}");
        assert!(!stderr.contains("panicked"), "{stderr}");
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        assert!(!ranks.iter().any(|rank| lives(*rank)));
    }
}

#[test]
fn a_stopped_rank_runs_the_others_into_their_timeout_and_is_killed() {
    // Long enough for a busy machine to get there.
    let (child, ranks) = endless("4");
    signal(ranks[2], Signal::STOP);
    let (code, stderr) = end(child);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("rank 2 did not end in time and were killed"), "{stderr}");
    assert!(!ranks.iter().any(|rank| lives(*rank)));
}

#[test]
fn no_rank_outlives_the_program() {
    for last in [Signal::KILL, Signal::INT, Signal::TERM] {
        // No rank gives up before, however busy the machine is.
        let (child, ranks) = endless("60");
        signal(child.id(), last);
        let ended = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), None, "{last:?}: {said}");
        until("all ranks are gone", || (!ranks.iter().any(|rank| lives(*rank))).then_some(()));
    }
}
