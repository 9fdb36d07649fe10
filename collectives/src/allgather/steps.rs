//! What the algorithms share: steps by their names, and who comes after whom.

use peerlane_hal::Rank;

use super::Task;
use crate::plan::{Cell, Flag, LaneId, Source, Step};

/// The lane between nodes, where the algorithm has one such lane.
pub(super) const BETWEEN: LaneId = LaneId(1);

/// The cells of one shard.
pub(super) fn cells(shard: Rank, parts: u32) -> impl Iterator<Item = Cell> + Clone {
    (0..parts).map(move |part| Cell { shard, part })
}

/// The own shard into the own output; nothing in place.
pub(super) fn own_copy(task: &Task<'_>) -> impl Iterator<Item = Step> + use<> {
    let &Task { rank, shape, .. } = task;
    cells(rank, shape.parts)
        .filter(move |_| !shape.in_place)
        .map(move |cell| put(rank, cell, Source::Input))
}

pub(super) fn put(peer: Rank, cell: Cell, from: Source) -> Step {
    Step::Put { peer, cell, from }
}

pub(super) fn signal(peer: Rank, flag: Flag) -> Step {
    Step::Signal { peer, flag }
}

pub(super) fn wait(flag: Flag) -> Step {
    Step::Wait { flag }
}

pub(super) fn arrived(cell: Cell, lane: LaneId) -> Flag {
    Flag::Arrived { cell, lane }
}

pub(super) fn ready(from: Rank, lane: LaneId) -> Flag {
    Flag::Ready { from, lane }
}

/// The others of `count` places in a circle, from the one after `at`: the order in which a rank
/// serves its peers, so that no two ranks serve the same peer at once.
pub(super) fn after(count: usize, at: usize) -> impl Iterator<Item = usize> + Clone {
    (at + 1..count).chain(0..at)
}

/// The others of `count` places in a circle, from the one before `at` backwards: the order in which
/// peers serve a rank.
pub(super) fn before(count: usize, at: usize) -> impl Iterator<Item = usize> + Clone {
    (0..at).rev().chain((at + 1..count).rev())
}
