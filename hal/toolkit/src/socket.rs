//! Bounds the calls on a socket by a deadline, also while signals interrupt them.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd as _};

use rustix::net::SendFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use peerlane_hal::Deadline;

/// Reads and writes a blocking socket until a deadline.
///
/// A read or write at the deadline fails with [`WouldBlock`](io::ErrorKind::WouldBlock) or
/// [`TimedOut`](io::ErrorKind::TimedOut). The methods of [`Read`] and [`Write`] that call others several times, such as
/// `write_all`, share the deadline; with the timeouts of the standard library, every part and every interruption by a
/// signal would begin a new timeout.
#[derive(Debug)]
pub struct DeadlineSocket<S> {
    socket: S,
    deadline: Deadline,
}

impl<S: AsFd> DeadlineSocket<S> {
    /// Creates a socket whose calls end at `deadline`. It sets the timeouts of `socket`.
    pub fn new(socket: S, deadline: Deadline) -> Self {
        Self { socket, deadline }
    }

    /// Returns the user id of the process at the other end of a connected Unix socket.
    pub(crate) fn peer_user(&self) -> io::Result<u32> {
        peer_user(&self.socket)
    }

    /// Makes a system call on the socket, which waits at most until the deadline.
    pub(crate) fn call<T>(
        &self,
        direction: Timeout,
        mut call: impl FnMut(&S) -> rustix::io::Result<T>,
    ) -> io::Result<T> {
        self.deadline.retry_interrupted(|timeout| {
            set_socket_timeout(&self.socket, direction, Some(timeout))?;
            Ok(call(&self.socket)?)
        })
    }
}

/// Returns the effective user id with which the process at the other end of a Unix socket connected, or listens.
///
/// rustix has such a function too, but it takes the number of the process to be positive. It is zero if the process is in
/// another process namespace.
pub(crate) fn peer_user(socket: impl AsFd) -> io::Result<u32> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, which is the size of the structure, and any numbers are valid in it.
    let code = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    if code == 0 { Ok(credentials.uid) } else { Err(io::Error::last_os_error()) }
}

impl<S: AsFd> Read for DeadlineSocket<S> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.call(Timeout::Recv, |socket| rustix::io::read(socket, &mut *bytes))
    }
}

impl<S: AsFd> Write for DeadlineSocket<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.call(Timeout::Send, |socket| rustix::net::send(socket, bytes, SendFlags::NOSIGNAL))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
