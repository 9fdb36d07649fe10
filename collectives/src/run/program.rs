//! Binding a plan: cells become offsets, flags become words.

use crate::layout::{FlagLayout, Layout};
use crate::plan::{Flag, LaneId, Plan, Source, Step, Tier};
use crate::run::crossings::Crossings;
use crate::run::port::Bound;
use crate::window::{BufferId, FlagSpot, Spot};

/// One lane of a plan, bound to a layout.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) steps: Box<[Bound]>,
    /// How many of the steps are the entry.
    pub(crate) entry: usize,
    /// The waits in order, for people.
    pub(crate) waits: Box<[Awaited]>,
}

/// A flag that this rank waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Awaited {
    pub(crate) flag: Flag,
    /// Of the lane that waits.
    pub(crate) tier: Tier,
    pub(crate) spot: FlagSpot,
}

/// What binding needs beside the plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Binding<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) layout: &'a Layout,
    pub(crate) flags: FlagLayout,
    pub(crate) crossings: &'a Crossings,
}

impl Binding<'_> {
    /// The program of one lane; copies of no bytes vanish.
    pub(crate) fn bind(&self, lane: LaneId) -> Program {
        let closed = self.plan.closed_lane(lane, |_| true);
        let tier = self.plan.lanes[lane.index()].tier;
        let waits = closed.iter().filter_map(|step| match *step {
            Step::Wait { flag } => Some(Awaited { flag, tier, spot: self.awaited(flag) }),
            _ => None,
        });
        let entry = closed.iter().take_while(|step| is_entry(step)).count();
        Program {
            steps: closed.iter().filter_map(|step| self.step(step, tier)).collect(),
            entry,
            waits: waits.collect(),
        }
    }

    fn step(&self, step: &Step, tier: Tier) -> Option<Bound> {
        Some(match *step {
            Step::Signal { peer, flag } => {
                let (crossing, word) =
                    (self.crossings.signalled(tier, flag), self.flags.word(flag));
                Bound::Signal { peer, flag: FlagSpot { crossing, word } }
            }
            Step::Wait { flag } => Bound::Wait { flag: self.awaited(flag) },
            Step::Put { peer, cell, from } => {
                let span = self.layout.cell(cell);
                let dst = Spot { buffer: BufferId::OUTPUT, offset: span.output_offset };
                let src = self.source(from, span.input_offset, span.output_offset);
                (span.bytes > 0).then_some(Bound::Put { peer, dst, src, bytes: span.bytes })?
            }
            Step::Get { peer, cell, from } => {
                let span = self.layout.cell(cell);
                let dst = Spot { buffer: BufferId::OUTPUT, offset: span.output_offset };
                let src = self.source(from, span.input_offset, span.output_offset);
                (span.bytes > 0).then_some(Bound::Get { peer, dst, src, bytes: span.bytes })?
            }
        })
    }

    /// Where a cell is read. In place, the own shard lies in the output.
    fn source(&self, from: Source, input_offset: u64, output_offset: u64) -> Spot {
        match from {
            Source::Input if !self.plan.in_place => {
                Spot { buffer: BufferId::INPUT, offset: input_offset }
            }
            Source::Input | Source::Output => {
                Spot { buffer: BufferId::OUTPUT, offset: output_offset }
            }
        }
    }

    fn awaited(&self, flag: Flag) -> FlagSpot {
        FlagSpot { crossing: self.crossings.awaited(flag), word: self.flags.word(flag) }
    }
}

/// Only lane 0 signals `go`, and only at its entry.
fn is_entry(step: &Step) -> bool {
    matches!(step, Step::Signal { flag: Flag::Go { .. }, .. })
}
