//! Spawns one process per rank on this machine and reports how they ended.
//!
//! The parent serves the bootstrap and measures nothing; it sleeps until a rank writes. No rank
//! outlives the parent, because each rank requests a death signal first. Therefore the parent needs
//! no handler for Ctrl-C or a kill.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::mem;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use peerlane::Deadline;
use peerlane_toolkit::limits::{self, AvailableMemory, SystemError};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Failure, Result};
use crate::report::print_error;

/// The time that the other ranks get to end after a failure, in addition to the timeout of one
/// wait.
const GRACE: Duration = Duration::from_secs(2);

/// The pause between two looks at the ranks that have not ended after a failure.
const LOOK_PAUSE: Duration = Duration::from_millis(50);

/// The device that is the standard input of ranks.
const NULL_DEVICE: &str = "/dev/null";

/// Prints the events that rank 0 reports.
pub(crate) trait OutputHandler {
    /// The type of an event of rank 0, sent as one line of JSON if rank 0 is another process.
    type Event: Serialize + DeserializeOwned;

    fn show(&mut self, event: Self::Event) -> Result<()>;

    /// Prints the results so far, also after a failure.
    fn finish(self) -> Result<()>;

    fn on_stderr(&self, line: &str) {
        print_error(line);
    }

    /// Returns the last known activity of the ranks, for error texts.
    fn activity(&self) -> &str;
}

/// Sends a value as a line of JSON from rank 0 to the process that has spawned it.
pub(crate) fn write_to_parent(what: &impl Serialize) -> Result<()> {
    let mut line = serde_json::to_vec(what).map_err(|error| Failure::failed(error.to_string()))?;
    line.push(b'\n');
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(&line)
        .and_then(|()| stdout.flush())
        .map_err(|error| Failure::io("cannot write to the parent process", &error))
}

enum Message {
    /// Rank 0 wrote a line to its stdout.
    Stdout(String),
    /// A rank wrote a line to its stderr.
    Stderr { rank: usize, line: String },
    /// A rank closed its stderr, because it ends.
    Ended { rank: usize },
}

struct Processes {
    children: Vec<Child>,
    messages: Receiver<Message>,
}

/// Spawns `ranks` processes, each made by `command`, and passes their output to `handler` until all
/// have ended. `on_failure` is told how a rank has failed, because it may not have joined the others.
pub(crate) fn run(
    ranks: usize,
    timeout: Duration,
    command: impl Fn(usize) -> Command,
    on_failure: &dyn Fn(usize, String),
    handler: &mut impl OutputHandler,
) -> Result<()> {
    let mut processes = Processes::start(ranks, command)?;
    let outcome = processes.watch(timeout, on_failure, handler)?;
    outcome.result(handler.activity())
}

/// Requests that the kernel kills this rank when its parent process ends.
pub(crate) fn die_with_parent(parent: u32) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| {
        Failure::failed(format!(
            "cannot request a signal for the end of the parent process: {error}"
        ))
    })?;
    let seen = getppid().map(Pid::as_raw_nonzero).map(|pid| pid.get().unsigned_abs());
    if seen != Some(parent) {
        return Err(Failure::failed(format!(
            "process {parent}, which spawned this rank, has already ended"
        )));
    }
    Ok(())
}

impl Processes {
    fn start(ranks: usize, command: impl Fn(usize) -> Command) -> Result<Self> {
        let (sender, messages) = channel();
        let mut processes = Self { children: Vec::with_capacity(ranks), messages };
        for rank in 0..ranks {
            let mut child = command(rank)
                .stdin(Stdio::null())
                .stdout(if rank == 0 { Stdio::piped() } else { Stdio::null() })
                .stderr(Stdio::piped())
                .spawn()
                .map_err(|error| not_started(rank, &error))?;
            let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
            processes.children.push(child);
            if let Some(stdout) = stdout {
                forward(stdout, &sender, Message::Stdout, None)?;
            }
            if let Some(stderr) = stderr {
                let on_stderr_line = move |line| Message::Stderr { rank, line };
                forward(stderr, &sender, on_stderr_line, Some(Message::Ended { rank }))?;
            }
        }
        Ok(processes)
    }

    /// Handles messages until every pipe is closed, or until the time after a failure has passed.
    fn watch(
        &mut self,
        timeout: Duration,
        on_failure: &dyn Fn(usize, String),
        handler: &mut impl OutputHandler,
    ) -> Result<Outcome> {
        let mut outcome = Outcome::new(self.children.len());
        let mut errors = Errors::new(self.children.len());
        let outcome_or_error =
            self.watch_errors((timeout, on_failure), handler, &mut outcome, &mut errors);
        let outcome = outcome_or_error.map(|()| outcome);
        errors.finish(&mut |line| handler.on_stderr(line));
        outcome
    }

    fn watch_errors(
        &mut self,
        (timeout, on_failure): (Duration, &dyn Fn(usize, String)),
        handler: &mut impl OutputHandler,
        outcome: &mut Outcome,
        errors: &mut Errors,
    ) -> Result<()> {
        let mut deadline: Option<Deadline> = None;
        loop {
            match self.next(deadline) {
                Ok(Message::Stdout(line)) => handler.show(parse(&line)?)?,
                Ok(Message::Stderr { rank, line }) => {
                    errors.add(rank, line, &mut |line| handler.on_stderr(line));
                }
                Ok(Message::Ended { rank }) => {
                    let error = errors.begun(rank);
                    errors.end(rank, &mut |line| handler.on_stderr(line));
                    let status = self.children[rank].wait().map_err(|error| {
                        Failure::io(format_args!("cannot wait for rank {rank}"), &error)
                    })?;
                    outcome.ended(rank, status);
                    if !status.success() {
                        on_failure(rank, failed_how(status, error));
                    }
                    if outcome.has_failed() && deadline.is_none() {
                        deadline = Some(Deadline::after(timeout.saturating_add(GRACE)));
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {
                    let is_over = deadline.is_none_or(|deadline| deadline.has_passed());
                    // A rank that is stopped does not end by itself, so there is nothing to wait for.
                    if is_over || outcome.left().into_iter().all(|rank| self.is_stopped(rank)) {
                        outcome.set_killed_rest();
                        self.kill();
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Waits for a message, without a deadline until a rank fails, because ranks limit their own waits.
    fn next(&self, deadline: Option<Deadline>) -> std::result::Result<Message, RecvTimeoutError> {
        match deadline {
            None => self.messages.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(deadline) => self.messages.recv_timeout(deadline.remaining().min(LOOK_PAUSE)),
        }
    }

    /// Returns whether a signal or a debugger has stopped a rank.
    fn is_stopped(&self, rank: usize) -> bool {
        let status = fs::read_to_string(format!("/proc/{}/stat", self.children[rank].id()));
        // The state follows the name of the program, which is in parentheses and can hold any character.
        let state = status.ok().and_then(|text| text.rsplit_once(") ")?.1.chars().next());
        matches!(state, Some('T' | 't'))
    }

    fn kill(&mut self) {
        for child in &mut self.children {
            // An error means that the process has already ended.
            drop(child.kill());
        }
        for child in &mut self.children {
            drop(child.wait());
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Sends every line of a pipe as a message, and `last` when the pipe is closed.
fn forward(
    pipe: impl Read + Send + 'static,
    to: &Sender<Message>,
    message: impl Fn(String) -> Message + Send + 'static,
    last: Option<Message>,
) -> Result<()> {
    let to = to.clone();
    let read = move || {
        let lines = BufReader::new(pipe).split(b'\n').map_while(std::result::Result::ok);
        let messages = lines.map(|line| message(String::from_utf8_lossy(&line).into_owned()));
        // The receiver is gone only if the parent stops.
        messages.chain(last).try_for_each(|message| to.send(message)).ok();
    };
    limits::spawn("pipe", read).map(drop).map_err(|error| Failure::of_system(&error))
}

/// Returns the failure of a process that could not be started.
fn not_started(rank: usize, error: &io::Error) -> Failure {
    let system = SystemError::of_process(format!("cannot start the process of rank {rank}"), error);
    let failure = Failure::of_system(&system);
    if system.is_exhausted() {
        return failure.with_advice("lower --ranks, or raise the limit");
    }
    match fs::metadata(NULL_DEVICE) {
        Ok(_) => failure,
        Err(missing) => failure
            .with_advice(format!("mount /dev, because {NULL_DEVICE} cannot be used: {missing}")),
    }
}

/// Says how a process has failed, with its own error if it has printed one.
fn failed_how(status: ExitStatus, error: Option<String>) -> String {
    match error {
        Some(error) => format!("its process {}: {error}", how(status)),
        None => format!("its process {}", how(status)),
    }
}

/// The errors of the ranks, of which each different one is printed once.
struct Errors {
    /// The lines of each rank since the one that begins an error.
    begun: Vec<Vec<String>>,
    /// The errors that have been printed, with the ranks that had the same one later.
    printed: Vec<(Vec<String>, usize, Vec<usize>)>,
}

impl Errors {
    fn new(ranks: usize) -> Self {
        Self { begun: vec![Vec::new(); ranks], printed: Vec::new() }
    }

    fn add(&mut self, rank: usize, line: String, print: &mut dyn FnMut(&str)) {
        let begun = &mut self.begun[rank];
        if begun.is_empty() && !line.starts_with("error: ") {
            return print(&format!("[rank {rank}] {line}"));
        }
        begun.push(line);
    }

    /// Returns the text of the error that a rank has begun to print.
    fn begun(&self, rank: usize) -> Option<String> {
        self.begun[rank].first()?.strip_prefix("error: ").map(str::to_owned)
    }

    /// Prints the error of a rank that has ended, unless another rank had the same one.
    fn end(&mut self, rank: usize, print: &mut dyn FnMut(&str)) {
        let lines = mem::take(&mut self.begun[rank]);
        if let Some((.., others)) = self.printed.iter_mut().find(|(same, ..)| *same == lines) {
            return others.push(rank);
        }
        if !lines.is_empty() {
            lines.iter().for_each(|line| print(&format!("[rank {rank}] {line}")));
            self.printed.push((lines, rank, Vec::new()));
        }
    }

    fn finish(mut self, print: &mut dyn FnMut(&str)) {
        (0..self.begun.len()).for_each(|rank| self.end(rank, print));
        for (_, first, mut others) in self.printed {
            others.sort_unstable();
            match others[..] {
                [] => {}
                [rank] => print(&format!("[rank {rank}] the same error as rank {first}")),
                _ => print(&format!("[ranks {}] the same error as rank {first}", list(&others))),
            }
        }
    }
}

/// A record of how each rank has ended, in order of time.
#[derive(Debug)]
pub(crate) struct Outcome {
    ranks: usize,
    ended: Vec<(usize, ExitStatus)>,
    killed_rest: bool,
}

impl Outcome {
    pub(crate) fn new(ranks: usize) -> Self {
        Self { ranks, ended: Vec::with_capacity(ranks), killed_rest: false }
    }

    pub(crate) fn ended(&mut self, rank: usize, status: ExitStatus) {
        self.ended.push((rank, status));
    }

    pub(crate) fn set_killed_rest(&mut self) {
        self.killed_rest = true;
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.ended.iter().any(|(_, status)| !status.success())
    }

    /// Returns the failure that names the rank to blame, or success if all ranks have succeeded.
    pub(crate) fn result(&self, doing: &str) -> Result<()> {
        let failed = || self.ended.iter().filter(|(_, status)| !status.success());
        let killed = failed().find(|(_, status)| status.signal().is_some());
        let Some((rank, status)) = killed.or(failed().next()) else { return Ok(()) };
        let mut text = format!("rank {rank} {}; last activity: {doing}", how(*status));
        let left = self.left();
        if self.killed_rest && !left.is_empty() {
            let ranks = if left.len() == 1 { "rank" } else { "ranks" };
            text += &format!("; {ranks} {} did not end in time and had to be killed", list(&left));
        }
        Err(Failure::failed(text).with_advice(advice(*status)))
    }

    fn left(&self) -> Vec<usize> {
        let has_ended = |rank| self.ended.iter().any(|(ended, _)| *ended == rank);
        (0..self.ranks).filter(|rank| !has_ended(*rank)).collect()
    }
}

fn parse<T: DeserializeOwned>(line: &str) -> Result<T> {
    serde_json::from_str(line).map_err(|error| {
        Failure::failed(format!("rank 0 wrote {line:?}, expected an event: {error}"))
    })
}

fn how(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was killed by signal {signal} ({})", signal_name(signal)),
        (None, Some(code)) => format!("failed with exit status {code}"),
        (None, None) => format!("ended with an unknown status ({status})"),
    }
}

fn advice(status: ExitStatus) -> String {
    let signal = status.signal();
    let group = AvailableMemory::of_control_groups().filter(|_| signal == Some(9));
    if let Some(group) = group {
        return format!(
            "if no user killed the process, its control group or the machine ran out of memory (see `dmesg`): lower \
             --max-bytes or --ranks; now {group}"
        );
    }
    // A failed allocation ends a process with one of these signals.
    let address_space = limits::address_space_limit().filter(|_| matches!(signal, Some(6 | 11)));
    if let Some(limit) = address_space {
        return format!("the process probably ran out of address space: {limit}");
    }

    let text = match signal {
        Some(9) => {
            "if no user killed the process, the machine ran out of memory (see `dmesg`): lower \
             --max-bytes or --ranks"
        }
        Some(7) => "shared memory ran out: lower --max-bytes or --ranks",
        Some(24) => {
            "the process used more processor time than `ulimit -t` permits: raise the limit"
        }
        Some(25) => "the process wrote a larger file than `ulimit -f` permits: raise the limit",
        Some(31) => {
            "a filter of system calls, such as the seccomp profile of a container, forbids a call \
             that the process makes: `dmesg` may name it"
        }
        Some(_) => "if no user sent the signal, this is a bug in Peerlane: please report it",
        None => "read the messages of that rank above, which begin with its number",
    };
    text.to_owned()
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        13 => "SIGPIPE",
        15 => "SIGTERM",
        24 => "SIGXCPU",
        25 => "SIGXFSZ",
        31 => "SIGSYS",
        _ => "see `kill -l`",
    }
}

/// Formats ranks in order, with three and more consecutive ones as a range, such as `0, 2 to 5, 7`.
fn list(ranks: &[usize]) -> String {
    let runs = ranks.chunk_by(|one, next| one + 1 == *next);
    let texts = runs.flat_map(|run| match *run {
        [first, _, .., last] => vec![format!("{first} to {last}")],
        _ => run.iter().map(usize::to_string).collect(),
    });
    texts.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const KILLED: i32 = 9;
    const EXIT_1: i32 = 1 << 8;

    fn outcome(ended: &[(usize, i32)], killed_rest: bool) -> Outcome {
        let mut outcome = Outcome::new(4);
        for (rank, raw) in ended {
            outcome.ended(*rank, ExitStatus::from_raw(*raw));
        }
        if killed_rest {
            outcome.set_killed_rest();
        }
        outcome
    }

    #[test]
    fn an_error_that_ranks_share_is_printed_once() {
        let mut printed = Vec::new();
        let mut print = |line: &str| printed.push(line.to_owned());
        let mut errors = Errors::new(7);
        for rank in [3, 1, 4, 0, 5] {
            errors.add(rank, "a note".to_owned(), &mut print);
            errors.add(rank, "error: rank 2 is lost".to_owned(), &mut print);
            errors.add(rank, " help: start it again".to_owned(), &mut print);
            errors.end(rank, &mut print);
        }
        errors.add(2, "error: full".to_owned(), &mut print);
        errors.end(6, &mut print);
        errors.finish(&mut print);
        insta::assert_snapshot!(printed.join("\n"), @"
        [rank 3] a note
        [rank 3] error: rank 2 is lost
        [rank 3]  help: start it again
        [rank 1] a note
        [rank 4] a note
        [rank 0] a note
        [rank 5] a note
        [rank 2] error: full
        [ranks 0, 1, 4, 5] the same error as rank 3
        ");
    }

    #[test]
    fn success_of_all_ranks_is_no_failure() {
        assert_eq!(outcome(&[(1, 0), (0, 0), (3, 0), (2, 0)], false).result("x"), Ok(()));
    }

    #[test]
    fn the_killed_rank_is_named_even_if_others_failed_first() {
        let outcome = outcome(&[(1, EXIT_1), (2, KILLED), (0, EXIT_1), (3, EXIT_1)], false);
        insta::assert_snapshot!(outcome.result("measuring 1 MiB").unwrap_err(), @"
        error: rank 2 was killed by signal 9 (SIGKILL); last activity: measuring 1 MiB
         help: if no user killed the process, the machine ran out of memory (see `dmesg`): lower --max-bytes or --ranks
        ");
    }

    #[test]
    fn the_first_failure_and_the_killed_ranks_are_named() {
        let outcome = outcome(&[(3, 0), (2, EXIT_1)], true);
        insta::assert_snapshot!(outcome.result("checking 4 KiB").unwrap_err(), @"
        error: rank 2 failed with exit status 1; last activity: checking 4 KiB; ranks 0, 1 did not end in time and had to be killed
         help: read the messages of that rank above, which begin with its number
        ");
    }
}
