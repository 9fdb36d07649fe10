//! Proves without hardware that the plans of all ranks move the right data without races or
//! deadlocks.
//!
//! [`verify`](verify()) checks plans that exist, and [`prove`](prove()) makes the plans of an
//! algorithm itself, for many ranks. Both return the first [`Fault`] with the events that lead to
//! it.
//!
//! The verifier knows no algorithm. It first checks the plans as a whole, then follows what each
//! lane knows in one start, after as many starts as sets of flags are used in turn. There is a set
//! for each output or inbox, whichever are more. More starts add nothing: a start refers at most to
//! the last one that used the same flags, and that one left every flag as this one does.
//!
//! The proof holds for flags that carry epochs and for flags that a captured start resets. No lane
//! signals a flag again before it knows that its last signal was consumed. A wait resets its flag
//! before anything after it, so a lane that knows that the signal was consumed knows that the flag
//! is 0. Captured starts have flags of their own, so eager starts between them change nothing that
//! is known. If captured starts alternate outputs, the first one of a graph runs another plan than
//! those behind it, which [`can_follow`] checks.
//!
//! For many ranks, [`prove()`] lets some ranks represent others; the [`Coverage`] of the proof
//! states its extent.
//!
//! Lanes are run with their `go` and `sent` flags; fork and join give the same order. Bytes are
//! left out on purpose: cells cover the output by the [layout](crate::layout), so a plan is correct
//! for every layout or for none. Time and cost are left out too.

// The files of this module:
//
// | file | checks or holds |
// | --- | --- |
// | `plan_set.rs` | the plans agree and name only what exists; the followed lanes |
// | `copies.rs` | every required cell is copied exactly once, and added in order; who hears from whom; the waits that prove a copy complete |
// | `flags.rs` | every flag has one writer, one reader, one signal and one wait in a start; all lanes end |
// | `races.rs` | no lane reads data early, and none overwrites data in use |
// | `happens_before.rs` | vector clocks and a search, for `races.rs` |
// | `prove.rs`, `symmetry.rs` | proofs for many ranks |
// | `following.rs` | starts of one plan can follow a start of another one |
// | `fault.rs`, `counterexample.rs` | faults with their classes, and events that lead to them |

use std::fmt;

use peerlane_hal::Rank;

use crate::plan::{Plan, Step};

mod copies;
mod counterexample;
mod fault;
mod flags;
mod following;
mod happens_before;
mod plan_set;
mod prove;
mod races;
mod symmetry;
#[cfg(test)]
mod tests;

pub use counterexample::Counterexample;
pub use fault::{Fault, FaultClass, Location, Position};
pub use following::can_follow;
pub use prove::{Budget, prove};

use flags::Flags;
use plan_set::PlanSet;
use symmetry::Symmetry;

/// The result of a successful verification of plans, printed as a statement of what is proven.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// The number of ranks whose plans the proof covers.
    pub ranks: u32,
    /// The number of chunks into which each block is cut.
    pub chunks: u32,
    /// The number of consecutive runs of the operation that the verifier checked.
    pub starts: u32,
    /// The number of copies, additions, signals and waits that all ranks execute in one run of the
    /// operation. It includes the entry and exit of each lane.
    ///
    /// In a [sampled](Coverage::Sampled) proof, this number and the next two are those of the
    /// plans that were summed up.
    pub steps: usize,
    /// The number of flags that all ranks use in one run of the operation.
    pub flags: usize,
    /// The number of contributions that all ranks add in one run of a reduction; 0 for other
    /// operations.
    pub additions: usize,
    /// The ranks whose plans the verifier checked, either all ranks or a selection.
    pub coverage: Coverage,
}

/// The ranks whose plans a proof has checked, with the assumption about the other ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Coverage {
    /// The verifier checked the plan of every rank, step by step.
    Exhaustive,
    /// The verifier checked only representative ranks, because all other plans are rotations of
    /// the plans of these ranks.
    BySymmetry {
        /// The representative ranks whose plans the verifier checked.
        followed: Vec<Rank>,
        /// The number of plans that were compared with the plan of a representative rank.
        ///
        /// They were compared after a rotation. If it is less than the number of ranks, the others
        /// are assumed to be equal.
        compared: usize,
    },
    /// The verifier checked only the plans for a smaller topology, made of some of the nodes.
    ///
    /// Sums over the plans of all ranks show that each required cell is copied once to each output,
    /// and that every signal has a wait.
    Sampled {
        /// The number of plans of the full topology whose copies and signals were summed up.
        ///
        /// If it is less than the number of ranks, the sums were not checked.
        summed: usize,
        /// The number of ranks of the smaller topology whose plans the verifier checked.
        ranks: usize,
        /// The number of nodes of the smaller topology.
        nodes: usize,
    },
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, chunks, starts, steps, flags, .. } = self;
        write!(
            f,
            "verified (ranks: {ranks}, chunks: {chunks}, starts: {starts}, steps: {steps}, flags: \
             {flags}"
        )?;
        self.write_coverage(f)?;

        f.write_str(
            "): every byte of every output arrives exactly once; no byte is read before it has \
             arrived; no deadlock; every flag has one writer and one reader and ends where it \
             began; no start passes on the flags of the one before; nothing is overwritten while \
             a rank may still read it",
        )?;
        if self.additions > 0 {
            f.write_str(
                "; every contribution is added exactly once, after it has arrived and in the order \
                 that the collective states",
            )?;
        }

        Ok(())
    }
}

impl Proof {
    /// Creates the proof for a set of plans that the verifier has checked step by step.
    fn new(first: &Plan, set: &PlanSet, flags: &Flags) -> Self {
        let adds = |step: &&Step| matches!(step, Step::Reduce { .. });
        let additions = set.lanes.iter().flat_map(|lane| &lane.steps).filter(adds).count();

        Self {
            additions,
            ranks: first.ranks,
            chunks: first.chunks,
            // The verifier examines one start after as many starts as there are sets of flags.
            starts: first.flag_sets() + 1,
            steps: set.lanes.iter().map(|lane| lane.steps.len()).sum(),
            flags: flags.len(),
            coverage: Coverage::Exhaustive,
        }
    }

    /// Writes to `f` how many plans were checked, compared or summed up.
    fn write_coverage(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.ranks as usize;
        let of_all = |plans: usize| {
            if plans == all { "all plans".to_owned() } else { format!("{plans} of {all} plans") }
        };
        let counted = |count: usize, one: &str, some: &str| {
            format!("{count} {}", if count == 1 { one } else { some })
        };

        match &self.coverage {
            Coverage::Exhaustive => Ok(()),
            Coverage::BySymmetry { followed, compared } => {
                let followed =
                    counted(followed.len(), "rank that represents", "ranks that represent");
                let compared = of_all(*compared);

                write!(f, "; followed for {followed} the others, {compared} compared")
            }
            Coverage::Sampled { summed, ranks, nodes } => {
                let plans = of_all(*summed);
                let ranks = counted(*ranks, "rank", "ranks");
                let nodes = counted(*nodes, "node", "nodes");

                write!(f, "; {plans} summed up, followed only for {ranks} on {nodes}")
            }
        }
    }
}

/// Verifies that the plans of all ranks move the right data without races or deadlocks.
///
/// The plans are given in rank order.
///
/// # Errors
/// The first fault found; plans with a fault must not run.
pub fn verify(plans: &[Plan]) -> Result<Proof, Fault> {
    let owners: Vec<Rank> = Rank::all(plans.len()).collect();
    let first = plan_set::check(plans, plans.len(), &owners)?;

    let set = PlanSet::new(plans, Symmetry::none(plans.len()));
    let flags = follow(&set)?;

    Ok(Proof::new(first, &set, &flags))
}

/// Checks all lanes of a set of plans step by step, and returns the uses of all flags.
///
/// The plans agree, and refer only to ranks, cells, flags and lanes that exist.
fn follow(set: &PlanSet) -> Result<Flags, Fault> {
    let copies = copies::check(set)?;
    let flags = flags::check(set)?;

    // The race check assumes that every wait passes, so deadlocks are refused first.
    flags::check_deadlock(set, &flags)?;
    races::check(set, &flags, &copies)?;

    Ok(flags)
}
