//! One rank's side of the exchange point: what has come from it, who waits for that, who listens.
//!
//! The in-process group and the TCP client bring the way there and back and share the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::{Mutex, PoisonError};

use peerlane_hal::{Deadline, ErrorKind, Rank};

use super::message::{
    BLOB_BYTES_MAX, Blob, LABEL_BYTES_MAX, Names, Reply, Request, Seconds, Verdict, with_peer,
};
use super::round::Round;
use super::watched::Watched;
use super::{Listener, Notice};
use crate::error::Error;

const START: &str = "the group did not start";

pub(super) struct Member {
    rank: Rank,
    ranks: usize,
    state: Watched<State>,
    delivery: Mutex<Delivery>,
}

#[derive(Default)]
struct State {
    here: BTreeSet<Rank>,
    left: BTreeSet<Rank>,
    /// How many exchanges this rank has begun; also the sequence number of its next.
    begun: u64,
    rounds: BTreeMap<u64, Round>,
    verdict: Option<Verdict>,
    told: bool,
    /// This rank has said goodbye; its listener hears no more.
    departed: bool,
    /// The exchange point says no more.
    closed: bool,
}

/// Locked while a listener runs, which keeps notices in order.
#[derive(Default)]
struct Delivery {
    listener: Option<Listener>,
    waiting: Vec<Notice>,
}

impl Member {
    pub(super) fn new(rank: Rank, ranks: usize) -> Self {
        Self { rank, ranks, state: Watched::new(State::default()), delivery: Mutex::default() }
    }

    pub(super) fn rank(&self) -> Rank {
        self.rank
    }

    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }

    /// Waits until every rank is here.
    pub(super) fn started(&self, deadline: Deadline) -> Result<(), Error> {
        let settled = self.state.wait(deadline, |state| {
            if state.here.len() == self.ranks {
                return Some(Ok(()));
            }
            state.verdict.as_ref().map(|verdict| Err(verdict.error(START)))
        });
        settled.unwrap_or_else(|| {
            let here = &self.state.lock().here;
            let missing = Rank::all(self.ranks).filter(|rank| !here.contains(rank));
            let missing = missing.map(|rank| rank.0).collect();
            Err(Verdict::NotStarted { missing, timeout: deadline.timeout() }.error(START))
        })
    }

    /// [`Bootstrap::exchange`](super::Bootstrap::exchange), with `send` as the way to the exchange
    /// point; what cannot be sent shows as a verdict.
    pub(super) fn exchange(
        &self,
        label: &str,
        mine: &[u8],
        deadline: Deadline,
        send: impl Fn(Request),
    ) -> Result<Vec<Vec<u8>>, Error> {
        check_sizes(label, mine)?;
        let what = format!("exchange {label:?}");
        let sequence = self.begin(&what)?;
        send(Request::Give { sequence, label: label.to_owned(), blob: Blob(mine.to_vec()) });
        let settled = self.state.wait(deadline, |state| state.outcome(sequence, &what));
        let missing = self.end(sequence);
        settled.unwrap_or_else(|| {
            let error = self.late(&what, &missing, deadline);
            // Half an exchange is no exchange: no rank goes on with it.
            let missing = error.peer().map(|rank| rank.0);
            send(Request::Late { text: error.to_string(), missing });
            Err(error)
        })
    }

    fn begin(&self, what: &str) -> Result<u64, Error> {
        let mut state = self.state.lock();
        if state.departed {
            return Err(departed(what));
        }
        if let Some(verdict) = &state.verdict {
            return Err(verdict.error_after(what));
        }
        let sequence = state.begun;
        state.begun += 1;
        state.rounds.entry(sequence).or_insert_with(|| Round::new(self.ranks));
        Ok(sequence)
    }

    fn end(&self, sequence: u64) -> Vec<Rank> {
        let round = self.state.lock().rounds.remove(&sequence);
        round.map(|round| round.missing().collect()).unwrap_or_default()
    }

    fn late(&self, what: &str, missing: &[Rank], deadline: Deadline) -> Error {
        let others: Vec<_> = missing.iter().copied().filter(|rank| *rank != self.rank).collect();
        let within = Seconds(deadline.timeout());
        let text = if others.len() == missing.len() {
            format!("{what}: {} did not come within {within}", Names(&others))
        } else if others.is_empty() {
            format!("{what}: the exchange point did not answer within {within}")
        } else {
            let others = Names(&others);
            format!("{what}: neither {others} nor the exchange point answered within {within}")
        };
        with_peer(Error::new(ErrorKind::Timeout, text), others.first().copied())
    }

    /// Checks that this rank may still abort, and that `record` can travel.
    pub(super) fn check_abort(&self, record: &[u8]) -> Result<(), Error> {
        check_sizes("", record)?;
        let state = self.state.lock();
        match &state.verdict {
            _ if state.departed => Err(departed("abort")),
            Some(verdict) if state.closed => Err(verdict.error_after("abort")),
            _ => Ok(()),
        }
    }

    /// Begins the goodbye of this rank; true if it must now be sent, false if it was before.
    pub(super) fn depart(&self) -> Result<bool, Error> {
        self.state.change(|state| match &state.verdict {
            _ if state.departed => Ok(false),
            Some(verdict) if state.closed => Err(verdict.error_after("goodbye")),
            _ => Ok(!mem::replace(&mut state.departed, true)),
        })
    }

    /// From now on the listener hears nothing.
    pub(super) fn silence(&self) {
        self.state.change(|state| state.departed = true);
    }

    /// Waits until the exchange point has said its last word to this rank.
    pub(super) fn wait_closed(&self, deadline: Deadline) -> bool {
        self.state.wait(deadline, |state| state.closed.then_some(())).is_some()
    }

    /// Takes what the exchange point says; true if this rank must now acknowledge it.
    pub(super) fn receive(&self, reply: Reply) -> bool {
        let notice = self.state.change(|state| state.take(reply, self.ranks));
        let Some(notice) = notice else { return false };
        let owes = matches!(notice, Notice::Abort { .. } | Notice::Lost { .. });
        self.hand(notice);
        owes
    }

    /// The exchange point says no more; if it was still needed, its host, rank 0, counts as lost.
    pub(super) fn close(&self, how: String) {
        let (lost, untold) = self.state.change(|state| {
            state.closed = true;
            let lost = Verdict::Lost { rank: 0, how };
            let new = state.verdict.is_none().then(|| state.verdict.insert(lost).notice());
            (new.flatten(), !mem::replace(&mut state.told, true))
        });
        lost.into_iter().chain(untold.then_some(Notice::Told)).for_each(|notice| self.hand(notice));
    }

    pub(super) fn listen(&self, listener: Listener) {
        let mut delivery = self.delivery.lock().unwrap_or_else(PoisonError::into_inner);
        delivery.waiting.drain(..).for_each(|notice| listener(notice));
        delivery.listener = Some(listener);
    }

    fn hand(&self, notice: Notice) {
        let mut delivery = self.delivery.lock().unwrap_or_else(PoisonError::into_inner);
        if self.state.lock().departed {
            return;
        }
        match &delivery.listener {
            Some(listener) => listener(notice),
            None => delivery.waiting.push(notice),
        }
    }
}

impl State {
    /// Takes what the exchange point says; numbers that no rank of the group has are passed over.
    fn take(&mut self, reply: Reply, ranks: usize) -> Option<Notice> {
        let known = |rank: u32| (rank as usize) < ranks;
        match reply {
            Reply::Here { ranks } => {
                self.here.extend(ranks.into_iter().filter(|rank| known(*rank)).map(Rank));
                None
            }
            Reply::Gave { from, sequence, label, blob } => {
                // What comes late for an exchange that this rank has ended is for nobody.
                let wanted = sequence >= self.begun || self.rounds.contains_key(&sequence);
                if wanted && known(from) {
                    let round = self.rounds.entry(sequence).or_insert_with(|| Round::new(ranks));
                    round.take(sequence, Rank(from), label, blob.0);
                }
                None
            }
            Reply::Over(verdict) => self.verdict.insert(verdict).notice(),
            Reply::Told => (!mem::replace(&mut self.told, true)).then_some(Notice::Told),
            Reply::Left { rank } => {
                self.left.insert(Rank(rank));
                Some(Notice::Left { rank: Rank(rank) })
            }
        }
    }

    /// What was complete before the verdict stays complete, on every rank.
    fn outcome(&mut self, sequence: u64, what: &str) -> Option<Result<Vec<Vec<u8>>, Error>> {
        let round = self.rounds.get_mut(&sequence)?;
        if let Some(outcome) = round.outcome() {
            return Some(outcome);
        }
        if let Some(verdict) = &self.verdict {
            return Some(Err(verdict.error(what)));
        }
        if self.departed {
            return Some(Err(departed(what)));
        }
        let gone = round.missing().find(|rank| self.left.contains(rank))?;
        let text = format!("{what}: rank {gone} has left the group and takes part in nothing more");
        Some(Err(Error::new(ErrorKind::PeerLost, text).with_peer(gone)))
    }
}

fn check_sizes(label: &str, blob: &[u8]) -> Result<(), Error> {
    for (what, bytes, bytes_max) in [
        ("the bytes of one rank are", blob.len(), BLOB_BYTES_MAX),
        ("the label is", label.len(), LABEL_BYTES_MAX),
    ] {
        if bytes > bytes_max {
            let text = format!("{what} {bytes} bytes long; at most {bytes_max} can be passed on");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
    }
    Ok(())
}

fn departed(what: &str) -> Error {
    Error::new(ErrorKind::Other, format!("{what}: this rank has left the group"))
}
