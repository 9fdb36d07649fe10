//! The verifier: proves without hardware that the plans of all ranks reach the goal of their collective.
//!
//! | file | checks or holds |
//! | --- | --- |
//! | `shape.rs` | the plans agree, and name only what exists |
//! | `delivery.rs` | every cell that the collective needs is copied exactly once |
//! | `flags.rs` | every flag has one writer and one reader, and is signalled and waited for once in a start |
//! | `order.rs` | all lanes end |
//! | `walk.rs` | each lane knows enough for each of its steps |
//! | `clocks.rs`, `past.rs`, `published.rs`, `siblings.rs`, `start.rs` | what lanes know, for `walk.rs` |
//! | `prove.rs`, `symmetry.rs`, `count.rs`, `sample.rs` | proofs for many ranks |
//! | `fault.rs`, `class.rs`, `story.rs` | faults, their classes, and counterexamples |
//! | `program.rs` | the lanes of all ranks in one list |
//!
//! The verifier knows no algorithm. It first checks the plans as a whole, then follows what each lane knows in one start,
//! with as many starts before it as outputs are used in turn. More starts add nothing: a start refers at most to the last one
//! that used the same output, and that one left every flag as this one does.
//!
//! The proof holds for flags that carry epochs and for flags that a captured start resets. No lane signals a flag again
//! before it knows that its last signal was consumed. A wait resets its flag before anything after it, so a lane that knows
//! that the signal was consumed knows that the flag is 0. Captured starts have one output and flags of their own, so eager
//! starts between them change nothing that is known.
//!
//! For many ranks, [`prove`] makes the plans itself and lets some ranks represent others; the [`Claim`] of the proof states
//! its extent.
//!
//! Lanes are run with their `go` and `sent` flags; fork and join give the same order. Bytes are left out on purpose: cells
//! cover the output by the [layout](crate::layout), so a plan is correct for every layout or for none. Time and cost are left
//! out too.

use std::fmt;

use peerlane_hal::Rank;

use crate::plan::Plan;

mod class;
mod clocks;
mod count;
mod delivery;
mod fault;
mod flags;
mod order;
mod past;
mod program;
mod prove;
mod published;
mod sample;
mod shape;
mod siblings;
mod start;
mod story;
mod symmetry;
#[cfg(test)]
mod tests;
mod walk;

pub use class::FaultClass;
pub use fault::{Fault, Place, Position};
pub use prove::{Effort, prove};
pub use story::Story;

use flags::Flags;
use program::Program;
use symmetry::Symmetry;

/// A successful proof. Its text states the claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// The number of ranks.
    pub ranks: u32,
    /// The number of chunks of each block.
    pub chunks: u32,
    /// The number of consecutive starts that were followed.
    pub starts: u32,
    /// The number of steps of all ranks in one start, including entries and exits.
    pub steps: usize,
    /// The number of flags of all ranks.
    pub flags: usize,
    /// The ranks for which the proof holds.
    pub claim: Claim,
}

/// States for which ranks a proof holds, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Claim {
    /// The plan of every rank was followed.
    Whole,
    /// Some ranks were followed; the plans of the others are equal after renumbering the ranks.
    Turned {
        /// The ranks that were followed.
        followed: Vec<Rank>,
        /// The number of plans that were compared. If it is less than the number of ranks, the others are assumed to be equal.
        compared: usize,
    },
    /// The plans of some nodes were followed alone. The plans of all nodes were only counted: each cell is copied once to each
    /// output that needs it, and every signal has a wait.
    Counted {
        /// The number of plans that were counted.
        counted: usize,
        /// The number of ranks whose plans were followed.
        ranks: usize,
        /// The number of their nodes.
        nodes: usize,
    },
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, chunks, starts, steps, flags, claim } = self;
        write!(
            f,
            "verified (ranks: {ranks}, chunks: {chunks}, starts: {starts}, steps: {steps}, flags: \
             {flags}{}): every byte of every output arrives exactly once; no byte is read before it \
             has arrived; no deadlock; every flag has one writer and one reader and ends where it \
             began; no start passes on the flags of the one before; nothing is overwritten while \
             somebody may still read it",
            Extent { claim, ranks: *ranks as usize }
        )
    }
}

/// Formats a claim for the text of a proof.
struct Extent<'a> {
    claim: &'a Claim,
    ranks: usize,
}

impl fmt::Display for Extent<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.ranks;
        let of_all = |count: usize| {
            if count == all { "all plans".to_owned() } else { format!("{count} of {all} plans") }
        };
        let counted = |count: usize, one: &str, some: &str| {
            format!("{count} {}", if count == 1 { one } else { some })
        };
        match self.claim {
            Claim::Whole => Ok(()),
            Claim::Turned { followed, compared } => {
                let followed = counted(followed.len(), "rank that stands", "ranks that stand");
                let compared = of_all(*compared);
                write!(f, "; followed for {followed} for the others, {compared} compared")
            }
            Claim::Counted { counted: plans, ranks, nodes } => {
                let (plans, ranks) = (of_all(*plans), counted(*ranks, "rank", "ranks"));
                let nodes = counted(*nodes, "node", "nodes");
                write!(f, "; {plans} counted, followed only for {ranks} on {nodes} by themselves")
            }
        }
    }
}

impl Proof {
    fn new(first: &Plan, program: &Program, flags: &Flags) -> Self {
        Self {
            ranks: first.ranks,
            chunks: first.chunks,
            starts: first.outputs + 1,
            steps: program.lanes.iter().map(|lane| lane.steps.len()).sum(),
            flags: flags.len(),
            claim: Claim::Whole,
        }
    }
}

/// Verifies the plans of all ranks, in rank order.
///
/// # Errors
/// The first fault found; plans with a fault must not run.
pub fn verify(plans: &[Plan]) -> Result<Proof, Fault> {
    let owners: Vec<Rank> = Rank::all(plans.len()).collect();
    let first = shape::check(plans, plans.len(), &owners)?;
    let program = Program::new(plans, Symmetry::none(plans.len()));
    let flags = follow(&program)?;
    Ok(Proof::new(first, &program, &flags))
}

/// Checks the lanes that are followed.
fn follow(program: &Program) -> Result<Flags, Fault> {
    let deliveries = delivery::check(program)?;
    let flags = flags::check(program)?;
    order::check(program, &flags)?;
    walk::check(program, &flags, &deliveries)?;
    Ok(flags)
}
