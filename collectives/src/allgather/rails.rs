//! The rails of a hierarchical plan: where shards enter and leave a node.
//!
//! The shard of local index l enters node j at the rank of local index l mod L, of the L ranks of
//! node j. Nodes may be uneven: a small node has several rails end at one rank.

use peerlane_hal::Rank;

use super::Task;
use crate::topology::Topology;

/// The nodes, seen from one rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rails<'a> {
    topology: &'a Topology,
    node: usize,
    at: usize,
}

impl<'a> Rails<'a> {
    pub(super) fn new(task: &Task<'a>) -> Self {
        let &Task { topology, rank, .. } = task;
        let node = topology.node(rank) as usize;
        Self { topology, node, at: topology.local_index(rank) }
    }

    pub(super) fn nodes(&self) -> usize {
        self.topology.nodes()
    }

    /// The place of this rank in its node.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// The ranks of the own node.
    pub(super) fn mates(&self) -> &'a [Rank] {
        self.ahead(0)
    }

    /// The ranks of the node `by` nodes further on.
    pub(super) fn ahead(&self, by: usize) -> &'a [Rank] {
        self.topology.members(Rank::at((self.node + by) % self.nodes()).0)
    }

    /// The ranks of the node `by` nodes back, at most all round.
    pub(super) fn behind(&self, by: usize) -> &'a [Rank] {
        self.ahead(self.nodes() - by)
    }

    /// The shards from `by` nodes back that enter the own node at the mate of local index `at`.
    pub(super) fn entering(&self, by: usize, at: usize) -> impl Iterator<Item = Rank> + Clone {
        self.behind(by).iter().copied().skip(at).step_by(self.mates().len())
    }
}

/// The place of the rank at which the shard of local index `at` enters a node with these members.
pub(super) fn entry(members: &[Rank], at: usize) -> Rank {
    members[at % members.len()]
}
