//! Sums over ranks and nodes, so that the time of a prediction does not depend on the number of ranks.

use std::collections::BTreeMap;

use peerlane_hal::Rank;

use crate::topology::Topology;

/// Sums over ranks and nodes. All sums saturate.
#[derive(Clone, Debug)]
pub(crate) struct ClusterSums {
    pub(crate) ranks: u64,
    pub(crate) nodes: u64,
    /// All shards.
    pub(crate) total_bytes: u64,
    pub(crate) shard_bytes_max: u64,
    pub(crate) shard_bytes_min: u64,
    /// The number of nodes of each size, and the largest sum of shards of a node of that size.
    sizes: BTreeMap<u64, Size>,
    /// The bytes inside nodes if every shard goes to all other ranks of its node.
    pub(crate) inside_bytes: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Size {
    nodes: u64,
    shard_bytes_max: u64,
}

impl ClusterSums {
    /// Computes the sums; there must be one shard for each rank.
    pub(crate) fn new(topology: &Topology, shard_bytes: &[u64]) -> Self {
        let mut sizes = BTreeMap::<u64, Size>::new();
        let mut inside_bytes = 0u64;
        for node in 0..Rank::at(topology.nodes()).0 {
            let members = topology.members(node);
            let bytes = sum(members.iter().map(|rank| shard_bytes[rank.index()]));
            let ranks = members.len() as u64;
            inside_bytes = inside_bytes.saturating_add(bytes.saturating_mul(ranks - 1));
            let size = sizes.entry(ranks).or_default();
            size.nodes += 1;
            size.shard_bytes_max = size.shard_bytes_max.max(bytes);
        }
        Self {
            ranks: topology.ranks() as u64,
            nodes: topology.nodes() as u64,
            total_bytes: sum(shard_bytes.iter().copied()),
            shard_bytes_max: shard_bytes.iter().copied().max().unwrap_or(0),
            shard_bytes_min: shard_bytes.iter().copied().min().unwrap_or(0),
            sizes,
            inside_bytes,
        }
    }

    /// Returns the fewest and the most ranks of a node.
    pub(crate) fn node_ranks_min_max(&self) -> (u64, u64) {
        (self.node_ranks().next().unwrap_or(1), self.node_ranks().last().unwrap_or(1))
    }

    /// Returns the bytes of all ranks if each block goes once to every peer of its rank.
    pub(crate) fn every_block_once_to_each_peer(&self) -> u64 {
        self.total_bytes.saturating_mul(self.ranks - 1)
    }

    /// Returns all sizes of nodes, ascending.
    pub(crate) fn node_ranks(&self) -> impl Iterator<Item = u64> + '_ {
        self.sizes.keys().copied()
    }

    /// Returns the largest sum of shards of a node with so many ranks.
    pub(crate) fn node_bytes(&self, node_ranks: u64) -> u64 {
        self.sizes.get(&node_ranks).map_or(0, |size| size.shard_bytes_max)
    }

    /// Returns the largest number of shards of other nodes that enter a node of `node_ranks` at one rank.
    ///
    /// The shard of local index l enters at the rank of local index l mod `node_ranks`.
    pub(crate) fn entering(&self, node_ranks: u64) -> u64 {
        let all = self.sizes.iter().map(|(ranks, size)| ranks.div_ceil(node_ranks) * size.nodes);
        sum(all) - 1
    }

    /// Returns the largest number of shards that one node sends to one rank of a node of `node_ranks`.
    pub(crate) fn entering_from_one(&self, node_ranks: u64) -> u64 {
        self.sizes.keys().last().map_or(1, |most| most.div_ceil(node_ranks))
    }
}

pub(crate) fn sum(terms: impl Iterator<Item = u64>) -> u64 {
    terms.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uneven_nodes_are_counted() {
        let topology = Topology::of_nodes(&[0, 0, 0, 1, 2, 2]).unwrap();
        let sums = ClusterSums::new(&topology, &[1, 2, 3, 40, 5, 6]);
        assert_eq!((sums.ranks, sums.nodes, sums.total_bytes), (6, 3, 57));
        assert_eq!((sums.shard_bytes_max, sums.shard_bytes_min), (40, 1));
        assert_eq!(sums.node_ranks().collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!([1, 2, 3].map(|ranks| sums.node_bytes(ranks)), [40, 11, 6]);
        assert_eq!(sums.inside_bytes, 6 * 2 + 11);
        // A lone rank gets all 5 foreign shards, the first of two gets 2 + 1, the first of three 1 + 1.
        assert_eq!([1, 2, 3].map(|ranks| sums.entering(ranks)), [5, 3, 2]);
        assert_eq!([1, 2, 3].map(|ranks| sums.entering_from_one(ranks)), [3, 2, 1]);
    }

    #[test]
    fn sums_saturate() {
        let topology = Topology::flat(2).unwrap();
        assert_eq!(ClusterSums::new(&topology, &[u64::MAX, 7]).total_bytes, u64::MAX);
    }
}
