//! Connects ranks that are threads of one process, for tests and single-process programs.
//!
//! One thread of the group runs the hub and the listeners. It sleeps while there is nothing to pass
//! on, and ends with the last handle. Listeners run one after the other, so that all have returned
//! before any of them receives [`Notice::Acknowledged`](super::Notice::Acknowledged).
//!
//! A rank whose exchange times out ends the group: through its [listener](super::Listener) if it
//! has one, else with a record that names the first missing rank.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::panic;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use peerlane_hal::{Deadline, ErrorKind, Rank};
use peerlane_toolkit::limits;

use super::client::Client;
use super::hub::{Event, Joining, check_ranks};
use super::message::{Blob, Request};
use super::monitor::Monitor;
use super::subgroups::{Addressed, Clients, HubGroups};
use super::{Bootstrap, Listener, host_id};
use crate::error::Error;

const ENDED: &str = "the thread of the in-process bootstrap has ended, because a listener panicked";

/// Connects a rank that is a thread of this process to the other ranks of its group.
///
/// If it is dropped before it said [goodbye](Bootstrap::leave), the other ranks lose this rank.
pub struct InProcessBootstrap {
    clients: Arc<Clients>,
    events: Sender<(Rank, Addressed<Event>)>,
    host: String,
    shrinks: Arc<Monitor<Shrinks>>,
    shrink_calls: AtomicUsize,
}

/// Tracks the calls of `shrink` by all ranks of a group.
#[derive(Default)]
struct Shrinks {
    gone: BTreeSet<Rank>,
    /// One round for the first calls of all ranks, one for their second calls, and so on.
    rounds: Vec<Round>,
}

/// Tracks the calls of `shrink` that form one new group, and stores the bootstraps of its ranks.
#[derive(Default)]
struct Round {
    called: BTreeSet<Rank>,
    formed: Option<BTreeMap<Rank, InProcessBootstrap>>,
}

impl Shrinks {
    /// Records the call of `shrink` by `rank` in the round with the index `round`.
    fn add_call(&mut self, round: usize, rank: Rank) {
        if self.rounds.len() <= round {
            self.rounds.resize_with(round + 1, Round::default);
        }
        self.rounds[round].called.insert(rank);
    }

    /// Returns the bootstrap of `own` in the new group, or `None` while ranks of `expected` have
    /// not called `shrink`.
    ///
    /// If `now` is true, it forms the group without them.
    fn take(
        &mut self,
        round: usize,
        own: Rank,
        expected: &[Rank],
        now: bool,
    ) -> Option<Result<InProcessBootstrap, Error>> {
        let Round { called, formed } = &mut self.rounds[round];
        if formed.is_none() {
            let awaited = |rank: &Rank| !called.contains(rank) && !self.gone.contains(rank);
            if !now && expected.iter().any(awaited) {
                return None;
            }

            match group(called.len()) {
                Ok(handles) => *formed = Some(called.iter().copied().zip(handles).collect()),
                Err(error) => return Some(Err(error)),
            }
        }

        // A rank that called after the group was formed is not in it.
        let handle = formed.as_mut().and_then(|handles| handles.remove(&own));
        Some(handle.ok_or_else(|| {
            let text = format!(
                "the group has shrunk without rank {own}, which did not call `shrink` in time"
            );
            Error::new(ErrorKind::Aborted, text)
        }))
    }

    /// Removes a rank that has left or is lost from all rounds, so that no other rank waits for it.
    fn remove(&mut self, rank: Rank) {
        self.gone.insert(rank);

        for round in &mut self.rounds {
            round.called.remove(&rank);
            // The ranks of the new group lose this one.
            round.formed.as_mut().map(|handles| handles.remove(&rank));
        }
    }
}

/// Creates a group of `ranks` threads of this process, and returns the bootstraps of all ranks, in
/// rank order.
///
/// # Errors
/// [`InvalidArgument`](ErrorKind::InvalidArgument) if `ranks` is 0 or more than 65,536;
/// [`OutOfMemory`](ErrorKind::OutOfMemory) if the system cannot start the thread of the group.
pub fn group(ranks: usize) -> Result<Vec<InProcessBootstrap>, Error> {
    check_ranks(ranks)?;

    let (events, inbox) = channel();
    let clients_of = |rank| connect_clients(rank, ranks, events.clone());
    let clients: Vec<_> = Rank::all(ranks).map(clients_of).collect();

    let shrinks = Arc::new(Monitor::new(Shrinks::default()));
    let mut handles = Vec::with_capacity(ranks);
    for clients in &clients {
        handles.push(InProcessBootstrap {
            clients: Arc::clone(clients),
            events: events.clone(),
            host: host_id(),
            shrinks: Arc::clone(&shrinks),
            shrink_calls: AtomicUsize::new(0),
        });
    }

    limits::spawn("peerlane-exchange", move || run_hub(&clients, &inbox))?;
    Ok(handles)
}

/// Creates the clients of `rank`, which send their requests through `events` to the thread of the
/// hub.
fn connect_clients(
    rank: Rank,
    ranks: usize,
    events: Sender<(Rank, Addressed<Event>)>,
) -> Arc<Clients> {
    let send =
        move |request| events.send((rank, request_event(request))).map_err(|_| ENDED.to_owned());
    Arc::new(Clients::new(Arc::new(Client::new(rank, ranks)), send))
}

fn request_event(request: Addressed<Request>) -> Addressed<Event> {
    let Addressed { subgroup, message } = request;
    Addressed { subgroup, message: Event::Request(message) }
}

/// Runs `body` once for each of `ranks` ranks, each on its own thread, and returns the results in
/// rank order.
///
/// A successful body says [goodbye](Bootstrap::leave) before it returns; otherwise ranks that are
/// still running lose it.
///
/// # Errors
/// The error of the rank that failed by itself, not of those that lost it; that of the lowest rank
/// if several failed by themselves. Errors of [`group`].
///
/// # Panics
/// If a rank panics, with its panic, after all ranks have ended.
pub fn run<R: Send>(
    ranks: usize,
    body: impl Fn(InProcessBootstrap) -> Result<R, Error> + Sync,
) -> Result<Vec<R>, Error> {
    let handles = group(ranks)?;
    let ended: Vec<Result<Result<R, Error>, Box<dyn Any + Send>>> = thread::scope(|scope| {
        let body = &body;
        // If a thread cannot be started, its rank is lost, which ends the others.
        let mut threads = Vec::with_capacity(ranks);
        for handle in handles {
            let name = format!("peerlane-rank-{}", handle.rank());
            threads.push(limits::spawn_scoped(scope, name, move || body(handle)));
        }

        let mut ended = Vec::with_capacity(ranks);
        for thread in threads {
            ended.push(match thread {
                Ok(thread) => thread.join(),
                Err(error) => Ok(Err(error.into())),
            });
        }
        ended
    });

    let mut results = Vec::with_capacity(ranks);
    let mut errors = Vec::new();
    let mut panicked = None;
    for end in ended {
        match end {
            Ok(Ok(result)) => results.push(result),
            Ok(Err(error)) => errors.push(error),
            Err(payload) => panicked = panicked.or(Some(payload)),
        }
    }

    // A panic comes first, because the errors of the other ranks may follow from it.
    if let Some(payload) = panicked {
        panic::resume_unwind(payload);
    }

    // Of equal distances the first is taken, which is that of the lowest rank.
    match errors.into_iter().min_by_key(|error| distance_from_cause(error.kind())) {
        Some(cause) => Err(cause),
        None => Ok(results),
    }
}

/// Returns how far an error of `kind` is from the cause of a failure, where 0 is the cause itself.
///
/// A rank that failed by itself is closer to the cause than one that timed out or lost a peer. A
/// rank that was aborted is the farthest.
fn distance_from_cause(kind: ErrorKind) -> u32 {
    match kind {
        ErrorKind::Timeout => 1,
        ErrorKind::PeerLost => 2,
        ErrorKind::Aborted => 3,
        _ => 0,
    }
}

/// Runs the hub and the listeners of all ranks on this thread, until no rank is live.
fn run_hub(clients: &[Arc<Clients>], inbox: &Receiver<(Rank, Addressed<Event>)>) {
    let mut state = HubGroups::new(clients.len());
    for rank in Rank::all(clients.len()) {
        let joined = Event::Joined(Joining::default());
        // No rank waits for its start, so the replies are not delivered.
        state.apply(rank, Addressed::to_all(joined));
    }

    // The sides of the ranks can send, so the inbox does not close while this thread has them.
    while state.first().live().next().is_some()
        && let Ok((from, event)) = inbox.recv()
    {
        let mut replies = VecDeque::from(state.apply(from, event));

        // All ranks receive a reply before the replies to their answers, which keeps one order for
        // all.
        while let Some(reply) = replies.pop_front() {
            for rank in reply.to {
                if let Some(request) = clients[rank.index()].receive(reply.reply.clone()) {
                    replies.extend(state.apply(rank, request_event(request)));
                }
            }
        }
    }
}

impl InProcessBootstrap {
    fn client(&self) -> &Client {
        self.clients.first()
    }

    fn send(&self, event: Event) -> Result<(), Error> {
        let sent = self.events.send((self.client().rank(), Addressed::to_all(event)));
        sent.map_err(|_| Error::new(ErrorKind::PeerLost, ENDED))
    }

    fn request(&self, request: Request) {
        // If the thread is gone, no reply comes and the caller's deadline passes.
        let _ = self.send(Event::Request(request));
    }
}

// SAFETY: every exchange has a sequence number, and its contributions are passed on unchanged. The
// client never changes the `rank` and `ranks` that `group` has assigned.
unsafe impl Bootstrap for InProcessBootstrap {
    fn rank(&self) -> Rank {
        self.client().rank()
    }

    fn ranks(&self) -> usize {
        self.client().ranks()
    }

    fn host(&self) -> &str {
        &self.host
    }

    fn exchange(
        &self,
        label: &str,
        mine: &[u8],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>, Error> {
        self.client().exchange(label, mine, deadline, |request| self.request(request))
    }

    fn missing(&self) -> Vec<Rank> {
        self.client().missing()
    }

    fn broadcast(&self, message: &[u8]) -> Result<(), Error> {
        self.client().check_send("broadcast", message)?;
        self.send(Event::Request(Request::Broadcast { message: Blob(message.to_vec()) }))
    }

    fn relay(&self) -> Option<Rank> {
        Some(self.client().rank())
    }

    fn shares_process(&self) -> bool {
        true
    }

    fn abort(&self, record: &[u8]) -> Result<(), Error> {
        self.client().check_send("abort", record)?;
        self.send(Event::Request(Request::Abort { record: Blob(record.to_vec()) }))
    }

    fn listen(&self, listener: Arc<dyn Listener>) {
        self.client().listen(listener);
    }

    fn leave(&self, _deadline: Deadline) -> Result<(), Error> {
        // No shrink may wait for this rank, even if the goodbye fails.
        self.shrinks.change(|shrinks| shrinks.remove(self.client().rank()));

        if self.client().begin_leave()? {
            self.send(Event::Request(Request::Leave))
        } else {
            Ok(())
        }
    }

    fn disconnect(&self) {
        self.client().stop_notifications();
        self.shrinks.change(|shrinks| shrinks.remove(self.client().rank()));

        let how = if thread::panicking() {
            "its thread panicked"
        } else {
            "its bootstrap was dropped before the rank left the group"
        };
        // The hub ignores the event if the rank has left. If its thread has ended, no rank can be
        // told.
        let _ = self.send(Event::Lost { how: how.into() });
    }

    fn shrink(&self, excluded: &[Rank], deadline: Deadline) -> Result<Box<dyn Bootstrap>, Error> {
        // Every remaining rank calls `shrink` equally often, so equal numbers of calls belong
        // together.
        let round = self.shrink_calls.fetch_add(1, Ordering::Relaxed);
        let own = self.client().rank();
        self.shrinks.change(|shrinks| shrinks.add_call(round, own));

        let ranks = Rank::all(self.client().ranks());
        let expected: Vec<_> = ranks.filter(|rank| !excluded.contains(rank)).collect();
        let half = Deadline::after(deadline.remaining() / 2);
        let in_time = self.shrinks.wait(half, |shrinks| shrinks.take(round, own, &expected, false));
        let taken = in_time
            .or_else(|| self.shrinks.change(|shrinks| shrinks.take(round, own, &expected, true)));
        let formed = taken.expect("the group is formed at the latest now")?;

        // The others wait until the group is formed, and a change inside of `wait` wakes nobody.
        self.shrinks.change(|_| ());
        Ok(Box::new(formed))
    }

    fn subgroup(&self, number: u32, members: &[Rank]) -> Result<Box<dyn Bootstrap>, Error> {
        let opened = self.clients.open(number, members.to_vec(), &self.host, self.relay())?;
        Ok(Box::new(opened))
    }
}

impl Drop for InProcessBootstrap {
    fn drop(&mut self) {
        self.disconnect();
    }
}

impl fmt::Debug for InProcessBootstrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InProcessBootstrap")
            .field("rank", &self.client().rank())
            .field("ranks", &self.client().ranks())
            .finish_non_exhaustive()
    }
}
