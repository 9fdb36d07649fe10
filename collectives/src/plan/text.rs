//! Plans as text, a line a step.
//!
//! What goes without saying is left out: a rank that signals `ready` speaks of its own output, and
//! lane 0 of the reader waits for it. Where that is not so, the text says it, so that every plan,
//! also a wrong one, reads back as it was.

use std::fmt;

use peerlane_hal::Rank;

use super::{Flag, FlagOrder, LaneId, Plan, Source, Step};

/// The text form, which [`FromStr`](std::str::FromStr) reads back:
///
/// ```text
/// all-gather direct: rank 0 of 2, 1 part, out of place
/// lane 0
///   signal ready to 1
///   put 0.0 input to 0
///   wait ready from 1
///   put 0.0 input to 1
///   signal arrived 0.0 to 1
///   wait arrived 1.0
/// ```
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { algorithm, rank, ranks, parts, in_place, outputs, flags, lanes } = self;
        let plural = if *parts == 1 { "" } else { "s" };
        let place = if *in_place { "in place" } else { "out of place" };
        write!(f, "all-gather {algorithm}: rank {rank} of {ranks}, {parts} part{plural}, {place}")?;
        if *outputs != 1 {
            write!(f, ", {outputs} outputs in turn")?;
        }
        if *flags != FlagOrder::Prompt {
            write!(f, ", flags {flags}")?;
        }
        writeln!(f)?;
        for (number, lane) in lanes.iter().enumerate() {
            writeln!(f, "lane {number}")?;
            for &step in &lane.steps {
                writeln!(f, "  {}", StepOf { rank: *rank, step })?;
            }
        }
        Ok(())
    }
}

/// A step of the plan of `rank`, as a line of its text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepOf {
    /// Whose plan.
    pub(crate) rank: Rank,
    /// The step.
    pub(crate) step: Step,
}

impl fmt::Display for StepOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.step {
            Step::Put { peer, cell, from } => write!(f, "put {cell} {from} to {peer}"),
            Step::Signal { peer, flag: Flag::Ready { from, lane } } if from == self.rank => {
                write!(f, "signal {} to {peer}", Ready(lane))
            }
            Step::Signal { peer, flag } => write!(f, "signal {flag} to {peer}"),
            Step::Wait { flag } => write!(f, "wait {flag}"),
        }
    }
}

impl fmt::Display for Flag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready { from, lane } => write!(f, "{} from {from}", Ready(*lane)),
            Self::Arrived { cell } => write!(f, "arrived {cell}"),
            Self::Go { lane } => write!(f, "go lane {lane}"),
            Self::Sent { lane } => write!(f, "sent lane {lane}"),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Input => "input",
            Self::Output => "output",
        })
    }
}

struct Ready(LaneId);

impl fmt::Display for Ready {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            LaneId::HOME => f.write_str("ready"),
            lane => write!(f, "ready for lane {lane}"),
        }
    }
}
