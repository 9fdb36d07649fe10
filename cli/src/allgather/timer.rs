//! Times an operation on all ranks: untimed barrier, clock, operation, clock.

use std::time::Duration;

use peerlane::Group;

use crate::error::Result;
use crate::ranks::comm::Comm;
use crate::ranks::statistics::{Interval, Statistics};

/// Time for the iterations of one size if their number is not given.
const BUDGET: Duration = Duration::from_millis(500);
const ITERATIONS_MIN: u32 = 20;
const ITERATIONS_MAX: u32 = 1000;

/// Number of iterations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimingOptions {
    /// Untimed iterations before the timed ones, at least 1.
    pub(crate) warmup: u32,
    /// Timed iterations; `None` for as many as fit in the budget.
    pub(crate) iterations: Option<u32>,
}

/// Statistics of a timed operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    pub(crate) statistics: Statistics,
    pub(crate) iterations: usize,
}

impl TimingOptions {
    /// Times operations on every rank in turn, so that a disturbance affects all of them alike.
    /// `reduce` makes one time per iteration from the times of all ranks. Collective.
    pub(crate) fn time(
        &self,
        comm: &Comm,
        group: &mut Group,
        reduce: fn(&[Vec<Interval>]) -> Vec<Duration>,
        operations: &mut [&mut dyn FnMut() -> Result<()>],
    ) -> Result<Vec<Timing>> {
        let mut timed = |operation: &mut dyn FnMut() -> Result<()>| -> Result<Interval> {
            group.barrier()?;
            let begin = Interval::now();
            operation()?;
            Ok(Interval { begin, end: Interval::now() })
        };
        let started_at = Interval::now();
        for _ in 0..self.warmup {
            operations.iter_mut().try_for_each(|operation| timed(operation).map(drop))?;
        }
        let turns = self.warmup.max(1) * u32::try_from(operations.len().max(1)).unwrap_or(u32::MAX);
        let estimate = Interval { begin: started_at, end: Interval::now() }.length();
        let iterations = self.agree(comm, estimate / turns)?;
        let mut times = vec![Vec::new(); operations.len()];
        for _ in 0..iterations {
            for (operation, times) in operations.iter_mut().zip(&mut times) {
                times.push(timed(operation)?);
            }
        }
        let all: Vec<Vec<Vec<Interval>>> = comm.share("times", &times)?;
        let timing = |index: usize| {
            let ranks: Vec<_> = all.iter().map(|rank| rank[index].clone()).collect();
            Timing { statistics: Statistics::of(reduce(&ranks)), iterations: iterations as usize }
        };
        Ok((0..operations.len()).map(timing).collect())
    }

    /// Returns the number of iterations. Ranks measure different times but must make the same
    /// number of iterations, so the slowest rank decides.
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
    use super::*;

    #[test]
    fn the_budget_is_kept_within_bounds() {
        assert_eq!(within_budget(Duration::ZERO), 1000);
        assert_eq!(within_budget(Duration::from_micros(5)), 1000);
        assert_eq!(within_budget(Duration::from_millis(5)), 100);
        assert_eq!(within_budget(Duration::from_secs(5)), 20);
    }
}
