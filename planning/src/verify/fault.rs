//! Defines the faults that the verifier finds in plans, and their classes.

use std::fmt;

use peerlane_hal::{ErrorKind, Rank};

use crate::collective::Collective;
use crate::plan::{CHUNKS_MAX, Cell, Flag, INBOXES_MAX, LaneId, OUTPUTS_MAX, Step, Tier};

/// The position of a step in the ordered steps of one lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Position {
    /// A step that is added before the steps of the plan, at the beginning of the lane.
    Entry,
    /// The step of the plan with this number, counted from 1 as in the text form of the plan.
    Step(usize),
    /// A step that is added after the steps of the plan, at the end of the lane.
    Exit,
}

/// The location of a step in a plan, printed as `rank 0, lane 0, step 3 (wait ready from 1)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Location {
    /// The rank whose plan contains the step.
    pub rank: Rank,
    /// The lane that contains the step.
    pub lane: LaneId,
    /// The position of the step in its lane.
    pub position: Position,
    /// The step itself, including its peer, chunk or flag.
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

        write!(f, " ({})", step.display_for(rank))
    }
}

/// An error in a set of plans, such as a deadlock or a race, because of which the plans must not
/// run.
///
/// A fault contains the step or the rank at fault. Starts are counted from 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The list of plans is empty.
    #[error("the set of plans is empty, expected one plan for each rank")]
    NoPlan,
    /// A field of one plan contradicts the other plans.
    ///
    /// It differs from the same field of the first plan, or from the number or the order of the
    /// plans.
    #[error("plan {index}: {field} is {found}, expected {expected}")]
    Disagrees {
        /// The index of the plan that disagrees, counted from 0.
        index: usize,
        /// The name of the field that disagrees.
        field: String,
        /// The value of the field in the plan that disagrees.
        found: String,
        /// The value that the field must have to agree with the other plans.
        expected: String,
    },
    /// A plan has an invalid number of chunks: each block must have 1 to [`CHUNKS_MAX`].
    #[error("rank {rank}: chunks is {chunks}, expected 1 to {CHUNKS_MAX}")]
    Chunks {
        /// The rank whose plan has the invalid number of chunks.
        rank: Rank,
        /// The invalid number of chunks in the plan.
        chunks: u32,
    },
    /// A plan has an invalid number of outputs: an operation in place must have 1, any other 1 to
    /// [`OUTPUTS_MAX`].
    #[error(
        "rank {rank}: outputs is {outputs}, expected 1 in place, or 1 to {OUTPUTS_MAX} out of place"
    )]
    Outputs {
        /// The rank whose plan has the invalid number of outputs.
        rank: Rank,
        /// The invalid number of outputs in the plan.
        outputs: u32,
    },
    /// A plan has an invalid number of inboxes: a reduction must have 1 to [`INBOXES_MAX`], any
    /// other operation 1.
    #[error(
        "rank {rank}: inboxes is {inboxes}, expected 1 to {INBOXES_MAX} in a reduction, or 1 in \
         another collective"
    )]
    Inboxes {
        /// The rank whose plan has the invalid number of inboxes.
        rank: Rank,
        /// The invalid number of inboxes in the plan.
        inboxes: u32,
    },
    /// A plan has a root that does not exist, or runs in place although its collective cannot.
    #[error("rank {rank}: {text}")]
    Collective {
        /// The rank whose plan contradicts its collective.
        rank: Rank,
        /// The reason why the plan contradicts its collective, as text.
        text: String,
    },
    /// A step copies from the output of a rank, although the collective's outputs hold different
    /// blocks.
    #[error(
        "{location}: the step copies from an output, expected an input, because the outputs of an \
         {collective} hold different blocks"
    )]
    UnequalOutputs {
        /// The location of the step that copies from an output.
        location: Location,
        /// The collective whose outputs hold different blocks.
        collective: Collective,
    },
    /// A step gets a contribution to a reduction from a peer, although only puts may move
    /// contributions.
    ///
    /// Contributions are put into the inbox of the rank that adds them.
    #[error(
        "{location}: the step gets a contribution, expected a put by its rank, because only puts write to an inbox"
    )]
    ContributionByGet {
        /// The location of the step that gets the contribution.
        location: Location,
    },
    /// A plan has no lane, not even lane 0.
    #[error("rank {rank}: the plan has no lanes, expected at least lane 0")]
    NoLane {
        /// The rank whose plan has no lane.
        rank: Rank,
    },
    /// A plan has more than [`LANES_MAX`](crate::plan::LANES_MAX) lanes.
    #[error("rank {rank}: the plan has {lanes} lanes, expected at most {}", crate::plan::LANES_MAX)]
    Lanes {
        /// The rank whose plan has too many lanes.
        rank: Rank,
        /// The number of lanes of the plan.
        lanes: usize,
    },
    /// A step refers to a rank, chunk, flag or lane that does not exist.
    #[error("{location}: {what} does not exist, expected {expected}")]
    Unknown {
        /// The location of the step with the invalid reference.
        location: Location,
        /// The rank, chunk, flag or lane that does not exist, as text.
        what: String,
        /// The ranks, chunks, flags or lanes that exist, as text.
        expected: String,
    },
    /// A step of a plan uses a flag that is reserved for the beginning and the end of lanes.
    #[error(
        "{location}: the flags `go` and `sent` are reserved for the entry and exit of lanes, expected \
         another flag"
    )]
    Reserved {
        /// The location of the step that uses the reserved flag.
        location: Location,
    },
    /// No step copies a required chunk of a block into an output.
    #[error("rank {rank}: no step copies cell {cell} into the output of rank {rank}")]
    NeverCopied {
        /// The rank whose output lacks the chunk.
        rank: Rank,
        /// The chunk of a block that no step copies.
        cell: Cell,
    },
    /// A rank may complete the operation before a chunk of its output has arrived.
    #[error("rank {rank}: start {start} may end before cell {cell} has arrived in the output")]
    NotArrived {
        /// The rank whose output may lack the chunk.
        rank: Rank,
        /// The chunk of a block that may not have arrived.
        cell: Cell,
        /// The number of the run that may end too early, counted from 1.
        start: u32,
    },
    /// Two steps copy the same chunk of a block into the same output.
    #[error("{second}: the same cell is already copied to the same output by {first}")]
    CopiedTwice {
        /// The location of one step that copies the chunk.
        first: Location,
        /// The location of the other step that copies the chunk.
        second: Location,
    },
    /// No step adds the contribution of a rank to a chunk of a reduced block.
    #[error("rank {rank}: no step adds the contribution of rank {from} to cell {cell}")]
    NeverReduced {
        /// The rank that reduces the block.
        rank: Rank,
        /// The chunk that lacks the contribution.
        cell: Cell,
        /// The rank whose contribution is not added.
        from: Rank,
    },
    /// Two steps add the contribution of one rank to the same chunk.
    #[error("{second}: the same contribution is already added to the same cell by {first}")]
    ReducedTwice {
        /// The location of the first step that adds the contribution.
        first: Location,
        /// The location of the second step that adds the contribution.
        second: Location,
    },
    /// Two lanes add contributions to the same chunk, so the order of the additions is undefined.
    #[error(
        "{second}: another lane adds to the same cell, by {first}; expected all additions to a cell in one lane"
    )]
    ReducedApart {
        /// The location of an addition in one lane.
        first: Location,
        /// The location of an addition in another lane.
        second: Location,
    },
    /// An addition to a chunk is not the one that the collective states at its place.
    ///
    /// The order of additions decides how a sum of floating-point numbers is rounded.
    #[error(
        "{location}: the addition is out of order, expected that of the contribution of rank {expected}"
    )]
    ReducedOutOfOrder {
        /// The location of the addition at the place of the expected one.
        location: Location,
        /// The rank whose contribution is added at this place.
        expected: Rank,
    },
    /// An addition in place reads the rank's own contribution, which an earlier addition has
    /// overwritten.
    #[error(
        "{location}: an earlier addition has overwritten the contribution; expected it first, because the operation is in place"
    )]
    Overwritten {
        /// The location of the addition that comes too late.
        location: Location,
    },
    /// A step of an operation in place copies a rank's own block, which is already in the output.
    #[error(
        "{location}: the step copies the rank's own block, which is already in its output, because \
         the operation is in place"
    )]
    CopiedInPlace {
        /// The location of the step that copies the block.
        location: Location,
    },
    /// A step copies a chunk of a block into an output that does not need it.
    #[error(
        "{location}: the output of rank {rank} does not need the copied cell; expected no copy"
    )]
    NotRequired {
        /// The location of the step whose copy is not needed.
        location: Location,
        /// The rank whose output does not need the chunk.
        rank: Rank,
    },
    /// A step may read a chunk from memory in which the chunk has not yet arrived.
    #[error(
        "{location}: in start {start}, the step may read its source before the data has arrived"
    )]
    ReadEarly {
        /// The location of the step that may read too early.
        location: Location,
        /// The number of the run in which the step may read too early, counted from 1.
        start: u32,
    },
    /// Several lanes wait for each other's signals in a cycle.
    #[error("deadlock in start {start}: {}", cycle(.waits))]
    Deadlock {
        /// The waits that form the cycle.
        ///
        /// The signal for each wait comes after the next wait of the list, in the lane of that
        /// wait. The signal for the last wait comes after the first wait.
        waits: Vec<Location>,
        /// The number of the run that deadlocks, counted from 1.
        start: u32,
    },
    /// Two lanes signal the same flag.
    #[error(
        "{second}: the same flag is signalled in another lane, by {first}; expected one lane that \
         signals a flag"
    )]
    TwoWriters {
        /// The location of one signal of the flag.
        first: Location,
        /// The location of the other signal of the same flag.
        second: Location,
    },
    /// Two lanes wait for the same flag.
    #[error(
        "{second}: the same flag is awaited in another lane, by {first}; expected one lane that \
         waits for a flag"
    )]
    TwoReaders {
        /// The location of one wait for the flag.
        first: Location,
        /// The location of the other wait for the same flag.
        second: Location,
    },
    /// A step waits for a flag that belongs to another lane.
    #[error(
        "{location}: the wait is in the wrong lane, expected lane {lane}, which the flag names"
    )]
    OtherReader {
        /// The location of the wait in the wrong lane.
        location: Location,
        /// The lane that may wait for the flag.
        lane: LaneId,
    },
    /// A flag has more signals than waits in one run of the operation, or fewer.
    #[error(
        "{location}: in one start, rank {reader} receives {signals} signals of the flag `{flag}` \
         and waits for it {waits} times, expected 1 signal and 1 wait"
    )]
    Unbalanced {
        /// The location of a step that signals the flag or waits for it.
        location: Location,
        /// The rank that waits for the flag.
        reader: Rank,
        /// The flag whose signals and waits differ in number.
        flag: Flag,
        /// The number of signals of the flag in one run of the operation.
        signals: usize,
        /// The number of waits for the flag in one run of the operation.
        waits: usize,
    },
    /// A flag is signalled more than once in one run of an operation, so a later wait passes too
    /// early.
    ///
    /// It passes on the first value.
    #[error(
        "{second}: the same flag is already signalled in this start, by {first}, so a wait may \
         pass too early; expected one signal"
    )]
    Repeated {
        /// The location of the first signal of the flag.
        first: Location,
        /// The location of the second signal of the flag in the same run of the operation.
        second: Location,
    },
    /// A flag may be signalled again before its reader has consumed the previous signal.
    #[error(
        "{location}: in start {start}, the flag may be signalled again before its reader has \
         passed the wait of the previous start"
    )]
    NotConsumed {
        /// The location of the signal that may come too early.
        location: Location,
        /// The number of the run in which the signal may come too early, counted from 1.
        start: u32,
    },
    /// A step may write to the output or inbox of a peer that still uses that memory.
    #[error(
        "{location}: in start {start}, the step may write to rank {peer} before rank {peer} has \
         entered this start"
    )]
    PeerInUse {
        /// The location of the step that may write too early.
        location: Location,
        /// The rank whose output or inbox may be overwritten too early.
        peer: Rank,
        /// The number of the run in which the step may write too early, counted from 1.
        start: u32,
    },
    /// A rank may complete the operation while one of its lanes still reads the caller's memory.
    #[error("rank {rank}: start {start} may end while lane {lane} still reads its sources")]
    SourceInUse {
        /// The rank whose memory may still be read.
        rank: Rank,
        /// The lane that may still read memory of its rank.
        lane: LaneId,
        /// The number of the run that may end before the reads are complete, counted from 1.
        start: u32,
    },
    /// A rank may complete the operation while a get of another rank still reads the caller's
    /// memory.
    #[error(
        "rank {rank}: start {start} may end while rank {peer}, lane {lane}, still gets data from \
         rank {rank}"
    )]
    PeerReads {
        /// The rank whose memory the get reads.
        rank: Rank,
        /// The rank that executes the get.
        peer: Rank,
        /// The lane that executes the get.
        lane: LaneId,
        /// The number of the run that may end before the get is complete, counted from 1.
        start: u32,
    },
    /// The algorithm cannot create plans for the given arguments.
    #[error("cannot create the plans: {reason}")]
    NotPlanned {
        /// The error message of the schedule that could not create the plans.
        reason: String,
    },
    /// Some copy or signal in the plans of all ranks is missing or superfluous.
    ///
    /// Sums over the plans show it.
    #[error("the plans of all ranks do not match: {what}")]
    SumMismatch {
        /// The property of the plans that does not hold.
        what: &'static str,
    },
    /// A step has a peer that the fabric of its lane cannot reach.
    #[error(
        "{location}: a {tier} lane cannot reach rank {peer}; expected a lane of the other tier"
    )]
    OutOfReach {
        /// The location of the step with the unreachable peer.
        location: Location,
        /// The rank that the fabric cannot reach.
        peer: Rank,
        /// The tier of the fabric, local or network.
        tier: Tier,
    },
    /// A local lane signals a flag of another rank's network lane, which the local fabric cannot
    /// write.
    ///
    /// Only flags of a rank's own lanes, and arrivals over the network, cross tiers. The local
    /// fabric cannot write the flags of the network fabric.
    #[error(
        "{location}: a local lane cannot signal a network lane of rank {peer}; expected a signal \
         to lane 0 of rank {peer}, which relays it"
    )]
    AcrossTiers {
        /// The location of the signal in the local lane.
        location: Location,
        /// The rank whose flag the step signals.
        peer: Rank,
    },
}

impl peerlane_hal::Error for Fault {
    fn kind(&self) -> ErrorKind {
        match self.class() {
            // Each plan may be valid, but not together with the others.
            FaultClass::Disagreement => ErrorKind::Mismatch,
            _ => ErrorKind::InvalidArgument,
        }
    }
}

/// Formats a cycle of waits as text, with one clause for each wait.
fn cycle(waits: &[Location]) -> String {
    let mut text = String::new();
    for (number, wait) in waits.iter().enumerate() {
        let which = if number == 0 { "" } else { ", which" };
        text += &format!("{wait}{which} needs a signal that comes after ");
    }

    text + if waits.len() == 1 { "itself" } else { "the first wait" }
}

/// The class of a fault in a set of plans, by which a program can tell faults apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum FaultClass {
    /// The plans of different ranks contradict each other.
    Disagreement,
    /// A plan refers to a rank, chunk, source or lane that does not exist.
    Unknown,
    /// A byte of an output never arrives.
    Missing,
    /// A byte of an output is written more than once.
    Twice,
    /// A byte may be read before it has arrived.
    ReadEarly,
    /// Several lanes wait for each other's signals in a cycle.
    Deadlock,
    /// A flag has two writers or two readers.
    Shared,
    /// A flag has more signals than waits, or fewer.
    Unbalanced,
    /// A wait may pass too early, on the value of an earlier signal.
    Stale,
    /// Memory may be overwritten while a rank still reads it.
    Overwritten,
    /// Contributions are added in another order than the collective states.
    OutOfOrder,
    /// A step has a peer that the fabric of its lane cannot reach.
    Unreachable,
}

impl FaultClass {
    /// All classes of faults, in the order of their declaration.
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
        Self::OutOfOrder,
        Self::Unreachable,
    ];

    /// Returns the short name of the fault class for tables.
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
            Self::OutOfOrder => "addition out of order",
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

            // The target of a copy that no output requires counts as an unknown cell.
            Self::NotRequired { .. }
            | Self::Chunks { .. }
            | Self::Outputs { .. }
            | Self::Inboxes { .. }
            | Self::NoLane { .. }
            | Self::Lanes { .. }
            | Self::Unknown { .. }
            | Self::Reserved { .. }
            | Self::Collective { .. }
            | Self::UnequalOutputs { .. }
            | Self::ContributionByGet { .. }
            | Self::NotPlanned { .. } => FaultClass::Unknown,

            Self::NeverCopied { .. } | Self::NotArrived { .. } | Self::NeverReduced { .. } => {
                FaultClass::Missing
            }
            Self::CopiedTwice { .. } | Self::CopiedInPlace { .. } | Self::ReducedTwice { .. } => {
                FaultClass::Twice
            }
            Self::ReadEarly { .. } => FaultClass::ReadEarly,

            Self::Deadlock { .. } => FaultClass::Deadlock,
            // Lanes that add to one cell share it, as writers of one flag do.
            Self::ReducedApart { .. }
            | Self::TwoWriters { .. }
            | Self::TwoReaders { .. }
            | Self::OtherReader { .. } => FaultClass::Shared,
            Self::Unbalanced { .. } | Self::SumMismatch { .. } => FaultClass::Unbalanced,
            Self::Repeated { .. } | Self::NotConsumed { .. } => FaultClass::Stale,

            Self::PeerInUse { .. }
            | Self::SourceInUse { .. }
            | Self::PeerReads { .. }
            | Self::Overwritten { .. } => FaultClass::Overwritten,
            Self::ReducedOutOfOrder { .. } => FaultClass::OutOfOrder,

            Self::AcrossTiers { .. } | Self::OutOfReach { .. } => FaultClass::Unreachable,
        }
    }
}
