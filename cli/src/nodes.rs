//! Which rank is on which node, as people write it.

use std::str::FromStr;

use peerlane::topology::Topology;

/// The nodes from the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Nodes {
    /// So many nodes, with the ranks spread as evenly as they can be: `2`.
    Count(usize),
    /// All that there is to know: `2x4`, `3+1+2` or `0,0,1,1`.
    Each(Topology),
}

impl FromStr for Nodes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<usize>() {
            Ok(0) => Err("wanted at least one node".to_owned()),
            Ok(nodes) => Ok(Self::Count(nodes)),
            Err(_) => text.parse().map(Self::Each).map_err(|error: peerlane::Error| {
                format!("{error}; or a number of nodes for the ranks that there are")
            }),
        }
    }
}

impl Nodes {
    /// The topology of `ranks` ranks.
    ///
    /// # Errors
    /// A text that says what does not fit.
    pub(crate) fn topology(&self, ranks: usize) -> Result<Topology, String> {
        let nodes = match self {
            Self::Each(topology) if topology.ranks() == ranks => return Ok(topology.clone()),
            Self::Each(topology) => {
                return Err(format!("{} is {topology}, not {ranks}", topology.notation()));
            }
            &Self::Count(nodes) => nodes,
        };
        if nodes > ranks {
            return Err(format!("{nodes} nodes are too many for {ranks} ranks"));
        }
        // Node n begins at rank ⌈n · ranks / nodes⌉; sizes differ by one at most.
        let node = |rank: usize| rank as u64 * nodes as u64 / ranks as u64;
        let node_of_rank = (0..ranks).map(|rank| u32::try_from(node(rank)).unwrap_or(u32::MAX));
        Topology::of_nodes(&node_of_rank.collect::<Vec<_>>()).map_err(|error| error.to_string())
    }

    /// How many ranks there are, where the nodes say so.
    pub(crate) fn ranks(&self) -> Option<usize> {
        match self {
            Self::Count(_) => None,
            Self::Each(topology) => Some(topology.ranks()),
        }
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    fn notation(text: &str, ranks: usize) -> Result<String, String> {
        Ok(text.parse::<Nodes>()?.topology(ranks)?.notation())
    }

    #[test]
    fn a_number_of_nodes_shares_the_ranks() {
        let of = |text, ranks| notation(text, ranks).unwrap();
        assert_snapshot!(of("1", 4), @"1x4");
        assert_snapshot!(of("2", 5), @"3+2");
        assert_snapshot!(of("3", 8), @"3+3+2");
        assert_snapshot!(of("4", 4), @"4x1");
        assert_snapshot!(of("3+1", 4), @"3+1");
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let fault = |text, ranks| notation(text, ranks).unwrap_err();
        assert_snapshot!(fault("0", 4), @"wanted at least one node");
        assert_snapshot!(fault("3", 2), @"3 nodes are too many for 2 ranks");
        assert_snapshot!(fault("3+1", 5), @"3+1 is 4 ranks on 2 nodes, not 5");
        assert_snapshot!(fault("2y4", 8), @r#"topology is "2y4": "2y4" is no number; expected forms like 2x4 (nodes x ranks of each), 3+1+2 (ranks of each node) or 0,1,0 (node of each rank); or a number of nodes for the ranks that there are"#);
    }
}
