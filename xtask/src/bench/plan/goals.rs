//! What planning and simulating may cost.

use std::fmt;

use super::{Row, What};

/// A bound on all algorithms at one number of ranks.
struct Goal {
    what: What,
    ranks: usize,
    text: &'static str,
    /// Exclusive.
    seconds: f64,
    bytes: u64,
}

const GOALS: [Goal; 2] = [
    Goal {
        what: What::Plan,
        ranks: 16_384,
        text: "the plan of one of 16,384 ranks takes less than 5 ms and 5 MB",
        seconds: 5e-3,
        bytes: 5_000_000,
    },
    Goal {
        what: What::Simulate,
        ranks: 4096,
        text: "the simulation of 4096 ranks takes less than 60 s and 8 GB",
        seconds: 60.0,
        bytes: 8_000_000_000,
    },
];

/// Whether a goal is reached, with the rows that miss it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    text: &'static str,
    /// `None` if nothing was measured there.
    misses: Option<Vec<String>>,
}

impl Verdict {
    pub(super) fn reached(&self) -> bool {
        self.misses.as_ref().is_some_and(Vec::is_empty)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { text, misses } = self;
        match misses {
            None => write!(f, "{text}: **not measured**"),
            Some(misses) if misses.is_empty() => write!(f, "{text}: reached"),
            Some(misses) => write!(f, "{text}: **missed** by {}", misses.join(", ")),
        }
    }
}

/// The verdict on each goal.
pub(super) fn judge(rows: &[Row]) -> Vec<Verdict> {
    let verdict = |goal: &Goal| {
        let there = || rows.iter().filter(|row| (row.what, row.ranks) == (goal.what, goal.ranks));
        let too_much = |row: &&Row| row.seconds >= goal.seconds || row.peak_bytes >= goal.bytes;
        let miss = |row: &Row| {
            format!("{} ({:.1} ms, {} bytes)", row.algorithm, row.seconds * 1e3, row.peak_bytes)
        };
        let misses = there().next().map(|_| there().filter(too_much).map(miss).collect());
        Verdict { text: goal.text, misses }
    };
    GOALS.iter().map(verdict).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::row;
    use super::*;

    #[test]
    fn goals_are_judged_where_they_are_set() {
        let rows = [
            row(What::Plan, "ring", 16_384, 4e-3),
            row(What::Plan, "direct", 16_384, 6e-3),
            row(What::Plan, "direct", 8192, 7e-3),
        ];
        let [plan, simulation] = judge(&rows).try_into().unwrap();
        assert_eq!(
            plan.to_string(),
            "the plan of one of 16,384 ranks takes less than 5 ms and 5 MB: **missed** by direct \
             (6.0 ms, 1638400 bytes)"
        );
        assert!(!plan.reached() && !simulation.reached());
        assert!(simulation.to_string().ends_with("**not measured**"));
        assert!(judge(&rows[..1])[0].reached());
    }
}
