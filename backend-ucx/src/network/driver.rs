//! Sends and receives by the worker of a rank, which one thread at a time drives.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::Rank;
use peerlane_toolkit::Fault;
use peerlane_toolkit::handover::Host;

use super::receiver::{GetReply, Inbox, PendingGet};
use super::wire::{Content, Header};
use super::{Address, Completions, Outcome};
use crate::error::{Error, Status};
use crate::registration::Registration;
use crate::sys::{Completion, EndpointId, OnLoss, Worker};

/// The longest wait for requests that go on, when memory of the caller is freed or an engine is
/// dropped.
pub(crate) const DROP_TIMEOUT: Duration = Duration::from_secs(2);

/// The number of an engine in messages that belong to none.
const NO_ENGINE: u32 = u32::MAX;

/// The worker with its endpoints, which one thread at a time uses.
#[derive(Debug)]
pub(crate) struct Driver {
    /// The worker, or `None` if it had to be destroyed.
    worker: Option<Worker<Inbox>>,
    endpoints: Vec<Connection>,
    rank: Rank,
    /// The regions whose bytes are being sent to peers that get them, by the number of the reply.
    replying: HashMap<u64, Arc<Registration>>,
    next_reply: u64,
    replied: Arc<Completions>,
    ended: Vec<(u64, Outcome)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Connection {
    /// Nothing was sent to the peer.
    Unused,
    Open(EndpointId),
    /// The endpoint was closed, because the peer took no bytes for a long time.
    Abandoned,
}

impl Driver {
    pub(super) fn new(worker: Worker<Inbox>, (rank, ranks): (Rank, usize)) -> Self {
        Self {
            worker: Some(worker),
            endpoints: vec![Connection::Unused; ranks],
            rank,
            replying: HashMap::new(),
            next_reply: 0,
            replied: Arc::default(),
            ended: Vec::new(),
        }
    }

    pub(crate) fn worker(&mut self) -> Result<&mut Worker<Inbox>, Error> {
        self.worker.as_mut().ok_or_else(|| {
            Fault::Unavailable(
                "the network of this rank was closed, because a peer neither took nor sent the rest of a message when its \
                 memory or its engine ended; open a new group"
                    .to_owned(),
            )
            .into()
        })
    }

    /// Returns the rank that sends the messages.
    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    /// Destroys the worker, because nothing else ends the requests of an engine.
    pub(crate) fn destroy(&mut self) {
        self.worker = None;
    }

    /// Adds a region, so that messages of peers find it by its number.
    pub(crate) fn add_region(
        &mut self,
        number: u64,
        region: &Arc<Registration>,
    ) -> Result<(), Error> {
        self.worker()?.receiver().0.add_region(number, region);
        Ok(())
    }

    /// Adds a get of this rank, and returns its number.
    pub(crate) fn add_get(&mut self, get: PendingGet) -> Result<u64, Error> {
        Ok(self.worker()?.receiver().0.add_get(get))
    }

    /// Forgets the gets of an engine, but for those whose bytes are on their way, whose tags it
    /// returns.
    pub(crate) fn remove_gets(&mut self, of: &Arc<Completions>) -> Vec<u64> {
        self.worker().map_or_else(|_| Vec::new(), |worker| worker.receiver().0.remove_gets(of))
    }

    /// Sends a message to a peer. Returns how the send has ended, or `None` if `completion` is
    /// told.
    ///
    /// # Safety
    /// The bytes can be read, and do not change until the send ends.
    pub(crate) unsafe fn send(
        &mut self,
        to: &Address,
        header: &Header,
        payload: (*const u8, usize),
        completion: &Arc<dyn Completion>,
        tag: u64,
    ) -> Result<Option<Outcome>, Error> {
        let endpoint = self.endpoint(to)?;
        let header = header.encode();
        // SAFETY: the caller keeps the bytes.
        let ended = unsafe { self.worker()?.send(endpoint, &header, payload, completion, tag) };
        Ok(ended.map(Outcome::from_request))
    }

    /// Closes the connection to a peer that takes no bytes, so that all requests to it end.
    pub(crate) fn abandon(&mut self, peer: Rank) {
        let connection = &mut self.endpoints[peer.index()];
        let Connection::Open(endpoint) = std::mem::replace(connection, Connection::Abandoned)
        else {
            return;
        };
        if self.worker().is_ok_and(|worker| !worker.abandon(endpoint)) {
            self.destroy();
        }
    }

    /// Forgets the endpoint to a peer that was not connected, so that another address can be tried.
    pub(super) fn forget_endpoint(&mut self, peer: Rank) {
        let connection = &mut self.endpoints[peer.index()];
        let connection = std::mem::replace(connection, Connection::Unused);
        if let (Connection::Open(endpoint), Ok(worker)) = (connection, self.worker()) {
            worker.abandon(endpoint);
        }
    }

    /// Returns the endpoint to a peer, which the first message creates.
    fn endpoint(&mut self, to: &Address) -> Result<EndpointId, Error> {
        let peer = to.rank;

        match self.endpoints[peer.index()] {
            Connection::Open(endpoint) => match self.worker()?.failure(endpoint) {
                None => Ok(endpoint),
                Some(status) => Err(lost(to, status)),
            },
            Connection::Abandoned => {
                let how = format!(
                    "{} neither took nor sent the rest of its messages for {DROP_TIMEOUT:?} when the work with it ended",
                    to.location()
                );
                Err(Fault::PeerLost { peer, how }.into())
            }
            Connection::Unused => {
                // The launcher or the bootstrap notices the loss of a process of this host.
                let is_here = to.host == *Host::own();
                let loss = if is_here { OnLoss::Ignore } else { OnLoss::Report };
                let endpoint = self.worker()?.connect(&to.worker, loss);
                // UCX opens the shared memory of the peer at once, which is gone with its process.
                let endpoint = endpoint.map_err(|error| match error {
                    Error::Call { status, .. } => lost(to, status),
                    error => error,
                })?;
                self.endpoints[peer.index()] = Connection::Open(endpoint);
                Ok(endpoint)
            }
        }
    }

    /// Asks a peer a question.
    pub(super) fn ask_peer(&mut self, to: &Address, header: &Header) -> Result<(), Error> {
        let endpoint = self.endpoint(to)?;
        match self.worker()?.send_question(endpoint, &header.encode()) {
            Some(Err(status)) => Err(lost(to, status)),
            _ => Ok(()),
        }
    }

    /// Fails if the endpoint to a peer has failed.
    pub(super) fn check(&mut self, to: &Address) -> Result<(), Error> {
        self.endpoint(to).map(drop)
    }

    /// Sends the bytes that peers have asked for.
    pub(super) fn send_replies(
        &mut self,
        peer: impl Fn(Rank) -> Result<Arc<Address>, Error>,
    ) -> Result<(), Error> {
        let mut ended = std::mem::take(&mut self.ended);
        self.replied.drain_into(&mut ended);
        for (reply, _) in ended.drain(..) {
            self.replying.remove(&reply);
        }
        self.ended = ended;

        for _ in 0..self.worker()?.receiver().0.replies.len() {
            let Some(reply) = self.worker()?.receiver().0.replies.pop_front() else { break };
            match peer(reply.to) {
                // A peer that cannot be reached learns of it itself.
                Ok(to) => drop(self.send_bytes_of_get(&to, &reply)),
                // This rank has not connected to it yet.
                Err(_) => self.worker()?.receiver().0.replies.push_back(reply),
            }
        }
        Ok(())
    }

    fn send_bytes_of_get(&mut self, to: &Address, reply: &GetReply) -> Result<(), Error> {
        let payload = match &reply.from {
            Some((region, offset, bytes)) => {
                (region.address_at(*offset).cast_const(), *bytes as usize)
            }
            None => (std::ptr::null(), 0),
        };
        let (request, is_freed) = (reply.request, reply.from.is_none());
        let header = Header {
            token: to.token,
            sender: self.rank,
            engine: NO_ENGINE,
            sequence: 0,
            content: Content::Reply { request, is_freed },
        };

        self.next_reply += 1;
        let tag = self.next_reply;
        let completion: Arc<dyn Completion> = Arc::clone(&self.replied) as _;
        // SAFETY: the region contains the bytes, and is kept until the send ends; who frees memory
        // of the caller waits for it.
        let ended = unsafe { self.send(to, &header, payload, &completion, tag) }?;
        if let (None, Some((region, ..))) = (ended, &reply.from) {
            self.replying.insert(tag, Arc::clone(region));
        }
        Ok(())
    }

    /// Returns whether a request that goes on accesses a region.
    pub(super) fn uses(&mut self, number: u64, region: &Arc<Registration>) -> bool {
        let is_it = |it: &Arc<Registration>| Arc::ptr_eq(it, region);
        self.replying.values().any(is_it)
            || self.worker().is_ok_and(|worker| {
                let inbox = worker.receiver().0;
                let replied = |reply: &GetReply| reply.from.iter().any(|(it, ..)| is_it(it));
                inbox.is_receiving(number) || inbox.replies.iter().any(replied)
            })
    }
}

fn lost(to: &Address, status: Status) -> Error {
    Error::Send { what: "a message to", peer: to.rank, location: to.location(), status }
}
