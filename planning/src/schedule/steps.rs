//! Creates the steps of plans, and chooses the order in which a rank serves its peers.

use peerlane_hal::Rank;

use super::{PlanRequest, Shape};
use crate::plan::{Cell, Flag, FlagOrder, LaneId, Source, Step, Tier};

pub(super) const NETWORK_LANE: LaneId = LaneId(1);

pub(super) fn cells(block: Rank, chunks: u32) -> impl Iterator<Item = Cell> + Clone {
    (0..chunks).map(move |chunk| Cell { block, chunk })
}

/// Returns steps that put the rank's own block into its output, or no steps if none are needed.
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

/// Returns steps that put each cell to its peer, and signal its arrival.
///
/// Depending on `flags`, each put is followed by its signal, or all puts come before all signals.
pub(super) fn announced_puts(
    flags: FlagOrder,
    puts: impl Iterator<Item = (Rank, Cell)> + Clone,
    from: Source,
    flag: impl Fn(Cell) -> Flag,
) -> Vec<Step> {
    let signals = puts.clone().map(|(peer, cell)| signal(peer, flag(cell)));
    let puts = puts.map(|(peer, cell)| put(peer, cell, from));

    match flags.is_batched() {
        false => puts.zip(signals).flat_map(|(put, flag)| [put, flag]).collect(),
        true => puts.chain(signals).collect(),
    }
}

pub(super) fn arrived(cell: Cell, lane: LaneId) -> Flag {
    Flag::Arrived { cell, lane }
}

/// Returns the flag that announces the contribution `cell` to lane 0 of its receiver.
pub(super) fn contributed(cell: Cell) -> Flag {
    Flag::Contributed { cell, lane: LaneId::HOME }
}

/// Returns the steps that add the contributions to the chunk `cell`, in the order that the
/// collective states.
pub(super) fn reduce(request: &PlanRequest<'_>, cell: Cell) -> impl Iterator<Item = Step> + use<> {
    let &PlanRequest { topology, rank, shape: Shape { collective, in_place, .. } } = request;
    let ranks = Rank::at(topology.ranks()).0;

    collective.additions(rank, ranks, in_place).map(move |from| Step::Reduce { cell, from })
}

pub(super) fn ready(from: Rank, lane: LaneId) -> Flag {
    Flag::Ready { from, lane }
}

/// Returns the flag that `from` signals when its output may be overwritten, or `None` if no flag is
/// needed.
///
/// The rank `from` signals the same flag. With two alternating outputs, the chunks that arrived in
/// the last start can show that the other output is free: a rank that has a block of every rank in
/// the last start knows that all of them have entered that start, so the output before it is free.
/// Otherwise a flag of the last start says so.
pub(super) fn writable(request: &PlanRequest<'_>, from: Rank, lane: LaneId) -> Option<Flag> {
    match request.shape {
        Shape { outputs: 1, .. } => Some(ready(from, lane)),
        Shape { collective, .. } if collective.everyone_hears_from_everyone() => None,
        _ => Some(Flag::Free { from, lane }),
    }
}

/// Returns the flag that `from` signals when contributions may be put into its inbox, or `None` if
/// no flag is needed.
///
/// The rank `from` signals the same flag. Several outputs have an inbox each, so the flag is that
/// for writing to the output. With two alternating inboxes and one output, the chunks that arrived
/// in the last start can show that the other inbox has been read, as they can for outputs.
/// Otherwise a flag of the last start says so.
pub(super) fn inbox_writable(request: &PlanRequest<'_>, from: Rank, lane: LaneId) -> Option<Flag> {
    let Shape { collective, inboxes, .. } = request.shape;
    match inboxes > 1 {
        true if collective.everyone_hears_from_everyone() => None,
        true => Some(Flag::Free { from, lane }),
        false => writable(request, from, lane),
    }
}

/// Returns the positions of all other ranks, in the order in which the rank at position `at` serves
/// them.
///
/// The order is cyclic from the next position on, so that no two ranks serve the same peer at once.
pub(super) fn after(count: usize, at: usize) -> impl Iterator<Item = usize> + Clone {
    (at + 1..count).chain(0..at)
}

/// Returns the positions of all other ranks, in the order in which they serve the rank at position
/// `at`.
///
/// As each of them serves in the order of [`after`], this order is cyclic and backwards from the
/// position before `at`.
pub(super) fn before(count: usize, at: usize) -> impl Iterator<Item = usize> + Clone {
    (0..at).rev().chain((at + 1..count).rev())
}

/// The peers that one lane of a rank exchanges data with, in order.
#[derive(Debug)]
pub(super) struct PeerLane {
    pub(super) lane: LaneId,
    pub(super) tier: Tier,
    /// The peers that the rank puts to, or gets from, in this order.
    pub(super) served: Vec<Rank>,
    /// The peers that put to the rank, or get from it, in the expected order.
    pub(super) serving: Vec<Rank>,
}

/// Returns the lanes of a rank with their peers, including a network lane if there is a network.
///
/// Without a network, lane 0 reaches all peers; otherwise it reaches those of the rank's node.
pub(super) fn peer_lanes(request: &PlanRequest<'_>) -> Vec<PeerLane> {
    let &PlanRequest { topology, rank, .. } = request;
    let home =
        |served, serving| PeerLane { lane: LaneId::HOME, tier: Tier::Local, served, serving };

    if !request.has_network() {
        let ranks = topology.ranks();
        let at = rank.index();
        let served = after(ranks, at).map(Rank::at).collect();
        let serving = before(ranks, at).map(Rank::at).collect();
        return vec![home(served, serving)];
    }

    let mates = topology.members(topology.node(rank));
    let at = topology.local_index(rank);
    let served = after(mates.len(), at).map(|mate| mates[mate]).collect();
    let serving = before(mates.len(), at).map(|mate| mates[mate]).collect();
    vec![home(served, serving), network_lane(request)]
}

/// Returns the lane that exchanges data with the ranks of all other nodes.
///
/// In each node a rank begins with the peer of its own local index, so that the ranks of two nodes
/// of equal size meet in pairs.
fn network_lane(request: &PlanRequest<'_>) -> PeerLane {
    let &PlanRequest { topology, rank, .. } = request;
    let nodes = topology.nodes();
    let node = topology.node(rank) as usize;
    let at = topology.local_index(rank);

    let mut served = Vec::new();
    for other in after(nodes, node) {
        let members = topology.members(Rank::at(other).0);
        served.extend((0..members.len()).map(|by| members[(at + by) % members.len()]));
    }

    let mut serving = Vec::new();
    for other in before(nodes, node) {
        let members = topology.members(Rank::at(other).0);
        let count = members.len();
        // The member of local index `at - by` serves this rank after `by` others. In a smaller
        // node, local indices count modulo its number of ranks; adding `count` avoids an underflow.
        serving.extend((0..count).map(|by| members[(at % count + count - by) % count]));
    }

    PeerLane { lane: NETWORK_LANE, tier: Tier::Network, served, serving }
}
