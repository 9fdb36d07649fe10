//! Decides which replies the ranks of a group receive, and in which order: [`HubState`].
//!
//! The state is driven by events and does no I/O; the in-process group and the TCP hub use the same. Its
//! replies go to every live rank in one order. That order decides everything on which ranks must agree:
//! which abort or loss was first, and whether an exchange was complete before it.

use std::collections::BTreeSet;
use std::time::Duration;

use peerlane_hal::{ErrorKind, Rank};

use super::message::{EndCause, Reply, Request};
use crate::error::Error;

/// An event of one rank.
#[derive(Debug)]
pub(crate) enum Event {
    Joined {
        runs_hub: bool,
    },
    Request(Request),
    /// The rank ended without a goodbye.
    Lost {
        how: String,
    },
}

/// Tracks the membership of a group, and why it ended.
pub(crate) struct HubState {
    members: Vec<Membership>,
    /// The rank whose process runs the hub, if one does.
    runs_hub: Option<Rank>,
    end_cause: Option<EndCause>,
    /// Ranks that have not acknowledged the cause of the end.
    unacknowledged: BTreeSet<Rank>,
    all_acknowledged: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Membership {
    NotJoined,
    Joined,
    Gone,
}

impl HubState {
    /// Creates the state of a group of `ranks` ranks, none of which has joined.
    pub(crate) fn new(ranks: usize) -> Self {
        let members = vec![Membership::NotJoined; ranks];
        Self {
            members,
            runs_hub: None,
            end_cause: None,
            unacknowledged: BTreeSet::new(),
            all_acknowledged: false,
        }
    }

    /// Handles an event; the replies go to all ranks that are live afterwards.
    pub(crate) fn apply(&mut self, from: Rank, event: Event) -> Vec<Reply> {
        match event {
            Event::Joined { runs_hub } => {
                self.members[from.index()] = Membership::Joined;
                if runs_hub {
                    self.runs_hub = Some(from);
                }
                vec![Reply::Joined {
                    ranks: rank_numbers(self.ranks_where(|member| member != Membership::NotJoined)),
                    runs_hub: self.runs_hub.map(|rank| rank.0),
                }]
            }
            _ if !self.is_live(from) => Vec::new(),
            Event::Request(request) => self.handle(from, request),
            Event::Lost { how } => {
                self.members[from.index()] = Membership::Gone;
                let mut replies = self.end_group(EndCause::Lost { rank: from.0, how });
                replies.extend(self.acknowledge(from));
                replies
            }
        }
    }

    fn handle(&mut self, from: Rank, request: Request) -> Vec<Reply> {
        match request {
            Request::Contribute { .. } if self.end_cause.is_some() => Vec::new(),
            Request::Contribute { sequence, label, blob } => {
                vec![Reply::Contribution { from: from.0, sequence, label, blob }]
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
        }
    }

    fn start_timed_out(&mut self, timeout: Duration) -> Vec<Reply> {
        let missing = rank_numbers(self.ranks_where(|member| member == Membership::NotJoined));
        if missing.is_empty() {
            return Vec::new();
        }
        self.end_group(EndCause::NotStarted { missing, timeout })
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

    /// Ends the wait for acknowledgements: after the last one, or because a rank does not answer.
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

    /// Returns whether the group has ended and some live rank may not know it yet.
    pub(crate) fn awaits_acknowledgement(&self) -> bool {
        self.end_cause.is_some() && !self.all_acknowledged
    }

    pub(crate) fn is_live(&self, rank: Rank) -> bool {
        self.members[rank.index()] == Membership::Joined
    }

    /// Returns the ranks that have joined and have neither left nor been lost.
    pub(crate) fn live(&self) -> impl Iterator<Item = Rank> {
        self.ranks_where(|member| member == Membership::Joined)
    }

    fn ranks_where(&self, is: impl Fn(Membership) -> bool) -> impl Iterator<Item = Rank> {
        Rank::all(self.members.len()).filter(move |rank| is(self.members[rank.index()]))
    }
}

/// Largest number of ranks of a group. Every rank has a connection to the hub, and a host has 65,536 ports.
pub(crate) const RANKS_MAX: usize = 1 << 16;

/// Checks the number of ranks of a group.
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
    use super::super::message::Blob;
    use super::*;

    fn full(ranks: usize) -> HubState {
        let mut state = HubState::new(ranks);
        for rank in Rank::all(ranks) {
            state.apply(rank, Event::Joined { runs_hub: false });
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
        state.apply(Rank(1), Event::Joined { runs_hub: false });
        state.apply(Rank(3), Event::Joined { runs_hub: false });
        let missing = EndCause::NotStarted { missing: vec![0, 2], timeout: Duration::from_secs(5) };
        assert!(missing.to_string().starts_with("ranks 0 and 2 did not connect within 5 s; "));
        assert_eq!(state.apply(Rank(3), give_up()), [Reply::Ended(missing)]);
        assert_eq!(full(2).apply(Rank(0), give_up()), []);
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
