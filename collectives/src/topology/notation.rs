//! Topologies as short text, and their fingerprints.

use std::str::FromStr;

use peerlane_hal::{ErrorKind, Rank};

use super::Topology;
use crate::error::Error;

/// The largest number of ranks in a text, so that a typing error does not exhaust memory.
const RANKS_MAX: usize = 1 << 24;

impl Topology {
    /// Returns the topology as [`FromStr`] reads it: `2x4` for 2 nodes of 4 ranks, `3+1+2` for nodes of different sizes, or
    /// `0,1,0` for the node of every rank.
    pub fn notation(&self) -> String {
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
        // FNV-1a, which any program can compute again.
        let bytes = self.node_of_rank.iter().flat_map(|node| node.to_le_bytes());
        bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    }
}

impl FromStr for Topology {
    type Err = Error;

    /// Reads what [`notation`](Self::notation) writes. A single number is that many ranks on one node.
    fn from_str(text: &str) -> Result<Self, Error> {
        let invalid = |why: String| {
            let text = format!(
                "topology is {text:?}: {why}; expected forms like 2x4 (nodes x ranks of each), 3+1+2 \
                 (ranks of each node) or 0,1,0 (node of each rank)"
            );
            Error::new(ErrorKind::InvalidArgument, text)
        };
        let number = |part: &str| {
            part.trim().parse::<usize>().map_err(|_| invalid(format!("{part:?} is no number")))
        };
        let few = |ranks: usize| match ranks {
            0 => Err(invalid("it has no rank".to_owned())),
            1..=RANKS_MAX => Ok(()),
            _ => Err(invalid(format!("it has more than {RANKS_MAX} ranks"))),
        };
        let why = |error: Error| invalid(error.to_string());
        if let Some((nodes, ranks)) = text.split_once('x') {
            let (nodes, ranks) = (number(nodes)?, number(ranks)?);
            few(nodes.saturating_mul(ranks))?;
            return Self::even(nodes, ranks).map_err(why);
        }
        if text.contains(',') {
            let node = |part: &str| Ok(Rank::at(number(part)?.min(RANKS_MAX)).0);
            let nodes: Vec<u32> = text.split(',').map(node).collect::<Result<_, Error>>()?;
            return Self::of_nodes(&nodes).map_err(why);
        }
        let sizes: Vec<usize> = text.split('+').map(number).collect::<Result<_, Error>>()?;
        if let Some(node) = sizes.iter().position(|&size| size == 0) {
            return Err(invalid(format!("node {node} has no rank")));
        }
        few(sizes.iter().fold(0, |sum, &size| sum.saturating_add(size)))?;
        let nodes = (0..).zip(&sizes).flat_map(|(node, &size)| std::iter::repeat_n(node, size));
        Self::of_nodes(&nodes.collect::<Vec<_>>()).map_err(why)
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
            error.to_string().split_once("; expected forms").unwrap().0.to_owned()
        };
        assert_snapshot!(text(""), @r#"topology is "": "" is no number"#);
        assert_snapshot!(text("2x"), @r#"topology is "2x": "" is no number"#);
        assert_snapshot!(text("2x0"), @r#"topology is "2x0": it has no rank"#);
        assert_snapshot!(text("99999x99999"), @r#"topology is "99999x99999": it has more than 16777216 ranks"#);
        assert_snapshot!(text("3+0+2"), @r#"topology is "3+0+2": node 1 has no rank"#);
        assert_snapshot!(text("3+a"), @r#"topology is "3+a": "a" is no number"#);
        assert_snapshot!(text("0,2"), @r#"topology is "0,2": node_of_rank names node 2 but not node 1; expected nodes from 0 without a gap"#);
        assert_snapshot!(text("-1"), @r#"topology is "-1": "-1" is no number"#);
    }

    /// Calibrations on disk are keyed by it.
    #[test]
    fn fingerprints_stay_as_they_are() {
        let of = |text: &str| text.parse::<Topology>().unwrap().fingerprint();
        assert_snapshot!(format!("{:016x} {:016x} {:016x}", of("1"), of("2x4"), of("3+1+2")), @"4d25767f9dce13f5 33c7634fe08a8885 8a8ef2380ee10574");
    }
}
