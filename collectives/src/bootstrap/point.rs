//! The exchange point of a group: who is there, what is passed on, and the one verdict.
//!
//! Pure state, driven by events; the in-process group and the TCP hub run the same. Whatever it
//! says goes to every live rank, in one order. That order decides everything that ranks must see
//! alike: which abort or loss was first, and whether an exchange was complete before it.

use std::collections::BTreeSet;
use std::time::Duration;

use peerlane_hal::{ErrorKind, Rank};

use super::message::{Reply, Request, Verdict};
use crate::error::Error;

/// What happens to a rank, seen from the exchange point.
#[derive(Debug)]
pub(super) enum Event {
    Came,
    Said(Request),
    /// It ended without a goodbye.
    Lost {
        how: String,
    },
}

pub(super) struct Point {
    places: Vec<Place>,
    verdict: Option<Verdict>,
    /// Who has not acknowledged the verdict.
    untold: BTreeSet<Rank>,
    told: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Empty,
    Live,
    Gone,
}

impl Point {
    /// A group of `ranks` of which nobody has come.
    pub(super) fn new(ranks: usize) -> Self {
        let places = vec![Place::Empty; ranks];
        Self { places, verdict: None, untold: BTreeSet::new(), told: false }
    }

    /// Takes one event; the answers are for all who are live afterwards.
    pub(super) fn take(&mut self, from: Rank, event: Event) -> Vec<Reply> {
        match event {
            Event::Came => {
                self.places[from.index()] = Place::Live;
                vec![Reply::Here { ranks: numbers(self.with(|place| place != Place::Empty)) }]
            }
            _ if !self.is_live(from) => Vec::new(),
            Event::Said(request) => self.said(from, request),
            Event::Lost { how } => {
                self.places[from.index()] = Place::Gone;
                let mut replies = self.decide(Verdict::Lost { rank: from.0, how });
                replies.extend(self.acknowledge(from));
                replies
            }
        }
    }

    fn said(&mut self, from: Rank, request: Request) -> Vec<Reply> {
        match request {
            Request::Give { .. } if self.verdict.is_some() => Vec::new(),
            Request::Give { sequence, label, blob } => {
                vec![Reply::Gave { from: from.0, sequence, label, blob }]
            }
            Request::GiveUp { timeout } => self.give_up(timeout),
            Request::Abort { record } => self.decide(Verdict::Abort { from: from.0, record }),
            Request::Late { text, missing } => {
                self.decide(Verdict::Late { from: from.0, text, missing })
            }
            Request::Acknowledge => self.acknowledge(from),
            Request::Leave => {
                self.places[from.index()] = Place::Gone;
                let mut replies = vec![Reply::Left { rank: from.0 }];
                replies.extend(self.acknowledge(from));
                replies
            }
        }
    }

    fn give_up(&mut self, timeout: Duration) -> Vec<Reply> {
        let missing = numbers(self.with(|place| place == Place::Empty));
        if missing.is_empty() {
            return Vec::new();
        }
        self.decide(Verdict::NotStarted { missing, timeout })
    }

    fn decide(&mut self, verdict: Verdict) -> Vec<Reply> {
        if self.verdict.is_some() {
            return Vec::new();
        }
        self.untold = self.live().collect();
        // Nobody waits on ranks that never started.
        self.told = matches!(verdict, Verdict::NotStarted { .. });
        self.verdict = Some(verdict.clone());
        vec![Reply::Over(verdict)]
    }

    fn acknowledge(&mut self, from: Rank) -> Vec<Reply> {
        self.untold.remove(&from);
        if self.untold.is_empty() { self.release() } else { Vec::new() }
    }

    /// Ends the wait for acknowledgements, at the last one or because somebody does not answer.
    pub(super) fn release(&mut self) -> Vec<Reply> {
        if !self.is_telling() {
            return Vec::new();
        }
        self.told = true;
        vec![Reply::Told]
    }

    pub(super) fn verdict(&self) -> Option<&Verdict> {
        self.verdict.as_ref()
    }

    /// Whether there is a verdict that some live rank may not have heard.
    pub(super) fn is_telling(&self) -> bool {
        self.verdict.is_some() && !self.told
    }

    pub(super) fn is_live(&self, rank: Rank) -> bool {
        self.places[rank.index()] == Place::Live
    }

    /// Ranks that have come and are neither lost nor gone.
    pub(super) fn live(&self) -> impl Iterator<Item = Rank> {
        self.with(|place| place == Place::Live)
    }

    fn with(&self, wanted: impl Fn(Place) -> bool) -> impl Iterator<Item = Rank> {
        Rank::all(self.places.len()).filter(move |rank| wanted(self.places[rank.index()]))
    }
}

/// Checks the size of a group.
pub(super) fn check_ranks(ranks: usize) -> Result<(), Error> {
    if ranks == 0 {
        let text = "a group of 0 ranks: it needs at least one";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    if u32::try_from(ranks).is_err() {
        let text = format!("a group of {ranks} ranks: at most {} are possible", u32::MAX);
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(())
}

fn numbers(ranks: impl Iterator<Item = Rank>) -> Vec<u32> {
    ranks.map(|rank| rank.0).collect()
}

#[cfg(test)]
mod tests {
    use super::super::message::Blob;
    use super::*;

    fn full(ranks: usize) -> Point {
        let mut point = Point::new(ranks);
        for rank in Rank::all(ranks) {
            point.take(rank, Event::Came);
        }
        point
    }

    fn abort(text: &str) -> Event {
        Event::Said(Request::Abort { record: Blob(text.into()) })
    }

    #[test]
    fn the_first_abort_wins_and_told_follows_the_last_acknowledgement() {
        let mut point = full(3);
        let first = Verdict::Abort { from: 1, record: Blob(b"one".into()) };
        assert_eq!(point.take(Rank(1), abort("one")), [Reply::Over(first)]);
        assert_eq!(point.take(Rank(2), abort("two")), []);
        assert_eq!(point.take(Rank(0), Event::Said(Request::Acknowledge)), []);
        assert_eq!(point.take(Rank(0), Event::Said(Request::Acknowledge)), []);
        assert_eq!(point.take(Rank(1), Event::Said(Request::Acknowledge)), []);
        assert!(point.is_telling());
        assert_eq!(point.take(Rank(2), Event::Said(Request::Acknowledge)), [Reply::Told]);
        assert!(!point.is_telling());
        assert_eq!(point.release(), []);
    }

    #[test]
    fn the_lost_and_the_leaving_owe_no_acknowledgement() {
        let mut point = full(3);
        let lost = Verdict::Lost { rank: 0, how: "gone".into() };
        let event = Event::Lost { how: "gone".into() };
        assert_eq!(point.take(Rank(0), event), [Reply::Over(lost)]);
        assert_eq!(point.take(Rank(1), Event::Lost { how: "too".into() }), []);
        let replies = point.take(Rank(2), Event::Said(Request::Leave));
        assert_eq!(replies, [Reply::Left { rank: 2 }, Reply::Told]);
        assert_eq!(point.live().count(), 0);
    }

    #[test]
    fn giving_up_names_who_has_not_come_and_counts_only_before_the_start() {
        let give_up = || Event::Said(Request::GiveUp { timeout: Duration::from_secs(5) });
        let mut point = Point::new(4);
        point.take(Rank(1), Event::Came);
        point.take(Rank(3), Event::Came);
        let missing = Verdict::NotStarted { missing: vec![0, 2], timeout: Duration::from_secs(5) };
        assert!(missing.to_string().starts_with("ranks 0 and 2 did not come within 5 s: "));
        assert_eq!(point.take(Rank(3), give_up()), [Reply::Over(missing)]);
        assert_eq!(full(2).take(Rank(0), give_up()), []);
    }

    #[test]
    fn nothing_is_passed_on_after_the_verdict_or_after_a_goodbye() {
        let give = || {
            let (label, blob) = ("a".into(), Blob(Vec::new()));
            Event::Said(Request::Give { sequence: 0, label, blob })
        };
        let mut point = full(2);
        assert_eq!(point.take(Rank(0), give()).len(), 1);
        point.take(Rank(0), Event::Said(Request::Leave));
        assert_eq!(point.take(Rank(0), give()), []);
        point.take(Rank(1), abort("over"));
        assert_eq!(point.take(Rank(1), give()), []);
    }
}
