//! The parent's side: a rank that runs as a process.

use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use peerlane_hal::Deadline;
use rustix::process::{Pid, Signal, kill_process};

use super::parent::{ROLE, variable};
use crate::failure::{Failure, Outcome, ensure};

/// A process that was started to play a role; killed and reaped when dropped.
#[derive(Debug)]
pub struct Child {
    name: String,
    process: std::process::Child,
    words: ChildStdin,
    lines: Receiver<String>,
}

impl Child {
    /// Starts this program again, to play `role` with these values.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn start(role: &str, values: &[(&str, String)]) -> Outcome<Self> {
        let program = std::env::current_exe();
        let program =
            program.map_err(|error| Failure::new(format!("find the program: {error}")))?;
        let mut command = Command::new(program);
        command.env(ROLE, role);
        for (name, value) in values {
            command.env(variable(name), value);
        }
        Self::spawn(role, command)
    }

    /// Starts `command`, which in the end runs this program in a role.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn spawn(name: &str, mut command: Command) -> Outcome<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let started = command.spawn();
        let mut process =
            started.map_err(|error| Failure::new(format!("start {name}: {error}")))?;
        let words = process.stdin.take().expect("it was asked for");
        let output = process.stdout.take().expect("it was asked for");
        let (say, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                // Nobody listens once the handle is gone.
                let _ = say.send(line);
            }
        });
        Ok(Self { name: format!("{name}, process {}", process.id()), process, words, lines })
    }

    /// The process's number.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// The next line that it says.
    ///
    /// # Errors
    /// If it ends or says nothing until the deadline.
    pub fn hear(&mut self, deadline: Deadline) -> Outcome<String> {
        self.lines.recv_timeout(deadline.remaining()).map_err(|_| {
            let ended = self.process.try_wait().ok().flatten();
            let state = ended.map_or_else(|| "still runs".to_owned(), |status| status.to_string());
            let timeout = deadline.timeout();
            Failure::new(format!("{} said nothing within {timeout:?}; it {state}", self.name))
        })
    }

    /// The rest of the next line, which must begin with `word`.
    ///
    /// # Errors
    /// As [`hear`](Self::hear), or if it says something else.
    pub fn expect(&mut self, word: &str, deadline: Deadline) -> Outcome<String> {
        let line =
            self.hear(deadline).map_err(|failure| failure.within(format!("wanted {word:?}")))?;
        let rest = line.strip_prefix(word).map(|rest| rest.trim_start().to_owned());
        rest.ok_or_else(|| Failure::new(format!("{} said {line:?}, wanted {word:?}", self.name)))
    }

    /// Passes over lines until it says `wanted`.
    ///
    /// # Errors
    /// If it ends, or does not say it until the deadline; with what it said instead.
    pub fn hear_until(&mut self, wanted: &str, deadline: Deadline) -> Outcome {
        let mut passed = Vec::new();
        loop {
            let place = || format!("wanted {wanted:?} after {passed:?}");
            match self.hear(deadline).map_err(|failure| failure.within(place()))? {
                line if line == wanted => return Ok(()),
                line => passed.push(line),
            }
        }
    }

    /// Answers a rank that waits for a line.
    ///
    /// # Errors
    /// If it has ended.
    pub fn tell(&mut self, line: impl fmt::Display) -> Outcome {
        let told = writeln!(self.words, "{line}").and_then(|()| self.words.flush());
        told.map_err(|error| Failure::new(format!("tell {} {line}: {error}", self.name)))
    }

    /// Kills it as `kill -9` does, and reaps it.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn kill(&mut self) -> Outcome {
        let killed = self.process.kill().and_then(|()| self.process.wait());
        killed.map(drop).map_err(|error| Failure::new(format!("kill {}: {error}", self.name)))
    }

    /// Stops it as `kill -STOP` does: it lives and does nothing.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn stop(&mut self) -> Outcome {
        let pid = i32::try_from(self.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| Failure::new(format!("{} has no number", self.name)))?;
        let stopped = kill_process(pid, Signal::STOP);
        stopped.map_err(|error| Failure::new(format!("stop {}: {error}", self.name)))
    }

    /// Waits until it has ended well.
    ///
    /// # Errors
    /// If it does not end in time, or with another status than success.
    pub fn finish(&mut self, deadline: Deadline) -> Outcome {
        let status = self.ended(deadline)?;
        ensure!(status.success(), "{} ended with {status}", self.name);
        Ok(())
    }

    fn ended(&mut self, deadline: Deadline) -> Outcome<ExitStatus> {
        loop {
            match self.process.try_wait() {
                Ok(Some(status)) => return Ok(status),
                Ok(None) if deadline.has_passed() => {
                    let timeout = deadline.timeout();
                    return Err(Failure::new(format!("{} did not end in {timeout:?}", self.name)));
                }
                Ok(None) => std::thread::sleep(Duration::from_millis(2)),
                Err(error) => return Err(Failure::new(format!("wait for {}: {error}", self.name))),
            }
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Both fail only where it has been reaped already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
