//! Tracks how far each lane of one rank knows all lanes to have come.
//!
//! Knowledge moves between the lanes of the rank as a log of changes, so passing it on often costs no more than once.

/// What the lanes of one rank know.
#[derive(Debug)]
pub(super) struct Clocks {
    lanes: Vec<Clock>,
}

#[derive(Debug)]
struct Clock {
    /// The last known time of every lane of every rank; 0 for none.
    known: Vec<i64>,
    /// The changes of `known`, in order.
    log: Vec<(usize, i64)>,
    /// The part of each lane's log that this lane has read.
    taken: Vec<usize>,
}

impl Clocks {
    pub(super) fn new(lanes: usize, columns: usize) -> Self {
        let clock = || Clock { known: vec![0; columns], log: Vec::new(), taken: vec![0; lanes] };
        Self { lanes: (0..lanes).map(|_| clock()).collect() }
    }

    /// Removes all knowledge.
    pub(super) fn clear(&mut self) {
        for clock in &mut self.lanes {
            clock.known.fill(0);
            clock.log.clear();
            clock.taken.fill(0);
        }
    }

    pub(super) fn known(&self, lane: usize, column: usize) -> i64 {
        self.lanes[lane].known[column]
    }

    pub(super) fn learn(&mut self, lane: usize, column: usize, time: i64) {
        let clock = &mut self.lanes[lane];
        if clock.known[column] < time {
            clock.known[column] = time;
            clock.log.push((column, time));
        }
    }

    /// Returns a position in the log of a lane, for another lane to [take](Self::take).
    pub(super) fn snapshot(&self, lane: usize) -> usize {
        self.lanes[lane].log.len()
    }

    /// Adds to a lane what another lane knew at a position of its log.
    pub(super) fn take(&mut self, lane: usize, from: usize, snapshot: usize) {
        let first = self.lanes[lane].taken[from];
        for index in first..snapshot {
            let (column, time) = self.lanes[from].log[index];
            self.learn(lane, column, time);
        }
        self.lanes[lane].taken[from] = first.max(snapshot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_takes_what_the_other_knew_then() {
        let mut clocks = Clocks::new(2, 3);
        clocks.learn(0, 2, 5);
        let then = clocks.snapshot(0);
        clocks.learn(0, 2, 7);
        clocks.learn(0, 1, 4);
        clocks.learn(0, 1, 3);
        clocks.take(1, 0, then);
        assert_eq!([0, 1, 2].map(|column| clocks.known(1, column)), [0, 0, 5]);
        clocks.take(1, 0, clocks.snapshot(0));
        assert_eq!([0, 1, 2].map(|column| clocks.known(1, column)), [0, 4, 7]);
        clocks.clear();
        assert_eq!(clocks.known(1, 2), 0);
    }
}
