//! The critical path: from the end of the last rank back, each step to the one that let it begin.

use std::collections::BTreeMap;
use std::fmt;

use peerlane_hal::Rank;

use super::lane::NO_STEP;
use super::machine::Machine;
use super::program::{Place, Program};
use crate::error::Error;
use crate::plan::{LaneId, Step, StepOf};

/// One step of the critical path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Whose step.
    pub rank: Rank,
    /// In which lane.
    pub lane: LaneId,
    /// The step.
    pub step: Step,
    /// The end of the stage before, in picoseconds; of the first stage, 0.
    pub begin_ps: u64,
    /// The end of the step, in picoseconds.
    pub end_ps: u64,
}

impl Stage {
    /// The step as a line of the plan's text.
    pub fn text(&self) -> String {
        StepOf { rank: self.rank, step: self.step }.to_string()
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, lane, step, .. } = *self;
        write!(f, "rank {rank} lane {lane}: {}", StepOf { rank, step })
    }
}

/// A stage whose step is known by its place only.
#[derive(Clone, Copy, Debug)]
pub(super) struct Raw {
    pub(super) place: Place,
    begin: u64,
    end: u64,
}

impl Raw {
    pub(super) fn stage(&self, steps: &Steps) -> Stage {
        let Place { rank, lane, .. } = self.place;
        let step = steps.step(self.place);
        Stage { rank, lane, step, begin_ps: self.begin, end_ps: self.end }
    }
}

/// The path, in order of time.
pub(super) fn critical(machine: &Machine<'_>, program: &Program) -> Vec<Raw> {
    // Of several that end last, the first.
    let last = machine.lanes.iter().rev().max_by_key(|lane| lane.at);
    let mut step = last.map_or(NO_STEP, |lane| lane.cause);
    let mut path = Vec::new();
    while step != NO_STEP {
        let cause = machine.causes[step as usize];
        let begin = if cause == NO_STEP { 0 } else { machine.ends[cause as usize] };
        path.push(Raw { place: program.place(step), begin, end: machine.ends[step as usize] });
        step = cause;
    }
    path.reverse();
    path
}

/// Steps by their places.
#[derive(Debug, Default)]
pub(super) struct Steps(BTreeMap<Place, Step>);

impl Steps {
    /// Makes the plans of the ranks of `places`, one after the other.
    pub(super) fn of(
        places: impl Iterator<Item = Place>,
        closed: &mut impl FnMut(Rank) -> Result<Vec<Vec<Step>>, Error>,
    ) -> Result<Self, Error> {
        let mut steps = Self::default();
        steps.add(places, closed)?;
        Ok(steps)
    }

    /// Adds those of more places.
    pub(super) fn add(
        &mut self,
        places: impl Iterator<Item = Place>,
        closed: &mut impl FnMut(Rank) -> Result<Vec<Vec<Step>>, Error>,
    ) -> Result<(), Error> {
        let mut places: Vec<Place> = places.collect();
        places.sort_unstable();
        places.dedup();
        for of_rank in places.chunk_by(|a, b| a.rank == b.rank) {
            let lanes = closed(of_rank[0].rank)?;
            self.0.extend(
                of_rank.iter().map(|&place| (place, lanes[place.lane.index()][place.index])),
            );
        }
        Ok(())
    }

    /// The step at a place that was added.
    pub(super) fn step(&self, place: Place) -> Step {
        self.0[&place]
    }
}
