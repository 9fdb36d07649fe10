//! What can be wrong with plans.

use std::fmt;

use peerlane_hal::{ErrorKind, Rank};

use super::class::FaultClass;
use crate::collective::Collective;
use crate::plan::{CHUNKS_MAX, Cell, Flag, LaneId, OUTPUTS_MAX, Step, StepOf, Tier};

/// Where a step stands in its lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Position {
    /// In the entry, which closes the lane towards the caller.
    Entry,
    /// The step of this number in the plan, from 1, as the lines of the text form count.
    Step(usize),
    /// In the exit.
    Exit,
}

/// A step, and where it stands; as text `rank 0, lane 0, step 3 (wait ready from 1)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// Whose plan.
    pub rank: Rank,
    /// Which lane of it.
    pub lane: LaneId,
    /// Where in the lane.
    pub position: Position,
    /// The step.
    pub step: Step,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, lane, position, step } = *self;
        write!(f, "rank {rank}, lane {lane}, ")?;
        match position {
            Position::Entry => f.write_str("entry")?,
            Position::Step(number) => write!(f, "step {number}")?,
            Position::Exit => f.write_str("exit")?,
        }
        write!(f, " ({})", StepOf { rank, step })
    }
}

/// Why plans must not run. `start` counts the starts from 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// There is no plan.
    #[error("there is no plan, expected one for every rank")]
    NoPlan,
    /// A field of a plan is not what the number, order or first of the plans say.
    #[error("plan {index}: {field} is {seen}, expected {wanted}")]
    Disagrees {
        /// The place of the plan among the plans, from 0.
        index: usize,
        /// The field.
        field: String,
        /// What it holds.
        seen: String,
        /// What it must hold.
        wanted: String,
    },
    /// The number of chunks is impossible.
    #[error("rank {rank}: chunks is {chunks}, expected 1 to {CHUNKS_MAX}")]
    Chunks {
        /// Whose plan.
        rank: Rank,
        /// The number.
        chunks: u32,
    },
    /// The number of outputs is impossible.
    #[error("rank {rank}: outputs is {outputs}, expected 1, or out of place up to {OUTPUTS_MAX}")]
    Outputs {
        /// Whose plan.
        rank: Rank,
        /// The number.
        outputs: u32,
    },
    /// The collective cannot have such plans.
    #[error("rank {rank}: {text}")]
    Collective {
        /// Whose plan.
        rank: Rank,
        /// What is wrong with it.
        text: String,
    },
    /// A step reads an output of a collective in which every output holds other blocks.
    #[error(
        "{place}: the outputs of an {collective} hold different blocks; expected a copy from an input"
    )]
    OtherBlock {
        /// The step.
        place: Place,
        /// The collective.
        collective: Collective,
    },
    /// The plan has not even lane 0.
    #[error("rank {rank}: there is no lane, expected at least lane 0")]
    NoLane {
        /// Whose plan.
        rank: Rank,
    },
    /// A step names something that is not there.
    #[error("{place}: {what} is not there, expected {wanted}")]
    Unknown {
        /// The step.
        place: Place,
        /// What is not there.
        what: String,
        /// What there is.
        wanted: String,
    },
    /// A flag that closes a lane is used as a step.
    #[error("{place}: go and sent belong to the entry and exit of lanes, expected another flag")]
    Reserved {
        /// The step.
        place: Place,
    },
    /// No step puts a cell into an output.
    #[error("rank {rank}: no step puts cell {cell} into its output")]
    NeverPut {
        /// Whose output.
        rank: Rank,
        /// The cell.
        cell: Cell,
    },
    /// The caller gets an output of which a cell is not known to be there.
    #[error("rank {rank}, end of lane 0 in start {start}: cell {cell} may not have arrived")]
    NotArrived {
        /// Whose output.
        rank: Rank,
        /// The cell.
        cell: Cell,
        /// In which start.
        start: u32,
    },
    /// Two steps put the same cell into the same output.
    #[error("{second}: {first} puts the same cell already")]
    PutTwice {
        /// One step.
        first: Place,
        /// The other.
        second: Place,
    },
    /// A step puts a cell that is there from the start.
    #[error("{place}: in place, the own shard is there already")]
    PutInPlace {
        /// The step.
        place: Place,
    },
    /// A step copies a cell that the goal does not require there.
    #[error("{place}: the output of rank {rank} does not need this cell; expected no copy of it")]
    NotRequired {
        /// The step.
        place: Place,
        /// Whose output.
        rank: Rank,
    },
    /// A put or a get reads what is not known to be there.
    #[error("{place} in start {start}: the source may not have arrived")]
    ReadEarly {
        /// The step.
        place: Place,
        /// In which start.
        start: u32,
    },
    /// Lanes wait for each other in a circle.
    #[error("deadlock in start {start}: {}", circle(.waits))]
    Deadlock {
        /// The waits; each is for a signal that stands behind the next one, the last for one that
        /// stands behind the first.
        waits: Vec<Place>,
        /// In which start.
        start: u32,
    },
    /// Two lanes signal one flag.
    #[error("{second}: {first} is in another lane; expected one writer")]
    TwoWriters {
        /// One signal.
        first: Place,
        /// The other.
        second: Place,
    },
    /// Two lanes wait for one flag.
    #[error("{second}: {first} is in another lane; expected one reader")]
    TwoReaders {
        /// One wait.
        first: Place,
        /// The other.
        second: Place,
    },
    /// A flag is waited for in a lane that is not the one it names.
    #[error("{place}: expected the wait in lane {lane}, which the flag names")]
    OtherReader {
        /// The wait.
        place: Place,
        /// The lane that the flag names.
        lane: LaneId,
    },
    /// A flag is not waited for as often as it is signalled.
    #[error(
        "{place}: rank {reader} gets {signals} signals and waits {waits} times for {flag} in a start, expected 1 and 1"
    )]
    Unbalanced {
        /// A step that names the flag.
        place: Place,
        /// The reader of the flag.
        reader: Rank,
        /// The flag.
        flag: Flag,
        /// How often it is signalled in one start.
        signals: usize,
        /// How often it is waited for in one start.
        waits: usize,
    },
    /// A flag is signalled more than once in a start, so a later wait passes on the first value.
    #[error(
        "{second}: {first} signals the flag in the same start already, a wait may pass too early"
    )]
    Repeated {
        /// The first signal.
        first: Place,
        /// The next.
        second: Place,
    },
    /// A flag is signalled again, though its reader may not have seen the last start's value.
    #[error(
        "{place} in start {start}: the reader may not have passed the wait of the start before"
    )]
    NotConsumed {
        /// The signal.
        place: Place,
        /// In which start.
        start: u32,
    },
    /// A put or a get into an output that its owner's caller may still use.
    #[error("{place} in start {start}: rank {peer} may not have entered this start")]
    PeerInUse {
        /// The step.
        place: Place,
        /// The owner of the output.
        peer: Rank,
        /// In which start.
        start: u32,
    },
    /// The caller gets its memory back while a lane may still read it.
    #[error("rank {rank}, end of lane 0 in start {start}: lane {lane} may still read its sources")]
    SourceInUse {
        /// Whose memory.
        rank: Rank,
        /// The lane that reads.
        lane: LaneId,
        /// In which start.
        start: u32,
    },
    /// The caller gets its memory back while a peer may still get from it.
    #[error(
        "rank {rank}, end of lane 0 in start {start}: rank {by}, lane {lane} may still get from rank {rank}"
    )]
    StillGot {
        /// Whose memory.
        rank: Rank,
        /// Who gets.
        by: Rank,
        /// In which of its lanes.
        lane: LaneId,
        /// In which start.
        start: u32,
    },
    /// There are no plans to prove.
    #[error("there are no such plans: {reason}")]
    NotPlanned {
        /// What the algorithm says.
        reason: String,
    },
    /// The plans of all ranks taken together lack something or have too much of it.
    #[error("of the plans of all ranks, the {what}")]
    Uncounted {
        /// Of what.
        what: &'static str,
    },
    /// A step goes where the fabric of its lane does not.
    #[error("{place}: rank {peer} is out of reach of a {tier} lane")]
    OutOfReach {
        /// The step.
        place: Place,
        /// The rank to which it goes.
        peer: Rank,
        /// The lane's tier.
        tier: Tier,
    },
    /// A local lane signals the network lane of a peer: the flag would lie where the signal cannot
    /// go, since only flags of one's own and arrivals over the network cross tiers.
    #[error(
        "{place}: a local lane cannot signal a network lane of rank {peer}; expected its lane 0 to \
         relay"
    )]
    AcrossTiers {
        /// The signal.
        place: Place,
        /// The reader.
        peer: Rank,
    },
}

impl peerlane_hal::Error for Fault {
    fn kind(&self) -> ErrorKind {
        match self.class() {
            FaultClass::Disagreement => ErrorKind::Mismatch,
            _ => ErrorKind::InvalidArgument,
        }
    }
}

fn circle(waits: &[Place]) -> String {
    let mut text = String::new();
    for (number, wait) in waits.iter().enumerate() {
        let which = if number == 0 { "" } else { ", which" };
        text += &format!("{wait}{which} is for a signal behind ");
    }
    text + if waits.len() == 1 { "itself" } else { "the first" }
}
