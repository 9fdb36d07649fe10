//! The verifier: proves without hardware that the plans of all ranks gather every byte.
//!
//! It knows no algorithm. First it looks at what the plans say taken together: they agree and name
//! only what there is (`shape`), every cell is copied once (`delivery`), every flag has one writer and
//! one reader and is signalled and waited for once a start (`flags`), and all lanes end (`order`). Then
//! it follows what each lane knows (`walk`): a start, with as many before it as outputs are used in
//! turn. That suffices: a start looks no further back than to the last one that used the same output,
//! which left every flag as this one does.
//!
//! The proof holds for flags that carry epochs, and for flags that a captured start resets: nobody
//! signals a flag again before it knows that the last signal was taken. A wait resets its flag before
//! anything behind it, so to know that it was taken is to know that it is 0, and each flag alternates
//! between its writer and its reader. Captured starts have one output and flags of their own, so
//! starts that run at once in between take nothing from what is known.
//!
//! For many ranks [`prove`] makes the plans itself, and lets ranks stand for others; the [`Claim`] of
//! the proof says how far it goes.
//!
//! Lanes are run closed, with `go` and `sent`; fork and join give the same order. Which bytes a cell
//! has is left out on purpose: cells tile the output by the [layout](crate::layout), and a plan is
//! right for every layout or for none. So are time and cost.

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

/// What has been proven, of which plans; as text, the claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// How many ranks the plans have.
    pub ranks: u32,
    /// How many parts each shard has.
    pub parts: u32,
    /// How many consecutive starts were followed; more would bring nothing new.
    pub starts: u32,
    /// The steps of all ranks in one start, entries and exits counted.
    pub steps: usize,
    /// The flags of all ranks.
    pub flags: usize,
    /// For which ranks it was proven.
    pub claim: Claim,
}

/// For which ranks something was proven, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Claim {
    /// For all: the plan of every rank was followed.
    Whole,
    /// Some ranks were followed; the plans of others are theirs, turned.
    Turned {
        /// The ranks that were followed.
        followed: Vec<Rank>,
        /// How many plans were compared with theirs. If that is less than there are ranks, it is
        /// taken as given that the others are equal too.
        compared: usize,
    },
    /// The plans of some nodes were followed, as they are where there are no others. The plans for all
    /// nodes were looked at alone, and if all were, counted: each cell is copied once to each output,
    /// and what is signalled is what is waited for.
    Counted {
        /// How many plans were looked at and counted.
        counted: usize,
        /// On how many ranks the plans were followed.
        ranks: usize,
        /// On how many nodes these are.
        nodes: usize,
    },
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, parts, starts, steps, flags, claim } = self;
        write!(
            f,
            "verified (ranks: {ranks}, parts: {parts}, starts: {starts}, steps: {steps}, flags: \
             {flags}{}): every byte of every output arrives exactly once; no byte is read before it \
             has arrived; no deadlock; every flag has one writer and one reader and ends where it \
             began; no start passes on the flags of the one before; nothing is overwritten while \
             somebody may still read it",
            Extent { claim, ranks: *ranks as usize }
        )
    }
}

/// A claim as the text of a proof has it.
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
            parts: first.parts,
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

/// What must hold for the lanes that are followed.
fn follow(program: &Program) -> Result<Flags, Fault> {
    let deliveries = delivery::check(program)?;
    let flags = flags::check(program)?;
    order::check(program, &flags)?;
    walk::check(program, &flags, &deliveries)?;
    Ok(flags)
}
