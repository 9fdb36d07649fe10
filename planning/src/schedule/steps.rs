//! Creates the steps of plans, and chooses the order in which a rank serves its peers.

use peerlane_hal::Rank;

use super::{PlanRequest, Shape};
use crate::plan::{Cell, Flag, LaneId, Source, Step, Tier};

pub(super) const NETWORK_LANE: LaneId = LaneId(1);

pub(super) fn cells(block: Rank, chunks: u32) -> impl Iterator<Item = Cell> + Clone {
    (0..chunks).map(move |chunk| Cell { block, chunk })
}

pub(super) fn self_copy(request: &PlanRequest<'_>) -> impl Iterator<Item = Step> + use<> {
    let &PlanRequest { rank, shape, .. } = request;
    let is_copied = shape.collective.requires(rank, rank) && !shape.in_place;
    cells(rank, shape.chunks)
        .filter(move |_| is_copied)
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

pub(super) fn contributed(cell: Cell) -> Flag {
    Flag::Contributed { cell, lane: LaneId::HOME }
}

/// Adds the contributions of all ranks to one chunk of a rank's own block, in rank order. In place, its own contribution is in the
/// chunk, so it comes first.
pub(super) fn reduce(request: &PlanRequest<'_>, cell: Cell) -> impl Iterator<Item = Step> + use<> {
    let &PlanRequest { topology, rank, shape } = request;
    let first = shape.in_place.then_some(rank);
    let others = Rank::all(topology.ranks()).filter(move |from| Some(*from) != first);
    first.into_iter().chain(others).map(move |from| Step::Reduce { cell, from })
}

pub(super) fn ready(from: Rank, lane: LaneId) -> Flag {
    Flag::Ready { from, lane }
}

/// With two alternating outputs, the chunks that arrived in the last run can show that the other output is
/// free. A rank that has a block of every rank in the last start knows that all of them have entered that
/// start, so the output before it is free. Otherwise a flag of the last start says so.
pub(super) fn writable(request: &PlanRequest<'_>, from: Rank, lane: LaneId) -> Option<Flag> {
    match request.shape {
        Shape { outputs: 1, .. } => Some(ready(from, lane)),
        Shape { collective, .. } if collective.everyone_hears_from_everyone() => None,
        _ => Some(Flag::Free { from, lane }),
    }
}

/// A rank serves its peers in cyclic order from the next rank on, so that no two ranks serve the same peer at once.
pub(super) fn after(count: usize, at: usize) -> impl Iterator<Item = usize> + Clone {
    (at + 1..count).chain(0..at)
}

/// Peers serve a rank in cyclic order, backwards from the rank before it.
pub(super) fn before(count: usize, at: usize) -> impl Iterator<Item = usize> + Clone {
    (0..at).rev().chain((at + 1..count).rev())
}

#[derive(Debug)]
pub(super) struct PeerLane {
    pub(super) lane: LaneId,
    pub(super) tier: Tier,
    pub(super) served: Vec<Rank>,
    pub(super) serving: Vec<Rank>,
}

pub(super) fn peer_lanes(request: &PlanRequest<'_>) -> Vec<PeerLane> {
    let &PlanRequest { topology, rank, .. } = request;
    let home =
        |served, serving| PeerLane { lane: LaneId::HOME, tier: Tier::Local, served, serving };
    if !request.has_network() {
        let (ranks, at) = (topology.ranks(), rank.index());
        let served = after(ranks, at).map(Rank::at).collect();
        return vec![home(served, before(ranks, at).map(Rank::at).collect())];
    }
    let (mates, at) = (topology.members(topology.node(rank)), topology.local_index(rank));
    let served = after(mates.len(), at).map(|mate| mates[mate]).collect();
    let serving = before(mates.len(), at).map(|mate| mates[mate]).collect();
    vec![home(served, serving), network_lane(request)]
}

/// In each node a rank begins with the peer of its own local index, so that the ranks of two nodes of one size meet in
/// pairs.
fn network_lane(request: &PlanRequest<'_>) -> PeerLane {
    let &PlanRequest { topology, rank, .. } = request;
    let (nodes, node) = (topology.nodes(), topology.node(rank) as usize);
    let at = topology.local_index(rank);
    let members = |node: usize| topology.members(Rank::at(node).0);
    let served = after(nodes, node).flat_map(|node| {
        let members = members(node);
        (0..members.len()).map(move |by| members[(at + by) % members.len()])
    });
    let serving = before(nodes, node).flat_map(|node| {
        let members = members(node);
        let count = members.len();
        (0..count).map(move |by| members[(at % count + count - by) % count])
    });
    let (served, serving) = (served.collect(), serving.collect());
    PeerLane { lane: NETWORK_LANE, tier: Tier::Network, served, serving }
}
