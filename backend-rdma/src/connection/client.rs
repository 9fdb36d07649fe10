//! Serves one client of the service: reads its requests, sends the responses, and owns the queue pairs that
//! it opened.
//!
//! No call waits for the client. The service calls [`Client::advance`] when the socket is ready, and closes the
//! client when its deadline has passed.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use peerlane_hal::{Deadline, RemoteKey as _};
use rustix::event::PollFlags;

use super::address::Token;
use super::control::{FRAME_BYTES_MAX, HELLO_BYTES, OpenRequest, Request, Response, framed};
use super::service::Resources;
use crate::error::Error;
use crate::nic::{self, QpAddress};
use crate::options::SignalBy;
use crate::registration;
use crate::sys::{Qp, QpSizes};

const LENGTH_BYTES: usize = size_of::<u32>();

/// The time limits of one client.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClientTimeouts {
    /// The time from the connection until the token has arrived.
    pub(super) hello: Duration,
    /// The time for the rest of a request that has begun, and for the client to take a response.
    pub(super) message: Duration,
}

pub(super) struct Client {
    stream: TcpStream,
    timeouts: ClientTimeouts,
    /// The time at which the client is closed, or `None` while it owes nothing.
    deadline: Option<Deadline>,
    /// Whether the client has sent the token.
    is_rank: bool,
    /// Whether the client is closed as soon as it has taken its response.
    is_refused: bool,
    received: Vec<u8>,
    /// The rest of the last response. While there is one, no request is read.
    unsent: Vec<u8>,
    queue_pairs: Vec<PassiveQp>,
}

/// The passive end of a queue pair, which receives from a peer's engine and never sends.
struct PassiveQp {
    qp: Qp,
    nic: usize,
    primary: u32,
}

impl Client {
    pub(super) fn new(stream: TcpStream, timeouts: ClientTimeouts) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            timeouts,
            deadline: Some(Deadline::after(timeouts.hello)),
            is_rank: false,
            is_refused: false,
            received: Vec::new(),
            unsent: Vec::new(),
            queue_pairs: Vec::new(),
        })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Returns what the socket must be ready for before the next call of [`advance`](Self::advance).
    pub(super) fn events(&self) -> PollFlags {
        if self.unsent.is_empty() { PollFlags::IN } else { PollFlags::OUT }
    }

    pub(super) fn deadline(&self) -> Option<Deadline> {
        self.deadline
    }

    pub(super) fn is_rank(&self) -> bool {
        self.is_rank
    }

    /// Reads, answers and sends what is possible without waiting. Returns false if the client must be closed.
    pub(super) fn advance(&mut self, resources: &Resources) -> bool {
        let answered = self.answer_requests(resources);
        let is_busy = !self.received.is_empty() || !self.unsent.is_empty();
        if self.is_rank {
            // Each answer gives the client the time for another message.
            let starts = matches!(answered, Ok(1..)) || self.deadline.is_none();
            match (is_busy, starts) {
                (false, _) => self.deadline = None,
                (true, true) => self.deadline = Some(Deadline::after(self.timeouts.message)),
                (true, false) => {}
            }
        }
        answered.is_ok() && (!self.is_refused || !self.unsent.is_empty())
    }

    /// Returns how many requests were answered.
    fn answer_requests(&mut self, resources: &Resources) -> io::Result<usize> {
        let mut answered = 0;
        self.send()?;
        if self.unsent.is_empty() {
            self.receive()?;
        }
        while self.unsent.is_empty()
            && !self.is_refused
            && let Some(request) = self.next_request()?
        {
            let response = self.response(resources, &request)?;
            self.unsent = framed(&response.encode());
            self.send()?;
            answered += 1;
        }
        Ok(answered)
    }

    fn send(&mut self) -> io::Result<()> {
        while !self.unsent.is_empty() {
            match (&self.stream).write(&self.unsent) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn receive(&mut self) -> io::Result<()> {
        let mut buffer = [0; FRAME_BYTES_MAX];
        match (&self.stream).read(&mut buffer) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.received.extend_from_slice(&buffer[..count]);
                Ok(())
            }
            // The next poll finds the bytes again.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                ) =>
            {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn next_request(&mut self) -> io::Result<Option<Request>> {
        let Some((length, rest)) = self.received.split_first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        let length_max = if self.is_rank { FRAME_BYTES_MAX } else { HELLO_BYTES };
        if length > length_max {
            return Err(io::Error::other(format!(
                "a request of {length} bytes, expected at most {length_max}"
            )));
        }

        let Some(request) = rest.get(..length) else { return Ok(None) };
        let request = Request::decode(request).map_err(io::Error::other)?;
        self.received.drain(..LENGTH_BYTES + length);
        Ok(Some(request))
    }

    /// Returns the response to a request; an error closes the client without one.
    fn response(&mut self, resources: &Resources, request: &Request) -> io::Result<Response> {
        if let Request::Hello { token, rank, ranks } = request {
            let refusal = check_hello(resources, token, rank.index(), *ranks as usize);
            self.is_rank = refusal.is_none();
            self.is_refused = refusal.is_some();
            let token = resources.tokens.service;
            return Ok(refusal.map_or(Response::Welcome { token }, Response::Refused));
        }
        if !self.is_rank {
            return Err(io::Error::other("a request before the token"));
        }

        Ok(match request {
            Request::Hello { .. } => unreachable!("answered above"),
            Request::Import(key) => {
                let known = key.rank == resources.rank && registration::find(key).is_some();
                let known = known && key.region_bytes() == key.bytes;
                if known { Response::Yes } else { Response::Freed }
            }
            Request::Open(request) => match self.open(resources, request) {
                Ok((address, signal)) => Response::Opened { address, signal },
                Err(error) => Response::Refused(error.to_string()),
            },
            Request::Close { primary } => {
                let queue_pairs = self.queue_pairs.extract_if(.., |qp| qp.primary == *primary);
                close(resources, queue_pairs.collect());
                Response::Yes
            }
        })
    }

    fn open(
        &mut self,
        resources: &Resources,
        request: &OpenRequest,
    ) -> Result<(QpAddress, SignalBy), Error> {
        let OpenRequest { address: remote, role, nic: nic_index, signal } = request;
        let (nic_index, receiver) = (usize::from(*nic_index), &resources.receiver);
        let nic = resources.nics.get(nic_index).ok_or_else(|| {
            let count = resources.nics.len();
            Error::argument(format!(
                "the index of the NIC is {nic_index}, expected less than {count}"
            ))
        })?;
        let is_open = |primary| self.queue_pairs.iter().any(|open| open.primary == primary);
        if role.primary.is_some_and(|primary| !is_open(primary)) {
            return Err(Error::argument(format!("the primary queue pair of {role:?} is not open")));
        }
        let sizes = QpSizes { sends: 1, inline_bytes: 0 };
        let qp = Qp::create(&nic.domain, &nic.cq, Some(&nic.srq), sizes)?;
        let local = QpAddress::new(&qp, &nic.port)?;
        // Added before a message can arrive.
        receiver.open((nic_index, qp.number()), *role);
        let primary = role.primary.unwrap_or(qp.number());
        let passive_qp = PassiveQp { qp, nic: nic_index, primary };
        if let Err(error) =
            nic::move_to_rtr(&passive_qp.qp, &nic.port, &resources.options, &local, remote)
        {
            close(resources, vec![passive_qp]);
            return Err(error);
        }
        let signal = signal.unwrap_or_else(|| {
            if passive_qp.qp.writes_in_order() { SignalBy::Write } else { SignalBy::Message }
        });
        let signal = match signal {
            SignalBy::Write if !receiver.allow_direct_writes() => SignalBy::Message,
            signal => signal,
        };
        self.queue_pairs.push(passive_qp);
        Ok((local, signal))
    }

    /// Closes the connection and the queue pairs.
    pub(super) fn close(self, resources: &Resources) {
        close(resources, self.queue_pairs);
    }
}

/// Returns the reason for which a client is refused, or `None` if it is a rank of this fabric.
///
/// The token is compared before anything else.
fn check_hello(resources: &Resources, token: &Token, rank: usize, ranks: usize) -> Option<String> {
    if !resources.tokens.peer.equals(token) {
        return Some("the address is of a fabric that was closed there".to_owned());
    }
    let expected = resources.ranks;
    if ranks != expected {
        return Some(format!("it was opened for {expected} ranks"));
    }
    (rank >= ranks).then(|| format!("rank {rank} is out of range, expected less than {ranks}"))
}

/// Processes the messages that have arrived before it closes queue pairs, because destroying a queue pair may
/// discard them.
fn close(resources: &Resources, queue_pairs: Vec<PassiveQp>) {
    if queue_pairs.is_empty() {
        return;
    }
    queue_pairs.iter().for_each(|qp| qp.qp.fail());
    resources.receiver.close(queue_pairs.iter().map(|qp| (qp.nic, qp.qp.number())));
}
