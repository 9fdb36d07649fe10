//! Times operations on all ranks in turn; on the host, each iteration runs between two clock
//! readings after a barrier.

use std::time::Duration;

use peerlane::Group;
use peerlane::bootstrap::Bootstrap as _;

use crate::error::Result;
use crate::ranks::comm::Comm;
use crate::ranks::statistics::{Interval, Statistics};

/// The time budget for all iterations of one size, if the number of iterations is not given.
const BUDGET: Duration = Duration::from_millis(500);
const ITERATIONS_MIN: u32 = 20;
const ITERATIONS_MAX: u32 = 1000;
/// The maximum number of intervals in one message of an exchange, whose length is limited.
const SHARED_MAX: usize = 20_000;

/// The numbers of untimed and timed iterations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimingOptions {
    /// The number of untimed iterations before the timed ones, at least 1.
    pub(crate) warmup: u32,
    /// The number of timed iterations; `None` for as many as fit in the time budget.
    pub(crate) iterations: Option<u32>,
}

/// The times of one operation, in which the longest time of all ranks counts for each iteration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    pub(crate) statistics: Statistics,
    pub(crate) iterations: usize,
    /// The time that the host needs to enqueue one run, for operations on GPUs.
    pub(crate) host: Option<Duration>,
}

/// A function that reduces the times of all ranks to one time per iteration.
pub(crate) type Reduce = fn(&[Vec<Interval>]) -> Vec<Duration>;

/// Measures all candidates in turn, so that a disturbance affects all of them alike. Each run
/// returns `N` times. Collective.
pub(crate) fn in_turn<C, const N: usize>(
    comm: &Comm,
    candidates: &mut [C],
    rounds: u32,
    reduce: Reduce,
    mut measure: impl FnMut(&mut C) -> Result<[Interval; N]>,
) -> Result<Vec<[Statistics; N]>> {
    let mut own = vec![Vec::new(); candidates.len() * N];
    for _ in 0..rounds {
        for (candidate, series) in candidates.iter_mut().zip(own.chunks_mut(N)) {
            for (times, time) in series.iter_mut().zip(measure(candidate)?) {
                times.push(time);
            }
        }
    }
    // The times of all ranks by series and rank.
    let mut all = vec![vec![Vec::new(); comm.ranks()]; own.len()];
    let shared_max = (SHARED_MAX / own.len().max(1)).max(1);
    for begin in (0..rounds as usize).step_by(shared_max) {
        let part =
            |times: &Vec<Interval>| times.iter().skip(begin).take(shared_max).copied().collect();
        let mine: Vec<Vec<Interval>> = own.iter().map(part).collect();
        for (rank, theirs) in comm.share("times", &mine)?.into_iter().enumerate() {
            all.iter_mut().zip(theirs).for_each(|(series, times)| series[rank].extend(times));
        }
    }
    let statistics = |series: usize| Statistics::of(reduce(&all[series]));
    let of = |candidate| std::array::from_fn(|kind| statistics(candidate * N + kind));
    Ok((0..candidates.len()).map(of).collect())
}

impl TimingOptions {
    /// Times candidates by the clock of the host, each iteration after a barrier.
    pub(crate) fn time<C>(
        &self,
        comm: &Comm,
        group: &mut Group,
        reduce: Reduce,
        candidates: &mut [C],
        run: impl Fn(&mut C) -> Result<()>,
    ) -> Result<Vec<Timing>> {
        let mut timed = |candidate: &mut C| -> Result<[Interval; 1]> {
            group.barrier()?;
            let begin = Interval::now();
            run(candidate)?;
            Ok([Interval { begin, end: Interval::now() }])
        };
        let started_at = Interval::now();
        for _ in 0..self.warmup {
            candidates.iter_mut().try_for_each(|candidate| timed(candidate).map(drop))?;
        }
        let turns = self.warmup.max(1) * u32::try_from(candidates.len().max(1)).unwrap_or(u32::MAX);
        let estimate = Interval { begin: started_at, end: Interval::now() }.length();
        let rounds = self.agree(comm, estimate / turns)?;
        let timing = |[statistics]: [Statistics; 1]| Timing {
            statistics,
            iterations: rounds as usize,
            host: None,
        };
        let statistics = in_turn(comm, candidates, rounds, reduce, timed)?;
        Ok(statistics.into_iter().map(timing).collect())
    }

    /// Returns the number of iterations that the slowest rank can make in the time budget, equal on
    /// all ranks.
    fn agree(&self, comm: &Comm, estimate: Duration) -> Result<u32> {
        let all = comm.share("time of an iteration", &estimate)?;
        let slowest = all.into_iter().max().unwrap_or_default();
        Ok(self.iterations.unwrap_or_else(|| within_budget(slowest)))
    }
}

fn within_budget(iteration: Duration) -> u32 {
    let fitting = BUDGET.as_nanos() / iteration.as_nanos().max(1);
    u32::try_from(fitting).unwrap_or(u32::MAX).clamp(ITERATIONS_MIN, ITERATIONS_MAX)
}

#[cfg(test)]
mod tests {
    use peerlane::bootstrap::in_process;

    use super::*;

    #[test]
    fn the_times_of_many_iterations_are_shared() {
        const ROUNDS: u32 = 2 * SHARED_MAX as u32 + 1;
        let results = in_process::run(2, |bootstrap| {
            let comm = Comm::new(bootstrap, Duration::from_secs(60));
            let mut number = 0;
            let timed = |_: &mut ()| {
                number += 1;
                Ok([Interval { begin: Duration::ZERO, end: Duration::from_nanos(number) }])
            };
            let longest = |ranks: &[Vec<Interval>]| {
                assert_eq!(ranks[0], ranks[1]);
                ranks[0].iter().map(|time| time.length()).collect()
            };
            let timings = in_turn(&comm, &mut [()], ROUNDS, longest, timed).unwrap();
            assert_eq!(timings[0][0].max, Duration::from_nanos(u64::from(ROUNDS)));
            Ok(())
        });
        results.unwrap();
    }

    #[test]
    fn the_budget_is_kept_within_bounds() {
        assert_eq!(within_budget(Duration::ZERO), 1000);
        assert_eq!(within_budget(Duration::from_micros(5)), 1000);
        assert_eq!(within_budget(Duration::from_millis(5)), 100);
        assert_eq!(within_budget(Duration::from_secs(5)), 20);
    }
}
