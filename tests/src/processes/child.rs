//! Controls a rank that runs as a process, from the parent's side.

use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use peerlane_hal::Deadline;
use rustix::process::{Pid, Signal, kill_process};

use super::parent::{ROLE, variable};
use peerlane_conformance::{Failure, Outcome, ensure};

/// A process that runs a role of the test program; killed and reaped when dropped.
#[derive(Debug)]
pub struct Child {
    name: String,
    process: std::process::Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Child {
    /// Starts this program again, to run `role` with these values.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn start(role: &str, values: &[(&str, String)]) -> Outcome<Self> {
        let program = std::env::current_exe();
        let program = program.map_err(|error| {
            Failure::new(format!("cannot find the file of the test program: {error}"))
        })?;
        let mut command = Command::new(program);
        command.env(ROLE, role);
        for (name, value) in values {
            command.env(variable(name), value);
        }
        Self::spawn(role, command)
    }

    /// Starts `command`, which must run this program in a role.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn spawn(name: &str, mut command: Command) -> Outcome<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let started = command.spawn();
        let mut process = started.map_err(|error| {
            Failure::new(format!("cannot start the process of {name}: {error}"))
        })?;
        let input = process.stdin.take().expect("it was asked for");
        let output = process.stdout.take().expect("it was asked for");
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                // The send fails when the handle was dropped.
                let _ = send.send(line);
            }
        });
        Ok(Self { name: format!("{name}, process {}", process.id()), process, input, lines })
    }

    /// Returns the process's number.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Returns the next line that the process prints.
    ///
    /// # Errors
    /// If it ends or prints nothing until the deadline.
    pub fn read_line(&mut self, deadline: Deadline) -> Outcome<String> {
        self.lines.recv_timeout(deadline.remaining()).map_err(|_| {
            let ended = self.process.try_wait().ok().flatten();
            let state = ended.map_or_else(
                || "is still running".to_owned(),
                |status| format!("has ended with {status}"),
            );
            let timeout = deadline.timeout();
            Failure::new(format!(
                "{} printed no line within {timeout:?}, and the process {state}",
                self.name
            ))
        })
    }

    /// Returns the rest of the next line, which must begin with `word`.
    ///
    /// # Errors
    /// Those of [`read_line`](Self::read_line), or that the process printed something else.
    pub fn expect(&mut self, word: &str, deadline: Deadline) -> Outcome<String> {
        let line = self.read_line(deadline).map_err(|failure| {
            failure.within(format!("expected a line that begins with {word:?}"))
        })?;
        let rest = line.strip_prefix(word).map(|rest| rest.trim_start().to_owned());
        rest.ok_or_else(|| {
            Failure::new(format!(
                "{} printed the line {line:?}, expected a line that begins with {word:?}",
                self.name
            ))
        })
    }

    /// Skips lines until the process prints `expected`.
    ///
    /// # Errors
    /// If it ends, or does not print it until the deadline; with what it printed instead.
    pub fn read_until(&mut self, expected: &str, deadline: Deadline) -> Outcome {
        let mut passed = Vec::new();
        loop {
            let place = || format!("expected the line {expected:?} after the lines {passed:?}");
            match self.read_line(deadline).map_err(|failure| failure.within(place()))? {
                line if line == expected => return Ok(()),
                line => passed.push(line),
            }
        }
    }

    /// Sends a line to a rank that waits for one.
    ///
    /// # Errors
    /// If it has ended.
    pub fn send_line(&mut self, line: impl fmt::Display) -> Outcome {
        let sent = writeln!(self.input, "{line}").and_then(|()| self.input.flush());
        sent.map_err(|error| {
            Failure::new(format!("cannot send the line \"{line}\" to {}: {error}", self.name))
        })
    }

    /// Kills the process as `kill -9` does, and reaps it.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn kill(&mut self) -> Outcome {
        let killed = self.process.kill().and_then(|()| self.process.wait());
        killed
            .map(drop)
            .map_err(|error| Failure::new(format!("cannot kill {}: {error}", self.name)))
    }

    /// Stops the process as `kill -STOP` does: it lives but does not run.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn stop(&mut self) -> Outcome {
        let pid = i32::try_from(self.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| {
            Failure::new(format!("the process number of {} is out of range", self.name))
        })?;
        let stopped = kill_process(pid, Signal::STOP);
        stopped.map_err(|error| Failure::new(format!("cannot stop {}: {error}", self.name)))
    }

    /// Waits until the process has ended with success.
    ///
    /// # Errors
    /// If it does not end in time, or with another status than success.
    pub fn finish(&mut self, deadline: Deadline) -> Outcome {
        let status = self.wait_exit(deadline)?;
        ensure!(status.success(), "{} ended with {status}, expected success", self.name);
        Ok(())
    }

    fn wait_exit(&mut self, deadline: Deadline) -> Outcome<ExitStatus> {
        loop {
            match self.process.try_wait() {
                Ok(Some(status)) => return Ok(status),
                Ok(None) if deadline.has_passed() => {
                    let timeout = deadline.timeout();
                    return Err(Failure::new(format!(
                        "{} did not end within {timeout:?}",
                        self.name
                    )));
                }
                Ok(None) => std::thread::sleep(Duration::from_millis(2)),
                Err(error) => {
                    return Err(Failure::new(format!("cannot wait for {}: {error}", self.name)));
                }
            }
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Both fail only if the process was reaped before.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Limits how long the other ranks may take to notice that one has failed.
const ECHO: Duration = Duration::from_secs(30);

/// Reads the lines of all ranks until they end; `children[rank]` is a rank's process.
///
/// A rank prints `passed CASE` after every case and `done` at the end. In between it may print
/// `under way`, and `figure ...`, which is shown to the user.
///
/// # Errors
/// If a rank prints anything else, or does not end with success until the deadline; one line for
/// each such rank.
pub fn finish_all(children: &mut [Child], mut deadline: Deadline) -> Outcome {
    let mut failures = Vec::new();
    for (rank, child) in children.iter_mut().enumerate() {
        if let Err(failure) = read_to_end(child, deadline).and_then(|()| child.finish(deadline)) {
            if failures.is_empty() {
                deadline = Deadline::after(deadline.remaining().min(ECHO));
            }
            failures.push(format!("rank {rank}: {failure}"));
        }
    }
    if failures.is_empty() { Ok(()) } else { Err(Failure::new(failures.join("\n"))) }
}

fn read_to_end(child: &mut Child, deadline: Deadline) -> Outcome {
    let mut passed = String::from("passed nothing");
    loop {
        match child.read_line(deadline) {
            Ok(line) if line == "done" => return Ok(()),
            Ok(line) if line == "under way" => {}
            Ok(line) if line.starts_with("figure ") => println!("{line}"),
            Ok(line) if line.starts_with("passed ") => passed = line,
            Ok(line) => return Err(Failure::new(line)),
            Err(failure) => return Err(failure.within(format!("after the rank {passed}"))),
        }
    }
}
