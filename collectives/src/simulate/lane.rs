//! What one lane is at.

use std::collections::VecDeque;

/// No step.
pub(super) const NO_STEP: u32 = u32::MAX;

/// Why a lane does not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hold {
    /// It goes on within this event.
    Free,
    /// Its next step, a put, is being issued.
    Issue,
    /// As many puts are under way as may be.
    Slot,
    /// All puts must have ended.
    Drain,
    /// The flag of its next step is not there.
    Flag,
    /// It has ended.
    Done,
}

/// A put or a get that was issued and has not ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    /// In order of issue.
    pub(super) number: u32,
    pub(super) step: u32,
    pub(super) peer: u32,
    pub(super) bytes: u64,
    pub(super) get: bool,
    /// A peer has put the bytes here.
    pub(super) passed_on: bool,
    /// When it was issued.
    pub(super) issued: u64,
    /// When its bytes began to move, and as which flow of the lane.
    pub(super) begun: Option<(u64, u32)>,
    /// The step whose end let it begin.
    pub(super) cause: u32,
}

/// A signal that must not pass puts before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deferred {
    pub(super) step: u32,
    /// Puts to this peer; to all if `None`.
    pub(super) behind: Option<u32>,
    /// Up to this number.
    pub(super) number: u32,
    /// When the lane came to it.
    pub(super) at: u64,
}

/// The state of one lane.
#[derive(Clone, Debug)]
pub(super) struct Lane {
    /// The next step, and the one behind the last.
    pub(super) next: u32,
    pub(super) end: u32,
    pub(super) hold: Hold,
    /// When the next step can begin, or since when it is held.
    pub(super) at: u64,
    /// The step whose end set `at`.
    pub(super) cause: u32,
    /// In order of issue.
    pub(super) entries: VecDeque<Entry>,
    pub(super) deferred: Vec<Deferred>,
    pub(super) issued: u32,
    /// A bit for each flow that moves.
    pub(super) moving: u64,
    /// How long at least one flow has moved, and since when one does.
    pub(super) busy: u64,
    pub(super) busy_since: u64,
}

impl Lane {
    pub(super) fn new(next: u32, end: u32, at: u64) -> Self {
        Self {
            next,
            end,
            hold: Hold::Free,
            at,
            cause: NO_STEP,
            entries: VecDeque::new(),
            deferred: Vec::new(),
            issued: 0,
            moving: 0,
            busy: 0,
            busy_since: 0,
        }
    }

    /// The last put to `peer`, or to anybody, that has not ended.
    pub(super) fn last(&self, peer: Option<u32>) -> Option<&Entry> {
        self.entries.iter().rev().find(|entry| peer.is_none_or(|peer| entry.peer == peer))
    }

    /// The first put that may begin to move: none to its peer is before it. A lane moves the bytes
    /// of at most `flows` puts at once.
    pub(super) fn startable(&mut self, flows: impl Fn(&Entry) -> u32) -> Option<&mut Entry> {
        let moving = self.moving.count_ones();
        let waiting = (0..self.entries.len()).filter(|&index| self.entries[index].begun.is_none());
        for index in waiting {
            let entry = &self.entries[index];
            if moving >= flows(entry) {
                return None;
            }
            if !self.entries.range(..index).any(|before| before.peer == entry.peer) {
                return self.entries.get_mut(index);
            }
        }
        None
    }

    /// Takes the first deferred signal that a put to `peer` has let go.
    pub(super) fn release(&mut self, peer: u32) -> Option<Deferred> {
        let index = self.deferred.iter().position(|deferred| {
            let Deferred { behind, number, .. } = *deferred;
            let mut before = self.entries.iter().take_while(|entry| entry.number <= number);
            behind.is_none_or(|behind| behind == peer)
                && !before.any(|entry| behind.is_none_or(|behind| behind == entry.peer))
        })?;
        Some(self.deferred.remove(index))
    }
}
