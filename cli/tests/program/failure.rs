//! Tests a run in which a process is killed, is stopped, or loses its parent.

use std::fs;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use peerlane::bootstrap::environment::Environment;
use peerlane::bootstrap::tcp::TcpBootstrap;
use peerlane::{Deadline, ErrorKind, Rank};
use peerlane_test_support::Stopwatch;
use rustix::process::Signal;

use crate::common::{command, has_moved_bytes, ranks_of, signal, variable};

const RANKS: usize = 3;
const WAIT_MAX: Duration = Duration::from_secs(20);

/// Starts a run that does not end by itself; returns it and the processes of its ranks in rank
/// order.
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

/// Returns the same command with the default handling of SIGINT. The shell that runs the tests in
/// the background may ignore SIGINT, and children inherit that. The program replaces `env` and
/// keeps its process id.
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

/// Returns whether the process runs; a zombie does not.
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
        assert!(start.elapsed() < WAIT_MAX, "waited {WAIT_MAX:?} until {what}");
        sleep(Duration::from_millis(20));
    }
}

/// Returns the exit code and stderr when the program has ended.
fn end(mut child: Child) -> (Option<i32>, String) {
    let status = until("the program ends", || child.try_wait().unwrap());
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    (status.code(), stderr)
}

#[test]
fn a_killed_rank_is_named_and_no_process_remains() {
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
fn a_stopped_rank_is_blamed_by_all_and_killed_when_the_others_have_ended() {
    // Rank 0 runs the hub in a group without a launcher, and here the parent does.
    for victim in [0, 2] {
        // Long enough for a busy machine.
        let (child, ranks) = endless("4");
        let watch = Stopwatch::start_with(ranks.iter().copied());
        signal(ranks[victim], Signal::STOP);
        let (code, stderr) = end(child);
        assert_eq!(code, Some(1), "{stderr}");
        let blamed = format!("rank {victim} does not answer, because its process is stopped");
        assert!(stderr.contains(&blamed), "{stderr}");
        let killed = format!("rank {victim} did not end in time and had to be killed");
        assert!(stderr.contains(&killed), "{stderr}");
        // The time of the others and the one after a failure are 4 s and 6 s. The second is not waited for.
        watch.assert_within(Duration::from_secs(9));
        assert!(!ranks.iter().any(|rank| lives(*rank)));
    }
}

#[test]
fn no_rank_outlives_the_program() {
    for last in [Signal::KILL, Signal::INT, Signal::TERM] {
        // Long enough that no rank gives up before, also on a busy machine.
        let (child, ranks) = endless("60");
        signal(child.id(), last);
        let ended = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), None, "{last:?}: {said}");
        until("all ranks are gone", || (!ranks.iter().any(|rank| lives(*rank))).then_some(()));
    }
}

#[test]
fn spawned_ranks_have_a_random_secret_that_a_stranger_needs() {
    let mut secrets = Vec::new();
    for _ in 0..2 {
        let (mut child, ranks) = endless("60");
        let hub = variable(ranks[0], "PEERLANE_HUB=").unwrap();
        let of_rank = |rank: &u32| variable(*rank, "PEERLANE_SECRET=").unwrap();
        let mut all: Vec<String> = ranks.iter().map(of_rank).collect();
        all.dedup();
        assert!(all.len() == 1 && all[0].len() == 64, "{all:?}");
        let deadline = Deadline::after(WAIT_MAX);
        let error = TcpBootstrap::join(&Environment::at_hub(hub, Rank(1), RANKS), deadline);
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert!(error.to_string().contains("has a secret, but rank 1 has none"), "{error}");
        assert!(child.try_wait().unwrap().is_none());
        signal(child.id(), Signal::KILL);
        child.wait().unwrap();
        secrets.extend(all);
    }
    assert_ne!(secrets[0], secrets[1]);
    // A secret of the user is for other jobs.
    let mut program = command("allgather --ranks 2 --max-bytes 1K --iterations 1 --json -");
    program.env("PEERLANE_SECRET_FILE", "/no/such/file");
    assert!(!crate::common::end(&mut program).rows().is_empty());
}
