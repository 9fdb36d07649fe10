//! Searches whether one step precedes another, along lanes and from each wait to its signal.
//!
//! The [walk](super::walk) uses this complete search only for what it cannot decide faster.

use std::collections::VecDeque;

use peerlane_hal::Rank;

use super::flags::Flags;
use super::program::Program;
use crate::plan::{LaneId, Step};

/// A moment in a lane of a rank. The times of all starts form one sequence, see [`Past::at`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moment {
    pub(super) rank: Rank,
    pub(super) lane: LaneId,
    pub(super) time: i64,
}

/// The search and its reused buffers.
#[derive(Debug)]
pub(super) struct Past<'a> {
    program: &'a Program,
    flags: &'a Flags,
    /// A number larger than the number of steps of any lane.
    pub(super) stride: i64,
    /// The waits of every lane, by index.
    waits: Vec<Vec<usize>>,
    /// The last known time of each lane of each rank; empty between searches.
    reached: Vec<i64>,
    touched: Vec<usize>,
}

impl<'a> Past<'a> {
    pub(super) fn new(program: &'a Program, flags: &'a Flags) -> Self {
        let steps = program.lanes.iter().map(|lane| lane.steps.len()).max().unwrap_or(0);
        let is_wait = |step: &Step| matches!(step, Step::Wait { .. });
        let waits = |steps: &[Step]| (0..steps.len()).filter(|&at| is_wait(&steps[at])).collect();
        Self {
            program,
            flags,
            stride: i64::try_from(steps).expect("memory is smaller") + 2,
            waits: program.lanes.iter().map(|lane| waits(&lane.steps)).collect(),
            reached: Vec::new(),
            touched: Vec::new(),
        }
    }

    /// Returns the time at which a lane has reached its step `at` of start `start`.
    pub(super) fn at(&self, start: i64, at: usize) -> i64 {
        start * self.stride + 1 + i64::try_from(at).expect("memory is smaller")
    }

    /// Returns whether `wanted` precedes `now`; nothing precedes start 0.
    pub(super) fn holds(&mut self, now: Moment, wanted: Moment) -> bool {
        let found = self.search(now, Some(wanted));
        self.touched.drain(..).for_each(|column| self.reached[column] = 0);
        found
    }

    /// Returns the time that each lane of each rank has certainly reached when a lane has reached `now`; 0 if unknown.
    pub(super) fn of(&mut self, now: Moment) -> Vec<i64> {
        self.search(now, None);
        self.touched.clear();
        std::mem::take(&mut self.reached)
    }

    fn search(&mut self, now: Moment, wanted: Option<Moment>) -> bool {
        self.reached.resize(self.program.ranks as usize * self.program.width, 0);
        let mut open = VecDeque::from([now]);
        while let Some(moment) = open.pop_front() {
            let column = self.program.column(moment.rank, moment.lane);
            let before = self.reached[column];
            if moment.time <= before {
                continue;
            }
            self.reached[column] = moment.time;
            self.touched.push(column);
            let is_wanted = |wanted: Moment| {
                (moment.rank, moment.lane) == (wanted.rank, wanted.lane)
                    && moment.time >= wanted.time
            };
            if wanted.is_some_and(is_wanted) {
                return true;
            }
            self.open(before, moment, &mut open);
        }
        false
    }

    /// Adds the signals that a lane has waited for between two moments.
    fn open(&self, before: i64, Moment { rank, lane, time }: Moment, open: &mut VecDeque<Moment>) {
        let symmetry = &self.program.symmetry;
        let turn = symmetry.turn_of(rank);
        let number = self.program.lane(rank, lane);
        let waits = &self.waits[number];
        for start in (before / self.stride..=time / self.stride).rev() {
            let passed = |until| waits.partition_point(|&at| self.at(start, at) < until);
            for &at in waits[passed(before)..passed(time)].iter().rev() {
                let ends = self.flags.of_step(number, at);
                let (writer, signal) = ends.signal;
                let moment = Moment {
                    rank: symmetry.turned(turn, ends.writer),
                    lane: self.program.lanes[writer].lane,
                    time: self.at(start, signal),
                };
                if self.reached[self.program.column(moment.rank, moment.lane)] < moment.time {
                    open.push_back(moment);
                }
            }
        }
    }
}
