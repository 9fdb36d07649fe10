//! Topologies: the node of every rank.
//!
//! Nodes may have different numbers of ranks, and the ranks of a node need not be consecutive. A topology contains no links
//! and no rates; these belong to fabrics and to the cost model.

use std::fmt;

use peerlane_hal::{ErrorKind, Rank};

use crate::error::Error;

mod notation;

/// The node of every rank. Nodes are numbered from 0 without gaps, and each has at least one rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Topology {
    node_of_rank: Vec<u32>,
    members: Vec<Vec<Rank>>,
}

impl Topology {
    /// Creates a topology of `ranks` ranks on one node.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if `ranks` is 0 or does not fit in 32 bits.
    pub fn flat(ranks: usize) -> Result<Self, Error> {
        check_ranks("ranks", ranks)?;
        Self::of_nodes(&vec![0; ranks])
    }

    /// Creates a topology with rank r on node `node_of_rank[r]`.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no rank, or a node below the largest has none.
    pub fn of_nodes(node_of_rank: &[u32]) -> Result<Self, Error> {
        check_ranks("length of node_of_rank", node_of_rank.len())?;
        check_no_gap(node_of_rank)?;
        let nodes = node_of_rank.iter().max().map_or(0, |&last| last as usize + 1);
        let mut members = vec![Vec::new(); nodes];
        for (rank, &node) in Rank::all(node_of_rank.len()).zip(node_of_rank) {
            members[node as usize].push(rank);
        }
        Ok(Self { node_of_rank: node_of_rank.to_vec(), members })
    }

    /// Creates a topology of `nodes` nodes with `ranks_per_node` consecutive ranks each.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if either is 0, or the ranks do not fit in 32 bits.
    pub fn even(nodes: usize, ranks_per_node: usize) -> Result<Self, Error> {
        check_ranks("nodes", nodes)?;
        check_ranks("ranks_per_node", ranks_per_node)?;
        check_ranks("nodes × ranks_per_node", nodes.saturating_mul(ranks_per_node))?;
        let node = |rank: Rank| rank.0 / Rank::at(ranks_per_node).0;
        Self::of_nodes(&Rank::all(nodes * ranks_per_node).map(node).collect::<Vec<_>>())
    }

    /// Creates a topology from the ranks of every node.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if a rank is named twice or left out, or a node has none.
    pub fn from_members<M: AsRef<[Rank]>>(members: &[M]) -> Result<Self, Error> {
        let invalid = |text| Err(Error::new(ErrorKind::InvalidArgument, text));
        let ranks = members.iter().map(|node| node.as_ref().len()).sum();
        check_ranks("number of ranks in members", ranks)?;
        let mut node_of_rank: Vec<Option<u32>> = vec![None; ranks];
        let mut surplus = None;
        for (node, members) in (0..).zip(members) {
            if members.as_ref().is_empty() {
                return invalid(format!("members of node {node} are none, expected at least one"));
            }
            for &rank in members.as_ref() {
                match node_of_rank.get_mut(rank.index()) {
                    Some(Some(first)) => {
                        let text = format!(
                            "members name rank {rank} twice, on node {first} and on node {node}"
                        );
                        return invalid(text);
                    }
                    Some(place) => *place = Some(node),
                    None => surplus = surplus.or(Some(rank)),
                }
            }
        }
        if let Some(rank) = surplus {
            let missing = node_of_rank.iter().position(Option::is_none).unwrap_or(0);
            return invalid(format!(
                "members leave rank {missing} out and name rank {rank}; expected each of 0 to {}",
                ranks - 1
            ));
        }
        Self::of_nodes(&node_of_rank.into_iter().flatten().collect::<Vec<_>>())
    }

    /// Returns the number of ranks, at least 1.
    pub fn ranks(&self) -> usize {
        self.node_of_rank.len()
    }

    /// Returns the number of nodes, at least 1.
    pub fn nodes(&self) -> usize {
        self.members.len()
    }

    /// Returns the node of `rank`.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn node(&self, rank: Rank) -> u32 {
        self.node_of_rank[rank.index()]
    }

    /// Returns the node of every rank, in rank order.
    pub fn node_of_rank(&self) -> &[u32] {
        &self.node_of_rank
    }

    /// Returns the ranks of `node`, in rank order.
    ///
    /// # Panics
    /// If there is no such node.
    pub fn members(&self, node: u32) -> &[Rank] {
        &self.members[node as usize]
    }

    /// Returns the index of `rank` among the [`members`](Self::members) of its node.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn local_index(&self, rank: Rank) -> usize {
        self.members(self.node(rank)).partition_point(|&member| member < rank)
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        let (ranks, nodes) = (self.ranks(), self.nodes());
        write!(f, "{ranks} rank{} on {nodes} node{}", plural(ranks), plural(nodes))
    }
}

fn check_ranks(field: &str, ranks: usize) -> Result<(), Error> {
    if ranks == 0 || u32::try_from(ranks).is_err() {
        let text = format!("{field} is {ranks}, expected 1 to {}", u32::MAX);
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(())
}

fn check_no_gap(node_of_rank: &[u32]) -> Result<(), Error> {
    let mut nodes = node_of_rank.to_vec();
    nodes.sort_unstable();
    nodes.dedup();
    match (0u32..).zip(&nodes).find(|(wanted, node)| wanted != *node) {
        None => Ok(()),
        Some((wanted, node)) => {
            let text = format!(
                "node_of_rank names node {node} but not node {wanted}; expected nodes from 0 without a gap"
            );
            Err(Error::new(ErrorKind::InvalidArgument, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    #[test]
    fn flat_is_one_node() {
        for ranks in 1..=9 {
            let topology = Topology::flat(ranks).unwrap();
            assert_eq!((topology.ranks(), topology.nodes()), (ranks, 1));
            assert!(topology.members(0).iter().copied().eq(Rank::all(ranks)));
        }
        assert_snapshot!(Topology::flat(1).unwrap(), @"1 rank on 1 node");
        assert_snapshot!(Topology::flat(4).unwrap(), @"4 ranks on 1 node");
    }

    #[test]
    fn uneven_and_interleaved_nodes_are_known() {
        let nodes = [0, 1, 0, 2, 1, 0];
        let topology = Topology::of_nodes(&nodes).unwrap();
        assert_snapshot!(topology, @"6 ranks on 3 nodes");
        assert_eq!(topology.node_of_rank(), nodes);
        for rank in Rank::all(nodes.len()) {
            let node = topology.node(rank);
            assert_eq!(topology.members(node)[topology.local_index(rank)], rank);
        }
        assert_eq!(topology.members(0), [Rank(0), Rank(2), Rank(5)]);
    }

    #[test]
    fn nodes_may_be_given_by_their_members() {
        let members = [vec![Rank(0), Rank(2)], vec![Rank(1)], vec![Rank(3), Rank(4)]];
        let topology = Topology::from_members(&members).unwrap();
        assert_eq!(topology.node_of_rank(), [0, 1, 0, 2, 2]);
        assert_eq!(Topology::even(2, 3).unwrap().node_of_rank(), [0, 0, 0, 1, 1, 1]);
    }

    #[test]
    fn impossible_topologies_are_named() {
        let text = |result: Result<Topology, Error>| {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            error.to_string()
        };
        assert_snapshot!(text(Topology::flat(0)), @"ranks is 0, expected 1 to 4294967295");
        assert_snapshot!(text(Topology::flat(1 << 40)), @"ranks is 1099511627776, expected 1 to 4294967295");
        assert_snapshot!(text(Topology::of_nodes(&[])), @"length of node_of_rank is 0, expected 1 to 4294967295");
        assert_snapshot!(text(Topology::of_nodes(&[0, 3, 0])), @"node_of_rank names node 3 but not node 1; expected nodes from 0 without a gap");
        assert_snapshot!(text(Topology::even(0, 4)), @"nodes is 0, expected 1 to 4294967295");
        assert_snapshot!(text(Topology::even(2, 0)), @"ranks_per_node is 0, expected 1 to 4294967295");
        assert_snapshot!(text(Topology::even(1 << 20, 1 << 12)), @"nodes × ranks_per_node is 4294967296, expected 1 to 4294967295");
        let members = |members: &[&[u32]]| {
            let members: Vec<Vec<Rank>> =
                members.iter().map(|node| node.iter().copied().map(Rank).collect()).collect();
            text(Topology::from_members(&members))
        };
        assert_snapshot!(members(&[]), @"number of ranks in members is 0, expected 1 to 4294967295");
        assert_snapshot!(members(&[&[0, 1], &[]]), @"members of node 1 are none, expected at least one");
        assert_snapshot!(members(&[&[0, 1], &[2, 1]]), @"members name rank 1 twice, on node 0 and on node 1");
        assert_snapshot!(members(&[&[0, 3], &[2]]), @"members leave rank 1 out and name rank 3; expected each of 0 to 2");
        assert_snapshot!(text(Topology::of_nodes(&[u32::MAX])), @"node_of_rank names node 4294967295 but not node 0; expected nodes from 0 without a gap");
    }
}
