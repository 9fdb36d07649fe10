//! Tests runs that reach a limit of a process: every rank names the limit, and none waits for its timeout.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use peerlane_test_support::ReservedPort;
use rustix::process::geteuid;

use crate::common::{Ended, command, end, ended};
use crate::launcher::rank;

/// A run whose ranks would wait for ten minutes for one that does not come.
const RUN: &str = "allgather --min-bytes 64K --max-bytes 64K --iterations 2 --timeout 600 --json -";

/// A run of ranks that a launcher starts, where one that the hub does not tell waits for a minute.
const LAUNCHED: &str =
    "allgather --min-bytes 64K --max-bytes 64K --iterations 2 --timeout 60 --json -";

/// A busy machine needs less for a run that does not wait.
const WITHOUT_WAIT: Duration = Duration::from_secs(120);
const LAUNCHED_WITHOUT_WAIT: Duration = Duration::from_secs(30);

/// Returns a command with a limit, which is an option of `prlimit` such as `--nofile=16`.
fn limited(limit: &str, program: &Command) -> Command {
    let mut limited = Command::new("prlimit");
    limited.args([limit, "--core=0"]).arg(program.get_program()).args(program.get_args());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    limited
}

/// Runs `ranks` ranks with a limit.
fn run(limit: &str, ranks: usize) -> Ended {
    let begun = Instant::now();
    let ended = end(&mut limited(limit, &command(&format!("{RUN} --ranks {ranks}"))));
    assert!(begun.elapsed() < WITHOUT_WAIT, "{limit}, {ranks} ranks: {ended:?}");
    ended
}

/// Checks that a run has succeeded, or that each of its errors names the limit, and returns whether it has failed.
fn names_limit(ended: &Ended, name: &str, context: &str) -> bool {
    if ended.code == Some(0) {
        return false;
    }
    let stderr = ended.error(1);
    let is_error = |line: &&str| line.starts_with("error: ") || line.contains("] error: ");
    // The last error only says which rank has failed first.
    let sums_up = |line: &str| line.contains("failed with exit status");
    let mut errors = stderr.lines().filter(is_error).filter(|line| !sums_up(line)).peekable();
    assert!(errors.peek().is_some(), "{context}: {ended:?}");
    for error in errors {
        assert!(error.contains(name), "{context}: {error}\nin {stderr}");
    }
    true
}

/// Checks the errors of a run if the standard library has aborted a rank, and returns whether it has.
///
/// It aborts a process whose small allocations fail. So that rank says nothing, the launcher names the limit, and the others name
/// the rank.
fn is_aborted(ended: &Ended) -> bool {
    let Some((_, launcher)) = ended.stderr.split_once("was killed by signal 6 (SIGABRT)") else {
        return false;
    };

    let victim = ended.stderr.lines().find_map(|line| line.strip_prefix("error: rank "));
    let victim = victim.and_then(|rest| rest.split(' ').next()).expect("the launcher names a rank");
    assert!(ended.stderr.contains(&format!("[rank {victim}] memory allocation of ")), "{ended:?}");
    assert!(launcher.contains("`ulimit -v`"), "{ended:?}");

    let errors = ended.stderr.lines().filter(|line| line.contains("] error: "));
    for error in errors {
        let is_named = error.contains(&format!("rank {victim} ")) || error.contains("`ulimit -v`");
        assert!(is_named, "{error}\nin {ended:?}");
    }
    true
}

#[test]
fn a_limit_of_descriptors_is_named_by_every_rank() {
    // One of 2 ranks holds 16 until it ends and others for a moment, so time decides whether 16 or 17 suffice for it.
    for (ranks, limits) in [(2, [8, 10, 12, 13, 14, 15]), (4, [8, 10, 12, 14, 16, 17])] {
        for limit in limits {
            let context = format!("{ranks} ranks with {limit} descriptors");
            let ended = run(&format!("--nofile={limit}"), ranks);
            assert!(names_limit(&ended, "`ulimit -n`", &context), "{context}: {ended:?}");
        }
    }
    assert!(!run("--nofile=64", 4).rows().is_empty());
}

#[test]
fn a_limit_of_the_address_space_is_named_by_every_rank() {
    // How much of it a thread takes differs, so some of these values can suffice.
    let failed = [32_u64, 40, 48, 56, 100, 104, 112].into_iter().filter(|mebibytes| {
        let ended = run(&format!("--as={}", mebibytes << 20), 4);
        // The loader had no room for the program.
        ended.code == Some(127)
            || is_aborted(&ended)
            || names_limit(&ended, "`ulimit -v`", &format!("{mebibytes} MiB of address space"))
    });
    assert!(failed.count() > 0);
    assert!(!run(&format!("--as={}", 4_u64 << 30), 2).rows().is_empty());
}

#[test]
fn a_limit_of_the_size_of_files_is_named_and_no_signal_ends_a_rank() {
    for bytes in [0, 32 << 10, 1 << 20] {
        let ended = run(&format!("--fsize={bytes}"), 2);
        assert!(names_limit(&ended, "`ulimit -f`", &format!("{bytes} bytes")), "{ended:?}");
    }
    assert!(!run("--fsize=1073741824", 2).rows().is_empty());
}

/// A copy of the program that every user can run, which is removed at the end.
struct PublicProgram(PathBuf);

impl PublicProgram {
    fn new() -> Self {
        let path = std::env::temp_dir().join(format!("peerlane-limits-{}", std::process::id()));
        // Another process writes the file: one that this process has open for writing cannot be run as long as a child
        // that another test is about to start has the descriptor.
        let mut install = Command::new("install");
        install.arg("-m755").arg(command("").get_program()).arg(&path);
        assert!(install.status().unwrap().success(), "{install:?}");
        Self(path)
    }
}

impl Drop for PublicProgram {
    fn drop(&mut self) {
        fs::remove_file(&self.0).unwrap();
    }
}

/// The kernel does not limit root, and counts all processes of another user. So root runs the program as a user that has no
/// other process, and another user can only test that no process can be started.
#[test]
fn a_limit_of_processes_is_named_by_every_rank() {
    let program = PublicProgram::new();
    let is_root = geteuid().is_root();
    let limits: &[u32] = if is_root { &[1, 2, 3, 6, 9, 12, 14, 18] } else { &[0] };
    for limit in limits {
        let own = command(&format!("{RUN} --ranks 3"));
        let mut public = Command::new(&program.0);
        public.args(own.get_args());
        // The variables of launchers, which `command` removes.
        for (name, _) in own.get_envs() {
            public.env_remove(name);
        }
        let mut limited = limited(&format!("--nproc={limit}"), &public);
        if is_root {
            limited.uid(60_000 + std::process::id() % 5_000);
        }
        let begun = Instant::now();
        let ended = end(&mut limited);
        assert!(begun.elapsed() < WITHOUT_WAIT, "{limit} processes: {ended:?}");
        let context = format!("{limit} processes");
        assert!(names_limit(&ended, "`ulimit -u`", &context), "{context}: {ended:?}");
    }
}

#[test]
fn other_ranks_of_a_launcher_name_the_rank_that_has_the_limit() {
    let ranks = 3;
    for victim in [0, 1] {
        for limit in [10, 11, 12, 13, 15, 16] {
            let port = ReservedPort::new();
            let begun = Instant::now();
            let all: Vec<Ended> = std::thread::scope(|scope| {
                // A hub that fails waits only a moment for other ranks, so rank 0 starts when they run.
                let run = |number: usize| {
                    let mut command = rank(LAUNCHED, number, ranks, &port);
                    if number == victim {
                        command = limited(&format!("--nofile={limit}"), &command);
                    }
                    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
                    let child = command.spawn().expect("the program starts");
                    scope.spawn(move || ended(child.wait_with_output()))
                };
                let mut running: Vec<_> = (0..ranks).rev().map(run).collect();
                running.reverse();
                running.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            let context = format!("rank {victim} with {limit} descriptors");
            assert!(begun.elapsed() < LAUNCHED_WITHOUT_WAIT, "{context}: {all:?}");
            for (number, ended) in all.iter().enumerate() {
                assert!(names_limit(ended, "`ulimit -n`", &context), "{context}: {all:?}");
                if number != victim {
                    let blamed = format!("rank {victim}");
                    assert!(ended.error(1).contains(&blamed), "{context}: {ended:?}");
                }
            }
        }
    }
}
