//! Defines plans, which list the copies, signals and waits that one rank executes in a collective
//! operation.
//!
//! A plan contains no address, no epoch and no vendor. Every flag is signalled once and waited for
//! once in a start. The executor assigns words and values to flags, and the [layout](crate::layout)
//! assigns bytes to cells. A plan can be written as [text](Plan#impl-Display-for-Plan), one step
//! per line, and as JSON with serde. Nothing is checked here; [`verify`](crate::verify::verify)
//! checks the plans of all ranks.

use std::fmt;

use peerlane_hal::Rank;
use serde::{Deserialize, Serialize};

use crate::collective::{Collective, RankNumber};

mod algorithm;
mod text;

pub use algorithm::{Algorithm, FlagOrder, Tier};
pub use text::{ParseError, StepOf};

/// The largest number of chunks into which a block can be cut.
///
/// It bounds sizes that are computed from a number of a peer or a user.
pub const CHUNKS_MAX: u32 = 1 << 16;

/// The largest number of lanes of a plan that the verifier accepts.
///
/// The verifier's memory grows with the square of this number.
pub const LANES_MAX: usize = 64;

/// The largest number of output buffers that an operation can alternate between.
pub const OUTPUTS_MAX: u32 = 2;

/// The largest number of inboxes that a reduction can alternate between.
pub const INBOXES_MAX: u32 = 2;

/// Identifies one chunk of one rank's block, written as `2.0` for chunk 0 of rank 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cell {
    /// The rank that provides the block of the chunk.
    #[serde(with = "RankNumber")]
    pub block: Rank,
    /// The number of the chunk in its block, counted from 0.
    pub chunk: u32,
}

/// Selects the buffer that a copy reads, either an input or an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The input of the rank whose memory is read.
    ///
    /// In place, the input is the rank's own block in the output.
    Input,
    /// The output of the rank whose memory is read.
    Output,
}

/// Identifies one lane of a plan, which is one engine's ordered steps, by a number from 0.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct LaneId(pub u32);

impl LaneId {
    /// Lane 0, in which an operation begins and ends for its caller.
    pub const HOME: Self = Self(0);

    /// Returns the lane's number as an index into [`Plan::lanes`].
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Identifies a flag, which one rank signals to tell another that data has arrived or a buffer is
/// free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Flag {
    /// Signals that the waiting rank may write the output of rank `from`, or read the input of that
    /// rank.
    Ready {
        /// The rank that owns the buffers that may be used.
        #[serde(with = "RankNumber")]
        from: Rank,
        /// The lane that waits for the flag.
        lane: LaneId,
    },
    /// Signals that rank `from` has begun a run of the operation, so that peers may write its other
    /// output or inbox in the next run.
    ///
    /// Outputs or inboxes must be used in turn. The flag is signalled in one start and
    /// [awaited in the next one](Self::lag).
    Free {
        /// The rank that owns the output.
        #[serde(with = "RankNumber")]
        from: Rank,
        /// The lane that waits for the flag.
        lane: LaneId,
    },
    /// Signals that a chunk of a block has arrived in the output of the waiting rank, or in that of
    /// the peer from which the waiting rank gets the chunk.
    Arrived {
        /// The chunk of a block that has arrived.
        cell: Cell,
        /// The lane that waits for the flag.
        ///
        /// If two lanes need a cell, each has its own flag.
        lane: LaneId,
    },
    /// Signals that a contribution to a reduction has arrived in the inbox of the waiting rank.
    Contributed {
        /// The chunk that has arrived; its `block` is the rank that contributes.
        cell: Cell,
        /// The lane that waits for the flag.
        lane: LaneId,
    },
    /// Signals that rank `by` has read all that it gets from the waiting rank, so that this memory
    /// may be reused.
    Taken {
        /// The rank whose gets are complete.
        #[serde(with = "RankNumber")]
        by: Rank,
        /// The lane that waits for the flag.
        lane: LaneId,
    },
    /// Signals to another lane of the same rank that the operation has begun.
    Go {
        /// The lane that may begin.
        lane: LaneId,
    },
    /// Signals to lane 0 of the same rank that another lane has completed its copies.
    ///
    /// The sources of these copies may be reused.
    Sent {
        /// The lane whose copies are complete.
        lane: LaneId,
    },
}

impl Flag {
    /// Returns the number of starts from the signal of the flag to the wait for it, which is 0 or
    /// 1.
    pub const fn lag(self) -> u32 {
        match self {
            Self::Free { .. } => 1,
            Self::Ready { .. }
            | Self::Arrived { .. }
            | Self::Contributed { .. }
            | Self::Taken { .. }
            | Self::Go { .. }
            | Self::Sent { .. } => 0,
        }
    }
}

/// Describes one step of a plan, which copies a chunk, adds a contribution, signals a flag or waits
/// for a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Step {
    /// Copies a chunk of a block into the output of `peer`, which may be this rank.
    ///
    /// In a reduction, bytes from an input are a contribution. The step copies them into the inbox
    /// of `peer`, which has a place for the contribution of each rank to the block that `peer`
    /// reduces.
    Put {
        /// The rank that owns the output into which the chunk is copied.
        #[serde(with = "RankNumber")]
        peer: Rank,
        /// The chunk of a block that is copied.
        cell: Cell,
        /// The buffer from which the chunk is read.
        from: Source,
    },
    /// Copies a chunk of a block from the memory of `peer`, which may be this rank, into this
    /// rank's output.
    Get {
        /// The rank whose memory is read.
        #[serde(with = "RankNumber")]
        peer: Rank,
        /// The chunk of a block that is copied.
        cell: Cell,
        /// The buffer from which the chunk is read.
        from: Source,
    },
    /// Adds the contribution of rank `from` to a chunk of this rank's own block in this rank's
    /// output.
    ///
    /// The first of these steps overwrites the chunk. This rank's own contribution is read from its
    /// input, and others from its inbox. The steps after it in the lane read the result.
    Reduce {
        /// The chunk of this rank's block that the contribution is added to.
        cell: Cell,
        /// The rank whose contribution is added.
        #[serde(with = "RankNumber")]
        from: Rank,
    },
    /// Signals a flag of rank `peer`, which may be this rank.
    Signal {
        /// The rank that waits for the flag.
        #[serde(with = "RankNumber")]
        peer: Rank,
        /// The flag that the step sets in the memory of `peer`.
        flag: Flag,
    },
    /// Waits until a flag of this rank is signalled.
    Wait {
        /// The flag that must be signalled before the next step.
        flag: Flag,
    },
}

impl Step {
    /// Returns whether the step puts a contribution into the inbox of the rank that reduces the
    /// block.
    pub fn contributes(&self, collective: Collective) -> bool {
        collective.is_reduction() && matches!(self, Self::Put { from: Source::Input, .. })
    }
}

/// Lists the steps that one engine executes in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lane {
    /// Whether the engine copies inside a node or over the network; equal on all ranks.
    #[serde(default)]
    pub tier: Tier,
    /// The steps in order, without the signals and waits by which the lane begins and ends.
    ///
    /// [`Plan::closed_lane`] adds these.
    pub steps: Vec<Step>,
}

/// Lists the copies, signals and waits that one rank executes in a collective operation, without
/// addresses.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// The collective operation that the plan executes.
    pub collective: Collective,
    /// The algorithm that created the plan.
    pub algorithm: Algorithm,
    /// The rank that executes the plan.
    #[serde(with = "RankNumber")]
    pub rank: Rank,
    /// The number of ranks that take part in the operation.
    pub ranks: u32,
    /// The number of chunks of each block, 1 to [`CHUNKS_MAX`].
    pub chunks: u32,
    /// Whether the operation runs in place, with the rank's input already in its output.
    pub in_place: bool,
    /// The number of output buffers that the operation alternates between, 1 to [`OUTPUTS_MAX`].
    ///
    /// Each output has a set of flags of its own and, in a reduction, an inbox of its own.
    ///
    /// With two, a start writes where the start before the last one did, so a rank that has entered
    /// the last start need not signal `ready`.
    pub outputs: u32,
    /// The number of inboxes that a reduction alternates between, 1 to [`INBOXES_MAX`]; 1 in other
    /// collectives.
    ///
    /// With two, contributions go where those of the start before the last one went, so a rank that
    /// has entered the last start need not signal `ready`, although every start writes to the same
    /// output. Each inbox has a set of flags of its own.
    #[serde(default = "single")]
    pub inboxes: u32,
    /// The order of signals, waits and copies in the plan, for information.
    pub flags: FlagOrder,
    /// The lanes of this rank, as many as on every other rank.
    ///
    /// A lane without work is empty. Lane 0 is [home](LaneId::HOME).
    pub lanes: Vec<Lane>,
}

impl Plan {
    /// Returns the number of sets of flags that starts use in turn, each with an inbox in a
    /// reduction.
    pub const fn flag_sets(&self) -> u32 {
        flag_sets(self.outputs, self.inboxes)
    }

    /// Returns the steps of `lane`, including the signals and waits by which the lane begins and
    /// ends.
    ///
    /// A lane that forks from the caller's stream and joins it needs no such steps, and an empty
    /// lane has none. Every other lane that `flagged` returns true for first waits for [`Flag::Go`]
    /// and last signals [`Flag::Sent`]; lane 0 has the matching signals and waits. `flagged` is not
    /// called for lane 0.
    ///
    /// # Panics
    /// If the plan has no such lane.
    pub fn closed_lane(&self, lane: LaneId, flagged: impl Fn(LaneId) -> bool) -> Vec<Step> {
        let steps = self.lanes[lane.index()].steps.iter().copied();
        let peer = self.rank;
        let is_closed = |lane: LaneId| !self.lanes[lane.index()].steps.is_empty() && flagged(lane);

        if lane != LaneId::HOME {
            let has_flags = is_closed(lane);
            let entry = has_flags.then_some(Step::Wait { flag: Flag::Go { lane } });
            let exit = has_flags.then_some(Step::Signal { peer, flag: Flag::Sent { lane } });
            return entry.into_iter().chain(steps).chain(exit).collect();
        }

        // Lane 0 starts the other lanes before its own steps, so that they run at the same time.
        let others = || self.lane_ids().skip(1).filter(|&lane| is_closed(lane));
        let entry = others().map(|lane| Step::Signal { peer, flag: Flag::Go { lane } });
        let exit = others().map(|lane| Step::Wait { flag: Flag::Sent { lane } });
        entry.chain(steps).chain(exit).collect()
    }

    /// Returns a function that tells which chunk is in the output of this rank after a step, if the
    /// step is one that brings or announces a chunk of the output.
    ///
    /// The steps of a lane are complete in order, so these chunks arrive in the order of the steps.
    /// A chunk that is announced to several lanes is complete with the first of them. No step has
    /// the chunks of this rank's own block in place, which are there from the beginning, and those
    /// that are announced together with another one, which are there at the end.
    pub fn arrivals(&self) -> impl Fn(&Step) -> Option<Cell> + use<> {
        let &Self { rank, collective, .. } = self;
        let steps = self.lanes.iter().flat_map(|lane| &lane.steps);
        // A rank that gets is told of chunks that it can get, and not of those that it has.
        let gets = steps.into_iter().any(|step| matches!(step, Step::Get { .. }));

        move |step| match *step {
            Step::Put { peer, cell, .. } if peer == rank => {
                Some(cell).filter(|_| !step.contributes(collective))
            }
            Step::Get { cell, .. } | Step::Reduce { cell, .. } => Some(cell),
            Step::Wait { flag: Flag::Arrived { cell, .. } } => Some(cell).filter(|_| !gets),
            _ => None,
        }
    }

    /// Returns the chunk of the input of this rank that `step` reads, if it reads one.
    ///
    /// If the input has a block for each rank, the block of the result is the rank that it is for.
    /// Otherwise it is this rank.
    pub fn departs_with(&self, step: &Step) -> Option<Cell> {
        let cell = |to: Rank, chunk| {
            let has_blocks = self.collective.has_input_block_per_receiver();
            Cell { block: if has_blocks { to } else { self.rank }, chunk }
        };
        match *step {
            Step::Put { peer, cell: Cell { chunk, .. }, from: Source::Input } => {
                Some(cell(peer, chunk))
            }
            // One command adds the contributions of all ranks, also that of this one.
            Step::Reduce { cell: Cell { chunk, .. }, .. } => Some(cell(self.rank, chunk)),
            _ => None,
        }
    }

    /// Returns the numbers of all lanes of the plan, in order.
    pub fn lane_ids(&self) -> impl Iterator<Item = LaneId> + use<> {
        let lanes = u32::try_from(self.lanes.len()).expect("a plan has fewer than 2^32 lanes");
        (0..lanes).map(LaneId)
    }
}

/// Returns the number of inboxes of a plan whose JSON form does not state it.
fn single() -> u32 {
    1
}

/// Returns the number of sets of flags of plans with these numbers of outputs and inboxes.
pub(crate) const fn flag_sets(outputs: u32, inboxes: u32) -> u32 {
    if outputs > inboxes { outputs } else { inboxes }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.block, self.chunk)
    }
}

impl fmt::Display for LaneId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_lanes() -> Plan {
        let rank = Rank(3);
        let put = |chunk| Step::Put {
            peer: rank,
            cell: Cell { block: rank, chunk },
            from: Source::Input,
        };
        let lanes = [0, 1].map(|chunk| Lane { steps: vec![put(chunk)], ..Lane::default() }).into();
        Plan {
            collective: Collective::AllGather,
            algorithm: Algorithm::Direct,
            rank,
            ranks: 4,
            chunks: 2,
            in_place: false,
            outputs: 1,
            inboxes: 1,
            flags: FlagOrder::Prompt,
            lanes,
        }
    }

    #[test]
    fn lanes_that_fork_get_no_entry_and_no_exit() {
        let plan = two_lanes();
        for lane in plan.lane_ids() {
            assert_eq!(plan.closed_lane(lane, |_| false), plan.lanes[lane.index()].steps);
        }
    }

    #[test]
    fn lanes_that_do_not_fork_are_closed_by_flags() {
        let plan = two_lanes();
        let (peer, lane) = (plan.rank, LaneId(1));
        let go = Flag::Go { lane };
        let sent = Flag::Sent { lane };
        assert_eq!(
            plan.closed_lane(LaneId::HOME, |_| true),
            [Step::Signal { peer, flag: go }, plan.lanes[0].steps[0], Step::Wait { flag: sent }]
        );
        assert_eq!(
            plan.closed_lane(lane, |_| true),
            [Step::Wait { flag: go }, plan.lanes[1].steps[0], Step::Signal { peer, flag: sent }]
        );
    }
}
