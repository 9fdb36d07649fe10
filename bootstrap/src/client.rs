//! Implements one rank's side of a bootstrap, which exchanges data and notices through the hub.
//!
//! The in-process group and the TCP bootstrap add the transport to and from the hub and share the
//! rest.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::repeat_n;
use std::mem;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use peerlane_hal::{Deadline, ErrorKind, Rank};

use super::message::{
    BLOB_BYTES_MAX, Blob, EndCause, LABEL_BYTES_MAX, RankList, Reply, Request, Seconds, with_peer,
};
use super::meter::{Charge, Meter};
use super::monitor::Monitor;
use super::process::{ProcessId, ProcessState};
use super::{AbortRecord, Listener, Notice};
use crate::error::Error;

const START: &str = "the group did not start";

/// How long a rank waits for the hub's answer to a start timeout before it checks whether the hub
/// runs.
const START_ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// The time after which a process that runs but does not answer counts as faulty.
///
/// It is long because the processors can be busy with other work.
pub const RUNNING_ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The maximum number of bytes of messages that are queued for a rank without a listener.
///
/// It applies to all groups of the rank together.
const QUEUED_BYTES_MAX: usize = 8 << 20;

/// The number of bytes that is counted for each queued notice in addition to its message.
const NOTICE_BYTES: usize = 256;

/// The fraction of an exchange's timeout, as a divisor, that remains when a rank asks which ranks
/// are missing.
const WATCH_PART: u32 = 4;

/// The longest time before the deadline of an exchange at which a rank asks which ranks are
/// missing.
const WATCH_MAX: Duration = Duration::from_secs(1);

/// Implements one rank's side of one group, without the transport to the hub.
pub(super) struct Client {
    rank: Rank,
    ranks: usize,
    state: Monitor<ClientState>,
    /// Makes exchanges begin one at a time, so that requests are sent in the order of their
    /// numbers.
    begins: Mutex<()>,
    notifications: Mutex<Notifications>,
    /// Counts the bytes of the messages that wait for listeners of this rank, in all of its groups.
    queued: Meter,
    /// The id of the process that runs the hub, if the hub has sent it.
    hub_process: Option<ProcessId>,
}

/// Stores the state of a group, as one rank knows it from the replies of the hub.
#[derive(Debug, Default)]
pub struct ClientState {
    ranks: usize,
    has_started: bool,
    runs_hub: Option<Rank>,
    /// The rank that counts as lost if the connection to the hub closes.
    hub: Option<Rank>,
    addresses: Vec<Option<SocketAddr>>,
    processes: Vec<Option<ProcessId>>,
    left: BTreeSet<Rank>,
    next_sequence: u64,
    exchanges: BTreeMap<u64, Exchange>,
    end_cause: Option<EndCause>,
    acknowledged: bool,
    has_left: bool,
    /// The reason why the connection to the hub has closed, or `None` while it is open.
    closed: Option<String>,
}

/// Stores the listener of a rank, and queues the notices that arrive before the listener is set.
///
/// The lock is held while the listener runs, which keeps notices in order.
#[derive(Default)]
struct Notifications {
    listener: Option<Arc<dyn Listener>>,
    queued: Vec<(Notice, Charge)>,
}

impl Client {
    pub(super) fn new(rank: Rank, ranks: usize) -> Self {
        Self {
            rank,
            ranks,
            state: Monitor::new(ClientState::new(ranks)),
            begins: Mutex::default(),
            notifications: Mutex::default(),
            queued: Meter::default(),
            hub_process: None,
        }
    }

    /// Creates the client of a rank whose hub runs in the process `hub_process`.
    pub(super) fn of_hub(rank: Rank, ranks: usize, hub_process: Option<ProcessId>) -> Self {
        Self { hub_process, ..Self::new(rank, ranks) }
    }

    /// Creates the client of this rank in a subgroup, in which the rank has the number `rank`.
    ///
    /// `hub` is the rank of the subgroup that runs the hub, if any.
    pub(super) fn of_subgroup(&self, rank: Rank, ranks: usize, hub: Option<Rank>) -> Self {
        let state = ClientState { runs_hub: hub, hub, ..ClientState::new(ranks) };

        // One meter counts for all groups, so that more groups do not permit more queued messages.
        let queued = self.queued.clone();
        Self { state: Monitor::new(state), queued, ..Self::new(rank, ranks) }
    }

    pub(super) fn rank(&self) -> Rank {
        self.rank
    }

    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }

    /// Waits until all ranks have joined the group, and calls `time_out` to tell the hub if the
    /// deadline passes.
    ///
    /// The hub then answers all ranks, because it knows why ranks are missing. A hub that runs is
    /// only slow, so the wait goes on for a limited time while `hub_runs` returns true.
    pub(super) fn wait_started(
        &self,
        deadline: Deadline,
        time_out: impl FnOnce(),
        hub_runs: impl Fn() -> bool,
    ) -> Result<(), Error> {
        if let Some(outcome) = self.state.wait(deadline, |state| state.start_outcome()) {
            return outcome;
        }

        time_out();
        let latest = Deadline::after(RUNNING_ANSWER_TIMEOUT);
        loop {
            // The hub has time for one answer even if this rank cannot see its process.
            let next_look = Deadline::after(START_ANSWER_TIMEOUT);
            if let Some(outcome) = self.state.wait(next_look, |state| state.start_outcome()) {
                return outcome;
            }
            if latest.has_passed() || !hub_runs() {
                break;
            }
        }

        let hub = self.state.lock().hub;
        let within = Seconds(deadline.timeout());
        let text = format!("{START}: the hub did not answer within {within}");
        Err(with_peer(Error::new(ErrorKind::Timeout, text), hub))
    }

    /// Contributes `mine` to the next exchange of the group, and returns the contributions of all
    /// ranks.
    ///
    /// `send` returns no error: if the hub cannot be reached, the client is closed or the deadline
    /// passes.
    pub(super) fn exchange(
        &self,
        label: &str,
        mine: &[u8],
        deadline: Deadline,
        send: impl Fn(Request),
    ) -> Result<Vec<Vec<u8>>, Error> {
        check_sizes(label, mine)?;

        let what = format!("exchange {label:?}");
        // The request has no number, so requests must be sent in the order of their sequence
        // numbers.
        let sequence = {
            let _begins = self.begins.lock().unwrap_or_else(PoisonError::into_inner);
            let sequence = self.state.lock().begin_exchange(&what)?;
            send(Request::Contribute { label: label.to_owned(), blob: Blob(mine.to_vec()) });
            sequence
        };

        // Only an exchange that is about to time out needs to know which ranks are missing.
        let settle = |state: &mut ClientState| state.outcome(sequence, &what);
        let unwatched = deadline.remaining().saturating_sub(watch_time(deadline.timeout()));
        let settled = self.state.wait(Deadline::after(unwatched), settle).or_else(|| {
            send(Request::Watch);
            self.state.wait(deadline, settle)
        });

        // An exchange that has timed out here must fail on every rank.
        let result = settled.unwrap_or_else(|| Err(self.time_out_exchange(&what, deadline, &send)));
        self.state.lock().end_exchange(sequence);
        result
    }

    /// Ends the group because the exchange `what` has timed out, and returns the error for its
    /// caller.
    fn time_out_exchange(&self, what: &str, deadline: Deadline, send: impl Fn(Request)) -> Error {
        let missing = self.state.lock().missing();
        let error = self.timeout_error(what, &missing, deadline);

        // A listener ends the group itself, and may find a better reason than this rank has.
        if let Some(listener) = self.listener() {
            let mut others = missing;
            others.retain(|rank| *rank != self.rank);
            // If no other rank is missing, the hub has not answered.
            if others.is_empty() {
                others.extend(self.relay().filter(|relay| *relay != self.rank));
            }
            return listener.exchange_timed_out(&others, error);
        }

        let first_missing = error.peer().map(|rank| rank.0);
        send(Request::TimedOut { text: error.to_string(), missing: first_missing });
        error
    }

    /// Returns whether the process of `rank` runs, is stopped or has ended, as far as this rank can
    /// see.
    pub(super) fn process(&self, rank: Rank) -> ProcessState {
        let id = self.state.lock().processes.get(rank.index()).cloned().flatten();
        ProcessState::from_id(id.as_ref())
    }

    /// Returns whether other ranks of the group are threads of this process.
    pub(super) fn shares_process(&self) -> bool {
        let Some(own) = ProcessId::own() else { return false };
        let state = self.state.lock();
        state.processes.iter().flatten().filter(|process| **process == own).count() > 1
    }

    /// Returns the state of the process that runs the hub, as far as this rank can see.
    pub(super) fn relay_process(&self) -> ProcessState {
        ProcessState::from_id(self.hub_process.as_ref())
    }

    pub(super) fn relay(&self) -> Option<Rank> {
        self.state.lock().runs_hub
    }

    /// Returns the ranks that can take part when the group shrinks, with the addresses at which
    /// they listen.
    ///
    /// A rank that has left the group or does not listen cannot take part.
    pub(super) fn remaining(&self) -> Vec<(Rank, SocketAddr)> {
        let state = self.state.lock();
        let address = |rank: Rank| state.addresses.get(rank.index()).copied().flatten();

        let ranks = Rank::all(self.ranks).filter(|rank| !state.left.contains(rank));
        ranks.filter_map(|rank| Some((rank, address(rank)?))).collect()
    }

    /// Returns the other ranks whose contributions to this rank's oldest pending exchange are
    /// missing.
    pub(super) fn missing(&self) -> Vec<Rank> {
        let missing = self.state.lock().missing();
        missing.into_iter().filter(|rank| *rank != self.rank).collect()
    }

    /// Returns the error for the exchange `what`, which timed out before the ranks `missing` took
    /// part.
    fn timeout_error(&self, what: &str, missing: &[Rank], deadline: Deadline) -> Error {
        let others: Vec<_> = missing.iter().copied().filter(|rank| *rank != self.rank).collect();
        let within = Seconds(deadline.timeout());

        // If this rank is missing too, the hub has not even confirmed the contribution of this
        // rank.
        let text = if missing.is_empty() {
            format!("{what}: what the ranks contributed did not arrive within {within}")
        } else if others.len() == missing.len() {
            format!("{what}: {} did not take part within {within}", RankList(&others))
        } else if others.is_empty() {
            format!("{what}: the hub did not answer within {within}")
        } else {
            let others = RankList(&others);
            format!("{what}: no message from {others} or the hub within {within}")
        };
        with_peer(Error::new(ErrorKind::Timeout, text), others.first().copied())
    }

    /// Checks that `bytes` fit into a request, and that this rank has neither left the group nor
    /// lost the hub.
    pub(super) fn check_send(&self, what: &str, bytes: &[u8]) -> Result<(), Error> {
        check_sizes("", bytes)?;

        // While the connection is open, the hub decides what a message means after the end of the
        // group.
        let state = self.state.lock();
        match &state.end_cause {
            _ if state.has_left => Err(left_error(what)),
            Some(end_cause) if state.closed.is_some() => Err(end_cause.error_after(what)),
            _ => Ok(()),
        }
    }

    /// Marks the group as left by this rank, and returns whether the caller must send a goodbye to
    /// the hub.
    ///
    /// It returns false if a goodbye was sent before.
    pub(super) fn begin_leave(&self) -> Result<bool, Error> {
        self.state.change(|state| match &state.end_cause {
            _ if state.has_left => Ok(false),
            Some(end_cause) if state.closed.is_some() => Err(end_cause.error_after("goodbye")),
            _ => {
                state.has_left = true;
                Ok(true)
            }
        })
    }

    pub(super) fn stop_notifications(&self) {
        self.state.change(|state| state.has_left = true);
    }

    pub(super) fn wait_closed(&self, deadline: Deadline) -> bool {
        self.state.wait(deadline, |state| state.closed.is_some().then_some(())).is_some()
    }

    /// Applies a reply of the hub, notifies the listener, and returns the request, if any, that
    /// answers the reply.
    pub(super) fn receive(&self, reply: Reply) -> Option<Request> {
        let notice = self.state.change(|state| state.apply(reply))?;
        let must_acknowledge = matches!(notice, Notice::Abort { .. } | Notice::Lost { .. });

        // The hub releases waits after the acknowledgement, so the listener handles the notice
        // first.
        if let Some(record) = self.notify(notice) {
            return Some(Request::Abort { record: Blob(record.encode()) });
        }
        must_acknowledge.then_some(Request::Acknowledge)
    }

    /// Returns the reason why the connection to the hub has closed, or `None` while it is open.
    pub(super) fn closed_how(&self) -> Option<String> {
        self.state.lock().closed.clone()
    }

    /// Records that the connection to the hub has closed, and notifies the listener.
    pub(super) fn close(&self, how: String) {
        let notices = self.state.change(|state| state.close(how));
        for notice in notices {
            self.notify(notice);
        }
    }

    /// Passes the queued notices to `listener`, and then sets it as the listener of this rank.
    pub(super) fn listen(&self, listener: Arc<dyn Listener>) {
        let mut notifications = self.notifications.lock().unwrap_or_else(PoisonError::into_inner);
        for (notice, _) in notifications.queued.drain(..) {
            listener.notice(notice);
        }
        notifications.listener = Some(listener);
    }

    fn listener(&self) -> Option<Arc<dyn Listener>> {
        self.notifications.lock().unwrap_or_else(PoisonError::into_inner).listener.clone()
    }

    /// Passes a notice to the listener or queues it, and returns an abort record if the queue is
    /// too long.
    ///
    /// The record ends the group, because the queued messages have too many bytes. After this rank
    /// has left the group, the notice is dropped.
    fn notify(&self, notice: Notice) -> Option<AbortRecord> {
        let mut notifications = self.notifications.lock().unwrap_or_else(PoisonError::into_inner);
        if self.state.lock().has_left {
            return None;
        }

        if let Some(listener) = &notifications.listener {
            listener.notice(notice);
            return None;
        }

        let message = match &notice {
            Notice::Message { from, message } => Some((*from, message.len())),
            _ => None,
        };
        let bytes = message.map_or(0, |(_, bytes)| bytes) + NOTICE_BYTES;
        let charge = self.queued.charge(bytes);

        // Only a message ends the group, because the hub limits the number of other notices.
        if let Some((from, _)) = message
            && self.queued.bytes() > QUEUED_BYTES_MAX
        {
            return Some(notifications.too_many(from, bytes));
        }

        notifications.queued.push((notice, charge));
        None
    }
}

impl Notifications {
    /// Returns the abort record that blames the rank with most waiting bytes in this group.
    ///
    /// The message that does not fit any more counts too: `sender` has sent it, and it takes
    /// `bytes` bytes. It can be the only message of the group, because the limit applies to all
    /// groups of the rank together.
    fn too_many(&self, sender: Rank, bytes: usize) -> AbortRecord {
        let mut bytes_of = BTreeMap::from([(sender, bytes)]);
        for (notice, _) in &self.queued {
            if let Notice::Message { from, message } = notice {
                *bytes_of.entry(*from).or_default() += message.len() + NOTICE_BYTES;
            }
        }

        let most = bytes_of.into_iter().max_by_key(|(_, bytes)| *bytes);
        let blamed = most.map_or(sender, |(rank, _)| rank);
        let how = format!(
            "the messages that wait for a listener on one rank take more than {QUEUED_BYTES_MAX} \
             bytes, and of those in this group it sent the largest part"
        );
        AbortRecord::lost(blamed, &how)
    }
}

impl ClientState {
    /// Creates the state of a rank in a group that was not split from another one.
    ///
    /// If the hub is lost, rank 0 counts as lost.
    pub fn new(ranks: usize) -> Self {
        Self { ranks, hub: Some(Rank(0)), ..Self::default() }
    }

    /// Returns success or the error once the group has started or failed to start, and `None`
    /// before.
    fn start_outcome(&self) -> Option<Result<(), Error>> {
        if self.has_started {
            return Some(Ok(()));
        }
        self.end_cause.as_ref().map(|end_cause| Err(end_cause.error(START)))
    }

    /// Begins the next exchange of this rank, and returns its sequence number.
    pub fn begin_exchange(&mut self, what: &str) -> Result<u64, Error> {
        if self.has_left {
            return Err(left_error(what));
        }

        if let Some(end_cause) = &self.end_cause {
            return Err(end_cause.error_after(what));
        }

        let sequence = self.next_sequence;
        self.next_sequence += 1;

        // It exists already if the hub has told of the contributions of other ranks.
        self.exchanges.entry(sequence).or_insert_with(|| Exchange::new(self.ranks));
        Ok(sequence)
    }

    pub fn end_exchange(&mut self, sequence: u64) {
        self.exchanges.remove(&sequence);
    }

    /// Returns the ranks whose contributions to this rank's oldest pending exchange are missing,
    /// according to the hub's reports so far.
    pub fn missing(&self) -> Vec<Rank> {
        let begun = self.exchanges.range(..self.next_sequence).next();
        begun.into_iter().flat_map(|(_, exchange)| exchange.missing()).collect()
    }

    /// Records that the connection to the hub has closed, and returns the notices for the listener.
    ///
    /// If the group has not ended before, the rank that runs the hub counts as lost: rank 0 in the
    /// first group.
    pub fn close(&mut self, how: String) -> Vec<Notice> {
        self.closed = Some(how.clone());

        let mut notices = Vec::new();
        if self.end_cause.is_none() {
            let lost = match self.hub {
                Some(Rank(rank)) => EndCause::Lost { rank, how },
                None => EndCause::HubLost { how },
            };
            notices.extend(self.end_cause.insert(lost).notice());
        }

        // No acknowledgement can arrive any more, so waits are released now.
        if !mem::replace(&mut self.acknowledged, true) {
            notices.push(Notice::Acknowledged);
        }
        notices
    }

    /// Applies a reply of the hub, and returns the notice, if any, for the listener.
    pub fn apply(&mut self, reply: Reply) -> Option<Notice> {
        let ranks = self.ranks;
        let known = |rank: u32| (rank as usize) < ranks;

        match reply {
            Reply::Joined { runs_hub, addresses, processes } => {
                self.addresses = addresses;
                self.processes = processes;
                self.runs_hub = runs_hub.filter(|rank| known(*rank)).map(Rank);
                self.has_started = true;
                None
            }

            Reply::Contributions { sequence, first, blobs } => {
                let exchange = self.exchange(sequence)?;

                // Only as many copies are made as there are slots, whatever the counts are.
                let runs =
                    blobs.into_iter().flat_map(|(count, blob)| repeat_n(blob.0, count as usize));
                for (slot, blob) in exchange.blobs.iter_mut().skip(first as usize).zip(runs) {
                    *slot = Some(blob);
                }
                None
            }

            Reply::Present { sequence, ranks } => {
                let exchange = self.exchange(sequence)?;
                exchange.is_watched = true;
                exchange.present.extend(ranks.into_iter().map(Rank));
                None
            }

            Reply::Differs { sequence, labels } => {
                let exchange = self.exchange(sequence)?;
                exchange.mismatch = Some(mismatch_error(sequence, labels));
                None
            }

            Reply::Ended(end_cause) => self.end_cause.insert(end_cause).notice(),

            // If the connection has closed meanwhile, `close` has told the listener before.
            Reply::Acknowledged => {
                (!mem::replace(&mut self.acknowledged, true)).then_some(Notice::Acknowledged)
            }

            Reply::Message { from, message } => {
                known(from).then_some(Notice::Message { from: Rank(from), message: message.0 })
            }

            Reply::Left { rank } => known(rank).then(|| {
                self.left.insert(Rank(rank));
                Notice::Left { rank: Rank(rank) }
            }),

            // `Clients` handles it, because it ends the client of a subgroup.
            Reply::Gone => None,
        }
    }

    /// Returns the exchange with the number `sequence`, or `None` if this rank has ended it
    /// already.
    ///
    /// An exchange that this rank has not begun yet is created.
    fn exchange(&mut self, sequence: u64) -> Option<&mut Exchange> {
        // A reply that comes after the end of its exchange must not create it again.
        if sequence < self.next_sequence {
            return self.exchanges.get_mut(&sequence);
        }

        let ranks = self.ranks;
        Some(self.exchanges.entry(sequence).or_insert_with(|| Exchange::new(ranks)))
    }

    /// Returns the result of the exchange `sequence`, or `None` while it can still complete.
    ///
    /// An exchange that was complete before the end of the group stays complete, on every rank.
    pub fn outcome(&mut self, sequence: u64, what: &str) -> Option<Result<Vec<Vec<u8>>, Error>> {
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

        // Until the hub tells who has contributed, ranks that have done so before they left look
        // missing too.
        let mut missing = exchange.missing().filter(|_| exchange.is_watched);
        let gone = missing.find(|rank| self.left.contains(rank))?;
        let text = format!("{what}: rank {gone} has left the group and cannot take part");
        Some(Err(Error::new(ErrorKind::PeerLost, text).with_peer(gone)))
    }
}

/// Returns how long before the deadline of an exchange a rank asks the hub which ranks are missing.
pub fn watch_time(timeout: Duration) -> Duration {
    (timeout / WATCH_PART).min(WATCH_MAX)
}

/// Checks that the label and the data of a request are not longer than the hub accepts.
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

/// Returns the error for an exchange to which two ranks have contributed with different labels.
fn mismatch_error(sequence: u64, mut labels: [(u32, String); 2]) -> Error {
    // The second rank is the one whose label differs from that of the rank which came first.
    let second = Rank(labels[1].0);

    labels.sort();
    let [(low, low_label), (high, high_label)] = labels;
    let text = format!(
        "ranks call different collectives in exchange {sequence}: rank {low} calls \
         {low_label:?}, rank {high} calls {high_label:?}; make the same collective calls \
         in the same order on all ranks"
    );
    Error::new(ErrorKind::Mismatch, text).with_peer(second)
}

fn left_error(what: &str) -> Error {
    Error::new(ErrorKind::Other, format!("{what}: this rank has already left the group"))
}

/// Collects the contributions to one exchange as they arrive from the hub.
#[derive(Debug)]
struct Exchange {
    blobs: Vec<Option<Vec<u8>>>,
    /// The ranks that, according to the hub's reports so far, have contributed.
    present: BTreeSet<Rank>,
    is_watched: bool,
    mismatch: Option<Error>,
}

impl Exchange {
    fn new(ranks: usize) -> Self {
        let blobs = vec![None; ranks];
        Self { blobs, present: BTreeSet::new(), is_watched: false, mismatch: None }
    }

    /// Takes and returns the result of the exchange, or returns `None` while contributions are
    /// missing.
    fn outcome(&mut self) -> Option<Result<Vec<Vec<u8>>, Error>> {
        if let Some(error) = self.mismatch.take() {
            return Some(Err(error));
        }

        // The last rank's contribution is the last to arrive.
        self.blobs.last()?.as_ref()?;
        Some(Ok(self.blobs.iter_mut().filter_map(Option::take).collect()))
    }

    fn missing(&self) -> impl Iterator<Item = Rank> {
        Rank::all(self.blobs.len()).filter(|rank| !self.present.contains(rank))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_without_data_are_limited_too() {
        let client = Client::new(Rank(1), 3);
        let message = |from| Reply::Message { from, message: Blob(Vec::new()) };
        assert!(client.receive(message(0)).is_none());
        let answer = (0..100_000).find_map(|_| client.receive(message(2)));
        let Some(Request::Abort { record }) = answer else { panic!("{answer:?}") };
        assert_eq!(AbortRecord::decode(&record.0, Rank(1)).peer, Some(Rank(2)));
    }

    #[test]
    fn the_first_message_of_a_group_is_limited_by_those_of_other_groups() {
        let client = Client::new(Rank(1), 3);
        let subgroup = client.of_subgroup(Rank(0), 2, None);
        let message = |from, bytes| Reply::Message { from, message: Blob(vec![0; bytes]) };
        assert!(client.receive(message(0, QUEUED_BYTES_MAX - NOTICE_BYTES)).is_none());
        let answer = subgroup.receive(message(1, 0));
        let Some(Request::Abort { record }) = answer else { panic!("{answer:?}") };
        assert_eq!(AbortRecord::decode(&record.0, Rank(0)).peer, Some(Rank(1)));
    }

    #[test]
    fn a_timeout_blames_no_rank_if_all_have_contributed() {
        let client = Client::new(Rank(1), 3);
        let text = |missing: &[Rank]| {
            let error = client.timeout_error("a", missing, Deadline::after(Duration::from_secs(2)));
            (error.to_string(), error.peer())
        };
        let late = "a: what the ranks contributed did not arrive within 2 s";
        assert_eq!(text(&[]), (late.to_owned(), None));
        let others = "a: ranks 0 and 2 did not take part within 2 s";
        assert_eq!(text(&[Rank(0), Rank(2)]), (others.to_owned(), Some(Rank(0))));
        let unanswered = "a: the hub did not answer within 2 s";
        assert_eq!(text(&[Rank(1)]), (unanswered.to_owned(), None));
    }

    #[test]
    fn a_rank_that_does_not_exist_cannot_leave() {
        let mut state = ClientState::new(2);
        assert_eq!(state.apply(Reply::Left { rank: 2 }), None);
        assert_eq!(state.apply(Reply::Left { rank: 1 }), Some(Notice::Left { rank: Rank(1) }));
    }

    #[test]
    fn nothing_is_kept_of_an_exchange_that_has_ended() {
        let mut state = ClientState::new(2);
        let present = |sequence| Reply::Present { sequence, ranks: vec![1] };
        let sequence = state.begin_exchange("a").unwrap();
        state.apply(present(sequence));
        assert_eq!(state.missing(), [Rank(0)]);
        state.end_exchange(sequence);
        state.apply(present(sequence));
        state.apply(present(sequence + 1));
        assert_eq!(state.exchanges.keys().copied().collect::<Vec<_>>(), [sequence + 1]);
    }
}
