//! Writes plans as text, one step per line.
//!
//! The text leaves out what it implies: a rank signals its own `ready` and `taken`, and lane 0 of the reader waits for a
//! flag. If that is not so, the text says it, so every plan, also a wrong one, can be read back.

use std::fmt;

use peerlane_hal::Rank;

use super::{Flag, FlagOrder, LaneId, Plan, Source, Step, Tier};

/// The text form, which [`FromStr`](std::str::FromStr) reads back:
///
/// ```text
/// all-gather direct: rank 0 of 2, 1 chunk, out of place
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
        let Self { collective, algorithm, rank, ranks, chunks, in_place, .. } = self;
        let Self { outputs, flags, lanes, .. } = self;
        let plural = if *chunks == 1 { "" } else { "s" };
        let place = if *in_place { "in place" } else { "out of place" };
        write!(
            f,
            "{collective} {algorithm}: rank {rank} of {ranks}, {chunks} chunk{plural}, {place}"
        )?;
        if *outputs != 1 {
            write!(f, ", {outputs} outputs in turn")?;
        }
        if *flags != FlagOrder::Prompt {
            write!(f, ", flags {flags}")?;
        }
        writeln!(f)?;
        for (number, lane) in lanes.iter().enumerate() {
            match lane.tier {
                Tier::Local => writeln!(f, "lane {number}")?,
                tier @ Tier::Network => writeln!(f, "lane {number} {tier}")?,
            }
            for &step in &lane.steps {
                writeln!(f, "  {}", StepOf { rank: *rank, step })?;
            }
        }
        Ok(())
    }
}

/// Writes a step of the plan of `rank` as a line of its text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepOf {
    /// The rank of the plan.
    pub(crate) rank: Rank,
    /// The step.
    pub(crate) step: Step,
}

impl fmt::Display for StepOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.step {
            Step::Put { peer, cell, from } => write!(f, "put {cell} {from} to {peer}"),
            Step::Get { peer, cell, from } => write!(f, "get {cell} {from} of {peer}"),
            Step::Signal { peer, flag: Flag::Taken { by, lane } } if by == self.rank => {
                write!(f, "signal taken{} to {peer}", For(lane))
            }
            Step::Signal { peer, flag: Flag::Ready { from, lane } } if from == self.rank => {
                write!(f, "signal ready{} to {peer}", For(lane))
            }
            Step::Signal { peer, flag } => write!(f, "signal {flag} to {peer}"),
            Step::Wait { flag } => write!(f, "wait {flag}"),
        }
    }
}

impl fmt::Display for Flag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready { from, lane } => write!(f, "ready{} from {from}", For(*lane)),
            Self::Arrived { cell, lane } => write!(f, "arrived {cell}{}", For(*lane)),
            Self::Taken { by, lane } => write!(f, "taken{} by {by}", For(*lane)),
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

/// Writes the lane that waits, unless it is lane 0.
struct For(LaneId);

impl fmt::Display for For {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            LaneId::HOME => Ok(()),
            lane => write!(f, " for lane {lane}"),
        }
    }
}
