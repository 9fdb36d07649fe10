//! Decides whether one step of a set of plans happens before another, with vector clocks or a
//! complete search.
//!
//! A step precedes another if a path leads from the one to the other, along lanes and from each
//! signal to its wait.

use std::collections::VecDeque;

use peerlane_hal::Rank;

use super::flags::Flags;
use super::plan_set::PlanSet;
use crate::plan::{LaneId, Step};

/// Stores the vector clocks of the lanes of one rank.
///
/// A clock has an entry for each lane of all ranks, or only for each lane of the same rank.
///
/// Lanes of the rank pass their clocks on as logs of changes, so passing a clock on repeatedly
/// costs no more than once.
#[derive(Debug)]
pub(super) struct VectorClocks {
    lanes: Vec<Clock>,
}

/// The vector clock of one lane, with a log of its changes.
#[derive(Debug)]
struct Clock {
    /// The latest known logical time of each tracked lane.
    times: Vec<i64>,
    /// All changes of `times` in order, each as an entry and its new time.
    log: Vec<(usize, i64)>,
    /// For each lane of the rank, how many changes of its log this clock has merged.
    merged: Vec<usize>,
}

impl VectorClocks {
    pub(super) fn new(lanes: usize, entries: usize) -> Self {
        let clock = || Clock { times: vec![0; entries], log: Vec::new(), merged: vec![0; lanes] };
        Self { lanes: (0..lanes).map(|_| clock()).collect() }
    }

    pub(super) fn clear(&mut self) {
        for clock in &mut self.lanes {
            clock.times.fill(0);
            clock.log.clear();
            clock.merged.fill(0);
        }
    }

    pub(super) fn time(&self, lane: usize, entry: usize) -> i64 {
        self.lanes[lane].times[entry]
    }

    /// Sets an entry of the clock of `lane` to `time`, unless the entry is later already.
    pub(super) fn advance(&mut self, lane: usize, entry: usize, time: i64) {
        let clock = &mut self.lanes[lane];
        if clock.times[entry] < time {
            clock.times[entry] = time;
            clock.log.push((entry, time));
        }
    }

    /// Returns the length of the change log of `lane`, which identifies the present state of its
    /// clock.
    pub(super) fn snapshot(&self, lane: usize) -> usize {
        self.lanes[lane].log.len()
    }

    /// Merges the state that the clock of `from` had at `snapshot` into the clock of `lane`.
    pub(super) fn merge(&mut self, lane: usize, from: usize, snapshot: usize) {
        // Changes before `first` were merged earlier, and times never decrease.
        let first = self.lanes[lane].merged[from];
        for index in first..snapshot {
            let (entry, time) = self.lanes[from].log[index];
            self.advance(lane, entry, time);
        }

        // An earlier merge may have read beyond this snapshot.
        self.lanes[lane].merged[from] = first.max(snapshot);
    }
}

/// A point in the logical time of one lane of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) rank: Rank,
    pub(super) lane: LaneId,
    pub(super) time: i64,
}

/// Searches for a happens-before path between two events of a set of plans.
///
/// It keeps its buffers for the next search.
#[derive(Debug)]
pub(super) struct HappensBefore<'a> {
    set: &'a PlanSet,
    flags: &'a Flags,
    /// The logical time from a step to the same step in the next start, larger than the number of
    /// steps of any lane.
    pub(super) start_stride: i64,
    /// For each lane of the set, the indices of its wait steps.
    waits: Vec<Vec<usize>>,
    /// For each lane of each rank, the latest time that the search has reached; 0 at first.
    found: Vec<i64>,
    /// The indices of the entries of `found` that are not 0.
    touched: Vec<usize>,
}

impl<'a> HappensBefore<'a> {
    pub(super) fn new(set: &'a PlanSet, flags: &'a Flags) -> Self {
        // Within a start, times go from 1 to `steps_max` + 1, the end of the longest lane. So a
        // time divided by the stride is the number of its start.
        let steps_max = set.lanes.iter().map(|lane| lane.steps.len()).max().unwrap_or(0);
        let start_stride = i64::try_from(steps_max).expect("memory is smaller") + 2;

        let is_wait = |step: &Step| matches!(step, Step::Wait { .. });
        let waits = |steps: &[Step]| (0..steps.len()).filter(|&at| is_wait(&steps[at])).collect();

        Self {
            set,
            flags,
            start_stride,
            waits: set.lanes.iter().map(|lane| waits(&lane.steps)).collect(),
            found: Vec::new(),
            touched: Vec::new(),
        }
    }

    /// Returns the logical time of the step with index `at` in `start`.
    ///
    /// If `at` is the number of steps of a lane, it is the time of the end of the lane.
    pub(super) fn time(&self, start: i64, at: usize) -> i64 {
        start * self.start_stride + 1 + i64::try_from(at).expect("memory is smaller")
    }

    /// Returns whether `earlier` happens before `later`, or is the same event.
    pub(super) fn precedes(&mut self, earlier: Event, later: Event) -> bool {
        let is_found = self.search(later, Some(earlier));

        // Only the touched entries are reset, because `found` has one for every lane of every rank.
        self.touched.drain(..).for_each(|index| self.found[index] = 0);

        is_found
    }

    /// Returns, for each lane of all ranks, the latest time that happens before `event`.
    pub(super) fn before(&mut self, event: Event) -> Vec<i64> {
        self.search(event, None);
        self.touched.clear();
        std::mem::take(&mut self.found)
    }

    /// Searches backwards from `later`, and returns whether the search meets `earlier`.
    ///
    /// Without `earlier`, the search stops only when `found` has the latest time of every lane.
    fn search(&mut self, later: Event, earlier: Option<Event>) -> bool {
        self.found.resize(self.set.all_lanes(), 0);
        let mut open = VecDeque::from([later]);
        while let Some(event) = open.pop_front() {
            let index = self.set.clock_index(event.rank, event.lane);
            let previous = self.found[index];
            // This event or a later one of its lane was visited, with everything before it.
            if event.time <= previous {
                continue;
            }

            self.found[index] = event.time;
            self.touched.push(index);

            let is_at_or_after = |other: Event| {
                (event.rank, event.lane) == (other.rank, other.lane) && event.time >= other.time
            };
            if earlier.is_some_and(is_at_or_after) {
                return true;
            }

            self.open_signals(previous, event, &mut open);
        }

        false
    }

    /// Appends to `open` the signals that the lane of `event` has waited for since the time
    /// `previous`.
    ///
    /// The signals of earlier waits were appended when the search reached `previous`.
    fn open_signals(&self, previous: i64, event: Event, open: &mut VecDeque<Event>) {
        let Event { rank, lane, time } = event;
        let number = self.set.followed_lane(rank, lane);
        let waits = &self.waits[number];

        // The latest waits come first, because their signals include the earlier signals of the
        // same writers.
        for start in (previous / self.start_stride..=time / self.start_stride).rev() {
            let passed = |until| waits.partition_point(|&at| self.time(start, at) < until);
            for &at in waits[passed(previous)..passed(time)].iter().rev() {
                let flag_use = self.flags.of_step(number, at);
                let (writer, signal) = flag_use.signal;
                let signal_start = start - self.set.lag(number, at);
                // A wait of start 0 can be for a signal of the start before, which does not exist.
                if signal_start < 0 {
                    continue;
                }

                let symmetry = &self.set.symmetry;
                let signalled = Event {
                    rank: symmetry.rotated(symmetry.rotation_of(rank), flag_use.writer),
                    lane: self.set.lanes[writer].lane,
                    time: self.time(signal_start, signal),
                };

                let index = self.set.clock_index(signalled.rank, signalled.lane);
                if self.found[index] < signalled.time {
                    open.push_back(signalled);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_merges_the_clock_of_a_snapshot() {
        let mut clocks = VectorClocks::new(2, 3);
        clocks.advance(0, 2, 5);
        let snapshot = clocks.snapshot(0);
        clocks.advance(0, 2, 7);
        clocks.advance(0, 1, 4);
        clocks.advance(0, 1, 3);
        clocks.merge(1, 0, snapshot);
        assert_eq!([0, 1, 2].map(|entry| clocks.time(1, entry)), [0, 0, 5]);
        clocks.merge(1, 0, clocks.snapshot(0));
        assert_eq!([0, 1, 2].map(|entry| clocks.time(1, entry)), [0, 4, 7]);
        clocks.clear();
        assert_eq!(clocks.time(1, 2), 0);
    }
}
