//! Every cell of every output is put exactly once in a start.
//!
//! That it is also known to be there when the caller gets the output is for the
//! [machine](super::machine) to prove.

use peerlane_hal::Rank;

use super::fault::Fault;
use super::program::Program;
use crate::plan::{Cell, Step};

/// Walks the puts in the order of outputs and cells, beside the cells that there must be. Nothing
/// is allocated by numbers of the plans: a missing cell ends the walk.
pub(super) fn check(program: &Program) -> Result<(), Fault> {
    let mut puts: Vec<(Rank, Cell, usize, usize)> = program
        .steps()
        .filter_map(|(lane, at, step)| match step {
            Step::Put { peer, cell, .. } => Some((peer, cell, lane, at)),
            Step::Get { cell, .. } => Some((program.lanes[lane].rank, cell, lane, at)),
            Step::Signal { .. } | Step::Wait { .. } => None,
        })
        .collect();
    puts.sort_unstable();
    check_in_place(program, &puts)?;
    for pair in puts.windows(2) {
        let [(peer, cell, lane, at), (next_peer, next_cell, next_lane, next_at)] = pair else {
            continue;
        };
        if (peer, cell) == (next_peer, next_cell) {
            let (first, second) = (program.place(*lane, *at), program.place(*next_lane, *next_at));
            return Err(Fault::PutTwice { first, second });
        }
    }
    let mut puts = puts.iter().map(|&(peer, cell, ..)| (peer, cell));
    match wanted(program).find(|&wanted| puts.next() != Some(wanted)) {
        Some((rank, cell)) => Err(Fault::NeverPut { rank, cell }),
        None => Ok(()),
    }
}

fn check_in_place(program: &Program, puts: &[(Rank, Cell, usize, usize)]) -> Result<(), Fault> {
    let own = puts.iter().find(|(peer, cell, ..)| program.in_place && cell.shard == *peer);
    own.map_or(Ok(()), |&(_, _, lane, at)| {
        Err(Fault::PutInPlace { place: program.place(lane, at) })
    })
}

/// The cells that must be put, output by output, in order.
fn wanted(program: &Program) -> impl Iterator<Item = (Rank, Cell)> {
    let in_place = program.in_place;
    (0..program.ranks).map(Rank).flat_map(move |rank| {
        let missing = program.cells().filter(move |cell| !(in_place && cell.shard == rank));
        missing.map(move |cell| (rank, cell))
    })
}
