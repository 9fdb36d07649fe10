//! Connects to the address of a hub before a deadline.

use std::io;
use std::net::{SocketAddr, TcpStream};

use peerlane_hal::Deadline;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::super::forks::Uninherited;
use super::wire::Stream;

/// Connects to the first of `addresses` that accepts, or returns the error of the last address.
pub(super) fn connect(addresses: &[SocketAddr], deadline: Deadline) -> io::Result<Stream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name of the host has no address");
    for address in addresses {
        match connect_to(*address, deadline) {
            // TCP can connect a port of this host to itself if no process listens at it.
            Ok(stream) if stream.local_addr()? == *address => {
                last = io::ErrorKind::ConnectionRefused.into();
            }
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }

    Err(last)
}

/// Connects to one address before the deadline.
///
/// The standard library would create the socket and connect it in one call. Here the socket is
/// closed in forked children from the beginning.
fn connect_to(address: SocketAddr, deadline: Deadline) -> io::Result<Stream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    let stream = Stream::new(Uninherited::new(TcpStream::from(socket)));

    match rustix::net::connect(&**stream, &address) {
        Ok(()) => {}
        Err(Errno::INPROGRESS) => {
            // The socket can be written once it is connected or has failed.
            let writable = deadline.retry_interrupted(|left| {
                let limit = Timespec::try_from(left).ok();
                let mut connected = [PollFd::new(&**stream, PollFlags::OUT)];
                Ok(poll(&mut connected, limit.as_ref())?)
            })?;
            if writable == 0 {
                return Err(io::ErrorKind::TimedOut.into());
            }

            if let Some(error) = stream.take_error()? {
                return Err(error);
            }
        }
        Err(error) => return Err(error.into()),
    }

    stream.set_nonblocking(false)?;
    Ok(stream)
}
