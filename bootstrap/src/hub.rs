//! Decides in which order the hub passes messages, aborts and losses to all ranks of a group.
//!
//! The state is driven by events and does no I/O; the in-process group and the TCP hub use the
//! same. Its replies go to every live rank in one order. That order decides everything on which
//! ranks must agree: which abort or loss was first, and whether an exchange was complete before it.
//!
//! The hub collects the contributions to an exchange and then sends them all to each rank, so an
//! exchange of n ranks has 2n messages, if its data fits into one. Ranks that ask are told which
//! ranks have contributed so far.

use std::collections::{BTreeSet, VecDeque};
use std::mem;
use std::net::SocketAddr;
use std::time::Duration;

use peerlane_hal::{ErrorKind, Rank};

use super::REFUSAL;
use super::message::{BLOB_BYTES_MAX, Blob, EndCause, LABEL_BYTES_MAX, Reply, Request};
use super::meter::{Charge, Meter};
use super::process::{ProcessId, ProcessState};
use crate::error::Error;

/// Describes a rank that joins a group through the hub.
#[derive(Debug, Default)]
pub struct Joining {
    pub runs_hub: bool,
    /// The address at which other ranks reach this rank if the group shrinks.
    pub address: Option<SocketAddr>,
    pub process: Option<ProcessId>,
}

/// Describes an event that the hub handles, such as a request of a rank or the loss of its
/// connection.
#[derive(Debug)]
pub enum Event {
    Joined(Joining),
    Request(Request),
    Lost {
        how: String,
    },
    /// Reports that the hub, or a rank that has not joined, has failed.
    ///
    /// It ends the group only if not all ranks have joined.
    Failed(EndCause),
}

/// The maximum number of incomplete exchanges to which one rank may have contributed.
///
/// A rank that keeps to the protocol begins an exchange when all ranks have contributed to the one
/// before, or when their labels differ.
const AHEAD_MAX: usize = 16;

/// The number of bytes that is charged for each message, contribution or group in addition to its
/// data.
pub(super) const KEPT_BYTES: usize = 1024;

/// Stores the hub's state of one group, and decides which replies its ranks receive, in which
/// order.
#[derive(Debug)]
pub struct HubState {
    members: Vec<Membership>,
    addresses: Vec<Option<SocketAddr>>,
    processes: Vec<Option<ProcessId>>,
    /// The counters of the bytes that each rank makes the hub store, in all groups of that rank.
    meters: Vec<Meter>,
    /// The exchanges that are not complete, the first of which has the number `completed`.
    exchanges: VecDeque<Exchange>,
    completed: usize,
    /// The number of exchanges to which each rank has contributed.
    ///
    /// All ranks contribute in the same order.
    contributed: Vec<usize>,
    refused: Option<(u64, String)>,
    /// A hint for the error of a failed start, which says what may be wrong with the hub's address.
    address_doubt: Option<String>,
    runs_hub: Option<Rank>,
    end_cause: Option<EndCause>,
    /// Charges the bytes of `end_cause` to the rank that sent it, as long as the group exists.
    cause_charge: Option<Charge>,
    unacknowledged: BTreeSet<Rank>,
    all_acknowledged: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Membership {
    NotJoined,
    Joined,
    Gone,
}

/// Collects the contributions of all ranks to one exchange.
#[derive(Debug)]
struct Exchange {
    /// The first rank that contributed with a label other than [`REFUSAL`], and its label.
    ///
    /// Until there is such a rank, it is a rank that refuses the call.
    first: (Rank, String),
    differs: bool,
    blobs: Vec<Option<Blob>>,
    charges: Vec<Charge>,
    missing: usize,
    /// Whether the hub reports each contribution to the ranks as it arrives.
    watched: bool,
}

impl Exchange {
    /// Compares `label` with the label of the exchange, and returns the ranks and labels of the
    /// first difference.
    fn compare_label(&mut self, from: Rank, label: String) -> Option<[(u32, String); 2]> {
        // A refusal is part of any call, so the labels of the other ranks are compared.
        if self.first.1 == REFUSAL {
            self.first = (from, label);
            return None;
        }
        if label == REFUSAL || label == self.first.1 {
            return None;
        }

        // The exchange has failed with the first difference; another one tells the ranks nothing
        // new.
        if mem::replace(&mut self.differs, true) {
            return None;
        }

        let (first, expected) = &self.first;
        Some([(first.0, expected.clone()), (from.0, label)])
    }

    /// Converts a complete exchange into the replies that carry the contributions of all ranks.
    ///
    /// No contribution may be missing. Equal contributions of consecutive ranks are sent once.
    fn replies(self, sequence: u64) -> Vec<Reply> {
        let mut replies = Vec::new();
        let mut first = 0;
        let mut bytes = 0;
        let mut runs = Vec::<(u32, Blob)>::new();

        for (rank, blob) in (0..).zip(self.blobs.into_iter().flatten()) {
            if let Some((count, last)) = runs.last_mut()
                && *last == blob
            {
                *count += 1;
                continue;
            }

            // A reply has room for one contribution of the largest size, or for several smaller
            // ones.
            let more = blob.0.len() + RUN_BYTES;
            if bytes + more > BLOB_BYTES_MAX + RUN_BYTES {
                let blobs = mem::take(&mut runs);
                replies.push(Reply::Contributions { sequence, first, blobs });
                first = rank;
                bytes = 0;
            }

            bytes += more;
            runs.push((1, blob));
        }

        replies.push(Reply::Contributions { sequence, first, blobs: runs });
        replies
    }
}

/// The maximum number of bytes that encode a run of equal contributions in addition to its data.
const RUN_BYTES: usize = 16;

impl HubState {
    pub fn new(ranks: usize) -> Self {
        // The start has not begun: no rank has joined, contributed or failed.
        Self {
            members: vec![Membership::NotJoined; ranks],
            addresses: vec![None; ranks],
            processes: vec![None; ranks],
            meters: (0..ranks).map(|_| Meter::default()).collect(),
            exchanges: VecDeque::new(),
            completed: 0,
            contributed: vec![0; ranks],
            refused: None,
            address_doubt: None,
            runs_hub: None,
            end_cause: None,
            cause_charge: None,
            unacknowledged: BTreeSet::new(),
            all_acknowledged: false,
        }
    }

    /// Creates the state of a subgroup, whose ranks have all joined, with one meter for each rank.
    pub(super) fn of_subgroup(meters: Vec<Meter>) -> Self {
        let ranks = meters.len();

        // Processes and addresses are those of the first group, which answers all questions about
        // them.
        let members = vec![Membership::Joined; ranks];
        Self { members, contributed: vec![0; ranks], meters, ..Self::new(0) }
    }

    /// Returns the number of bytes that the state of a group of `ranks` ranks takes, without
    /// exchanges.
    pub(super) fn bytes(ranks: usize) -> usize {
        let each = size_of::<Membership>() + size_of::<usize>() + size_of::<Meter>();
        size_of::<Self>() + ranks * each
    }

    pub(super) fn meter(&self, rank: Rank) -> &Meter {
        &self.meters[rank.index()]
    }

    /// Applies an event of the rank `from`, and returns the replies, which every live rank
    /// receives.
    pub fn apply(&mut self, from: Rank, event: Event) -> Vec<Reply> {
        match event {
            // A rank that joins is not live yet, so this comes before the check whether it is live.
            Event::Joined(Joining { runs_hub, address, process }) => {
                self.members[from.index()] = Membership::Joined;
                self.addresses[from.index()] = address;
                self.processes[from.index()] = process;
                if runs_hub {
                    self.runs_hub = Some(from);
                }

                if !self.is_formed() {
                    return Vec::new();
                }

                let addresses = self.addresses.clone();
                let processes = self.processes.clone();
                let runs_hub = self.runs_hub.map(|rank| rank.0);
                vec![Reply::Joined { runs_hub, addresses, processes }]
            }

            // A failure is not an event of `from`, so it counts even if `from` is not live. Once
            // all ranks have joined, they need no new connections, and the hub notices the loss of
            // a rank by its connection.
            Event::Failed(_) if self.is_formed() => Vec::new(),
            Event::Failed(cause) => self.end_group(cause),

            // A rank that has left or was lost has no part in the group, even if its last messages
            // come later.
            _ if !self.is_live(from) => Vec::new(),
            Event::Request(request) => self.handle(from, request),
            Event::Lost { how } => self.lose(from, how),
        }
    }

    /// Marks `rank` as lost, ends the group for this reason, and returns the replies.
    fn lose(&mut self, rank: Rank, how: String) -> Vec<Reply> {
        // The rank is marked first, so that the end of the group does not wait for its
        // acknowledgement.
        self.members[rank.index()] = Membership::Gone;

        // If the group had ended before, the ranks may have waited for this rank only.
        let mut replies = self.end_group(EndCause::Lost { rank: rank.0, how });
        replies.extend(self.acknowledge(rank));
        replies
    }

    /// Counts a refused connection, so that the error of a group that does not start can mention
    /// it.
    pub(crate) fn refuse(&mut self, which: String) {
        let count = self.refused.as_ref().map_or(0, |(count, _)| *count);
        self.refused = Some((count + 1, which));
    }

    pub(crate) fn doubt_address(&mut self, how: String) {
        self.address_doubt = Some(how);
    }

    fn handle(&mut self, from: Rank, request: Request) -> Vec<Reply> {
        match request {
            // The end of the group is the result of every open exchange.
            Request::Contribute { .. } | Request::Watch if self.end_cause.is_some() => Vec::new(),
            Request::Contribute { label, blob } => self.contribute(from, label, blob),
            Request::Watch => self.watch_all(),
            Request::StartTimedOut { timeout } => self.start_timed_out(timeout),
            Request::Abort { record } => self.end_group(EndCause::Abort { from: from.0, record }),
            Request::Broadcast { message } => {
                // A message can be an inquiry. The ranks answer it with the ranks that they wait
                // for, so they must know who has contributed.
                let mut replies = self.watch_all();
                replies.push(Reply::Message { from: from.0, message });
                replies
            }
            Request::TimedOut { text, missing } => {
                self.end_group(EndCause::TimedOut { from: from.0, text, missing })
            }
            Request::Acknowledge => self.acknowledge(from),
            Request::Leave => {
                self.members[from.index()] = Membership::Gone;

                // Ranks then know whether the rank that has left is missing.
                let mut replies = self.watch_all();
                replies.push(Reply::Left { rank: from.0 });
                replies.extend(self.complete());
                replies.extend(self.acknowledge(from));
                replies
            }
            // They are addressed to subgroups, and `HubGroups` handles them.
            Request::Open { .. } | Request::GiveUp { .. } => Vec::new(),
        }
    }

    /// Adds the contribution of `from` to its next exchange, and returns the resulting replies.
    ///
    /// A rank that breaks a limit is lost.
    fn contribute(&mut self, from: Rank, label: String, blob: Blob) -> Vec<Reply> {
        if label.len() > LABEL_BYTES_MAX {
            let bytes = label.len();
            let how =
                format!("it sent a label of {bytes} bytes, expected at most {LABEL_BYTES_MAX}");
            return self.lose(from, how);
        }

        // A live rank has contributed to every exchange that is completed, so the index is not
        // negative.
        let index = self.contributed[from.index()] - self.completed;
        let sequence = self.contributed[from.index()] as u64;
        self.contributed[from.index()] += 1;

        let ranks = self.members.len();
        let is_first = index == self.exchanges.len();
        if is_first {
            self.exchanges.push_back(Exchange {
                first: (from, label.clone()),
                differs: false,
                blobs: vec![None; ranks],
                charges: Vec::new(),
                missing: ranks,
                watched: false,
            });
        }

        // The rank that begins an exchange pays for the slots of all ranks.
        let slots_bytes = if is_first { ranks * size_of::<Option<Blob>>() } else { 0 };
        let kept_bytes = KEPT_BYTES + label.len() + blob.0.len() + slots_bytes;
        let charge = self.meters[from.index()].charge(kept_bytes);

        let exchange = &mut self.exchanges[index];
        exchange.blobs[from.index()] = Some(blob);
        exchange.charges.push(charge);
        exchange.missing -= 1;

        let mut replies = Vec::new();
        if let Some(labels) = exchange.compare_label(from, label) {
            replies.push(Reply::Differs { sequence, labels });
        }

        // The contribution of a rank that has left may never come, so the ranks must know who is
        // missing.
        if exchange.watched {
            replies.push(Reply::Present { sequence, ranks: vec![from.0] });
        } else if self.members.contains(&Membership::Gone) {
            replies.extend(self.watch(index));
        }

        replies.extend(self.complete());
        // Checked last, because this contribution may have completed exchanges.
        let ahead = self.contributed[from.index()].saturating_sub(self.completed);
        if ahead > AHEAD_MAX {
            let how = format!(
                "it contributed to {ahead} exchanges that other ranks have not begun, expected at most {AHEAD_MAX}"
            );
            replies.extend(self.lose(from, how));
        }
        replies
    }

    /// Removes the exchanges that await no more contributions, and returns the replies with their
    /// results.
    fn complete(&mut self) -> Vec<Reply> {
        let mut replies = Vec::new();
        while let Some(exchange) = self.exchanges.front() {
            let is_gone = |rank: usize| self.members[rank] == Membership::Gone;
            let mut blobs = exchange.blobs.iter().enumerate();
            if exchange.missing > 0 && blobs.any(|(rank, blob)| blob.is_none() && !is_gone(rank)) {
                break;
            }

            // Without a result, the ranks know why from `Left` or `Differs`.
            let exchange = self.exchanges.pop_front().expect("it is the front");
            if exchange.missing == 0 && !exchange.differs {
                replies.extend(exchange.replies(self.completed as u64));
            }
            self.completed += 1;
        }
        replies
    }

    /// Begins to report the contributions to every open exchange, and returns the first reports.
    fn watch_all(&mut self) -> Vec<Reply> {
        (0..self.exchanges.len()).filter_map(|index| self.watch(index)).collect()
    }

    /// Begins to report the contributions to an exchange, and returns the report of those that have
    /// arrived.
    ///
    /// `index` is the place of the exchange in `exchanges`. It returns `None` if the contributions
    /// are reported already.
    fn watch(&mut self, index: usize) -> Option<Reply> {
        let sequence = (self.completed + index) as u64;
        let exchange = &mut self.exchanges[index];
        if mem::replace(&mut exchange.watched, true) {
            return None;
        }

        let present = |(rank, blob): (u32, &Option<Blob>)| blob.as_ref().map(|_| rank);
        let ranks = (0..).zip(&exchange.blobs).filter_map(present).collect();
        Some(Reply::Present { sequence, ranks })
    }

    /// Ends a group in which ranks are still missing after `timeout`, and returns the replies.
    ///
    /// It does nothing if the last rank has joined meanwhile.
    fn start_timed_out(&mut self, timeout: Duration) -> Vec<Reply> {
        let missing: Vec<_> = self.missing().map(|rank| rank.0).collect();
        if missing.is_empty() {
            return Vec::new();
        }

        // The missing ranks may be among the connections that were refused.
        let refused = self.refused.as_ref().map(|(count, last)| match count {
            1 => format!("the hub refused a connection from {last}"),
            _ => format!("the hub refused {count} connections, the last from {last}"),
        });
        let hints = refused.into_iter().chain(self.address_doubt.clone()).collect();
        self.end_group(EndCause::NotStarted { missing, timeout, hints })
    }

    /// Ends the group because of `end_cause`, and returns the reply that reports it.
    ///
    /// It does nothing if the group has ended before.
    fn end_group(&mut self, end_cause: EndCause) -> Vec<Reply> {
        if self.end_cause.is_some() {
            return Vec::new();
        }

        self.unacknowledged = self.live().collect();
        // A rank that did not answer before does not acknowledge in time either.
        if let Some(silent) = end_cause.unanswered() {
            self.unacknowledged.remove(&silent);
        }
        // A group that did not start in time has no waits to release, so no acknowledgement is
        // needed.
        self.all_acknowledged = matches!(end_cause, EndCause::NotStarted { .. });

        // The cause is kept as long as the group, so it counts for the rank that sent it.
        let charge = |from: Rank| self.meter(from).charge(end_cause.data_bytes());
        self.cause_charge = end_cause.from().map(charge);

        // The end of the group is the result of every open exchange.
        self.exchanges.clear();
        self.end_cause = Some(end_cause.clone());
        vec![Reply::Ended(end_cause)]
    }

    /// Stops waiting for the acknowledgement of `from`, and returns a reply if it was the last
    /// rank.
    fn acknowledge(&mut self, from: Rank) -> Vec<Reply> {
        self.unacknowledged.remove(&from);
        if self.unacknowledged.is_empty() { self.stop_waiting() } else { Vec::new() }
    }

    /// Marks the end of the group as acknowledged, even if ranks have not answered, and returns the
    /// reply.
    pub(crate) fn stop_waiting(&mut self) -> Vec<Reply> {
        if !self.awaits_acknowledgement() {
            return Vec::new();
        }
        self.all_acknowledged = true;
        vec![Reply::Acknowledged]
    }

    pub(crate) fn end_cause(&self) -> Option<&EndCause> {
        self.end_cause.as_ref()
    }

    pub(crate) fn awaits_acknowledgement(&self) -> bool {
        self.end_cause.is_some() && !self.all_acknowledged
    }

    /// Returns the ranks that have not acknowledged the end of the group.
    pub(crate) fn unacknowledged(&self) -> impl Iterator<Item = Rank> {
        self.unacknowledged.iter().copied().filter(|_| self.awaits_acknowledgement())
    }

    /// Returns whether the process of `rank` is stopped, as far as the hub can see.
    pub(crate) fn is_stopped(&self, rank: Rank) -> bool {
        let process = self.processes.get(rank.index()).and_then(Option::as_ref);
        ProcessState::from_id(process) == ProcessState::Stopped
    }

    pub(crate) fn is_live(&self, rank: Rank) -> bool {
        self.members[rank.index()] == Membership::Joined
    }

    /// Returns whether all ranks have joined, even if some have left or were lost since.
    pub(crate) fn is_formed(&self) -> bool {
        self.missing().next().is_none()
    }

    /// Returns the rank that runs the hub, or `None` if a process outside of the group runs it.
    pub(crate) fn runs_hub(&self) -> Option<Rank> {
        self.runs_hub
    }

    pub(crate) fn knows(&self, rank: Rank) -> bool {
        rank.index() < self.members.len()
    }

    /// Returns the ranks that have not joined the group yet.
    pub(crate) fn missing(&self) -> impl Iterator<Item = Rank> {
        self.ranks_where(|member| member == Membership::NotJoined)
    }

    pub fn live(&self) -> impl Iterator<Item = Rank> {
        self.ranks_where(|member| member == Membership::Joined)
    }

    fn ranks_where(&self, is: impl Fn(Membership) -> bool) -> impl Iterator<Item = Rank> {
        Rank::all(self.members.len()).filter(move |rank| is(self.members[rank.index()]))
    }
}

/// The maximum number of ranks of a group.
///
/// Every rank has a TCP connection to the hub, and a host has 65,536 ports.
pub(crate) const RANKS_MAX: usize = 1 << 16;

/// Checks that `ranks`, the size of a group, is neither 0 nor more than [`RANKS_MAX`].
pub(crate) fn check_ranks(ranks: usize) -> Result<(), Error> {
    if ranks == 0 {
        let text = "number of ranks is 0, expected at least 1";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }

    if ranks > RANKS_MAX {
        let text = format!("number of ranks is {ranks}, expected at most {RANKS_MAX}");
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::subgroups::Addressed;
    use super::*;

    fn full(ranks: usize) -> HubState {
        let mut state = HubState::new(ranks);
        for rank in Rank::all(ranks) {
            state.apply(rank, Event::Joined(Joining::default()));
        }
        state
    }

    fn abort(text: &str) -> Event {
        Event::Request(Request::Abort { record: Blob(text.into()) })
    }

    #[test]
    fn the_first_abort_wins_and_the_last_acknowledgement_is_reported() {
        let mut state = full(3);
        let first = EndCause::Abort { from: 1, record: Blob(b"one".into()) };
        assert_eq!(state.apply(Rank(1), abort("one")), [Reply::Ended(first)]);
        assert_eq!(state.apply(Rank(2), abort("two")), []);
        assert_eq!(state.apply(Rank(0), Event::Request(Request::Acknowledge)), []);
        assert_eq!(state.apply(Rank(0), Event::Request(Request::Acknowledge)), []);
        assert_eq!(state.apply(Rank(1), Event::Request(Request::Acknowledge)), []);
        assert!(state.awaits_acknowledgement());
        assert_eq!(
            state.apply(Rank(2), Event::Request(Request::Acknowledge)),
            [Reply::Acknowledged]
        );
        assert!(!state.awaits_acknowledgement());
        assert_eq!(state.stop_waiting(), []);
    }

    #[test]
    fn the_number_of_ranks_is_limited() {
        assert!(check_ranks(1).is_ok() && check_ranks(RANKS_MAX).is_ok());
        let text = |ranks| check_ranks(ranks).unwrap_err().to_string();
        assert_eq!(text(0), "number of ranks is 0, expected at least 1");
        let most = u32::MAX as usize;
        assert_eq!(text(most), "number of ranks is 4294967295, expected at most 65536");
    }

    #[test]
    fn ranks_that_are_lost_or_have_left_need_not_acknowledge() {
        let mut state = full(3);
        let lost = EndCause::Lost { rank: 0, how: "gone".into() };
        let event = Event::Lost { how: "gone".into() };
        assert_eq!(state.apply(Rank(0), event), [Reply::Ended(lost)]);
        assert_eq!(state.apply(Rank(1), Event::Lost { how: "too".into() }), []);
        let replies = state.apply(Rank(2), Event::Request(Request::Leave));
        assert_eq!(replies, [Reply::Left { rank: 2 }, Reply::Acknowledged]);
        assert_eq!(state.live().count(), 0);
    }

    #[test]
    fn a_start_timeout_names_the_missing_ranks_and_counts_only_before_the_start() {
        let give_up = || Event::Request(Request::StartTimedOut { timeout: Duration::from_secs(5) });
        let mut state = HubState::new(4);
        state.apply(Rank(1), Event::Joined(Joining::default()));
        state.apply(Rank(3), Event::Joined(Joining::default()));
        let (timeout, hints) = (Duration::from_secs(5), Vec::new());
        let missing = EndCause::NotStarted { missing: vec![0, 2], timeout, hints };
        assert!(missing.to_string().starts_with("ranks 0 and 2 did not connect within 5 s; "));
        assert_eq!(state.apply(Rank(3), give_up()), [Reply::Ended(missing)]);
        assert_eq!(full(2).apply(Rank(0), give_up()), []);
    }

    fn contribute(label: &str, bytes: &[u8]) -> Event {
        Event::Request(Request::Contribute { label: label.into(), blob: Blob(bytes.into()) })
    }

    #[test]
    fn an_exchange_is_sent_when_all_have_contributed_and_equal_data_once() {
        let mut state = full(4);
        assert_eq!(state.apply(Rank(3), contribute("a", b"x")), []);
        assert_eq!(state.apply(Rank(0), contribute("a", b"yy")), []);
        assert_eq!(state.apply(Rank(2), contribute("a", b"x")), []);
        let blobs = vec![(1, Blob(b"yy".into())), (3, Blob(b"x".into()))];
        assert_eq!(
            state.apply(Rank(1), contribute("a", b"x")),
            [Reply::Contributions { sequence: 0, first: 0, blobs }]
        );
        assert_eq!(state.completed, 1);
        // Data that does not fit into one frame is sent in several.
        let long = |rank: u8| vec![rank; BLOB_BYTES_MAX / 2];
        (0..3).for_each(|rank| drop(state.apply(Rank(rank), contribute("b", &long(rank as u8)))));
        let replies = state.apply(Rank(3), contribute("b", &long(3)));
        let parts = replies.iter().map(|reply| match reply {
            Reply::Contributions { sequence: 1, first, blobs } => (*first, blobs.len()),
            reply => panic!("{reply:?}"),
        });
        assert_eq!(parts.collect::<Vec<_>>(), [(0, 1), (1, 1), (2, 1), (3, 1)]);
    }

    /// Returns the number of messages of an exchange, and its bytes to and from the hub.
    fn traffic(ranks: usize, blob: impl Fn(u32) -> Vec<u8>) -> (usize, usize, usize) {
        let bytes = |message: &[u8]| 4 + message.len();
        let (mut state, mut messages, mut to_hub, mut from_hub) = (full(ranks), 0, 0, 0);
        for rank in Rank::all(ranks) {
            let request = Request::Contribute { label: "keys".into(), blob: Blob(blob(rank.0)) };
            messages += 1;
            to_hub += bytes(&postcard::to_stdvec(&Addressed::to_all(&request)).unwrap());
            for reply in state.apply(rank, Event::Request(request)) {
                messages += ranks;
                from_hub +=
                    ranks * bytes(&postcard::to_stdvec(&Addressed::to_all(&reply)).unwrap());
            }
        }
        (messages, to_hub, from_hub)
    }

    /// Prints the table of docs/perf/exchange.md.
    #[test]
    fn an_exchange_has_two_messages_for_each_rank() {
        for ranks in (1_usize..10).chain((4..13).map(|power| 1 << power)) {
            let keys = traffic(ranks, |rank| vec![rank as u8; 157]);
            let equal = traffic(ranks, |_| vec![1; 248]);
            assert_eq!((keys.0, equal.0), (2 * ranks, 2 * ranks));
            // A result has the data of all ranks, or once what is equal.
            let data = |bytes: usize| ranks * (bytes + 32);
            assert!(keys.1 <= data(157) && keys.2 <= ranks * (data(157) + 32), "{keys:?}");
            assert!(equal.1 <= data(248) && equal.2 <= data(248), "{equal:?}");
            println!(
                "{ranks} ranks: {} messages; keys {:?}, equal {:?} bytes",
                keys.0,
                (keys.1, keys.2),
                (equal.1, equal.2)
            );
        }
    }

    #[test]
    fn who_is_missing_is_told_if_a_rank_asks_and_before_messages_and_goodbyes() {
        let mut state = full(4);
        let present = |ranks: &[u32]| Reply::Present { sequence: 0, ranks: ranks.to_vec() };
        let message = Reply::Message { from: 3, message: Blob(b"?".into()) };
        let ask = || Event::Request(Request::Broadcast { message: Blob(b"?".into()) });
        assert_eq!(state.apply(Rank(3), ask()), std::slice::from_ref(&message));
        assert_eq!(state.apply(Rank(2), contribute("a", b"")), []);
        assert_eq!(state.apply(Rank(3), ask()), [present(&[2]), message.clone()]);
        assert_eq!(state.apply(Rank(3), ask()), [message]);
        assert_eq!(state.apply(Rank(0), Event::Request(Request::Watch)), []);
        assert_eq!(state.apply(Rank(0), contribute("a", b"")), [present(&[0])]);

        let mut state = full(3);
        assert_eq!(state.apply(Rank(2), contribute("a", b"")), []);
        assert_eq!(state.apply(Rank(1), Event::Request(Request::Watch)), [present(&[2])]);
        let mut state = full(3);
        assert_eq!(state.apply(Rank(1), contribute("a", b"")), []);
        let left = Reply::Left { rank: 2 };
        assert_eq!(state.apply(Rank(2), Event::Request(Request::Leave)), [present(&[1]), left]);
        assert_eq!(state.apply(Rank(0), contribute("a", b"")), [present(&[0])]);
        // No exchange without it can complete.
        assert_eq!(state.completed, 1);
        let present = Reply::Present { sequence: 1, ranks: vec![1] };
        assert_eq!(state.apply(Rank(1), contribute("b", b"")), [present]);
    }

    #[test]
    fn the_first_two_labels_that_differ_are_told() {
        let mut state = full(3);
        assert_eq!(state.apply(Rank(2), contribute("b", b"")), []);
        let labels = [(2, "b".into()), (1, "a".into())];
        let differs = Reply::Differs { sequence: 0, labels };
        assert_eq!(state.apply(Rank(1), contribute("a", b"")), [differs]);
        assert_eq!(state.apply(Rank(0), contribute("c", b"")), []);
        assert_eq!(state.completed, 1);
    }

    #[test]
    fn a_refusal_is_part_of_the_exchange_of_any_label() {
        for order in [[0, 1, 2], [1, 0, 2], [1, 2, 0]] {
            let mut state = full(3);
            let mut replies = Vec::new();
            for rank in order {
                let label = if rank == 1 { REFUSAL } else { "a" };
                replies.extend(state.apply(Rank(rank), contribute(label, &[rank as u8])));
            }
            let blobs = (0..3).map(|rank| (1, Blob(vec![rank]))).collect();
            assert_eq!(replies, [Reply::Contributions { sequence: 0, first: 0, blobs }]);
        }

        // The labels of the others are compared.
        let mut state = full(3);
        assert_eq!(state.apply(Rank(1), contribute(REFUSAL, b"")), []);
        assert_eq!(state.apply(Rank(2), contribute("b", b"")), []);
        let labels = [(2, "b".into()), (0, "a".into())];
        let differs = Reply::Differs { sequence: 0, labels };
        assert_eq!(state.apply(Rank(0), contribute("a", b"")), [differs]);
    }

    #[test]
    fn a_rank_that_is_too_many_exchanges_ahead_is_lost() {
        let mut state = full(3);
        let mut give = |rank| {
            state.apply(Rank(rank), contribute("a", b""));
            state.is_live(Rank(1))
        };
        // As long as the others keep up, it may contribute as often as it likes.
        for _ in 0..2 * AHEAD_MAX {
            assert!([0, 1, 2].into_iter().all(&mut give));
        }
        let ahead = (0..).find(|_| !give(1));
        assert_eq!(ahead, Some(AHEAD_MAX));
        let how =
            "it contributed to 17 exchanges that other ranks have not begun, expected at most 16";
        let lost = EndCause::Lost { rank: 1, how: how.into() };
        assert_eq!(state.end_cause(), Some(&lost));
    }

    #[test]
    fn no_contribution_is_passed_on_after_the_end_or_after_a_goodbye() {
        let mut state = full(2);
        assert_eq!(state.apply(Rank(0), contribute("a", b"")), []);
        state.apply(Rank(0), Event::Request(Request::Leave));
        assert_eq!(state.apply(Rank(0), contribute("a", b"")), []);
        state.apply(Rank(1), abort("over"));
        assert_eq!(state.apply(Rank(1), contribute("a", b"")), []);
    }
}
