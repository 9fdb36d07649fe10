//! Binding a plan: cells become offsets, flags become words.

use peerlane_hal::Rank;

use crate::layout::{FlagLayout, Layout};
use crate::plan::{Flag, LaneId, Plan, Source, Step};
use crate::run::port::Bound;

/// One lane of a plan, bound to a layout.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) steps: Box<[Bound]>,
    /// The waits in order, for people.
    pub(crate) waits: Box<[Awaited]>,
}

/// A flag that this rank waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Awaited {
    pub(crate) flag: Flag,
    pub(crate) word: u64,
    /// The rank that signals it.
    pub(crate) writer: Rank,
}

impl Program {
    /// Binds `lane` of rank `me`'s plan among all ranks' `plans`; puts of no bytes vanish.
    pub(crate) fn bind(
        plans: &[Plan],
        me: Rank,
        lane: LaneId,
        layout: &Layout,
        flags: &FlagLayout,
    ) -> Self {
        let plan = &plans[me.index()];
        let closed = plan.closed_lane(lane, |_| true);
        let steps = closed.iter().filter_map(|step| bound(step, plan.in_place, layout, flags));
        let waits = closed.iter().filter_map(|step| match *step {
            Step::Wait { flag } => {
                Some(Awaited { flag, word: flags.word(flag), writer: writer(plans, me, flag) })
            }
            _ => None,
        });
        Self { steps: steps.collect(), waits: waits.collect() }
    }
}

fn bound(step: &Step, in_place: bool, layout: &Layout, flags: &FlagLayout) -> Option<Bound> {
    match *step {
        Step::Signal { peer, flag } => Some(Bound::Signal { peer, word: flags.word(flag) }),
        Step::Wait { flag } => Some(Bound::Wait { word: flags.word(flag) }),
        Step::Get { .. } => unimplemented!("gets are not bound yet"),
        Step::Put { peer, cell, from } => {
            let span = layout.cell(cell);
            // In place, the own shard lies in the output.
            let src_offset = match from {
                Source::Input if !in_place => span.input_offset,
                Source::Input | Source::Output => span.output_offset,
            };
            let (dst_offset, bytes) = (span.output_offset, span.bytes);
            let put = Bound::Put { peer, dst_offset, from, src_offset, bytes };
            (bytes > 0).then_some(put)
        }
    }
}

/// The rank that signals `flag` to `me`; a verified plan has exactly one.
fn writer(plans: &[Plan], me: Rank, wanted: Flag) -> Rank {
    let signals = |plan: &&Plan| {
        plan.lanes.iter().flat_map(|lane| &lane.steps).any(
            |step| matches!(step, Step::Signal { peer, flag } if *peer == me && *flag == wanted),
        )
    };
    // Entry and exit of lanes are not in the lanes: there the rank signals itself.
    plans.iter().find(signals).map_or(me, |plan| plan.rank)
}
