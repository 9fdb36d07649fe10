//! Binds plans: cells become offsets, and flags become words.

use peerlane_hal::Rank;

use crate::layout::{FlagLayout, Layout, Span};
use crate::plan::{Flag, LaneId, Plan, Source, Step, Tier};
use crate::run::crossings::Crossings;
use crate::run::port::Bound;
use crate::window::{BufferId, FlagSpot, Spot};

/// One lane of a plan, bound to a layout.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) steps: Box<[Bound]>,
    /// The plan's step for each bound step, if steps are timed.
    pub(crate) origins: Option<Box<[Step]>>,
    /// The number of steps of the entry.
    pub(crate) entry: usize,
    /// The waits in order, for error texts.
    pub(crate) waits: Box<[Awaited]>,
}

/// A flag that this rank waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Awaited {
    pub(crate) flag: Flag,
    /// The tier of the lane that waits.
    pub(crate) tier: Tier,
    pub(crate) spot: FlagSpot,
}

/// A plan and what it is bound to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Binding<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) layout: &'a Layout,
    pub(crate) flags: FlagLayout,
    pub(crate) crossings: &'a Crossings,
    /// Whether programs keep the plan's steps.
    pub(crate) with_origins: bool,
}

impl Binding<'_> {
    /// Returns the program of one lane. Copies of no bytes are left out.
    pub(crate) fn bind(&self, lane: LaneId) -> Program {
        let closed = self.plan.closed_lane(lane, |_| true);
        let tier = self.plan.lanes[lane.index()].tier;
        let waits = closed.iter().filter_map(|step| match *step {
            Step::Wait { flag } => Some(Awaited { flag, tier, spot: self.awaited(flag) }),
            _ => None,
        });
        let entry = closed.iter().take_while(|step| is_entry(step)).count();
        let mut steps = Vec::with_capacity(closed.len());
        let mut origins = Vec::new();
        for step in &closed {
            self.step(step, tier, &mut steps);
            if self.with_origins {
                origins.resize(steps.len(), *step);
            }
        }
        let origins = self.with_origins.then(|| origins.into());
        Program { steps: steps.into(), origins, entry, waits: waits.collect() }
    }

    /// Appends the bound steps of a step: for a copy, one for each span of its cell.
    fn step(&self, step: &Step, tier: Tier, bound: &mut Vec<Bound>) {
        match *step {
            Step::Signal { peer, flag } => {
                let (crossing, word) =
                    (self.crossings.signalled(tier, flag), self.flags.word(flag));
                bound.push(Bound::Signal { peer, flag: FlagSpot { crossing, word } });
            }
            Step::Wait { flag } => bound.push(Bound::Wait { flag: self.awaited(flag) }),
            Step::Put { peer, cell, from } => {
                let spans = self.layout.spans(cell, self.source(self.plan.rank, from), peer);
                bound.extend(spans.map(|span| {
                    let (src, dst) = spots(from, self.plan.in_place, &span);
                    Bound::Put { peer, dst, src, bytes: span.bytes }
                }));
            }
            Step::Get { peer, cell, from } => {
                let spans = self.layout.spans(cell, self.source(peer, from), self.plan.rank);
                bound.extend(spans.map(|span| {
                    let (src, dst) = spots(from, self.plan.in_place, &span);
                    Bound::Get { peer, dst, src, bytes: span.bytes }
                }));
            }
        }
    }

    /// Returns the buffer that is read. In place, the rank's own block is in the output.
    fn source(&self, of: Rank, from: Source) -> (Rank, Source) {
        (of, if self.plan.in_place { Source::Output } else { from })
    }

    fn awaited(&self, flag: Flag) -> FlagSpot {
        FlagSpot { crossing: self.crossings.awaited(flag), word: self.flags.word(flag) }
    }
}

/// Returns the source and the destination of a span.
fn spots(from: Source, in_place: bool, span: &Span) -> (Spot, Spot) {
    let src = match from {
        Source::Input if !in_place => BufferId::Input(span.src.buffer),
        Source::Input | Source::Output => BufferId::Output(span.src.buffer),
    };
    let dst = Spot { buffer: BufferId::Output(span.dst.buffer), offset: span.dst.offset };
    (Spot { buffer: src, offset: span.src.offset }, dst)
}

/// Only lane 0 signals `go`, and only at its entry.
fn is_entry(step: &Step) -> bool {
    matches!(step, Step::Signal { flag: Flag::Go { .. }, .. })
}
