//! Detects whether the processes of other ranks on this host run, are stopped, or have ended.
//!
//! The kernel closes the connections of a process that ends, unless a child has copies of them. A
//! descriptor of the process shows its end in any case. Its state shows whether it is stopped or
//! only slow.
//!
//! A process is visible to those of the same kernel and the same process namespace. Containers
//! usually have namespaces of their own, so ranks in different containers of one host see each
//! other no more than ranks of different hosts.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};
use serde::{Deserialize, Serialize};

/// Identifies a process among those of all hosts and earlier processes with the same `pid`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub struct ProcessId {
    /// The boot id of the kernel and the process namespace, within which `pid` is unique at any
    /// time.
    place: String,
    pid: i32,
    /// The time at which the process was started, in clock ticks since the boot.
    ///
    /// A later process can have the same `pid`.
    started: u64,
}

/// Describes the state of a rank's process, as far as another rank can see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessState {
    /// The process cannot be seen, for example because it runs on another host.
    Unknown,
    /// The process runs, waits for a processor, or sleeps.
    Running,
    /// The process is stopped by a signal or by a debugger.
    Stopped,
    /// The process has ended.
    Ended,
}

/// Holds an open descriptor of a process of this host, which may be this process.
#[derive(Debug)]
pub(crate) struct Process {
    pid: i32,
    descriptor: OwnedFd,
}

impl ProcessId {
    /// Returns the id of this process, or `None` if the kernel does not show it.
    pub(crate) fn own() -> Option<Self> {
        let pid = getpid().as_raw_nonzero().get();
        let (_, started) = status(pid)?;

        Some(Self { place: place()?.to_owned(), pid, started })
    }

    /// Opens a descriptor of the process, or returns `None` if this process cannot see it.
    pub(crate) fn find(&self) -> Option<Process> {
        if place()? != self.place {
            return None;
        }

        let descriptor = pidfd_open(Pid::from_raw(self.pid)?, PidfdFlags::empty()).ok()?;
        // Another process can have the number by now. If not, the descriptor was opened for the
        // right process.
        let (_, started) = status(self.pid)?;
        (started == self.started).then_some(Process { pid: self.pid, descriptor })
    }
}

impl ProcessState {
    /// Returns the state of the process `id`, or `Unknown` if there is no id or the process cannot
    /// be seen.
    pub(crate) fn from_id(id: Option<&ProcessId>) -> Self {
        let process = id.and_then(ProcessId::find);
        process.map_or(Self::Unknown, |process| process.state())
    }
}

impl Process {
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    pub(crate) fn state(&self) -> ProcessState {
        let status = status(self.pid);
        // Checked after the status was read, so that the status is not that of another process with
        // the same number.
        if self.has_ended() {
            return ProcessState::Ended;
        }

        match status {
            Some(('T' | 't', _)) => ProcessState::Stopped,
            // A process that looks like a zombie still runs if only its first thread has ended.
            // `has_ended` has ruled out that all have.
            Some(_) => ProcessState::Running,
            None => ProcessState::Unknown,
        }
    }

    fn has_ended(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut ended = [PollFd::new(&self.descriptor, PollFlags::IN)];

        // If the poll fails, the process counts as running, so that no rank is lost by mistake.
        retry_on_intr(|| poll(&mut ended, Some(&now))).is_ok_and(|ready| ready > 0)
    }
}

/// Returns the descriptor of the process, which becomes readable when the process ends.
impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Returns the boot id and the process namespace of this process as one text, which never changes.
fn place() -> Option<&'static str> {
    static PLACE: OnceLock<Option<String>> = OnceLock::new();

    let read = || {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let namespace = fs::read_link("/proc/self/ns/pid").ok()?;
        Some(format!("{}/{}", boot.trim(), namespace.display()))
    };
    PLACE.get_or_init(read).as_deref()
}

/// Reads the state letter and the start time, in clock ticks, of the process `pid` from `/proc`.
fn status(pid: i32) -> Option<(char, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;

    // The name of the program is in parentheses and can hold any character.
    let (_, fields) = text.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;

    // The state is field 3, so the start, field 22, has index 18 among the fields that follow.
    Some((state, fields.nth(18)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use rustix::process::{Signal, kill_process};

    use super::*;

    fn sleeper() -> (Child, Process) {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        let id =
            ProcessId { place: place().unwrap().to_owned(), pid, started: status(pid).unwrap().1 };
        (child, id.find().unwrap())
    }

    fn wait_for(process: &Process, state: ProcessState) {
        while process.state() != state {
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_state_of_a_process_follows_signals() {
        let (mut child, process) = sleeper();
        assert_eq!(process.state(), ProcessState::Running);
        let signal = |signal| kill_process(Pid::from_raw(process.pid()).unwrap(), signal).unwrap();
        signal(Signal::STOP);
        wait_for(&process, ProcessState::Stopped);
        signal(Signal::CONT);
        wait_for(&process, ProcessState::Running);
        child.kill().unwrap();
        // It has ended although nobody has waited for it.
        wait_for(&process, ProcessState::Ended);
        child.wait().unwrap();
        assert_eq!(process.state(), ProcessState::Ended);
    }

    #[test]
    fn a_process_of_another_place_or_time_is_not_found() {
        let own = ProcessId::own().unwrap();
        assert_eq!(own.find().unwrap().state(), ProcessState::Running);
        assert!(ProcessId { place: "elsewhere".to_owned(), ..own.clone() }.find().is_none());
        assert!(ProcessId { started: own.started + 1, ..own }.find().is_none());
    }
}
