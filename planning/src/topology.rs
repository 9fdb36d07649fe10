//! Describes which rank belongs to which node, and reads and writes such topologies as text.
//!
//! Nodes may have different numbers of ranks, and the ranks of a node need not be consecutive. A
//! topology contains no links and no rates; these belong to fabrics and to the cost model.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use peerlane_hal::wire::checksum;
use peerlane_hal::{ErrorKind, Rank};

use crate::error::{Error, quoted};

/// The maximum number of ranks of a topology that is read from text.
///
/// The limit keeps a typing error from exhausting the memory.
const RANKS_MAX: usize = 1 << 20;

/// Assigns every rank to a node.
///
/// Nodes are numbered from 0 without gaps, and each has at least one rank.
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

    /// Creates a topology in which rank r belongs to node `node_of_rank[r]`.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no rank, or a node below the
    /// largest has no rank.
    pub fn of_nodes(node_of_rank: &[u32]) -> Result<Self, Error> {
        check_ranks("number of ranks in node_of_rank", node_of_rank.len())?;
        check_no_gap(node_of_rank)?;

        // The numbers have no gap, so every node has a member.
        let nodes = node_of_rank.iter().max().map_or(0, |&last| last as usize + 1);
        let mut members = vec![Vec::new(); nodes];
        for (rank, &node) in Rank::all(node_of_rank.len()).zip(node_of_rank) {
            members[node as usize].push(rank);
        }

        Ok(Self { node_of_rank: node_of_rank.to_vec(), members })
    }

    /// Creates a topology in which ranks with equal keys, such as host names, share a node.
    ///
    /// Nodes are numbered in order of appearance.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no key.
    pub fn by_key<K: Ord>(key_of_rank: impl IntoIterator<Item = K>) -> Result<Self, Error> {
        let mut nodes = BTreeMap::new();
        let mut node_of_rank = Vec::new();
        for key in key_of_rank {
            let next = Rank::at(nodes.len()).0;
            node_of_rank.push(*nodes.entry(key).or_insert(next));
        }

        Self::of_nodes(&node_of_rank)
    }

    /// Creates a topology of `nodes` nodes with `ranks_per_node` consecutive ranks each.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if either is 0, or the ranks do not fit in
    /// 32 bits.
    pub fn even(nodes: usize, ranks_per_node: usize) -> Result<Self, Error> {
        check_ranks("nodes", nodes)?;
        check_ranks("ranks_per_node", ranks_per_node)?;
        check_ranks("nodes × ranks_per_node", nodes.saturating_mul(ranks_per_node))?;

        let node = |rank: Rank| rank.0 / Rank::at(ranks_per_node).0;
        Self::of_nodes(&Rank::all(nodes * ranks_per_node).map(node).collect::<Vec<_>>())
    }

    /// Creates a topology in which node n has the ranks `members[n]`.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if a rank is listed twice or left out, or a
    /// node has no rank.
    pub fn from_members<M: AsRef<[Rank]>>(members: &[M]) -> Result<Self, Error> {
        let ranks = members.iter().map(|node| node.as_ref().len()).sum();
        check_ranks("number of ranks in members", ranks)?;

        let invalid = |text| Err(Error::new(ErrorKind::InvalidArgument, text));

        // A rank that is too large is reported last, because the missing rank is not known before.
        let mut surplus = None;
        let mut node_of_rank: Vec<Option<u32>> = vec![None; ranks];
        for (node, members) in (0..).zip(members) {
            if members.as_ref().is_empty() {
                return invalid(format!("node {node} has no members, expected at least 1 rank"));
            }

            for &rank in members.as_ref() {
                match node_of_rank.get_mut(rank.index()) {
                    Some(Some(first)) => {
                        let text = format!(
                            "members name rank {rank} twice, on node {first} and on node {node}; \
                             expected each rank once"
                        );
                        return invalid(text);
                    }
                    Some(slot) => *slot = Some(node),
                    None => surplus = surplus.or(Some(rank)),
                }
            }
        }

        if let Some(rank) = surplus {
            // A surplus rank fills no entry, so at least one entry is still empty.
            let missing = node_of_rank.iter().position(Option::is_none).unwrap_or(0);
            return invalid(format!(
                "members name rank {rank} but not rank {missing}; expected each rank from 0 to {} \
                 once",
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

    /// Returns the number of the node to which `rank` belongs.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn node(&self, rank: Rank) -> u32 {
        self.node_of_rank[rank.index()]
    }

    /// Returns the node number of every rank, in rank order.
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

    /// Returns the position of `rank` among the [ranks](Self::members) of its node.
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
        let ranks = self.ranks();
        let nodes = self.nodes();
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

/// Checks that every node number from 0 to the largest has a rank.
fn check_no_gap(node_of_rank: &[u32]) -> Result<(), Error> {
    let mut nodes = node_of_rank.to_vec();
    nodes.sort_unstable();
    nodes.dedup();

    match (0u32..).zip(&nodes).find(|(expected, node)| expected != *node) {
        None => Ok(()),
        Some((expected, node)) => {
            let text = format!(
                "node_of_rank names node {node} but not node {expected}; expected node numbers \
                 from 0 without a gap"
            );
            Err(Error::new(ErrorKind::InvalidArgument, text))
        }
    }
}

impl Topology {
    /// Returns the topology as text, such as `2x4` for 2 nodes of 4 ranks.
    ///
    /// [`FromStr`] reads this notation. It is `3+1+2` for nodes of different sizes, or `0,1,0` for
    /// the node of every rank.
    pub fn notation(&self) -> String {
        // Sizes of nodes cannot tell which ranks belong to a node unless its ranks are consecutive.
        if !self.node_of_rank.is_sorted() {
            return join(self.node_of_rank.iter(), ",");
        }

        let size = self.members[0].len();
        if self.members.iter().all(|members| members.len() == size) {
            return format!("{}x{size}", self.nodes());
        }

        join(self.members.iter().map(Vec::len), "+")
    }

    /// Returns a hash of the topology that is equal in every version and on every machine.
    pub fn fingerprint(&self) -> u64 {
        let bytes: Vec<u8> = self.node_of_rank.iter().flat_map(|node| node.to_le_bytes()).collect();
        checksum(&bytes)
    }
}

impl FromStr for Topology {
    type Err = Error;

    /// Parses a topology such as `2x4`, in the notation that [`notation`](Self::notation) returns.
    ///
    /// A single number is the number of ranks on one node.
    fn from_str(text: &str) -> Result<Self, Error> {
        // Faults of the topology are reported together with the text that they come from.
        let with_text = |error: Error| invalid_text(text, &error.to_string());

        if let Some((nodes, ranks)) = text.split_once('x') {
            let nodes = parse_number(text, nodes)?;
            let ranks = parse_number(text, ranks)?;
            check_text_ranks(text, nodes.saturating_mul(ranks))?;
            return Self::even(nodes, ranks).map_err(with_text);
        }

        if text.contains(',') {
            let mut node_of_rank = Vec::new();
            for part in text.split(',') {
                // The limit keeps numbers within 32 bits. A node with that number is refused below,
                // because at most `RANKS_MAX` ranks leave a gap before it.
                let node = parse_number(text, part)?.min(RANKS_MAX);
                node_of_rank.push(Rank::at(node).0);
            }
            check_text_ranks(text, node_of_rank.len())?;
            return Self::of_nodes(&node_of_rank).map_err(with_text);
        }

        let parts = text.split('+').map(|part| parse_number(text, part));
        let sizes: Vec<usize> = parts.collect::<Result<_, Error>>()?;
        if let Some(node) = sizes.iter().position(|&size| size == 0) {
            return Err(invalid_text(text, &format!("node {node} has no ranks")));
        }

        // The sum is checked before there is a list with an entry for each rank.
        check_text_ranks(text, sizes.iter().fold(0, |sum, &size| sum.saturating_add(size)))?;
        let nodes = (0..).zip(&sizes).flat_map(|(node, &size)| std::iter::repeat_n(node, size));
        Self::of_nodes(&nodes.collect::<Vec<_>>()).map_err(with_text)
    }
}

fn invalid_text(text: &str, why: &str) -> Error {
    let text = format!(
        "invalid topology {}: {why}; expected a form such as 2x4 (2 nodes of 4 ranks), 3+1+2 \
         (ranks of each node) or 0,1,0 (node of each rank)",
        quoted(text)
    );
    Error::new(ErrorKind::InvalidArgument, text)
}

/// Parses `part`, which is a number in the topology `text`.
fn parse_number(text: &str, part: &str) -> Result<usize, Error> {
    let number = part.trim().parse();
    number.map_err(|_| invalid_text(text, &format!("{} is not a number", quoted(part))))
}

/// Checks that the topology `text` has at least one rank and at most [`RANKS_MAX`] ranks.
fn check_text_ranks(text: &str, ranks: usize) -> Result<(), Error> {
    match ranks {
        0 => Err(invalid_text(text, "the number of ranks is 0")),
        1..=RANKS_MAX => Ok(()),
        _ => Err(invalid_text(text, &format!("the number of ranks exceeds {RANKS_MAX}"))),
    }
}

fn join(parts: impl Iterator<Item = impl ToString>, separator: &str) -> String {
    parts.map(|part| part.to_string()).collect::<Vec<_>>().join(separator)
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
        assert_snapshot!(text(Topology::of_nodes(&[])), @"number of ranks in node_of_rank is 0, expected 1 to 4294967295");
        assert_snapshot!(text(Topology::of_nodes(&[0, 3, 0])), @"node_of_rank names node 3 but not node 1; expected node numbers from 0 without a gap");
        assert_snapshot!(text(Topology::even(0, 4)), @"nodes is 0, expected 1 to 4294967295");
        assert_snapshot!(text(Topology::even(2, 0)), @"ranks_per_node is 0, expected 1 to 4294967295");
        assert_snapshot!(text(Topology::even(1 << 20, 1 << 12)), @"nodes × ranks_per_node is 4294967296, expected 1 to 4294967295");
        let members = |members: &[&[u32]]| {
            let members: Vec<Vec<Rank>> =
                members.iter().map(|node| node.iter().copied().map(Rank).collect()).collect();
            text(Topology::from_members(&members))
        };
        assert_snapshot!(members(&[]), @"number of ranks in members is 0, expected 1 to 4294967295");
        assert_snapshot!(members(&[&[0, 1], &[]]), @"node 1 has no members, expected at least 1 rank");
        assert_snapshot!(members(&[&[0, 1], &[2, 1]]), @"members name rank 1 twice, on node 0 and on node 1; expected each rank once");
        assert_snapshot!(members(&[&[0, 3], &[2]]), @"members name rank 3 but not rank 1; expected each rank from 0 to 2 once");
        assert_snapshot!(text(Topology::of_nodes(&[u32::MAX])), @"node_of_rank names node 4294967295 but not node 0; expected node numbers from 0 without a gap");
    }

    #[test]
    fn every_notation_is_read_back() {
        let cases: [(&[u32], &str); 6] = [
            (&[0], "1x1"),
            (&[0, 0, 0], "1x3"),
            (&[0, 0, 1, 1], "2x2"),
            (&[0, 1, 2], "3x1"),
            (&[0, 0, 0, 1, 2, 2], "3+1+2"),
            (&[0, 1, 0], "0,1,0"),
        ];
        for (nodes, notation) in cases {
            let topology = Topology::of_nodes(nodes).unwrap();
            assert_eq!(topology.notation(), notation);
            assert_eq!(notation.parse::<Topology>().unwrap(), topology);
        }
        assert_eq!("4".parse::<Topology>().unwrap(), Topology::flat(4).unwrap());
        assert_eq!("0,0,1".parse::<Topology>().unwrap().notation(), "2+1");
    }

    #[test]
    fn what_is_no_topology_says_why() {
        let text = |text: &str| {
            let error = text.parse::<Topology>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            error.to_string().split_once("; expected a form").unwrap().0.to_owned()
        };
        assert_snapshot!(text(""), @r#"invalid topology "": "" is not a number"#);
        assert_snapshot!(text("2x"), @r#"invalid topology "2x": "" is not a number"#);
        assert_snapshot!(text("2x0"), @r#"invalid topology "2x0": the number of ranks is 0"#);
        assert_snapshot!(text(&"x".repeat(1000)), @r#"invalid topology "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"…: "" is not a number"#);
        assert_snapshot!(text("99999x99999"), @r#"invalid topology "99999x99999": the number of ranks exceeds 1048576"#);
        assert_snapshot!(text("3+0+2"), @r#"invalid topology "3+0+2": node 1 has no ranks"#);
        assert_snapshot!(text("3+a"), @r#"invalid topology "3+a": "a" is not a number"#);
        assert_snapshot!(text("0,2"), @r#"invalid topology "0,2": node_of_rank names node 2 but not node 1; expected node numbers from 0 without a gap"#);
        assert_snapshot!(text("-1"), @r#"invalid topology "-1": "-1" is not a number"#);
    }

    #[test]
    fn a_list_of_too_many_ranks_is_refused() {
        let error = "0,".repeat(RANKS_MAX) + "0";
        let error = error.parse::<Topology>().unwrap_err().to_string();
        assert!(error.contains("…: the number of ranks exceeds 1048576"), "{error}");
    }

    /// Calibrations on disk are keyed by the fingerprints of topologies, so these must never
    /// change.
    #[test]
    fn fingerprints_stay_as_they_are() {
        let of = |text: &str| text.parse::<Topology>().unwrap().fingerprint();
        assert_snapshot!(format!("{:016x} {:016x} {:016x}", of("1"), of("2x4"), of("3+1+2")), @"4d25767f9dce13f5 33c7634fe08a8885 8a8ef2380ee10574");
    }
}
