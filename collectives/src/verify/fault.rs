//! The faults that the verifier finds, and their classes.

use std::fmt;

use peerlane_hal::{ErrorKind, Rank};

use crate::collective::Collective;
use crate::plan::{CHUNKS_MAX, Cell, Flag, LaneId, OUTPUTS_MAX, Step, Tier};

/// The position of a step in its lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Position {
    /// The entry of the lane: the steps before those of the plan.
    Entry,
    /// The step with this number in the plan, from 1, in the order of the lines of the text form.
    Step(usize),
    /// In the exit, the steps that end the lane before the caller continues.
    Exit,
}

/// Location of a step, printed as `rank 0, lane 0, step 3 (wait ready from 1)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Location {
    /// The rank of the plan.
    pub rank: Rank,
    /// The lane in the plan.
    pub lane: LaneId,
    /// The position in the lane.
    pub position: Position,
    /// The step at this position.
    pub step: Step,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, lane, position, step } = *self;
        write!(f, "rank {rank}, lane {lane}, ")?;
        match position {
            Position::Entry => f.write_str("entry")?,
            Position::Step(number) => write!(f, "step {number}")?,
            Position::Exit => f.write_str("exit")?,
        }
        write!(f, " ({})", step.of(rank))
    }
}

/// Describes why plans must not run. Starts are counted from 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// There is no plan.
    #[error("the set of plans is empty, expected one plan for each rank")]
    NoPlan,
    /// A field of a plan differs from the first plan, or from the number or the order of the plans.
    #[error("plan {index}: {field} is {found}, expected {expected}")]
    Disagrees {
        /// The index of the plan, from 0.
        index: usize,
        /// The name of the field.
        field: String,
        /// The value of the field.
        found: String,
        /// The value in the plan of rank 0.
        expected: String,
    },
    /// The number of chunks is out of bounds.
    #[error("rank {rank}: chunks is {chunks}, expected 1 to {CHUNKS_MAX}")]
    Chunks {
        /// The rank of the plan.
        rank: Rank,
        /// The number of chunks.
        chunks: u32,
    },
    /// The number of outputs is out of bounds, or greater than 1 in place.
    #[error(
        "rank {rank}: outputs is {outputs}, expected 1 in place, or 1 to {OUTPUTS_MAX} out of place"
    )]
    Outputs {
        /// The rank of the plan.
        rank: Rank,
        /// The number of outputs.
        outputs: u32,
    },
    /// The collective does not allow such plans.
    #[error("rank {rank}: {text}")]
    Collective {
        /// The rank of the plan.
        rank: Rank,
        /// The reason why it does not.
        text: String,
    },
    /// A step reads an output of a collective in which every output holds other blocks.
    #[error(
        "{location}: the step copies from an output, expected an input, because the outputs of an \
         {collective} hold different blocks"
    )]
    UnequalOutputs {
        /// The location of the step.
        location: Location,
        /// The collective of the plan.
        collective: Collective,
    },
    /// The plan has no lane, not even lane 0.
    #[error("rank {rank}: the plan has no lanes, expected at least lane 0")]
    NoLane {
        /// The rank of the plan.
        rank: Rank,
    },
    /// A step names something that does not exist.
    #[error("{location}: {what} does not exist, expected {expected}")]
    Unknown {
        /// The location of the step.
        location: Location,
        /// The name that does not exist.
        what: String,
        /// The names that exist.
        expected: String,
    },
    /// A step names a flag that only entries and exits use.
    #[error(
        "{location}: the flags `go` and `sent` are reserved for the entry and exit of lanes, expected \
         another flag"
    )]
    Reserved {
        /// The location of the step.
        location: Location,
    },
    /// No step copies a required cell into an output.
    #[error("rank {rank}: no step copies cell {cell} into the output of rank {rank}")]
    NeverCopied {
        /// The owner of the output.
        rank: Rank,
        /// The cell that is missing.
        cell: Cell,
    },
    /// The caller gets an output before a cell is known to have arrived.
    #[error("rank {rank}: start {start} may end before cell {cell} has arrived in the output")]
    NotArrived {
        /// The owner of the output.
        rank: Rank,
        /// The cell that is missing.
        cell: Cell,
        /// The number of the start.
        start: u32,
    },
    /// Two steps copy the same cell into the same output.
    #[error("{second}: the same cell is already copied to the same output by {first}")]
    CopiedTwice {
        /// One step that copies the cell.
        first: Location,
        /// The other step that copies the cell.
        second: Location,
    },
    /// A step copies a cell that is in the output from the start.
    #[error(
        "{location}: the step copies the rank's own block, which is already in its output, because \
         the operation is in place"
    )]
    CopiedInPlace {
        /// The location of the step.
        location: Location,
    },
    /// A step copies a cell that the collective does not require there.
    #[error(
        "{location}: the output of rank {rank} does not need the copied cell; expected no copy"
    )]
    NotRequired {
        /// The location of the step.
        location: Location,
        /// The owner of the output.
        rank: Rank,
    },
    /// A copy reads a cell before it is known to have arrived.
    #[error(
        "{location}: in start {start}, the step may read its source before the data has arrived"
    )]
    ReadEarly {
        /// The location of the step.
        location: Location,
        /// The number of the start.
        start: u32,
    },
    /// Lanes wait for each other in a cycle.
    #[error("deadlock in start {start}: {}", cycle(.waits))]
    Deadlock {
        /// The waits. The signal for each comes after the next wait in that wait's lane; for the last one, after the first.
        waits: Vec<Location>,
        /// The number of the start.
        start: u32,
    },
    /// Two lanes signal one flag.
    #[error(
        "{second}: the same flag is signalled in another lane, by {first}; expected one lane that \
         signals a flag"
    )]
    TwoWriters {
        /// One signal.
        first: Location,
        /// A signal in another lane.
        second: Location,
    },
    /// Two lanes wait for one flag.
    #[error(
        "{second}: the same flag is awaited in another lane, by {first}; expected one lane that \
         waits for a flag"
    )]
    TwoReaders {
        /// The first of the two waits.
        first: Location,
        /// A wait in another lane.
        second: Location,
    },
    /// A wait is in another lane than the flag names.
    #[error(
        "{location}: the wait is in the wrong lane, expected lane {lane}, which the flag names"
    )]
    OtherReader {
        /// The location of the wait.
        location: Location,
        /// The lane that the flag names.
        lane: LaneId,
    },
    /// A flag has different numbers of signals and waits.
    #[error(
        "{location}: in one start, rank {reader} receives {signals} signals of the flag `{flag}` \
         and waits for it {waits} times, expected 1 signal and 1 wait"
    )]
    Unbalanced {
        /// A step that names the flag.
        location: Location,
        /// The reader of the flag.
        reader: Rank,
        /// The flag that is signalled or waited for too often.
        flag: Flag,
        /// The number of signals in one start.
        signals: usize,
        /// The number of waits in one start.
        waits: usize,
    },
    /// A flag is signalled more than once in a start, so a later wait passes on the first value.
    #[error(
        "{second}: the same flag is already signalled in this start, by {first}, so a wait may \
         pass too early; expected one signal"
    )]
    Repeated {
        /// The first signal in the start.
        first: Location,
        /// The next signal in the same start.
        second: Location,
    },
    /// A flag is signalled again before its reader is known to have consumed the last signal.
    #[error(
        "{location}: in start {start}, the flag may be signalled again before its reader has \
         passed the wait of the previous start"
    )]
    NotConsumed {
        /// The location of the signal.
        location: Location,
        /// The number of the start.
        start: u32,
    },
    /// A step copies into an output that its owner's caller may still use.
    #[error(
        "{location}: in start {start}, the step may write to rank {peer} before rank {peer} has \
         entered this start"
    )]
    PeerInUse {
        /// The location of the step.
        location: Location,
        /// The owner of the output.
        peer: Rank,
        /// The number of the start.
        start: u32,
    },
    /// The caller gets its memory back while a lane of its rank may still read it.
    #[error("rank {rank}: start {start} may end while lane {lane} still reads its sources")]
    SourceInUse {
        /// The owner of the memory.
        rank: Rank,
        /// The lane that reads.
        lane: LaneId,
        /// The number of the start.
        start: u32,
    },
    /// The caller gets its memory back while a peer may still get from it.
    #[error(
        "rank {rank}: start {start} may end while rank {peer}, lane {lane}, still gets data from \
         rank {rank}"
    )]
    PeerReads {
        /// The owner of the memory.
        rank: Rank,
        /// The rank that gets.
        peer: Rank,
        /// The lane that gets.
        lane: LaneId,
        /// The number of the start.
        start: u32,
    },
    /// The algorithm makes no plans for these arguments.
    #[error("cannot create the plans: {reason}")]
    NotPlanned {
        /// The error of the schedule.
        reason: String,
    },
    /// The sums over the plans of all ranks do not match.
    #[error("the plans of all ranks do not match: {what}")]
    SumMismatch {
        /// The property that differs.
        what: &'static str,
    },
    /// A step names a rank that the fabric of its lane does not reach.
    #[error(
        "{location}: a {tier} lane cannot reach rank {peer}; expected a lane of the other tier"
    )]
    OutOfReach {
        /// The location of the step.
        location: Location,
        /// The rank that the step names.
        peer: Rank,
        /// The tier of the lane.
        tier: Tier,
    },
    /// A local lane signals a network lane of a peer.
    ///
    /// Only flags of a rank's own lanes, and arrivals over the network, cross tiers. The local fabric cannot write the flags of
    /// the network fabric.
    #[error(
        "{location}: a local lane cannot signal a network lane of rank {peer}; expected a signal \
         to lane 0 of rank {peer}, which relays it"
    )]
    AcrossTiers {
        /// The location of the signal.
        location: Location,
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

fn cycle(waits: &[Location]) -> String {
    let mut text = String::new();
    for (number, wait) in waits.iter().enumerate() {
        let which = if number == 0 { "" } else { ", which" };
        text += &format!("{wait}{which} needs a signal that comes after ");
    }
    text + if waits.len() == 1 { "itself" } else { "the first wait" }
}

/// Classifies faults, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum FaultClass {
    /// The plans do not belong together.
    Disagreement,
    /// A plan names a rank, cell, source or lane that does not exist.
    Unknown,
    /// A byte of a result does not arrive.
    Missing,
    /// A byte of a result arrives more than once.
    Twice,
    /// A byte is read before it is known to have arrived.
    ReadEarly,
    /// Lanes wait for each other in a cycle.
    Deadlock,
    /// A flag has two writers or two readers.
    Shared,
    /// A flag has different numbers of signals and waits.
    Unbalanced,
    /// A wait could pass on the value of an earlier signal.
    Stale,
    /// Memory is overwritten while a rank may still read it.
    Overwritten,
    /// A step names a rank that the fabric of its lane does not reach.
    Unreachable,
}

impl FaultClass {
    /// All classes of faults.
    pub const ALL: &'static [Self] = &[
        Self::Disagreement,
        Self::Unknown,
        Self::Missing,
        Self::Twice,
        Self::ReadEarly,
        Self::Deadlock,
        Self::Shared,
        Self::Unbalanced,
        Self::Stale,
        Self::Overwritten,
        Self::Unreachable,
    ];

    /// Returns a short name for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Disagreement => "disagreement",
            Self::Unknown => "unknown name",
            Self::Missing => "missing byte",
            Self::Twice => "byte twice",
            Self::ReadEarly => "read too early",
            Self::Deadlock => "deadlock",
            Self::Shared => "shared flag",
            Self::Unbalanced => "unbalanced flag",
            Self::Stale => "stale flag",
            Self::Overwritten => "overwritten too early",
            Self::Unreachable => "out of reach",
        }
    }
}

impl fmt::Display for FaultClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Fault {
    /// Returns the class of the fault.
    pub const fn class(&self) -> FaultClass {
        match self {
            Self::NoPlan | Self::Disagrees { .. } => FaultClass::Disagreement,
            Self::Chunks { .. }
            | Self::Outputs { .. }
            | Self::NoLane { .. }
            | Self::Unknown { .. }
            | Self::Reserved { .. }
            | Self::Collective { .. }
            | Self::UnequalOutputs { .. }
            | Self::NotRequired { .. }
            | Self::NotPlanned { .. } => FaultClass::Unknown,
            Self::NeverCopied { .. } | Self::NotArrived { .. } => FaultClass::Missing,
            Self::CopiedTwice { .. } | Self::CopiedInPlace { .. } => FaultClass::Twice,
            Self::ReadEarly { .. } => FaultClass::ReadEarly,
            Self::Deadlock { .. } => FaultClass::Deadlock,
            Self::TwoWriters { .. } | Self::TwoReaders { .. } | Self::OtherReader { .. } => {
                FaultClass::Shared
            }
            Self::Unbalanced { .. } | Self::SumMismatch { .. } => FaultClass::Unbalanced,
            Self::Repeated { .. } | Self::NotConsumed { .. } => FaultClass::Stale,
            Self::PeerInUse { .. } | Self::SourceInUse { .. } | Self::PeerReads { .. } => {
                FaultClass::Overwritten
            }
            Self::AcrossTiers { .. } | Self::OutOfReach { .. } => FaultClass::Unreachable,
        }
    }
}
