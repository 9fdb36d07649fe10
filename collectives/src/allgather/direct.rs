//! Direct: every rank puts its shard to every peer.
//!
//! One lane. A peer's `ready` says that its output may be overwritten; where two outputs are used in
//! turn, its arrivals of the start before say so already. There is no barrier at the end, because a
//! push reads only the rank's own source, and the end of the lane gives that back.
//! Peers are served in shifted order, so that no two ranks push to the same peer first. Nodes do
//! not matter: any topology is served, each pair of ranks over the fabric that links it.
//!
//! With batched flags the lane is a few groups: all `ready` signals and waits, all puts, all
//! `arrived` signals and waits. The own copy stands with the puts, so that no group is cut.

use peerlane_hal::Rank;

use super::Shape;
use crate::plan::{Cell, Flag, FlagOrder, Lane, LaneId, Source, Step};

/// The lanes of `rank`.
pub(super) fn lanes(rank: Rank, ranks: u32, shape: Shape) -> Vec<Lane> {
    let Shape { parts, in_place, outputs, flags } = shape;
    let says_ready = outputs == 1;
    let peers = || after(rank, ranks);
    let own_cells = || cells(rank, parts);
    let mut steps = Vec::new();
    if says_ready {
        steps.extend(peers().map(|peer| signal_ready(rank, peer)));
    }
    let own_copy = own_cells().filter(|_| !in_place).map(|cell| put(rank, cell));
    match flags {
        FlagOrder::Prompt => {
            steps.extend(own_copy);
            for peer in peers() {
                steps.extend(says_ready.then(|| wait_ready(peer)));
                steps.extend(
                    own_cells().flat_map(|cell| [put(peer, cell), signal_arrived(peer, cell)]),
                );
            }
        }
        FlagOrder::Batched => {
            steps.extend(peers().filter(|_| says_ready).map(wait_ready));
            steps.extend(own_copy);
            let to_peers = || peers().flat_map(|peer| own_cells().map(move |cell| (peer, cell)));
            steps.extend(to_peers().map(|(peer, cell)| put(peer, cell)));
            steps.extend(to_peers().map(|(peer, cell)| signal_arrived(peer, cell)));
        }
    }
    for peer in before(rank, ranks) {
        steps.extend(cells(peer, parts).map(|cell| Step::Wait { flag: arrived(cell) }));
    }
    vec![Lane { steps, ..Lane::default() }]
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

fn wait_ready(peer: Rank) -> Step {
    Step::Wait { flag: Flag::Ready { from: peer, lane: LaneId::HOME } }
}

fn put(peer: Rank, cell: Cell) -> Step {
    Step::Put { peer, cell, from: Source::Input }
}

fn signal_arrived(peer: Rank, cell: Cell) -> Step {
    Step::Signal { peer, flag: arrived(cell) }
}

fn arrived(cell: Cell) -> Flag {
    Flag::Arrived { cell, lane: LaneId::HOME }
}
