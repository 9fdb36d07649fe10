//! Sends requests to a peer's TCP service, for example to open the peer's end of a queue pair.
//!
//! A message is its length in four bytes, followed by that number of bytes. Each request has one response, in
//! order.
//!
//! | request | fields | response |
//! | --- | --- | --- |
//! | hello | token of peers, rank and number of ranks of the sender | token of the service, or the reason of the refusal |
//! | import | generation and fields of a key | yes, or that the memory has been freed |
//! | open | address of an engine's queue pair, its index and NIC, and the requested method of signals | address of the other end, and the method that is possible |
//! | close | number of the primary queue pair at the receiver | yes, after it and the other queue pairs of its engine are closed |

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use peerlane_hal::wire::{Reader, Writer};
use peerlane_hal::{Deadline, Generation, KeyError, Rank, RemoteKey as _};
use peerlane_toolkit::limits::SystemError;
use peerlane_toolkit::{DeadlineSocket, Fault};

use super::address::{Address, Token};
use super::signals::{QpRole, RAILS_MAX};
use crate::error::Error;
use crate::key::Key;
use crate::nic::QpAddress;
use crate::options::{NICS_MAX, SignalBy};

#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) peer: Rank,
    pub(crate) location: String,
    pub(crate) nics: usize,
    /// The TCP stream to the peer, or `None` after a lost response, because the next bytes would be that
    /// response.
    stream: Mutex<Option<TcpStream>>,
}

impl Control {
    pub(crate) fn open(me: Rank, address: &Address, deadline: Deadline) -> Result<Self, Error> {
        let peer = address.rank;
        let location = address.location();
        let Address { tokens, ranks, .. } = *address;
        let hello = Request::Hello { token: tokens.peer, rank: me, ranks }.encode();
        let (stream, response) = loop {
            let left = deadline.remaining().max(Duration::from_millis(1));
            let stream = TcpStream::connect_timeout(&address.service, left);
            let stream =
                stream.map_err(|error| tcp_error(peer, &location, &error, "answer", deadline))?;
            // A request is one small packet; the connection works without this, only slower.
            let _ = stream.set_nodelay(true);
            match exchange(&stream, &hello, deadline) {
                Ok(response) => break (stream, response),
                // A service with too many clients closes the oldest without the token. That of a process that
                // has ended refuses the next connection.
                Err(error) if is_closed(&error) && !deadline.has_passed() => {
                    thread::sleep(RETRY_PAUSE);
                }
                Err(error) => {
                    return Err(tcp_error(peer, &location, &error, "say hello", deadline));
                }
            }
        };

        let response =
            Response::decode(&response).map_err(|error| malformed(peer, &location, &error))?;
        let nics = usize::from(address.nics);
        let control = Self { peer, location, nics, stream: Mutex::new(Some(stream)) };
        match response {
            Response::Welcome { token } if tokens.service.equals(&token) => Ok(control),
            Response::Welcome { .. } => {
                let service = address.service;
                let how = format!(
                    "the process that listens at {service} does not know the address of the rank, so the rank has \
                     ended, and another process has its port"
                );
                Err(Fault::PeerLost { peer, how }.into())
            }
            Response::Refused(why) => Err(Fault::PeerLost { peer, how: why }.into()),
            response => Err(control.unexpected_response(&response)),
        }
    }

    pub(crate) fn import(&self, key: &Key, deadline: Deadline) -> Result<(), Error> {
        match self.call(
            &Request::Import(*key),
            "answer whether its memory still exists",
            deadline,
        )? {
            Response::Yes => Ok(()),
            Response::Freed => {
                Err(Fault::Freed { peer: self.peer, generation: key.generation().0 }.into())
            }
            response => Err(self.unexpected_response(&response)),
        }
    }

    pub(crate) fn open_queue_pair(
        &self,
        open: OpenRequest,
        deadline: Deadline,
    ) -> Result<(QpAddress, SignalBy), Error> {
        match self.call(&Request::Open(open), "open a queue pair", deadline)? {
            Response::Opened { address, signal } => Ok((address, signal)),
            Response::Refused(why) => {
                let (peer, location) = (self.peer, &self.location);
                let how = format!("{location} cannot open a queue pair: {why}");
                Err(Fault::PeerLost { peer, how }.into())
            }
            response => Err(self.unexpected_response(&response)),
        }
    }

    pub(crate) fn close_queue_pairs(&self, primary: u32, deadline: Deadline) {
        // An error is ignored: a peer that has ended has closed its queue pairs already.
        let _ = self.call(&Request::Close { primary }, "close a queue pair", deadline);
    }

    fn unexpected_response(&self, response: &Response) -> Error {
        let (peer, location) = (self.peer, &self.location);
        let how = format!("{location} answered {response:?} to another request");
        Fault::PeerLost { peer, how }.into()
    }

    /// Sends a request to the peer and waits for the response; `what` completes the error text "rank 1 did not ...".
    fn call(
        &self,
        request: &Request,
        what: &'static str,
        deadline: Deadline,
    ) -> Result<Response, Error> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = &*stream else {
            let how = format!("{} did not answer an earlier request", self.location);
            return Err(Fault::PeerLost { peer: self.peer, how }.into());
        };
        let response = exchange(open, &request.encode(), deadline);
        let response =
            response.map_err(|error| tcp_error(self.peer, &self.location, &error, what, deadline));
        let decoded = response.and_then(|bytes| {
            Response::decode(&bytes).map_err(|error| malformed(self.peer, &self.location, &error))
        });
        if decoded.is_err() {
            *stream = None;
        }
        decoded
    }
}

fn exchange(stream: &TcpStream, request: &[u8], deadline: Deadline) -> std::io::Result<Vec<u8>> {
    let mut stream = DeadlineSocket::new(stream, deadline);
    stream.write_all(&framed(request))?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > FRAME_BYTES_MAX {
        return Err(std::io::Error::other(format!("it announced a response of {length} bytes")));
    }
    let mut response = vec![0; length];
    stream.read_exact(&mut response)?;
    Ok(response)
}

pub(super) fn framed(message: &[u8]) -> Vec<u8> {
    let length = message.len() as u32;
    [&length.to_le_bytes(), message].concat()
}

fn is_closed(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
}

fn malformed(peer: Rank, location: &str, error: &KeyError) -> Error {
    let how = format!("{location} sent a malformed response: {error}");
    Fault::PeerLost { peer, how }.into()
}

fn tcp_error(
    peer: Rank,
    location: &str,
    error: &std::io::Error,
    what: &'static str,
    deadline: Deadline,
) -> Error {
    use std::io::ErrorKind;
    let system = SystemError::of_io(format!("cannot reach rank {peer} at {location}"), error);
    if system.is_exhausted() {
        return Fault::from(system).into();
    }
    let fault = match error.kind() {
        ErrorKind::TimedOut | ErrorKind::WouldBlock => {
            let what = format!("rank {peer} did not {what}");
            Fault::Timeout { what, timeout: deadline.timeout() }
        }
        ErrorKind::UnexpectedEof => {
            let how = format!("{location} closed the connection instead of answering");
            Fault::PeerLost { peer, how }
        }
        _ => Fault::PeerLost { peer, how: format!("{location}: {error}") },
    };
    fault.into()
}

pub(super) const FRAME_BYTES_MAX: usize = 4096;
/// The length of a hello, the only request of a client without the token.
pub(super) const HELLO_BYTES: usize = 2 + Token::BYTES + 4 + 4;

/// The pause before a connection that was closed without an answer is made again.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

const HELLO: u16 = 1;
const IMPORT: u16 = 2;
const OPEN: u16 = 3;
const CLOSE: u16 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Hello { token: Token, rank: Rank, ranks: u32 },
    Import(Key),
    Open(OpenRequest),
    Close { primary: u32 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpenRequest {
    pub(crate) address: QpAddress,
    pub(crate) role: QpRole,
    /// The index of the NIC on which the receiver of the request opens its end of the queue pair.
    pub(crate) nic: u8,
    pub(crate) signal: Option<SignalBy>,
}

impl Request {
    pub(super) fn encode(&self) -> Vec<u8> {
        let writer = Writer::new();
        match self {
            Self::Hello { token, rank, ranks } => {
                token.write(writer.u16(HELLO)).u32(rank.0).u32(*ranks).finish()
            }
            Self::Import(key) => key.write(writer.u16(IMPORT).u64(key.generation.0)).finish(),
            Self::Open(open) => open.write(writer.u16(OPEN)).finish(),
            Self::Close { primary } => writer.u16(CLOSE).u32(*primary).finish(),
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, KeyError> {
        let mut reader = Reader::new(bytes);
        Ok(match reader.u16("request")? {
            HELLO => Self::Hello {
                token: Token::read(&mut reader)?,
                rank: Rank(reader.u32("rank")?),
                ranks: reader.u32("number of ranks")?,
            },
            IMPORT => {
                let generation = Generation(reader.u64("generation")?);
                Self::Import(Key::read(&mut reader, generation)?)
            }
            OPEN => Self::Open(OpenRequest::read(&mut reader)?),
            CLOSE => Self::Close { primary: reader.u32("queue pair")? },
            found => {
                let (field, expected) = ("request", "1 to 4");
                return Err(KeyError::Field { field, found: found.into(), expected });
            }
        })
    }
}

impl OpenRequest {
    fn write(&self, writer: Writer) -> Writer {
        let Self { address, role, nic, signal } = self;
        // Numbers of queue pairs have 24 bits.
        let primary = role.primary.unwrap_or(u32::MAX);
        address
            .write(writer)
            .u32(primary)
            .u16(role.index.into())
            .u16((*nic).into())
            .u16(signal_number(*signal))
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, KeyError> {
        let address = QpAddress::read(reader)?;
        let primary =
            Some(reader.u32("primary queue pair")?).filter(|primary| *primary != u32::MAX);
        let index = reader.u16("rail")?;
        let nic = reader.u16("NIC")?;
        let signal = signal_method(reader.u16("signal method")?)?;
        let index_max = if primary.is_some() { RAILS_MAX - 1 } else { 0 };
        if usize::from(index) > index_max || primary.is_some() && index == 0 {
            let (field, expected) = ("rail", "0 for the primary queue pair, 1 to 7 for the others");
            return Err(KeyError::Field { field, found: index.into(), expected });
        }
        if usize::from(nic) >= NICS_MAX {
            let (field, expected) = ("NIC", "0 to 3");
            return Err(KeyError::Field { field, found: nic.into(), expected });
        }
        // Both were just checked to be small.
        let role = QpRole { primary, index: index as u8 };
        Ok(Self { address, role, nic: nic as u8, signal })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Response {
    Welcome {
        token: Token,
    },
    Yes,
    /// The region that a peer wants to import no longer exists.
    Freed,
    /// The service refused the request; the text gives the reason.
    Refused(String),
    Opened {
        address: QpAddress,
        signal: SignalBy,
    },
}

impl Response {
    pub(super) fn encode(&self) -> Vec<u8> {
        let writer = Writer::new();
        match self {
            Self::Yes => writer.u16(0).finish(),
            Self::Freed => writer.u16(1).finish(),
            Self::Refused(why) => {
                let why = &why.as_bytes()[..why.len().min(FRAME_BYTES_MAX / 2)];
                writer.u16(2).bytes(why).finish()
            }
            Self::Opened { address, signal } => {
                address.write(writer.u16(3)).u16(signal_number(Some(*signal))).finish()
            }
            Self::Welcome { token } => token.write(writer.u16(4)).finish(),
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, KeyError> {
        let mut reader = Reader::new(bytes);
        Ok(match reader.u16("response")? {
            0 => Self::Yes,
            1 => Self::Freed,
            2 => Self::Refused(String::from_utf8_lossy(reader.rest()).into_owned()),
            3 => Self::Opened {
                address: QpAddress::read(&mut reader)?,
                signal: signal_method(reader.u16("signal method")?)?.unwrap_or(SignalBy::Message),
            },
            4 => Self::Welcome { token: Token::read(&mut reader)? },
            found => {
                let (field, expected) = ("response", "0 to 4");
                return Err(KeyError::Field { field, found: found.into(), expected });
            }
        })
    }
}

fn signal_number(signal: Option<SignalBy>) -> u16 {
    match signal {
        None => 0,
        Some(SignalBy::Message) => 1,
        Some(SignalBy::Write) => 2,
    }
}

fn signal_method(number: u16) -> Result<Option<SignalBy>, KeyError> {
    match number {
        0 => Ok(None),
        1 => Ok(Some(SignalBy::Message)),
        2 => Ok(Some(SignalBy::Write)),
        found => {
            let (field, expected) = ("signal method", "0 to 2");
            Err(KeyError::Field { field, found: found.into(), expected })
        }
    }
}

#[cfg(test)]
mod tests {
    use peerlane_hal::Role;

    use super::super::address::Tokens;
    use super::*;

    #[test]
    fn requests_and_responses_survive_the_wire() {
        let address = QpAddress { qp_num: 17, psn: 1, gid: [3; 16], lid: 5, mtu: 3, reads: 16 };
        let key = Key {
            generation: Generation(5),
            rank: Rank(1),
            role: Role::Data,
            address: 4096,
            bytes: 77,
            nics: 1,
            remote_keys: [8, 0, 0, 0],
        };
        let primary = QpRole { primary: None, index: 0 };
        let open = OpenRequest { address, role: primary, nic: 3, signal: Some(SignalBy::Write) };
        let other = QpRole { primary: Some(17), index: 7 };
        let token = Tokens::random().unwrap().peer;
        let requests = [
            Request::Hello { token, rank: Rank(3), ranks: 5 },
            Request::Import(key),
            Request::Open(open),
            Request::Open(OpenRequest { role: other, signal: None, ..open }),
            Request::Close { primary: 3 },
        ];
        for request in requests {
            let bytes = request.encode();
            assert_eq!(Request::decode(&bytes), Ok(request));
            for length in 0..bytes.len() {
                Request::decode(&bytes[..length]).unwrap_err();
            }
        }
        for wrong in [
            OpenRequest { role: QpRole { primary: None, index: 1 }, ..open },
            OpenRequest { role: QpRole { primary: Some(17), index: 0 }, ..open },
            OpenRequest { role: QpRole { primary: Some(17), index: 8 }, ..open },
            OpenRequest { nic: 4, ..open },
        ] {
            Request::decode(&Request::Open(wrong).encode()).unwrap_err();
        }
        assert_eq!(requests[0].encode().len(), HELLO_BYTES);
        let responses = [
            Response::Welcome { token },
            Response::Yes,
            Response::Freed,
            Response::Refused("no".into()),
            Response::Opened { address, signal: SignalBy::Message },
        ];
        for response in responses {
            assert_eq!(Response::decode(&response.encode()), Ok(response));
        }
        Request::decode(&[9, 9]).unwrap_err();
        Response::decode(&[9, 9]).unwrap_err();
    }
}
