//! Counts what the plans of all ranks copy and signal, without keeping them.
//!
//! Every copy into an output and every cell that must come there add and subtract a number that is
//! strewn over 64 bits; so do the signal and the wait of a flag. Unless all plans together copy what
//! must be copied, each cell once, and signal what they wait for, a sum differs from 0 in all but one
//! of 2^64 cases.

use peerlane_hal::Rank;

use super::fault::Fault;
use super::sample::mixed;
use crate::plan::{Cell, Flag, LaneId, Plan, Step};

/// The sums.
#[derive(Debug, Default)]
pub(super) struct Count {
    cells: u64,
    flags_left: u64,
    /// How many steps there are, entries and exits counted.
    pub(super) steps: usize,
    /// How many flags are waited for.
    pub(super) flags: usize,
}

impl Count {
    /// Adds the plan of one rank.
    pub(super) fn add(&mut self, plan: &Plan) {
        let me = plan.rank;
        let &Plan { collective, ranks, chunks, in_place, .. } = plan;
        for copied in collective.copied_cells(me, ranks, chunks, in_place) {
            self.cells = self.cells.wrapping_sub(cell(me, copied));
        }
        for lane in plan.lane_ids() {
            for step in plan.closed_lane(lane, |_| true) {
                self.step(me, step);
            }
        }
    }

    fn step(&mut self, me: Rank, step: Step) {
        self.steps += 1;
        match step {
            Step::Put { peer, cell: put, .. } => {
                self.cells = self.cells.wrapping_add(cell(peer, put))
            }
            Step::Get { cell: got, .. } => self.cells = self.cells.wrapping_add(cell(me, got)),
            Step::Signal { peer, flag: sent } => {
                self.flags_left = self.flags_left.wrapping_add(flag(peer, sent));
            }
            Step::Wait { flag: awaited } => {
                self.flags += 1;
                self.flags_left = self.flags_left.wrapping_sub(flag(me, awaited));
            }
        }
    }

    /// What the plans of all ranks have in common.
    pub(super) fn check(&self) -> Result<(), Fault> {
        let unequal = |what| Err(Fault::Uncounted { what });
        match (self.cells, self.flags_left) {
            (0, 0) => Ok(()),
            (0, _) => unequal("signals are not those that are waited for"),
            _ => unequal("copies are not one for each cell of each output"),
        }
    }
}

fn cell(rank: Rank, Cell { shard, chunk }: Cell) -> u64 {
    strewn([rank.0, shard.0, chunk, 0])
}

fn flag(reader: Rank, flag: Flag) -> u64 {
    let one = |kind, LaneId(lane), rank: Rank| [reader.0, rank.0, lane, kind];
    match flag {
        Flag::Arrived { cell: Cell { shard, chunk }, lane } => {
            strewn(one(1, lane, shard)).wrapping_add(strewn([reader.0, shard.0, chunk, lane.0 + 8]))
        }
        Flag::Ready { from, lane } => strewn(one(2, lane, from)),
        Flag::Taken { by, lane } => strewn(one(3, lane, by)),
        Flag::Go { lane } => strewn(one(4, lane, reader)),
        Flag::Sent { lane } => strewn(one(5, lane, reader)),
    }
}

fn strewn([a, b, c, d]: [u32; 4]) -> u64 {
    let first = mixed((u64::from(a) << 32 | u64::from(b)) ^ 0x9e37_79b9_7f4a_7c15);
    mixed(first ^ (u64::from(c) << 32 | u64::from(d)))
}
