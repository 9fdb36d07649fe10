//! The verifier: proves without hardware that the plans of all ranks gather every byte.
//!
//! It knows no algorithm. First it looks at what the plans say taken together: they agree and name
//! only what there is (`shape`), every cell is put once (`delivery`), every flag has one writer and
//! one reader and is signalled and waited for once a start (`flags`). Then it runs some starts and
//! follows what each lane knows (`machine`): every output twice, so two starts, or four where two
//! outputs are used in turn. That suffices: a start looks no further back than to the last one that
//! used the same output, which left every flag as this one does.
//!
//! The proof holds for flags that carry epochs, and for flags that a captured start resets: nobody
//! signals a flag again before it knows that the last signal was taken. A wait resets its flag before
//! anything behind it, so to know that it was taken is to know that it is 0, and each flag alternates
//! between its writer and its reader. Captured starts have one output and flags of their own, so
//! starts that run at once in between take nothing from what is known.
//!
//! Lanes are run closed, with `go` and `sent`; fork and join give the same order. Which bytes a cell
//! has is left out on purpose: cells tile the output by the [layout](crate::layout), and a plan is
//! right for every layout or for none. So are time and cost.

use std::fmt;

use crate::plan::Plan;

mod clocks;
mod delivery;
mod fault;
mod flags;
mod order;
mod past;
mod program;
mod published;
mod shape;
mod symmetry;
#[cfg(test)]
mod tests;
mod walk;

pub use fault::{Fault, FaultClass, Place, Position};

use flags::Flags;
use program::Program;
use symmetry::Symmetry;

/// What [`verify`] has proven, of which plans; as text, the claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// How many ranks the plans have.
    pub ranks: u32,
    /// How many parts each shard has.
    pub parts: u32,
    /// How many consecutive starts were run.
    pub starts: u32,
    /// The steps of all ranks in one start, entries and exits counted.
    pub steps: usize,
    /// The flags of all ranks.
    pub flags: usize,
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, parts, starts, steps, flags } = self;
        write!(
            f,
            "verified (ranks: {ranks}, parts: {parts}, starts: {starts}, steps: {steps}, flags: \
             {flags}): every byte of every output arrives exactly once; no byte is read before it \
             has arrived; no deadlock; every flag has one writer and one reader and ends where it \
             began; no start passes on the flags of the one before; nothing is overwritten while \
             somebody may still read it"
        )
    }
}

/// Verifies the plans of all ranks, in rank order.
///
/// # Errors
/// The first fault found; plans with a fault must not run.
pub fn verify(plans: &[Plan]) -> Result<Proof, Fault> {
    let first = shape::check(plans)?;
    let program = Program::new(plans, Symmetry::none(plans.len()));
    let flags = follow(&program)?;
    Ok(Proof {
        ranks: first.ranks,
        parts: first.parts,
        starts: first.outputs + 1,
        steps: program.lanes.iter().map(|lane| lane.steps.len()).sum(),
        flags: flags.len(),
    })
}

/// What must hold for the lanes that are followed.
fn follow(program: &Program) -> Result<Flags, Fault> {
    let deliveries = delivery::check(program)?;
    let flags = flags::check(program)?;
    order::check(program, &flags)?;
    walk::check(program, &flags, &deliveries)?;
    Ok(flags)
}
