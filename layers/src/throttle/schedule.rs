//! When each op of a throttled engine takes effect. It knows no clock: times are arguments.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Nothing is put off for longer, however slow the wire; about three years.
const LONGEST: Duration = Duration::from_secs(100_000_000);

/// What the schedule has to know of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// Bytes that leave.
    Put(u64),
    /// Bytes that come.
    Get(u64),
    Signal,
    /// Behind a wait of the caller: what follows leaves when the wait has passed.
    Mark,
}

/// The gates of one engine, in order, each with the time at which it opens.
#[derive(Debug)]
pub(super) struct Schedule {
    bytes_per_second: f64,
    delay: Duration,
    /// Ops whose time is not known yet, with when they were submitted; the first one is a mark.
    unknown: VecDeque<(Event, Instant)>,
    /// Closed gates.
    due: VecDeque<Instant>,
    /// Gates and marks that were ever made.
    gates: u64,
    marks: u64,
    /// Gates that are open, and marks that were seen.
    open: u64,
    passed: u64,
    /// Nothing leaves before: a wait has held it.
    ready: Instant,
    out_free: Instant,
    in_free: Instant,
    /// When the last get is here.
    got: Instant,
    /// The last time given to a gate: they open in order.
    last: Instant,
}

impl Schedule {
    pub(super) fn new(bytes_per_second: f64, delay: Duration, now: Instant) -> Self {
        Self {
            bytes_per_second,
            delay: delay.min(LONGEST),
            unknown: VecDeque::new(),
            due: VecDeque::new(),
            gates: 0,
            marks: 0,
            open: 0,
            passed: 0,
            ready: now,
            out_free: now,
            in_free: now,
            got: now,
            last: now,
        }
    }

    /// The number of the last gate and of the last mark.
    pub(super) fn made(&self) -> (u64, u64) {
        (self.gates, self.marks)
    }

    /// Takes the ops of a slice.
    pub(super) fn push(&mut self, events: impl Iterator<Item = Event>, now: Instant) {
        for event in events {
            match event {
                Event::Mark => self.marks += 1,
                Event::Put(_) | Event::Get(_) | Event::Signal => self.gates += 1,
            }
            self.unknown.push_back((event, now));
        }
    }

    /// Whether a mark is waited for.
    pub(super) fn awaits_mark(&self) -> bool {
        !self.unknown.is_empty()
    }

    /// Up to which gate all are due, if any is, when the marks up to `passed` were seen.
    pub(super) fn look(&mut self, passed: u64, now: Instant) -> Option<u64> {
        while let Some((event, at)) = self.unknown.front().copied() {
            if event == Event::Mark {
                if self.passed == passed {
                    break;
                }
                self.passed += 1;
                self.ready = self.ready.max(now);
            } else {
                let time = self.time(event, at);
                self.due.push_back(time);
            }
            self.unknown.pop_front();
        }
        let ripe = self.due.partition_point(|due| *due <= now);
        (ripe > 0).then(|| self.open + ripe as u64)
    }

    /// The gates up to `last` are open.
    pub(super) fn opened(&mut self, last: u64) {
        let count = usize::try_from(last - self.open).unwrap_or(usize::MAX);
        self.due.drain(..count.min(self.due.len()));
        self.open = last;
    }

    /// When the next gate opens, as far as it is known.
    pub(super) fn next(&self) -> Option<Instant> {
        self.due.front().copied()
    }

    /// The engine was released.
    pub(super) fn clear(&mut self) {
        self.unknown.clear();
        self.due.clear();
    }

    /// When an op submitted at `at` takes effect.
    fn time(&mut self, event: Event, at: Instant) -> Instant {
        let ready = self.ready.max(at);
        let effect = match event {
            Event::Put(bytes) => {
                self.out_free = self.out_free.max(ready) + self.travel(bytes);
                self.out_free
            }
            Event::Get(bytes) => {
                // The question takes as long as the answer.
                self.in_free = self.in_free.max(ready + self.delay) + self.travel(bytes);
                self.got = self.in_free + self.delay;
                self.in_free
            }
            Event::Signal | Event::Mark => self.out_free.max(ready).max(self.got),
        };
        self.last = self.last.max(effect + self.delay);
        self.last
    }

    fn travel(&self, bytes: u64) -> Duration {
        let seconds = bytes as f64 / self.bytes_per_second;
        Duration::try_from_secs_f64(seconds).map_or(LONGEST, |time| time.min(LONGEST))
    }
}

#[cfg(test)]
mod tests {
    use super::Event::{Get, Mark, Put, Signal};
    use super::*;

    const DELAY: u64 = 10;

    /// A byte a millisecond, and the milliseconds at which each op takes effect, all submitted at 0.
    fn times(events: &[Event]) -> Vec<u128> {
        let start = Instant::now();
        let mut schedule = Schedule::new(1000.0, Duration::from_millis(DELAY), start);
        schedule.push(events.iter().copied(), start);
        schedule.look(0, start);
        schedule.due.iter().map(|due| (*due - start).as_millis()).collect()
    }

    #[test]
    fn rate_and_delay_overlap() {
        assert_eq!(times(&[Put(5), Put(5), Signal]), [15, 20, 20]);
        assert_eq!(times(&[Signal, Put(0)]), [10, 10]);
    }

    #[test]
    fn a_get_takes_both_ways_and_the_other_direction() {
        assert_eq!(times(&[Get(5), Get(5)]), [25, 30]);
        // In order, though the wire out was free before.
        assert_eq!(times(&[Get(5), Put(7)]), [25, 25]);
        assert_eq!(times(&[Put(20), Get(5)]), [30, 30]);
        // The signal says that the bytes are here, so it leaves when they are.
        assert_eq!(times(&[Get(5), Signal]), [25, 35]);
    }

    #[test]
    fn what_stands_behind_a_wait_leaves_when_it_has_passed() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut schedule = Schedule::new(1000.0, Duration::from_millis(DELAY), start);
        schedule.push([Put(1), Mark, Put(2), Signal].into_iter(), start);
        assert_eq!((schedule.look(0, at(0)), schedule.next()), (None, Some(at(11))));
        assert_eq!(schedule.look(0, at(11)), Some(1));
        // It was not opened, so it stays due.
        assert_eq!(schedule.look(0, at(40)), Some(1));
        schedule.opened(1);
        assert_eq!((schedule.look(0, at(50)), schedule.next()), (None, None));
        assert_eq!((schedule.look(1, at(100)), schedule.next()), (None, Some(at(112))));
        assert_eq!(schedule.look(1, at(112)), Some(3));
        schedule.opened(3);
        assert!(!schedule.awaits_mark() && schedule.next().is_none());
    }

    #[test]
    fn a_rate_of_almost_nothing_overflows_no_clock() {
        let start = Instant::now();
        let mut schedule = Schedule::new(f64::MIN_POSITIVE, Duration::MAX, start);
        schedule.push([Put(u64::MAX), Put(u64::MAX), Get(1)].into_iter(), start);
        assert_eq!(schedule.look(0, start), None);
    }
}
