//! The plans agree, and name only what there is.

use std::fmt::Display;

use peerlane_hal::Rank;

use super::fault::{Fault, Place, Position};
use crate::plan::{CHUNKS_MAX, Cell, Flag, LaneId, OUTPUTS_MAX, Plan, Source, Step, Tier};

/// Checks plans that stand for those of all `ranks` ranks, each the plan of the rank that `owners` has
/// in its place, and returns the first.
pub(super) fn check<'a>(
    plans: &'a [Plan],
    ranks: usize,
    owners: &[Rank],
) -> Result<&'a Plan, Fault> {
    let first = plans.first().ok_or(Fault::NoPlan)?;
    for (index, (plan, owner)) in plans.iter().zip(owners).enumerate() {
        agrees(index, "ranks", &u64::from(plan.ranks), &(ranks as u64))?;
        agrees(index, "rank", &plan.rank, owner)?;
        agrees(index, "collective", &plan.collective, &first.collective)?;
        agrees(index, "algorithm", &plan.algorithm, &first.algorithm)?;
        agrees(index, "chunks", &plan.chunks, &first.chunks)?;
        agrees(index, "in_place", &plan.in_place, &first.in_place)?;
        agrees(index, "outputs", &plan.outputs, &first.outputs)?;
        agrees(index, "flags", &plan.flags, &first.flags)?;
    }
    plans.iter().try_for_each(check_sizes)?;
    for (index, plan) in plans.iter().enumerate() {
        agrees(index, "number of lanes", &plan.lanes.len(), &first.lanes.len())?;
        agrees(index, "tier of lane 0", &plan.lanes[0].tier, &Tier::Local)?;
        for (lane, (seen, wanted)) in plan.lanes.iter().zip(&first.lanes).enumerate() {
            if seen.tier != wanted.tier {
                agrees(index, &format!("tier of lane {lane}"), &seen.tier, &wanted.tier)?;
            }
        }
    }
    plans.iter().try_for_each(check_plan)?;
    Ok(first)
}

fn agrees<T: PartialEq + Display>(
    index: usize,
    field: &str,
    seen: &T,
    wanted: &T,
) -> Result<(), Fault> {
    if seen == wanted {
        return Ok(());
    }
    Err(Fault::Disagrees {
        index,
        field: field.to_owned(),
        seen: seen.to_string(),
        wanted: wanted.to_string(),
    })
}

fn check_sizes(plan: &Plan) -> Result<(), Fault> {
    let &Plan { rank, chunks, in_place, outputs, .. } = plan;
    if !(1..=CHUNKS_MAX).contains(&chunks) {
        return Err(Fault::Chunks { rank, chunks });
    }
    if !(1..=OUTPUTS_MAX).contains(&outputs) || (in_place && outputs > 1) {
        return Err(Fault::Outputs { rank, outputs });
    }
    if let Err(text) = plan.collective.check(plan.ranks as usize, in_place) {
        return Err(Fault::Collective { rank, text });
    }
    if plan.lanes.is_empty() {
        return Err(Fault::NoLane { rank });
    }
    Ok(())
}

fn check_plan(plan: &Plan) -> Result<(), Fault> {
    for (lane, steps) in plan.lane_ids().zip(&plan.lanes) {
        for (at, &step) in steps.steps.iter().enumerate() {
            let place = Place { rank: plan.rank, lane, position: Position::Step(at + 1), step };
            Names { plan, place }.check()?;
        }
    }
    Ok(())
}

/// Checks the names in one step.
struct Names<'a> {
    plan: &'a Plan,
    place: Place,
}

impl Names<'_> {
    fn check(&self) -> Result<(), Fault> {
        let me = self.place.rank;
        match self.place.step {
            Step::Put { peer, cell, from } => {
                self.rank(peer)?;
                self.cell(cell)?;
                self.source(from)?;
                let there = from == Source::Output || cell.shard == me;
                self.there(there, || {
                    (format!("cell {cell} of the input"), format!("a cell of shard {me}"))
                })
            }
            Step::Get { peer, cell, from } => {
                self.rank(peer)?;
                self.cell(cell)?;
                self.source(from)?;
                let there = from == Source::Output || cell.shard == peer;
                self.there(there, || {
                    (format!("cell {cell} of the input"), format!("a cell of shard {peer}"))
                })
            }
            Step::Signal { peer, flag } => {
                self.rank(peer)?;
                self.flag(peer, flag)
            }
            Step::Wait { flag } => self.flag(me, flag),
        }
    }

    fn rank(&self, rank: Rank) -> Result<(), Fault> {
        let ranks = self.plan.ranks as usize;
        self.there(rank.index() < ranks, || {
            (format!("rank {rank}"), format!("a rank below {ranks}"))
        })
    }

    fn cell(&self, cell: Cell) -> Result<(), Fault> {
        self.rank(cell.shard)?;
        let chunks = self.plan.chunks;
        self.there(cell.chunk < chunks, || {
            (format!("chunk {}", cell.chunk), format!("a chunk below {chunks}"))
        })
    }

    /// An output may be read only if the other outputs need the same blocks.
    fn source(&self, from: Source) -> Result<(), Fault> {
        match from {
            Source::Output if !self.plan.collective.has_equal_outputs() => {
                Err(Fault::OtherBlock { place: self.place, collective: self.plan.collective })
            }
            _ => Ok(()),
        }
    }

    fn flag(&self, reader: Rank, flag: Flag) -> Result<(), Fault> {
        match flag {
            Flag::Ready { from: rank, lane } | Flag::Taken { by: rank, lane } => {
                self.rank(rank)?;
                self.lane(reader, lane)
            }
            Flag::Arrived { cell, lane } => {
                self.cell(cell)?;
                self.lane(reader, lane)
            }
            Flag::Go { .. } | Flag::Sent { .. } => Err(Fault::Reserved { place: self.place }),
        }
    }

    fn lane(&self, rank: Rank, lane: LaneId) -> Result<(), Fault> {
        let lanes = self.plan.lanes.len();
        self.there(lane.index() < lanes, || {
            (format!("lane {lane} of rank {rank}"), format!("a lane below {lanes}"))
        })
    }

    fn there(&self, there: bool, say: impl FnOnce() -> (String, String)) -> Result<(), Fault> {
        if there {
            return Ok(());
        }
        let (what, wanted) = say();
        Err(Fault::Unknown { place: self.place, what, wanted })
    }
}
