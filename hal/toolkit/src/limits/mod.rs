//! Names the limit of this process, its control groups or the machine that has run out.
//!
//! Linux answers a call that reaches a limit with an error number that several limits share. [`SystemError`] adds the
//! limit, its value and how to raise it to the text. Where the kernel would end the process instead of failing the
//! call, the limit is checked before the call.
//!
//! | limit | the kernel's answer | checked before |
//! | --- | --- | --- |
//! | file descriptors, `ulimit -n` | `EMFILE` | no |
//! | address space, `ulimit -v` | `ENOMEM`; a thread without room for its signal stack ends the process | threads: [`spawn`] |
//! | processes and threads, `ulimit -u` and `pids.max` | `EAGAIN` | no |
//! | size of a file, `ulimit -f`, which includes shared memory | `SIGXFSZ` | [`check_file_bytes`] |
//! | memory of a control group, `memory.max` | `SIGKILL` | [`AvailableMemory`] |

mod control_groups;
mod memory;
mod process;

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

use peerlane_hal::{Error, ErrorKind};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

pub(crate) use memory::GroupLock;
pub use memory::{AvailableMemory, MemoryInfo};
pub use process::{address_space_limit, check_file_bytes};

/// The error of a system call, with the limit that has run out if that is the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SystemError {
    what: String,
    errno: Errno,
    /// The limit that has run out, its value and how to raise it.
    limit: Option<String>,
}

impl SystemError {
    /// Creates the error of a call, where `what` says what failed.
    pub fn new(what: impl Into<String>, errno: Errno) -> Self {
        Self { what: what.into(), errno, limit: process::limit_of(errno) }
    }

    /// Creates the error of a call of the standard library, where `what` says what failed.
    pub fn of_io(what: impl Into<String>, error: &io::Error) -> Self {
        Self::new(what, Errno::from_io_error(error).unwrap_or(Errno::IO))
    }

    /// Creates the error of a call that starts a process, where `what` says what failed.
    pub fn of_process(what: impl Into<String>, error: &io::Error) -> Self {
        let error = Self::of_io(what, error);
        let limit = match error.errno {
            Errno::AGAIN => process::limit_of_threads(0),
            _ => error.limit,
        };
        Self { limit, ..error }
    }

    fn of_thread(what: impl Into<String>, errno: Errno) -> Self {
        // The C library reports a stack that cannot be mapped as `EAGAIN` too. What was used up when the call failed may be
        // free again, so that `ENOMEM` says more than another look.
        let limit =
            process::limit_of(errno).or_else(|| process::limit_of_threads(process::THREAD_BYTES));
        Self { what: what.into(), errno, limit }
    }

    /// Returns the error number of the call.
    pub fn errno(&self) -> Errno {
        self.errno
    }

    /// Returns whether the call failed because memory or a limit has run out.
    pub fn is_exhausted(&self) -> bool {
        self.kind() == ErrorKind::OutOfMemory
    }
}

impl fmt::Display for SystemError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.errno)?;
        match &self.limit {
            Some(limit) => write!(f, "; {limit}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for SystemError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.errno)
    }
}

impl Error for SystemError {
    fn kind(&self) -> ErrorKind {
        match self.errno {
            Errno::NOMEM | Errno::NOSPC | Errno::MFILE | Errno::NFILE | Errno::FBIG => {
                ErrorKind::OutOfMemory
            }
            _ if self.limit.is_some() => ErrorKind::OutOfMemory,
            Errno::PERM | Errno::ACCESS | Errno::NOSYS => ErrorKind::Unavailable,
            _ => ErrorKind::Other,
        }
    }
}

/// Starts a named thread.
///
/// # Errors
/// Returns an error if the system has no room for a thread, which names the limit. The standard library would end the
/// process if the address space has room for the stack of the thread but not for its signal stack.
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    body: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>, SystemError> {
    start_thread(name.into(), |thread| thread.spawn(body))
}

/// Starts a named thread that can borrow what outlives `scope`.
///
/// # Errors
/// As [`spawn`].
pub fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: impl Into<String>,
    body: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>, SystemError> {
    start_thread(name.into(), |thread| thread.spawn_scoped(scope, body))
}

fn start_thread<H>(
    name: String,
    start: impl FnOnce(Builder) -> io::Result<H>,
) -> Result<H, SystemError> {
    let what = format!("cannot start the thread {name}");
    if process::lacks_address_space(process::THREAD_BYTES) {
        return Err(SystemError::of_thread(what, Errno::NOMEM));
    }
    start(Builder::new().name(name)).map_err(|error| {
        SystemError::of_thread(what, Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))
    })
}

/// A file descriptor that a server keeps free, so that it can tell a client that its descriptors have run out.
#[derive(Debug)]
pub struct SpareDescriptor(Option<OwnedFd>);

impl SpareDescriptor {
    /// Reserves a file descriptor.
    ///
    /// # Errors
    /// Returns the error of the system call.
    pub fn reserve() -> Result<Self, SystemError> {
        let reserved = eventfd(0, EventfdFlags::CLOEXEC);
        let failed = |errno| SystemError::new("cannot reserve a file descriptor", errno);
        reserved.map(|reserved| Self(Some(reserved))).map_err(failed)
    }

    /// Gives the descriptor free for one call, such as an `accept` that has just failed. The caller must close what the
    /// call returns before it calls [`take_back`](Self::take_back).
    pub fn lend<T>(&mut self, call: impl FnOnce() -> T) -> T {
        self.0 = None;
        call()
    }

    /// Reserves the descriptor again. If another thread has taken it, the next call tries again.
    pub fn take_back(&mut self) {
        if self.0.is_none() {
            *self = Self::reserve().unwrap_or(Self(None));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_limit_that_ran_out() {
        let error = SystemError::new("cannot open a socket", Errno::MFILE);
        let text = error.to_string();
        let begin =
            "cannot open a socket: Too many open files (os error 24); the limit of the process is ";
        assert!(text.starts_with(begin), "{text}");
        assert!(text.contains("file descriptors: raise it with `ulimit -n`"), "{text}");
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);

        let other = SystemError::new("cannot open a socket", Errno::PERM);
        assert_eq!(other.to_string(), "cannot open a socket: Operation not permitted (os error 1)");
        assert_eq!(other.kind(), ErrorKind::Unavailable);
    }

    #[test]
    fn a_thread_has_its_name_and_its_result() {
        let body = || std::thread::current().name().map(str::to_owned);
        assert_eq!(spawn("peerlane-test", body).unwrap().join().unwrap().unwrap(), "peerlane-test");
    }
}
