//! Plans: the schedule of one rank as data.
//!
//! A plan holds no address, no epoch and no vendor. Every flag is signalled once and waited for
//! once a start; whoever runs the plan gives flags their words and values, and cells their bytes.
//! A plan is written as [text](Plan#impl-Display-for-Plan), a line a step, and as JSON by serde.
//! Nothing here is checked; [`verify`](crate::verify::verify) does that for the plans of all ranks.

use std::fmt;

use peerlane_hal::Rank;
use serde::{Deserialize, Serialize};

use crate::collective::Collective;

mod algorithm;
mod order;
mod parse;
mod text;
mod tier;

pub use algorithm::Algorithm;
pub use order::FlagOrder;
pub use parse::ParseError;
pub(crate) use text::StepOf;
pub use tier::Tier;

/// The most parts that a shard is split into, inclusive: far beyond use, and few enough that sizes
/// computed from a peer's or a user's number stay small.
pub const PARTS_MAX: u32 = 1 << 16;

/// The most outputs that starts use in turn.
pub const OUTPUTS_MAX: u32 = 2;

/// One part of one shard; as text `2.0` for part 0 of the shard of rank 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cell {
    /// Whose shard.
    #[serde(with = "RankNumber")]
    pub shard: Rank,
    /// Which part of it, from 0.
    pub part: u32,
}

/// Where a put or a get reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The own shard of the rank that is read, as its caller gave it; in place, that is its place in
    /// the output.
    Input,
    /// The output of the rank that is read.
    Output,
}

/// The number of a lane of one rank, from 0.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct LaneId(pub u32);

impl LaneId {
    /// The lane that starts with the caller and ends for the caller.
    pub const HOME: Self = Self(0);

    /// The lane as an index into [`Plan::lanes`].
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a flag says. With the rank that reads it, this is its whole name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Flag {
    /// The buffers of `from` may be used: its output written, its own shard read.
    Ready {
        /// Whose buffers.
        #[serde(with = "RankNumber")]
        from: Rank,
        /// The lane of the reader that waits.
        lane: LaneId,
    },
    /// The cell is there in the reader's output.
    Arrived {
        /// Which.
        cell: Cell,
        /// The lane of the reader that waits. Two lanes that need one cell get a flag each.
        lane: LaneId,
    },
    /// `by` has got all that it gets from the reader, which may reuse its sources.
    Taken {
        /// Who got it.
        #[serde(with = "RankNumber")]
        by: Rank,
        /// The lane of the reader that waits.
        lane: LaneId,
    },
    /// The caller has started the plan: from lane 0 to `lane` of the same rank.
    Go {
        /// The lane that begins.
        lane: LaneId,
    },
    /// The sources of `lane` may be reused: from it to lane 0 of the same rank.
    Sent {
        /// The lane that ends.
        lane: LaneId,
    },
}

/// One step of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Step {
    /// Copy a cell into the output of `peer`, which may be this rank.
    Put {
        /// Whose output.
        #[serde(with = "RankNumber")]
        peer: Rank,
        /// Which cell.
        cell: Cell,
        /// Where it is read.
        from: Source,
    },
    /// Copy a cell of `peer`, which may be this rank, into the own output.
    Get {
        /// Whose memory is read.
        #[serde(with = "RankNumber")]
        peer: Rank,
        /// Which cell.
        cell: Cell,
        /// Where it is read.
        from: Source,
    },
    /// Signal a flag that `peer` reads, which may be this rank.
    Signal {
        /// The reader.
        #[serde(with = "RankNumber")]
        peer: Rank,
        /// Which flag.
        flag: Flag,
    },
    /// Hold the lane until a flag of this rank is signalled.
    Wait {
        /// Which flag.
        flag: Flag,
    },
}

/// The steps of one engine, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lane {
    /// The fabric that carries it; the same for this lane on all ranks.
    #[serde(default)]
    pub tier: Tier,
    /// The steps, without entry and exit.
    pub steps: Vec<Step>,
}

/// The schedule of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// The goal; plans written before there were several are all-gathers.
    #[serde(default)]
    pub collective: Collective,
    /// The algorithm that made it.
    pub algorithm: Algorithm,
    /// Whose it is.
    #[serde(with = "RankNumber")]
    pub rank: Rank,
    /// How many ranks take part.
    pub ranks: u32,
    /// How many parts each shard has, 1 to [`PARTS_MAX`].
    pub parts: u32,
    /// Whether the own shard lies in the output from the start.
    pub in_place: bool,
    /// How many outputs, and sets of flags, starts use in turn, 1 to [`OUTPUTS_MAX`]. With two, a
    /// start writes where the start before the last one did: who has entered the last start is done
    /// with that, and need not say `ready`.
    pub outputs: u32,
    /// Where the flags stand. Says what was meant; the steps are what counts.
    pub flags: FlagOrder,
    /// The lanes, as many on every rank; those in which a rank has nothing to do are empty. Lane 0 is
    /// [home](LaneId::HOME).
    pub lanes: Vec<Lane>,
}

impl Plan {
    /// The steps of `lane` with its entry and exit.
    ///
    /// A lane that can fork from the caller's stream and join it needs none, nor does an empty one.
    /// Every other lane, for which `flagged` is true, waits for [`Flag::Go`] first and signals
    /// [`Flag::Sent`] last; lane 0 holds the counterparts. `flagged` is not asked about lane 0.
    ///
    /// # Panics
    /// If the plan has no such lane.
    pub fn closed_lane(&self, lane: LaneId, flagged: impl Fn(LaneId) -> bool) -> Vec<Step> {
        let steps = &self.lanes[lane.index()].steps;
        let peer = self.rank;
        let flagged = |lane: LaneId| !self.lanes[lane.index()].steps.is_empty() && flagged(lane);
        if lane != LaneId::HOME {
            let flagged = flagged(lane);
            let entry = flagged.then_some(Step::Wait { flag: Flag::Go { lane } });
            let exit = flagged.then_some(Step::Signal { peer, flag: Flag::Sent { lane } });
            return entry.into_iter().chain(steps.iter().copied()).chain(exit).collect();
        }
        let others = || self.lane_ids().skip(1).filter(|&lane| flagged(lane));
        let entry = others().map(|lane| Step::Signal { peer, flag: Flag::Go { lane } });
        let exit = others().map(|lane| Step::Wait { flag: Flag::Sent { lane } });
        entry.chain(steps.iter().copied()).chain(exit).collect()
    }

    /// The numbers of the lanes, in order.
    pub fn lane_ids(&self) -> impl Iterator<Item = LaneId> + use<> {
        let lanes = u32::try_from(self.lanes.len()).expect("a plan has fewer than 2^32 lanes");
        (0..lanes).map(LaneId)
    }
}

/// How serde writes a [`Rank`], which knows no serde: as its number.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Rank")]
pub(crate) struct RankNumber(u32);

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.shard, self.part)
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
        let put =
            |part| Step::Put { peer: rank, cell: Cell { shard: rank, part }, from: Source::Input };
        let lanes = [0, 1].map(|part| Lane { steps: vec![put(part)], ..Lane::default() }).into();
        Plan {
            collective: Collective::AllGather,
            algorithm: Algorithm::Direct,
            rank,
            ranks: 4,
            parts: 2,
            in_place: false,
            outputs: 1,
            flags: FlagOrder::Prompt,
            lanes,
        }
    }

    #[test]
    fn lanes_that_fork_are_left_as_they_are() {
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
