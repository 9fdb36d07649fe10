//! Finds the waits after which a rank knows that a copy is complete.
//!
//! A signal to a peer publishes that its lane has completed all puts to that peer and all gets from it. A signal to the own
//! rank publishes that the lane has completed everything, which for puts to other ranks means only that their sources are
//! free. A lane that passes the wait for such a signal knows what it publishes. So for everything that a lane completes, the
//! first signal after it to each possible reader names a wait, and a lane with one of these waits in its past knows it.

use peerlane_hal::Rank;

use super::flags::Flags;
use super::program::Program;
use crate::plan::{LaneId, Step};

/// A wait: its lane and the index of the wait in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Waited {
    pub(super) rank: Rank,
    pub(super) lane: LaneId,
    pub(super) at: usize,
}

/// A set of waits, by number, as the publishing lane's rank numbers them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waits {
    first: u32,
    end: u32,
}

impl Waits {
    pub(super) fn indices(self) -> impl Iterator<Item = usize> {
        self.first as usize..self.end as usize
    }
}

/// A lane that gets from a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taking {
    /// The rank that gets.
    pub(super) by: Rank,
    /// The number of the representing lane.
    pub(super) lane: usize,
    pub(super) waits: Waits,
}

/// What the followed lanes publish.
#[derive(Debug)]
pub(super) struct Published {
    waits: Vec<Waited>,
    /// The waits of every copy of every lane; none for other steps.
    copies: Vec<Vec<Waits>>,
    /// The waits after which each lane no longer reads its sources.
    done: Vec<Waits>,
    /// Whether each lane is lane 0 or ends with a flag to it.
    joins: Vec<bool>,
    /// The lanes that get from each followed rank.
    takings: Vec<Vec<Taking>>,
}

impl Published {
    pub(super) fn new(program: &Program, flags: &Flags) -> Self {
        let mut published = Self {
            waits: Vec::new(),
            copies: Vec::with_capacity(program.lanes.len()),
            done: Vec::with_capacity(program.lanes.len()),
            joins: (0..program.lanes.len()).map(|lane| joins(program, flags, lane)).collect(),
            takings: vec![Vec::new(); program.lanes.len() / program.width],
        };
        let mut soonest =
            Soonest { program, at: vec![None; program.ranks as usize * program.width] };
        for lane in 0..program.lanes.len() {
            soonest.at.fill(None);
            published.add(program, flags, lane, &mut soonest);
        }
        published
    }

    /// Examines a lane from its end, so that everything after a copy is known at the copy.
    fn add(&mut self, program: &Program, flags: &Flags, lane: usize, soonest: &mut Soonest<'_>) {
        let me = program.lanes[lane].rank;
        let none = Waits { first: 0, end: 0 };
        let mut copies = vec![none; program.lanes[lane].steps.len()];
        let mut done = None;
        for (at, &step) in program.lanes[lane].steps.iter().enumerate().rev() {
            let (peer, other) = match step {
                Step::Wait { .. } => continue,
                Step::Signal { peer, .. } => {
                    let (reader, wait) = flags.of_step(lane, at).wait;
                    soonest.hear(peer, program.lanes[reader].lane, wait);
                    continue;
                }
                Step::Put { peer, .. } => (peer, peer),
                Step::Get { peer, .. } => (peer, me),
            };
            if done.is_none() {
                done = Some(self.push(soonest.waits([me, me])));
            }
            let waits = self.push(soonest.waits([peer, other]));
            if matches!(step, Step::Get { .. }) {
                self.take(program, lane, peer, waits);
            }
            copies[at] = waits;
        }
        self.copies.push(copies);
        let done = done.unwrap_or_else(|| self.push(soonest.waits([me, me])));
        self.done.push(done);
    }

    fn push(&mut self, waits: impl Iterator<Item = Waited>) -> Waits {
        let next = |waits: &[Waited]| u32::try_from(waits.len()).expect("fewer than 2^32 waits");
        let first = next(&self.waits);
        self.waits.extend(waits);
        Waits { first, end: next(&self.waits) }
    }

    /// Records the last get of a lane from a rank, which is the first in this direction.
    fn take(&mut self, program: &Program, lane: usize, peer: Rank, waits: Waits) {
        let symmetry = &program.symmetry;
        let by = symmetry.turned(symmetry.turn_back(peer), program.lanes[lane].rank);
        let takings = &mut self.takings[symmetry.number(peer)];
        let mut of_lane = takings.iter().rev().take_while(|taking| taking.lane == lane);
        if of_lane.all(|taking| taking.by != by) {
            takings.push(Taking { by, lane, waits });
        }
    }

    /// Returns the waits after which the copy at `at` of a followed lane is known to be complete.
    pub(super) fn copy(&self, (lane, at): (usize, usize)) -> Waits {
        self.copies[lane][at]
    }

    /// Returns the waits after which a followed lane no longer reads its sources.
    pub(super) fn done(&self, lane: usize) -> Waits {
        self.done[lane]
    }

    /// Returns whether a followed lane has ended when lane 0 of its rank has.
    pub(super) fn joins(&self, lane: usize) -> bool {
        self.joins[lane]
    }

    /// Returns the lanes that get from the followed rank `rank`.
    pub(super) fn takings(&self, program: &Program, rank: Rank) -> &[Taking] {
        &self.takings[program.symmetry.number(rank)]
    }

    pub(super) fn waits(&self, waits: Waits) -> impl Iterator<Item = Waited> + '_ {
        waits.indices().map(|index| self.waits[index])
    }

    pub(super) fn wait(&self, index: usize) -> Waited {
        self.waits[index]
    }
}

fn joins(program: &Program, flags: &Flags, lane: usize) -> bool {
    let closed = &program.lanes[lane];
    let Some((last, Step::Signal { peer, .. })) = closed.steps.iter().enumerate().next_back()
    else {
        return closed.lane == LaneId::HOME;
    };
    let (reader, _) = flags.of_step(lane, last).wait;
    closed.lane == LaneId::HOME
        || (*peer == closed.rank && program.lanes[reader].lane == LaneId::HOME)
}

/// The first waits of each lane of each rank for signals after the current step.
struct Soonest<'a> {
    program: &'a Program,
    at: Vec<Option<u32>>,
}

impl Soonest<'_> {
    fn hear(&mut self, rank: Rank, lane: LaneId, at: usize) {
        let soonest = &mut self.at[self.program.column(rank, lane)];
        let at = u32::try_from(at).expect("fewer than 2^32 steps");
        *soonest = Some(soonest.map_or(at, |soonest| soonest.min(at)));
    }

    /// Returns the waits of two ranks, or of one rank that is named twice.
    fn waits(&self, [first, second]: [Rank; 2]) -> impl Iterator<Item = Waited> + '_ {
        let second = (second != first).then_some(second);
        [Some(first), second].into_iter().flatten().flat_map(move |rank| {
            let columns = self.program.column(rank, LaneId::HOME)..;
            columns.take(self.program.width).filter_map(move |column| {
                let (rank, lane) = self.program.lane_of_column(column);
                self.at[column].map(|at| Waited { rank, lane, at: at as usize })
            })
        })
    }
}
