//! Direct: every rank puts its shard to every peer.
//!
//! One lane. A peer's `ready` says that its output may be overwritten; where two outputs are used in
//! turn, its arrivals of the start before say so already. There is no barrier at the end, because a push reads only the rank's own source, and the end of the lane gives that back.
//! Peers are served in shifted order, so that no two ranks push to the same peer first. Nodes do
//! not matter: any topology is served, each pair of ranks over the fabric that links it.

use peerlane_hal::Rank;

use crate::plan::{Cell, Flag, Lane, LaneId, Source, Step};

/// The lanes of `rank`.
pub(super) fn lanes(rank: Rank, ranks: u32, parts: u32, in_place: bool, outputs: u32) -> Vec<Lane> {
    let says_ready = outputs == 1;
    let mut steps = Vec::new();
    if says_ready {
        steps.extend(after(rank, ranks).map(|peer| signal_ready(rank, peer)));
    }
    if !in_place {
        steps.extend(cells(rank, parts).map(|cell| put(rank, cell)));
    }
    for peer in after(rank, ranks) {
        if says_ready {
            steps.push(Step::Wait { flag: Flag::Ready { from: peer, lane: LaneId::HOME } });
        }
        steps.extend(cells(rank, parts).flat_map(|cell| push(peer, cell)));
    }
    for peer in before(rank, ranks) {
        steps.extend(cells(peer, parts).map(|cell| Step::Wait { flag: Flag::Arrived { cell } }));
    }
    vec![Lane { steps }]
}

/// The other ranks, from the next one upwards: the order in which this rank serves them.
fn after(rank: Rank, ranks: u32) -> impl Iterator<Item = Rank> {
    (rank.0 + 1..ranks).chain(0..rank.0).map(Rank)
}

/// The other ranks, from the previous one downwards: the order in which they serve this rank.
fn before(rank: Rank, ranks: u32) -> impl Iterator<Item = Rank> {
    (0..rank.0).rev().chain((rank.0 + 1..ranks).rev()).map(Rank)
}

fn cells(shard: Rank, parts: u32) -> impl Iterator<Item = Cell> {
    (0..parts).map(move |part| Cell { shard, part })
}

fn signal_ready(rank: Rank, peer: Rank) -> Step {
    Step::Signal { peer, flag: Flag::Ready { from: rank, lane: LaneId::HOME } }
}

fn put(peer: Rank, cell: Cell) -> Step {
    Step::Put { peer, cell, from: Source::Input }
}

fn push(peer: Rank, cell: Cell) -> [Step; 2] {
    [put(peer, cell), Step::Signal { peer, flag: Flag::Arrived { cell } }]
}
