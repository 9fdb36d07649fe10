//! Computes the statistics of timed iterations over all ranks.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The begin and end of one iteration on one rank, by the monotonic clock that all processes of a
/// machine share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Interval {
    pub(crate) begin: Duration,
    pub(crate) end: Duration,
}

impl Interval {
    pub(crate) fn now() -> Duration {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let seconds = Duration::from_secs(now.tv_sec.unsigned_abs());
        seconds + Duration::from_nanos(now.tv_nsec.unsigned_abs())
    }

    /// Creates an interval of this length, for times that were not taken from the shared clock.
    pub(crate) fn of(length: Duration) -> Self {
        Self { begin: Duration::ZERO, end: length }
    }

    pub(crate) fn length(self) -> Duration {
        self.end.saturating_sub(self.begin)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Statistics {
    pub(crate) median: Duration,
    pub(crate) p99: Duration,
    pub(crate) max: Duration,
}

impl Statistics {
    /// Computes the statistics of unordered times; all are zero if there are no times.
    pub(crate) fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let middle = times.len() / 2;
        let median = match times.len() {
            0 => Duration::ZERO,
            odd if odd % 2 == 1 => times[middle],
            _ => (times[middle - 1] + times[middle]) / 2,
        };
        // Nearest-rank method: the smallest time that at least 99 % of the times do not exceed.
        let p99 = (times.len() * 99).div_ceil(100).checked_sub(1);
        let max = times.last().copied().unwrap_or_default();
        Self { median, p99: p99.map_or(Duration::ZERO, |index| times[index]), max }
    }
}

/// Returns the longest time of a rank in each iteration, because an operation ends when all ranks
/// are done.
pub(crate) fn longest_of_each(ranks: &[Vec<Interval>]) -> Vec<Duration> {
    each(ranks, |iteration| iteration.map(Interval::length).max().unwrap_or_default())
}

/// Returns the time from the first begin to the last end of each iteration, which ranks need
/// together that share cores and do not wait for each other.
pub(crate) fn span_of_each(ranks: &[Vec<Interval>]) -> Vec<Duration> {
    each(ranks, |iteration| {
        let (begin, end) = iteration.fold((Duration::MAX, Duration::ZERO), |(begin, end), next| {
            (begin.min(next.begin), end.max(next.end))
        });
        end.saturating_sub(begin)
    })
}

type Ranks<'a> = &'a mut dyn Iterator<Item = Interval>;

fn each(ranks: &[Vec<Interval>], reduce: impl Fn(Ranks<'_>) -> Duration) -> Vec<Duration> {
    let iterations = ranks.iter().map(Vec::len).min().unwrap_or(0);
    (0..iterations).map(|index| reduce(&mut ranks.iter().map(|times| times[index]))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(nanoseconds: impl IntoIterator<Item = u64>) -> Vec<Duration> {
        nanoseconds.into_iter().map(Duration::from_nanos).collect()
    }

    #[test]
    fn median_and_p99() {
        let of = |nanoseconds: Vec<u64>| {
            let Statistics { median, p99, max } = Statistics::of(times(nanoseconds));
            assert!(median <= p99 && p99 <= max);
            (median.as_nanos(), p99.as_nanos())
        };
        assert_eq!(of(vec![]), (0, 0));
        assert_eq!(of(vec![5]), (5, 5));
        assert_eq!(of(vec![4, 2]), (3, 4));
        assert_eq!(of(vec![9, 1, 5]), (5, 9));
        assert_eq!(of((1..=100).rev().collect()), (50, 99));
        assert_eq!(of((1..=1000).collect()), (500, 990));
    }

    fn intervals(bounds: [(u64, u64); 2]) -> Vec<Interval> {
        let time = Duration::from_nanos;
        bounds.map(|(begin, end)| Interval { begin: time(begin), end: time(end) }).into()
    }

    #[test]
    fn an_iteration_takes_as_long_as_its_slowest_rank() {
        let ranks = [intervals([(0, 1), (10, 19)]), intervals([(1, 3), (10, 14)])];
        assert_eq!(longest_of_each(&ranks), times([2, 9]));
        assert_eq!(longest_of_each(&[]), []);
    }

    #[test]
    fn ranks_on_shared_cores_need_the_time_from_first_to_last() {
        let ranks = [intervals([(0, 4), (10, 19)]), intervals([(4, 8), (12, 14)])];
        assert_eq!(span_of_each(&ranks), times([8, 9]));
        assert_eq!(span_of_each(&[]), []);
    }
}
