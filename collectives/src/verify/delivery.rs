//! Checks that every cell of every output is copied exactly once in a start.
//!
//! The [walk](super::walk) proves that it has arrived when the caller gets the output.

use peerlane_hal::Rank;

use super::fault::Fault;
use super::program::Program;
use crate::plan::{Cell, Step};

/// The copies into the outputs of the followed ranks, in the order of cells.
#[derive(Debug)]
pub(super) struct Deliveries {
    of_rank: Vec<Vec<Delivery>>,
}

/// A copy into an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Delivery {
    pub(super) cell: Cell,
    /// The rank that copies.
    pub(super) rank: Rank,
    /// The number of the representing lane, and the index of the step in it.
    pub(super) step: (usize, usize),
}

impl Deliveries {
    /// Returns the copy of `cell` into the output of the followed rank `rank`, if there is one.
    pub(super) fn of(&self, program: &Program, rank: Rank, cell: Cell) -> Option<Delivery> {
        let deliveries = self.to(program, rank);
        let index = deliveries.binary_search_by_key(&cell, |delivery| delivery.cell);
        index.ok().map(|index| deliveries[index])
    }

    /// Returns all copies into the output of the followed rank `rank`.
    pub(super) fn to(&self, program: &Program, rank: Rank) -> &[Delivery] {
        &self.of_rank[program.symmetry.number(rank)]
    }
}

/// Compares the copies with the required cells of each output.
///
/// Nothing is allocated by the numbers in the plans; a missing cell ends the comparison.
pub(super) fn check(program: &Program) -> Result<Deliveries, Fault> {
    let symmetry = &program.symmetry;
    let mut of_rank: Vec<Vec<Delivery>> = vec![Vec::new(); program.lanes.len() / program.width];
    for (lane, at, step) in program.steps() {
        let me = program.lanes[lane].rank;
        let (target, cell) = match step {
            Step::Put { peer, cell, .. } => (peer, cell),
            Step::Get { cell, .. } => (me, cell),
            Step::Signal { .. } | Step::Wait { .. } => continue,
        };
        let turn = symmetry.turn_back(target);
        let (cell, rank) = (symmetry.turned_cell(turn, cell), symmetry.turned(turn, me));
        of_rank[symmetry.number(target)].push(Delivery { cell, rank, step: (lane, at) });
    }
    for ((rank, _), deliveries) in program.homes().zip(&mut of_rank) {
        deliveries.sort_unstable();
        check_output(program, rank, deliveries)?;
    }
    Ok(Deliveries { of_rank })
}

fn check_output(program: &Program, rank: Rank, deliveries: &[Delivery]) -> Result<(), Fault> {
    let place = |delivery: &Delivery| program.turned_place(delivery.rank, delivery.step);
    let is_there = |delivery: &&Delivery| program.is_there_from_the_start(rank, delivery.cell);
    if let Some(delivery) = deliveries.iter().find(is_there) {
        return Err(Fault::PutInPlace { place: place(delivery) });
    }
    let twice = deliveries.windows(2).find(|pair| pair[0].cell == pair[1].cell);
    if let Some([first, second]) = twice {
        return Err(Fault::PutTwice { first: place(first), second: place(second) });
    }
    if let Some(delivery) =
        deliveries.iter().find(|copy| !program.collective.is_provider(copy.cell.shard))
    {
        return Err(Fault::NotRequired { place: place(delivery), rank });
    }
    let &Program { collective, ranks, chunks, in_place, .. } = program;
    let mut seen = deliveries.iter().map(|delivery| delivery.cell);
    let mut required = collective.copied_cells(rank, ranks, chunks, in_place);
    match required.find(|&cell| seen.next() != Some(cell)) {
        Some(cell) => Err(Fault::NeverPut { rank, cell }),
        None => Ok(()),
    }
}
