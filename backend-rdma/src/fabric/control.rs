//! Sends requests to a peer's service over TCP: imports of regions, and opening and closing of queue pairs.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use peerlane_hal::{Deadline, Rank, RemoteKey as _};
use peerlane_toolkit::device::Fault;

use super::SignalBy;
use super::address::Address;
use super::ends::End;
use super::question::{Answer, MESSAGE_BYTES_MAX, Opening, Question};
use crate::error::Error;
use crate::key::Key;

/// The TCP connection to a peer's service, from `connect` until the last user is dropped.
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) peer: Rank,
    /// The location of the peer, for error texts.
    pub(crate) place: String,
    /// The number of NICs of the peer.
    pub(crate) cards: usize,
    /// `None` after a request without a response, because the next bytes would be that response.
    stream: Mutex<Option<TcpStream>>,
}

impl Control {
    /// Connects to the service at an address as rank `me`.
    pub(super) fn open(me: Rank, address: &Address, deadline: Deadline) -> Result<Self, Error> {
        let peer = address.rank;
        let place = address.place();
        let left = deadline.remaining().max(Duration::from_millis(1));
        let stream = TcpStream::connect_timeout(&address.service, left);
        let stream = stream.map_err(|error| lost(peer, &place, &error, "answer", deadline))?;
        // A question is one small packet; the connection works without this, only slower.
        let _ = stream.set_nodelay(true);
        let cards = usize::from(address.cards);
        let control = Self { peer, place, cards, stream: Mutex::new(Some(stream)) };
        let Address { token, ranks, .. } = *address;
        match control.ask(&Question::Hello { token, rank: me, ranks }, "say hello", deadline)? {
            Answer::Yes => Ok(control),
            Answer::Refused(why) => Err(Fault::PeerLost { peer, how: why }.into()),
            answer => Err(control.nonsense(&answer)),
        }
    }

    /// Asks the peer whether it still has the region that a key names.
    pub(crate) fn import(&self, key: &Key, deadline: Deadline) -> Result<(), Error> {
        match self.ask(&Question::Import(*key), "say whether its memory lives", deadline)? {
            Answer::Yes => Ok(()),
            Answer::Freed => {
                Err(Fault::Freed { peer: self.peer, generation: key.generation().0 }.into())
            }
            answer => Err(self.nonsense(&answer)),
        }
    }

    /// Asks the peer to open the other end of a queue pair.
    pub(crate) fn open_pair(
        &self,
        opening: Opening,
        deadline: Deadline,
    ) -> Result<(End, SignalBy), Error> {
        match self.ask(&Question::Open(opening), "open a queue pair", deadline)? {
            Answer::Opened { end, signal } => Ok((end, signal)),
            Answer::Refused(why) => {
                let (peer, place) = (self.peer, &self.place);
                let how = format!("{place} cannot open a queue pair: {why}");
                Err(Fault::PeerLost { peer, how }.into())
            }
            answer => Err(self.nonsense(&answer)),
        }
    }

    /// Asks the peer to close an engine's queue pairs. A peer that has ended has closed them already.
    pub(crate) fn close_pairs(&self, lead: u32, deadline: Deadline) {
        let _ = self.ask(&Question::Close { lead }, "close a queue pair", deadline);
    }

    fn nonsense(&self, answer: &Answer) -> Error {
        let (peer, place) = (self.peer, &self.place);
        let how = format!("{place} answered {answer:?} to another question");
        Fault::PeerLost { peer, how }.into()
    }

    fn ask(
        &self,
        question: &Question,
        what: &'static str,
        deadline: Deadline,
    ) -> Result<Answer, Error> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = stream.as_mut() else {
            let how = format!("{} did not answer before", self.place);
            return Err(Fault::PeerLost { peer: self.peer, how }.into());
        };
        let answer = exchange(open, &question.encode(), deadline);
        let answer = answer.map_err(|error| lost(self.peer, &self.place, &error, what, deadline));
        let decoded = answer.and_then(|bytes| {
            Answer::decode(&bytes).map_err(|error| {
                let how = format!("{} answers what it should not: {error}", self.place);
                Fault::PeerLost { peer: self.peer, how }.into()
            })
        });
        if decoded.is_err() {
            *stream = None;
        }
        decoded
    }
}

fn exchange(
    stream: &mut TcpStream,
    question: &[u8],
    deadline: Deadline,
) -> std::io::Result<Vec<u8>> {
    bound(stream, deadline)?;
    stream.write_all(&framed(question))?;
    let mut length = [0; 4];
    read_exact(stream, &mut length, deadline)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MESSAGE_BYTES_MAX {
        return Err(std::io::Error::other(format!("it announced an answer of {length} bytes")));
    }
    let mut answer = vec![0; length];
    read_exact(stream, &mut answer, deadline)?;
    Ok(answer)
}

/// Returns a message with its length prefix.
pub(super) fn framed(message: &[u8]) -> Vec<u8> {
    let length = message.len() as u32;
    [&length.to_le_bytes(), message].concat()
}

fn read_exact(stream: &mut TcpStream, bytes: &mut [u8], deadline: Deadline) -> std::io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        bound(stream, deadline)?;
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok(more) => filled += more,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Sets the timeout of the next call to the time until the deadline.
fn bound(stream: &TcpStream, deadline: Deadline) -> std::io::Result<()> {
    // Zero would mean no timeout at all.
    let left = Some(deadline.remaining().max(Duration::from_millis(1)));
    stream.set_read_timeout(left)?;
    stream.set_write_timeout(left)
}

fn lost(
    peer: Rank,
    place: &str,
    error: &std::io::Error,
    what: &'static str,
    deadline: Deadline,
) -> Error {
    use std::io::ErrorKind;
    let fault = match error.kind() {
        ErrorKind::TimedOut | ErrorKind::WouldBlock => {
            let what = format!("rank {peer} did not {what}");
            Fault::Timeout { what, timeout: deadline.timeout() }
        }
        ErrorKind::UnexpectedEof => {
            let how = format!("{place} closed the connection instead of answering");
            Fault::PeerLost { peer, how }
        }
        _ => Fault::PeerLost { peer, how: format!("{place}: {error}") },
    };
    fault.into()
}
