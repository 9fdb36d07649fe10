//! Implements the state of the hub, which sends every message, abort and loss to all ranks in one order.
//!
//! The state is driven by events and does no I/O; the in-process group and the TCP hub use the same. Its
//! replies go to every live rank in one order. That order decides everything on which ranks must agree:
//! which abort or loss was first, and whether an exchange was complete before it.

use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use peerlane_hal::{ErrorKind, Rank};

use super::message::{EndCause, FRAME_BYTES_MAX, Reply, Request};
use crate::error::Error;

#[derive(Debug)]
pub(crate) enum Event {
    Joined { runs_hub: bool, address: Option<SocketAddr> },
    Request(Request),
    Lost { how: String },
}

/// Limits the memory for exchanges to which one rank has contributed and others have not.
///
/// That is one exchange ahead, or two if labels differ.
pub(crate) const AHEAD_BYTES_MAX: usize = 2 * FRAME_BYTES_MAX;

const CONTRIBUTION_BYTES: usize = 64;

pub(crate) struct HubState {
    members: Vec<Membership>,
    addresses: Vec<Option<SocketAddr>>,
    ahead: Vec<Ahead>,
    refused: Option<(u64, String)>,
    runs_hub: Option<Rank>,
    end_cause: Option<EndCause>,
    unacknowledged: BTreeSet<Rank>,
    all_acknowledged: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Membership {
    NotJoined,
    Joined,
    Gone,
}

#[derive(Clone, Default)]
struct Ahead {
    sizes: VecDeque<usize>,
    bytes: usize,
}

impl HubState {
    pub(crate) fn new(ranks: usize) -> Self {
        let members = vec![Membership::NotJoined; ranks];
        Self {
            members,
            addresses: vec![None; ranks],
            ahead: vec![Ahead::default(); ranks],
            refused: None,
            runs_hub: None,
            end_cause: None,
            unacknowledged: BTreeSet::new(),
            all_acknowledged: false,
        }
    }

    /// Creates the state of a group whose ranks have all joined.
    pub(crate) fn full(ranks: usize) -> Self {
        Self { members: vec![Membership::Joined; ranks], ..Self::new(ranks) }
    }

    pub(crate) fn apply(&mut self, from: Rank, event: Event) -> Vec<Reply> {
        match event {
            Event::Joined { runs_hub, address } => {
                self.members[from.index()] = Membership::Joined;
                self.addresses[from.index()] = address;
                if runs_hub {
                    self.runs_hub = Some(from);
                }
                let ranks = self.ranks_where(|member| member != Membership::NotJoined);
                let ranks = rank_numbers(ranks);
                let is_complete = ranks.len() == self.members.len();
                let addresses = if is_complete { self.addresses.clone() } else { Vec::new() };
                let runs_hub = self.runs_hub.map(|rank| rank.0);
                vec![Reply::Joined { ranks, runs_hub, addresses }]
            }
            _ if !self.is_live(from) => Vec::new(),
            Event::Request(request) => self.handle(from, request),
            Event::Lost { how } => self.lose(from, how),
        }
    }

    fn lose(&mut self, rank: Rank, how: String) -> Vec<Reply> {
        self.members[rank.index()] = Membership::Gone;
        let mut replies = self.end_group(EndCause::Lost { rank: rank.0, how });
        replies.extend(self.acknowledge(rank));
        replies
    }

    pub(crate) fn refuse(&mut self, which: String) {
        let count = self.refused.as_ref().map_or(0, |(count, _)| *count);
        self.refused = Some((count + 1, which));
    }

    fn handle(&mut self, from: Rank, request: Request) -> Vec<Reply> {
        match request {
            Request::Contribute { .. } if self.end_cause.is_some() => Vec::new(),
            Request::Contribute { sequence, label, blob } => {
                let bytes = self.count_ahead(from, label.len() + blob.0.len());
                if bytes <= AHEAD_BYTES_MAX {
                    return vec![Reply::Contribution { from: from.0, sequence, label, blob }];
                }
                let how = format!(
                    "it sent {bytes} bytes for exchanges that other ranks have not begun, expected at most \
                     {AHEAD_BYTES_MAX} bytes"
                );
                self.lose(from, how)
            }
            Request::StartTimedOut { timeout } => self.start_timed_out(timeout),
            Request::Abort { record } => self.end_group(EndCause::Abort { from: from.0, record }),
            Request::Broadcast { message } => vec![Reply::Message { from: from.0, message }],
            Request::TimedOut { text, missing } => {
                self.end_group(EndCause::TimedOut { from: from.0, text, missing })
            }
            Request::Acknowledge => self.acknowledge(from),
            Request::Leave => {
                self.members[from.index()] = Membership::Gone;
                let mut replies = vec![Reply::Left { rank: from.0 }];
                replies.extend(self.acknowledge(from));
                replies
            }
            // They are addressed to subgroups, and `HubGroups` handles them.
            Request::Open { .. } | Request::GiveUp { .. } => Vec::new(),
        }
    }

    /// All ranks contribute to exchanges in the same order, so the n-th contribution of each rank is for the n-th
    /// exchange.
    fn count_ahead(&mut self, from: Rank, bytes: usize) -> usize {
        let own = &mut self.ahead[from.index()];
        own.sizes.push_back(bytes + CONTRIBUTION_BYTES);
        own.bytes += bytes + CONTRIBUTION_BYTES;
        let has_contributed = |(member, ahead): (&Membership, &Ahead)| {
            *member == Membership::Gone || !ahead.sizes.is_empty()
        };
        while self.members.iter().zip(&self.ahead).all(has_contributed) {
            for ahead in &mut self.ahead {
                ahead.bytes -= ahead.sizes.pop_front().unwrap_or_default();
            }
        }
        self.ahead[from.index()].bytes
    }

    fn start_timed_out(&mut self, timeout: Duration) -> Vec<Reply> {
        let missing = rank_numbers(self.ranks_where(|member| member == Membership::NotJoined));
        if missing.is_empty() {
            return Vec::new();
        }
        let refused = self.refused.as_ref().map(|(count, last)| match count {
            1 => format!("the hub refused a connection from {last}"),
            _ => format!("the hub refused {count} connections, the last from {last}"),
        });
        self.end_group(EndCause::NotStarted { missing, timeout, refused })
    }

    fn end_group(&mut self, end_cause: EndCause) -> Vec<Reply> {
        if self.end_cause.is_some() {
            return Vec::new();
        }
        self.unacknowledged = self.live().collect();
        // A rank that did not answer before does not acknowledge in time either.
        if let Some(silent) = end_cause.unanswered() {
            self.unacknowledged.remove(&silent);
        }
        // A group that never started has no waits to release, so no acknowledgement is needed.
        self.all_acknowledged = matches!(end_cause, EndCause::NotStarted { .. });
        self.end_cause = Some(end_cause.clone());
        vec![Reply::Ended(end_cause)]
    }

    fn acknowledge(&mut self, from: Rank) -> Vec<Reply> {
        self.unacknowledged.remove(&from);
        if self.unacknowledged.is_empty() { self.stop_waiting() } else { Vec::new() }
    }

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

    pub(crate) fn is_live(&self, rank: Rank) -> bool {
        self.members[rank.index()] == Membership::Joined
    }

    pub(crate) fn knows(&self, rank: Rank) -> bool {
        rank.index() < self.members.len()
    }

    pub(crate) fn live(&self) -> impl Iterator<Item = Rank> {
        self.ranks_where(|member| member == Membership::Joined)
    }

    fn ranks_where(&self, is: impl Fn(Membership) -> bool) -> impl Iterator<Item = Rank> {
        Rank::all(self.members.len()).filter(move |rank| is(self.members[rank.index()]))
    }
}

/// Every rank has a TCP connection to the hub, and a host has 65,536 ports, so a group cannot have more ranks.
pub(crate) const RANKS_MAX: usize = 1 << 16;

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

fn rank_numbers(ranks: impl Iterator<Item = Rank>) -> Vec<u32> {
    ranks.map(|rank| rank.0).collect()
}

#[cfg(test)]
mod tests {
    use super::super::message::{BLOB_BYTES_MAX, Blob};
    use super::*;

    fn full(ranks: usize) -> HubState {
        let mut state = HubState::new(ranks);
        for rank in Rank::all(ranks) {
            state.apply(rank, Event::Joined { runs_hub: false, address: None });
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
        state.apply(Rank(1), Event::Joined { runs_hub: false, address: None });
        state.apply(Rank(3), Event::Joined { runs_hub: false, address: None });
        let (timeout, refused) = (Duration::from_secs(5), None);
        let missing = EndCause::NotStarted { missing: vec![0, 2], timeout, refused };
        assert!(missing.to_string().starts_with("ranks 0 and 2 did not connect within 5 s; "));
        assert_eq!(state.apply(Rank(3), give_up()), [Reply::Ended(missing)]);
        assert_eq!(full(2).apply(Rank(0), give_up()), []);
    }

    #[test]
    fn a_rank_that_is_too_many_bytes_ahead_is_lost() {
        let give = |bytes| {
            let (label, blob) = ("a".into(), Blob(vec![0; bytes]));
            Event::Request(Request::Contribute { sequence: 0, label, blob })
        };
        let mut state = full(3);
        state.apply(Rank(2), Event::Request(Request::Leave));
        // The other rank keeps up, and the third has left.
        for _ in 0..3 {
            for rank in [0, 1] {
                let replies = state.apply(Rank(rank), give(BLOB_BYTES_MAX));
                assert!(matches!(replies[..], [Reply::Contribution { .. }]), "{replies:?}");
            }
        }
        for _ in 0..2 {
            assert_eq!(state.apply(Rank(1), give(BLOB_BYTES_MAX)).len(), 1);
        }
        let how = "it sent 33554626 bytes for exchanges that other ranks have not begun, expected at most 33554432 bytes";
        let lost = EndCause::Lost { rank: 1, how: how.into() };
        assert_eq!(state.apply(Rank(1), give(8191)), [Reply::Ended(lost)]);
        assert!(!state.is_live(Rank(1)));
    }

    #[test]
    fn no_contribution_is_passed_on_after_the_end_or_after_a_goodbye() {
        let give = || {
            let (label, blob) = ("a".into(), Blob(Vec::new()));
            Event::Request(Request::Contribute { sequence: 0, label, blob })
        };
        let mut state = full(2);
        assert_eq!(state.apply(Rank(0), give()).len(), 1);
        state.apply(Rank(0), Event::Request(Request::Leave));
        assert_eq!(state.apply(Rank(0), give()), []);
        state.apply(Rank(1), abort("over"));
        assert_eq!(state.apply(Rank(1), give()), []);
    }
}
