//! Implements the bootstrap of one rank, with exchanges between all ranks and notices of lost ranks.
//!
//! The in-process group and the TCP bootstrap add the transport to and from the hub and share the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use peerlane_hal::{Deadline, ErrorKind, Rank};

use super::message::{
    BLOB_BYTES_MAX, Blob, EndCause, FRAME_BYTES_MAX, LABEL_BYTES_MAX, RankList, Reply, Request,
    Seconds, with_peer,
};
use super::{AbortRecord, Listener, Notice};
use crate::error::Error;

const START: &str = "the group did not start";

const START_ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// Messages for a rank that has no listener yet are kept up to this number of bytes.
const QUEUED_BYTES_MAX: usize = FRAME_BYTES_MAX;

/// Another rank can be ahead of this rank by at most this number of exchanges.
///
/// A rank begins the next exchange when all ranks have contributed to the one before, or when their labels differ.
const AHEAD_MAX: u64 = 2;

pub(super) struct Client {
    rank: Rank,
    ranks: usize,
    state: Monitor<ClientState>,
    notifications: Mutex<Notifications>,
}

#[derive(Default)]
pub(crate) struct ClientState {
    ranks: usize,
    joined: BTreeSet<Rank>,
    runs_hub: Option<Rank>,
    /// The rank that counts as lost if the connection to the hub closes.
    hub: Option<Rank>,
    addresses: Vec<Option<SocketAddr>>,
    left: BTreeSet<Rank>,
    next_sequence: u64,
    exchanges: BTreeMap<u64, Exchange>,
    end_cause: Option<EndCause>,
    acknowledged: bool,
    has_left: bool,
    /// Why the connection to the hub has closed.
    closed: Option<String>,
}

/// The lock is held while the listener runs, which keeps notices in order.
#[derive(Default)]
struct Notifications {
    listener: Option<Arc<dyn Listener>>,
    queued: Vec<Notice>,
    queued_bytes: usize,
}

impl Client {
    pub(super) fn new(rank: Rank, ranks: usize) -> Self {
        Self {
            rank,
            ranks,
            state: Monitor::new(ClientState::new(ranks)),
            notifications: Mutex::default(),
        }
    }

    /// Creates the side of a rank in a group that was split from another one. `hub` is the rank that runs the hub.
    pub(super) fn of_subgroup(rank: Rank, ranks: usize, hub: Option<Rank>) -> Self {
        let state = ClientState { runs_hub: hub, hub, ..ClientState::new(ranks) };
        Self { state: Monitor::new(state), ..Self::new(rank, ranks) }
    }

    pub(super) fn rank(&self) -> Rank {
        self.rank
    }

    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }

    /// If the deadline passes, `time_out` tells the hub, which knows why ranks are missing and answers all ranks.
    pub(super) fn wait_started(
        &self,
        deadline: Deadline,
        time_out: impl FnOnce(),
    ) -> Result<(), Error> {
        let settled = |state: &mut ClientState| {
            if state.joined.len() == self.ranks {
                return Some(Ok(()));
            }
            state.end_cause.as_ref().map(|end_cause| Err(end_cause.error(START)))
        };
        let answered = self.state.wait(deadline, settled).or_else(|| {
            time_out();
            self.state.wait(Deadline::after(START_ANSWER_TIMEOUT), settled)
        });
        answered.unwrap_or_else(|| {
            let joined = &self.state.lock().joined;
            let missing = Rank::all(self.ranks).filter(|rank| !joined.contains(rank));
            let missing = missing.map(|rank| rank.0).collect();
            let timeout = deadline.timeout();
            Err(EndCause::NotStarted { missing, timeout, refused: None }.error(START))
        })
    }

    /// An error of sending to the hub is reported to the caller as the end of the group.
    pub(super) fn exchange(
        &self,
        label: &str,
        mine: &[u8],
        deadline: Deadline,
        send: impl Fn(Request),
    ) -> Result<Vec<Vec<u8>>, Error> {
        check_sizes(label, mine)?;
        let what = format!("exchange {label:?}");
        let sequence = self.state.lock().begin_exchange(&what)?;
        send(Request::Contribute { sequence, label: label.to_owned(), blob: Blob(mine.to_vec()) });
        let settled = self.state.wait(deadline, |state| state.outcome(sequence, &what));
        let missing = self.state.lock().missing();
        let result = settled.unwrap_or_else(|| {
            // The exchange failed here, so it must fail on every rank.
            let error = self.timeout_error(&what, &missing, deadline);
            if let Some(listener) = self.listener() {
                let mut others = missing;
                others.retain(|rank| *rank != self.rank);
                if others.is_empty() {
                    others.extend(self.relay().filter(|relay| *relay != self.rank));
                }
                return Err(listener.exchange_timed_out(&others, error));
            }
            let missing = error.peer().map(|rank| rank.0);
            send(Request::TimedOut { text: error.to_string(), missing });
            Err(error)
        });
        self.state.lock().end_exchange(sequence);
        result
    }

    pub(super) fn relay(&self) -> Option<Rank> {
        self.state.lock().runs_hub
    }

    /// Only ranks that listen and have not left the group can take part in a smaller group.
    pub(super) fn remaining(&self) -> Vec<(Rank, SocketAddr)> {
        let state = self.state.lock();
        let address = |rank: Rank| state.addresses.get(rank.index()).copied().flatten();
        let ranks = Rank::all(self.ranks).filter(|rank| !state.left.contains(rank));
        ranks.filter_map(|rank| Some((rank, address(rank)?))).collect()
    }

    pub(super) fn missing(&self) -> Vec<Rank> {
        let missing = self.state.lock().missing();
        missing.into_iter().filter(|rank| *rank != self.rank).collect()
    }

    fn timeout_error(&self, what: &str, missing: &[Rank], deadline: Deadline) -> Error {
        let others: Vec<_> = missing.iter().copied().filter(|rank| *rank != self.rank).collect();
        let within = Seconds(deadline.timeout());
        let text = if others.len() == missing.len() {
            format!("{what}: {} did not take part within {within}", RankList(&others))
        } else if others.is_empty() {
            format!("{what}: the hub did not answer within {within}")
        } else {
            let others = RankList(&others);
            format!("{what}: no message from {others} or the hub within {within}")
        };
        with_peer(Error::new(ErrorKind::Timeout, text), others.first().copied())
    }

    pub(super) fn check_send(&self, what: &str, bytes: &[u8]) -> Result<(), Error> {
        check_sizes("", bytes)?;
        let state = self.state.lock();
        match &state.end_cause {
            _ if state.has_left => Err(left_error(what)),
            Some(end_cause) if state.closed.is_some() => Err(end_cause.error_after(what)),
            _ => Ok(()),
        }
    }

    /// Returns true if a goodbye must now be sent to the hub, and false if it was sent before.
    pub(super) fn begin_leave(&self) -> Result<bool, Error> {
        self.state.change(|state| match &state.end_cause {
            _ if state.has_left => Ok(false),
            Some(end_cause) if state.closed.is_some() => Err(end_cause.error_after("goodbye")),
            _ => Ok(!mem::replace(&mut state.has_left, true)),
        })
    }

    pub(super) fn stop_notifications(&self) {
        self.state.change(|state| state.has_left = true);
    }

    pub(super) fn wait_closed(&self, deadline: Deadline) -> bool {
        self.state.wait(deadline, |state| state.closed.is_some().then_some(())).is_some()
    }

    pub(super) fn receive(&self, reply: Reply) -> Option<Request> {
        let notice = self.state.change(|state| state.apply(reply))?;
        let must_acknowledge = matches!(notice, Notice::Abort { .. } | Notice::Lost { .. });
        let answer =
            self.notify(notice).map(|record| Request::Abort { record: Blob(record.encode()) });
        answer.or_else(|| must_acknowledge.then_some(Request::Acknowledge))
    }

    /// Returns why the connection to the hub has closed, if it has.
    pub(super) fn closed_how(&self) -> Option<String> {
        self.state.lock().closed.clone()
    }

    pub(super) fn close(&self, how: String) {
        let notices = self.state.change(|state| state.close(how));
        for notice in notices {
            self.notify(notice);
        }
    }

    pub(super) fn listen(&self, listener: Arc<dyn Listener>) {
        let mut notifications = self.notifications.lock().unwrap_or_else(PoisonError::into_inner);
        notifications.queued.drain(..).for_each(|notice| listener.notice(notice));
        notifications.listener = Some(listener);
    }

    fn listener(&self) -> Option<Arc<dyn Listener>> {
        self.notifications.lock().unwrap_or_else(PoisonError::into_inner).listener.clone()
    }

    fn notify(&self, notice: Notice) -> Option<AbortRecord> {
        let mut notifications = self.notifications.lock().unwrap_or_else(PoisonError::into_inner);
        if self.state.lock().has_left {
            return None;
        }
        if let Some(listener) = &notifications.listener {
            listener.notice(notice);
            return None;
        }
        if let Notice::Message { from, message } = &notice {
            notifications.queued_bytes += message.len() + size_of::<Notice>();
            let too_many = too_many_messages(*from, notifications.queued_bytes);
            if too_many.is_some() {
                return too_many;
            }
        }
        notifications.queued.push(notice);
        None
    }
}

/// Returns the record that ends the group if a rank has sent more bytes than are kept for one that does not listen yet.
pub(super) fn too_many_messages(from: Rank, bytes: usize) -> Option<AbortRecord> {
    let how = format!(
        "it sent more than {QUEUED_BYTES_MAX} bytes of messages to a rank that does not listen yet"
    );
    (bytes > QUEUED_BYTES_MAX).then(|| AbortRecord::lost(from, &how))
}

impl ClientState {
    pub(crate) fn new(ranks: usize) -> Self {
        Self { ranks, hub: Some(Rank(0)), ..Self::default() }
    }

    pub(crate) fn begin_exchange(&mut self, what: &str) -> Result<u64, Error> {
        if self.has_left {
            return Err(left_error(what));
        }
        if let Some(end_cause) = &self.end_cause {
            return Err(end_cause.error_after(what));
        }
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.exchanges.entry(sequence).or_insert_with(|| Exchange::new(self.ranks));
        Ok(sequence)
    }

    pub(crate) fn end_exchange(&mut self, sequence: u64) {
        self.exchanges.remove(&sequence);
    }

    pub(crate) fn missing(&self) -> Vec<Rank> {
        let begun = self.exchanges.range(..self.next_sequence).next();
        begun.into_iter().flat_map(|(_, exchange)| exchange.missing()).collect()
    }

    /// If the connection to the hub closes before the group has ended, the rank that runs it counts as lost: rank 0 in the
    /// first group.
    pub(crate) fn close(&mut self, how: String) -> Vec<Notice> {
        self.closed = Some(how.clone());
        let mut notices = Vec::new();
        if self.end_cause.is_none() {
            let lost = match self.hub {
                Some(Rank(rank)) => EndCause::Lost { rank, how },
                None => EndCause::HubLost { how },
            };
            notices.extend(self.end_cause.insert(lost).notice());
        }
        if !mem::replace(&mut self.acknowledged, true) {
            notices.push(Notice::Acknowledged);
        }
        notices
    }

    pub(crate) fn apply(&mut self, reply: Reply) -> Option<Notice> {
        let ranks = self.ranks;
        let known = |rank: u32| (rank as usize) < ranks;
        match reply {
            Reply::Joined { ranks, runs_hub, addresses } => {
                self.addresses = addresses;
                self.runs_hub = runs_hub.filter(|rank| known(*rank)).map(Rank);
                self.joined.extend(ranks.into_iter().filter(|rank| known(*rank)).map(Rank));
                None
            }
            Reply::Contribution { from, sequence, label, blob } => {
                // This rank has ended the exchange, or no correct rank can have begun it.
                let begins = self.next_sequence..=self.next_sequence + AHEAD_MAX;
                let is_open = begins.contains(&sequence) || self.exchanges.contains_key(&sequence);
                if is_open && known(from) {
                    let exchange =
                        self.exchanges.entry(sequence).or_insert_with(|| Exchange::new(ranks));
                    exchange.add(sequence, Rank(from), label, blob.0);
                }
                None
            }
            Reply::Ended(end_cause) => self.end_cause.insert(end_cause).notice(),
            Reply::Acknowledged => {
                (!mem::replace(&mut self.acknowledged, true)).then_some(Notice::Acknowledged)
            }
            Reply::Message { from, message } => {
                known(from).then_some(Notice::Message { from: Rank(from), message: message.0 })
            }
            Reply::Left { rank } => {
                self.left.insert(Rank(rank));
                Some(Notice::Left { rank: Rank(rank) })
            }
            Reply::Gone => None,
        }
    }

    /// An exchange that was complete before the end of the group stays complete, on every rank.
    pub(crate) fn outcome(
        &mut self,
        sequence: u64,
        what: &str,
    ) -> Option<Result<Vec<Vec<u8>>, Error>> {
        let exchange = self.exchanges.get_mut(&sequence)?;
        if let Some(outcome) = exchange.outcome() {
            return Some(outcome);
        }
        if let Some(end_cause) = &self.end_cause {
            return Some(Err(end_cause.error(what)));
        }
        if self.has_left {
            return Some(Err(left_error(what)));
        }
        let gone = exchange.missing().find(|rank| self.left.contains(rank))?;
        let text = format!("{what}: rank {gone} has left the group and cannot take part");
        Some(Err(Error::new(ErrorKind::PeerLost, text).with_peer(gone)))
    }
}

fn check_sizes(label: &str, blob: &[u8]) -> Result<(), Error> {
    for (what, bytes, bytes_max) in [
        ("exchange data is", blob.len(), BLOB_BYTES_MAX),
        ("exchange label is", label.len(), LABEL_BYTES_MAX),
    ] {
        if bytes > bytes_max {
            let text = format!("{what} {bytes} bytes long, expected at most {bytes_max} bytes");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
    }
    Ok(())
}

fn left_error(what: &str) -> Error {
    Error::new(ErrorKind::Other, format!("{what}: this rank has already left the group"))
}

struct Exchange {
    blobs: Vec<Option<Vec<u8>>>,
    missing: usize,
    first: Option<(Rank, String)>,
    mismatch: Option<Error>,
}

impl Exchange {
    fn new(ranks: usize) -> Self {
        Self { blobs: vec![None; ranks], missing: ranks, first: None, mismatch: None }
    }

    /// All ranks receive contributions to an exchange in the same order, so all report the same two ranks if labels
    /// differ.
    fn add(&mut self, sequence: u64, from: Rank, label: String, blob: Vec<u8>) {
        let (first, expected) = self.first.get_or_insert_with(|| (from, label.clone()));
        if *expected != label && self.mismatch.is_none() {
            let mut sides = [(*first, expected.as_str()), (from, label.as_str())];
            sides.sort();
            let [(low, low_label), (high, high_label)] = sides;
            let text = format!(
                "ranks call different collectives in exchange {sequence}: rank {low} calls \
                 {low_label:?}, rank {high} calls {high_label:?}; make the same collective calls \
                 in the same order on all ranks"
            );
            self.mismatch = Some(Error::new(ErrorKind::Mismatch, text).with_peer(from));
        }
        let contribution = &mut self.blobs[from.index()];
        if contribution.is_none() {
            self.missing -= 1;
        }
        *contribution = Some(blob);
    }

    fn outcome(&mut self) -> Option<Result<Vec<Vec<u8>>, Error>> {
        if let Some(error) = self.mismatch.take() {
            return Some(Err(error));
        }
        (self.missing == 0).then(|| Ok(self.blobs.iter_mut().filter_map(Option::take).collect()))
    }

    fn missing(&self) -> impl Iterator<Item = Rank> {
        Rank::all(self.blobs.len()).filter(|rank| self.blobs[rank.index()].is_none())
    }
}

/// A mutex and a condition variable, with which threads wait for changes of a value.
///
/// A panic of another thread, for example in a listener, does not make the value unusable: every change under
/// the lock is complete before foreign code runs.
pub(super) struct Monitor<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Monitor<T> {
    pub(super) fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Condvar::new() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }

    /// Waits until `find` returns a result; `None` means that the deadline has passed.
    pub(super) fn wait<R>(
        &self,
        deadline: Deadline,
        mut find: impl FnMut(&mut T) -> Option<R>,
    ) -> Option<R> {
        let mut value = self.lock();
        loop {
            if let Some(found) = find(&mut value) {
                return Some(found);
            }
            let remaining = deadline.remaining();
            if remaining.is_zero() {
                return None;
            }
            let woken = self.changed.wait_timeout(value, remaining);
            value = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exchanges_that_can_have_begun_are_kept() {
        let mut state = ClientState::new(2);
        for sequence in [0, 1, AHEAD_MAX, AHEAD_MAX + 1, 1 << 20, u64::MAX] {
            let (label, blob) = ("a".to_owned(), Blob(vec![1; 100]));
            state.apply(Reply::Contribution { from: 1, sequence, label, blob });
        }
        assert_eq!(state.exchanges.keys().copied().collect::<Vec<_>>(), [0, 1, AHEAD_MAX]);
        let sequence = state.begin_exchange("a").unwrap();
        state.end_exchange(sequence);
        let (label, blob) = ("a".to_owned(), Blob(Vec::new()));
        state.apply(Reply::Contribution { from: 1, sequence, label, blob });
        assert!(!state.exchanges.contains_key(&sequence), "the exchange has ended");
    }
}
