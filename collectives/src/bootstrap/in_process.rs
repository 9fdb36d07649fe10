//! Ranks as threads of one process.
//!
//! One thread of the group's own runs the exchange point and the listeners; it sleeps while there
//! is nothing to pass on, and ends with the last handle. Listeners run one after the other, so that
//! all have returned before anyone hears [`Notice::Told`](super::Notice::Told).
//!
//! A rank whose exchange times out ends the group: ranks that wait in an exchange get its error,
//! and listeners hear an [abort](super::Notice::Abort) whose record is the text of the error.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::{panic, thread};

use peerlane_hal::{Deadline, ErrorKind, Rank};

use super::member::Member;
use super::message::{Blob, Request};
use super::point::{Event, Point, check_ranks};
use super::{Bootstrap, Listener, host};
use crate::error::Error;

/// One rank's handle; to be moved into the thread that is the rank.
///
/// A handle that is dropped before it said [goodbye](Bootstrap::leave) is a loss to the others.
pub struct InProcess {
    member: Arc<Member>,
    events: Sender<(Rank, Event)>,
    host: String,
}

/// Opens a group of `ranks` and returns the handle of each, in rank order.
///
/// # Errors
/// [`InvalidArgument`](ErrorKind::InvalidArgument) if `ranks` is 0 or does not fit in 32 bits;
/// [`Other`](ErrorKind::Other) if the system has no thread for the group.
pub fn group(ranks: usize) -> Result<Vec<InProcess>, Error> {
    check_ranks(ranks)?;
    let members: Vec<_> = Rank::all(ranks).map(|rank| Arc::new(Member::new(rank, ranks))).collect();
    let (events, inbox) = channel();
    let handles = members.iter().map(|member| InProcess {
        member: Arc::clone(member),
        events: events.clone(),
        host: host::id(),
    });
    let handles = handles.collect();
    thread::Builder::new()
        .name("peerlane-exchange".into())
        .spawn(move || pass_on(&members, &inbox))
        .map_err(|error| {
            let text = format!("no thread for the exchange of an in-process group: {error}");
            Error::new(ErrorKind::Other, text).with_source(error)
        })?;
    Ok(handles)
}

/// Runs `body` as each of `ranks` ranks, on a thread each, and returns what they returned, in rank
/// order.
///
/// A body that ends well says [goodbye](Bootstrap::leave) first; otherwise ranks that are still at
/// work lose it.
///
/// # Errors
/// That of the rank that failed by itself, rather than of those that lost it; the lowest rank's if
/// there are several. Errors of [`group`].
///
/// # Panics
/// With the panic of a rank, after all ranks have ended.
pub fn run<R: Send>(
    ranks: usize,
    body: impl Fn(InProcess) -> Result<R, Error> + Sync,
) -> Result<Vec<R>, Error> {
    let handles = group(ranks)?;
    let ended: Vec<Result<Result<R, Error>, Box<dyn Any + Send>>> = thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> =
            handles.into_iter().map(|handle| scope.spawn(move || body(handle))).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
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
    if let Some(payload) = panicked {
        panic::resume_unwind(payload);
    }
    match errors.into_iter().min_by_key(|error| distance_from_cause(error.kind())) {
        Some(cause) => Err(cause),
        None => Ok(results),
    }
}

/// Ranks that failed by themselves come before those that waited for them in vain, were left alone,
/// or were told to stop.
fn distance_from_cause(kind: ErrorKind) -> u32 {
    match kind {
        ErrorKind::Timeout => 1,
        ErrorKind::PeerLost => 2,
        ErrorKind::Aborted => 3,
        _ => 0,
    }
}

fn pass_on(members: &[Arc<Member>], inbox: &Receiver<(Rank, Event)>) {
    let mut point = Point::new(members.len());
    for rank in Rank::all(members.len()) {
        point.take(rank, Event::Came);
    }
    while let Ok((from, event)) = inbox.recv() {
        let mut replies = VecDeque::from(point.take(from, event));
        while let Some(reply) = replies.pop_front() {
            for rank in point.live().collect::<Vec<_>>() {
                if members[rank.index()].receive(reply.clone()) {
                    replies.extend(point.take(rank, Event::Said(Request::Acknowledge)));
                }
            }
        }
    }
}

impl InProcess {
    fn send(&self, event: Event) -> Result<(), Error> {
        self.events.send((self.member.rank(), event)).map_err(|_| {
            let text = "the thread of the in-process group is gone: a listener panicked";
            Error::new(ErrorKind::PeerLost, text)
        })
    }

    fn request(&self, request: Request) {
        // Without the thread nothing comes back, and the caller's deadline tells.
        let _ = self.send(Event::Said(request));
    }
}

impl Bootstrap for InProcess {
    fn rank(&self) -> Rank {
        self.member.rank()
    }

    fn ranks(&self) -> usize {
        self.member.ranks()
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
        self.member.exchange(label, mine, deadline, |request| self.request(request))
    }

    fn abort(&self, record: &[u8]) -> Result<(), Error> {
        self.member.check_abort(record)?;
        self.send(Event::Said(Request::Abort { record: Blob(record.to_vec()) }))
    }

    fn listen(&self, listener: Listener) {
        self.member.listen(listener);
    }

    fn leave(&self, _deadline: Deadline) -> Result<(), Error> {
        if self.member.depart()? { self.send(Event::Said(Request::Leave)) } else { Ok(()) }
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        self.member.silence();
        let how = if thread::panicking() {
            "its thread panicked"
        } else {
            "its handle was dropped without a goodbye"
        };
        let _ = self.send(Event::Lost { how: how.into() });
    }
}

impl fmt::Debug for InProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InProcess")
            .field("rank", &self.member.rank())
            .field("ranks", &self.member.ranks())
            .finish_non_exhaustive()
    }
}
