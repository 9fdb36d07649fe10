//! One process per rank, on this machine, for a trial.
//!
//! The parent serves the bootstrap and measures nothing; it sleeps until a rank says something. No
//! rank outlives it: each asks for a death signal first thing, and a Ctrl-C or a kill of the parent
//! needs no handler here.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use peerlane::Deadline;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use serde::Serialize;

use super::outcome::Outcome;
use crate::error::{Failure, Result};

/// How much longer than the timeout of one wait the others may take to end after a failure.
const GRACE: Duration = Duration::from_secs(2);

/// The one who prints what ranks say.
pub(crate) trait Audience {
    /// Rank 0 said something.
    ///
    /// # Errors
    /// If it makes no sense, or cannot be shown.
    fn hear(&mut self, line: &str) -> Result<()>;

    /// A rank complained.
    fn complaint(&self, line: &str);

    /// What was being done last.
    fn doing(&self) -> &str;
}

/// Says something, as rank 0, to the process that spawned this one.
///
/// # Errors
/// If it is gone.
pub(crate) fn write_to_parent(what: &impl Serialize) -> Result<()> {
    let mut line = serde_json::to_vec(what).map_err(|error| Failure::failed(error.to_string()))?;
    line.push(b'\n');
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(&line)
        .and_then(|()| stdout.flush())
        .map_err(|error| Failure::io("cannot tell the parent process", &error))
}

/// What the parent learns of its ranks.
enum Message {
    /// Rank 0 said something.
    Said(String),
    /// A rank wrote to its standard error output.
    Complaint { rank: usize, line: String },
    /// A rank closed its standard error output: it ends.
    Ended { rank: usize },
}

/// The processes of a group; whatever is left of them is killed on drop.
struct Processes {
    children: Vec<Child>,
    messages: Receiver<Message>,
}

/// Spawns `ranks` processes, each made by `command`, and passes on what they say until all have ended.
///
/// # Errors
/// If one fails: which, and how.
pub(crate) fn run(
    ranks: usize,
    timeout: Duration,
    command: impl Fn(usize) -> Command,
    audience: &mut impl Audience,
) -> Result<()> {
    let mut processes = Processes::start(ranks, command)?;
    let outcome = processes.watch(timeout, audience)?;
    outcome.judge(audience.doing())
}

/// In a spawned rank: dies with its parent from now on.
///
/// # Errors
/// If the parent is gone already, or the system refuses.
pub(crate) fn die_with_parent(parent: u32) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| Failure::failed(format!("cannot ask for a death signal: {error}")))?;
    let seen = getppid().map(Pid::as_raw_nonzero).map(|pid| pid.get().unsigned_abs());
    if seen != Some(parent) {
        return Err(Failure::failed(format!("process {parent}, which spawned this rank, is gone")));
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
                .map_err(|error| {
                    Failure::io(format_args!("cannot start the process of rank {rank}"), &error)
                        .with_advice("lower --ranks, or raise the limit that ulimit -u shows")
                })?;
            let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
            processes.children.push(child);
            if let Some(stdout) = stdout {
                forward(stdout, &sender, Message::Said, None)?;
            }
            if let Some(stderr) = stderr {
                let complaint = move |line| Message::Complaint { rank, line };
                forward(stderr, &sender, complaint, Some(Message::Ended { rank }))?;
            }
        }
        Ok(processes)
    }

    /// Until every pipe is closed, or until the others have had their time after a failure.
    fn watch(&mut self, timeout: Duration, audience: &mut impl Audience) -> Result<Outcome> {
        let mut outcome = Outcome::new(self.children.len());
        let mut patience: Option<Deadline> = None;
        loop {
            match self.next(patience) {
                Ok(Message::Said(line)) => audience.hear(&line)?,
                Ok(Message::Complaint { rank, line }) => {
                    audience.complaint(&format!("[rank {rank}] {line}"));
                }
                Ok(Message::Ended { rank }) => {
                    let status = self.children[rank].wait().map_err(|error| {
                        Failure::io(format_args!("cannot wait for rank {rank}"), &error)
                    })?;
                    outcome.ended(rank, status);
                    if outcome.has_failed() && patience.is_none() {
                        patience = Some(Deadline::after(timeout.saturating_add(GRACE)));
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(outcome),
                Err(RecvTimeoutError::Timeout) => {
                    outcome.patience_ended();
                    self.kill();
                    return Ok(outcome);
                }
            }
        }
    }

    /// Without a failure the ranks bound their own waits, and a run may take as long as it takes.
    fn next(&self, patience: Option<Deadline>) -> std::result::Result<Message, RecvTimeoutError> {
        match patience {
            None => self.messages.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(deadline) => self.messages.recv_timeout(deadline.remaining()),
        }
    }

    fn kill(&mut self) {
        for child in &mut self.children {
            // It has ended already: as wanted.
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

/// Sends every line of `pipe`, and `last` when it is closed.
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
        // The receiver is gone only if nobody listens any more.
        messages.chain(last).try_for_each(|message| to.send(message)).ok();
    };
    thread::Builder::new()
        .name("pipe".to_owned())
        .spawn(read)
        .map(drop)
        .map_err(|error| Failure::io("cannot start a thread", &error))
}
