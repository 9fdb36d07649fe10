//! Which lane of a direct plan has which peers.

use peerlane_hal::Rank;

use super::Task;
use super::steps::{BETWEEN, after, before};
use crate::plan::{LaneId, Tier};

/// A lane and the peers that it reaches.
#[derive(Debug)]
pub(super) struct Circle {
    pub(super) lane: LaneId,
    pub(super) tier: Tier,
    /// In the order in which this rank serves them.
    pub(super) served: Vec<Rank>,
    /// In the order in which they serve this rank.
    pub(super) serving: Vec<Rank>,
}

/// One lane for all peers, or one for the own node and one for the others, which the network reaches.
pub(super) fn circles(task: &Task<'_>) -> Vec<Circle> {
    let &Task { topology, rank, .. } = task;
    let home = |served, serving| Circle { lane: LaneId::HOME, tier: Tier::Local, served, serving };
    if !task.has_network() {
        let (ranks, at) = (topology.ranks(), rank.index());
        let served = after(ranks, at).map(Rank::at).collect();
        return vec![home(served, before(ranks, at).map(Rank::at).collect())];
    }
    let (mates, at) = (topology.members(topology.node(rank)), topology.local_index(rank));
    let served = after(mates.len(), at).map(|mate| mates[mate]).collect();
    let serving = before(mates.len(), at).map(|mate| mates[mate]).collect();
    vec![home(served, serving), foreign(task)]
}

/// The ranks of other nodes, a node at a time. Inside a node each rank begins at its own local index,
/// so that the ranks of two nodes of one size meet in pairs.
fn foreign(task: &Task<'_>) -> Circle {
    let &Task { topology, rank, .. } = task;
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
    Circle { lane: BETWEEN, tier: Tier::Network, served, serving }
}
