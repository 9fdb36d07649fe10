//! Which rank is on which node, as people write it.

use std::fmt;
use std::str::FromStr;

use peerlane::topology::Topology;

/// The nodes from the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Nodes {
    /// So many nodes, with the ranks spread as evenly as they can be: `2`.
    Count(usize),
    /// So many ranks on each node: `2x4`, `3+1+2`, or `2x8+4`.
    Sizes(Vec<usize>),
    /// The node of each rank: `0,0,1,1`.
    OfRank(Vec<u32>),
}

/// More ranks than that are a slip of the pen.
pub(crate) const RANKS_MAX: usize = 1 << 20;

/// How to write them, for error texts.
const EXAMPLES: &str = "write 2x4 for 2 nodes of 4 ranks, 3+1+2 for the ranks of each node, 0,0,1,1 \
                        for the node of each rank, or 2 for so many nodes";

impl FromStr for Nodes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains(',') {
            let node = |word: &str| number::<u32>(word, "number of a node", text);
            return Ok(Self::OfRank(text.split(',').map(node).collect::<Result<_, _>>()?));
        }
        if !text.contains(['x', '+']) {
            return positive(text, "nodes", text).map(Self::Count);
        }
        let mut sizes = Vec::new();
        for term in text.split('+') {
            let (nodes, ranks) = term.split_once('x').unwrap_or(("1", term));
            let (nodes, ranks) = (positive(nodes, "nodes", text)?, positive(ranks, "ranks", text)?);
            let total = sizes.iter().sum::<usize>().saturating_add(nodes.saturating_mul(ranks));
            if total > RANKS_MAX {
                return Err(format!("more than {RANKS_MAX} ranks in {text:?}"));
            }
            sizes.extend(std::iter::repeat_n(ranks, nodes));
        }
        Ok(Self::Sizes(sizes))
    }
}

fn positive(word: &str, what: &str, text: &str) -> Result<usize, String> {
    let wanted = format!("number of {what}");
    match number(word, &wanted, text)? {
        number @ 1..=RANKS_MAX => Ok(number),
        number => {
            Err(format!("the number of {what} is {number} in {text:?}, wanted 1 to {RANKS_MAX}"))
        }
    }
}

fn number<T: FromStr>(word: &str, what: &str, text: &str) -> Result<T, String> {
    let parsed = word.parse().ok().filter(|_| !word.starts_with('+'));
    parsed.ok_or_else(|| format!("{word:?} in {text:?} is no {what}; {EXAMPLES}"))
}

impl Nodes {
    /// The topology; `ranks` is how many there are, if that is known.
    ///
    /// # Errors
    /// A text that says what does not fit.
    pub(crate) fn topology(&self, ranks: Option<usize>) -> Result<Topology, String> {
        let sizes = match self {
            Self::OfRank(nodes) => return self.checked(nodes, ranks),
            Self::Sizes(sizes) => sizes.clone(),
            &Self::Count(nodes) => {
                let ranks = ranks.ok_or_else(|| format!("{nodes} nodes of how many ranks?"))?;
                if nodes > ranks {
                    return Err(format!("{ranks} ranks are too few for {nodes} nodes"));
                }
                (0..nodes).map(|node| ranks * (node + 1) / nodes - ranks * node / nodes).collect()
            }
        };
        let nodes = (0..).zip(&sizes).flat_map(|(node, &size)| std::iter::repeat_n(node, size));
        self.checked(&nodes.collect::<Vec<u32>>(), ranks)
    }

    fn checked(&self, nodes: &[u32], ranks: Option<usize>) -> Result<Topology, String> {
        match ranks {
            Some(ranks) if ranks != nodes.len() => {
                Err(format!("{self} are {} ranks, not {ranks}", nodes.len()))
            }
            _ => Topology::of_nodes(nodes).map_err(|error| error.to_string()),
        }
    }
}

impl fmt::Display for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn joined<T: ToString>(numbers: &[T], mark: &str) -> String {
            numbers.iter().map(T::to_string).collect::<Vec<_>>().join(mark)
        }
        match self {
            Self::Count(nodes) => write!(f, "{nodes}"),
            Self::Sizes(sizes) if sizes.len() == 1 => write!(f, "1x{}", sizes[0]),
            Self::Sizes(sizes) => f.write_str(&joined(sizes, "+")),
            Self::OfRank(nodes) => f.write_str(&joined(nodes, ",")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(text: &str, ranks: Option<usize>) -> Result<Vec<u32>, String> {
        let topology = text.parse::<Nodes>()?.topology(ranks)?;
        Ok(topology.node_of_rank().to_vec())
    }

    #[test]
    fn nodes_are_written_in_four_ways() {
        assert_eq!(nodes("2x3", None).unwrap(), [0, 0, 0, 1, 1, 1]);
        assert_eq!(nodes("3+1+2", Some(6)).unwrap(), [0, 0, 0, 1, 2, 2]);
        assert_eq!(nodes("2x2+1", None).unwrap(), [0, 0, 1, 1, 2]);
        assert_eq!(nodes("0,1,0,1", None).unwrap(), [0, 1, 0, 1]);
        assert_eq!(nodes("2", Some(5)).unwrap(), [0, 0, 1, 1, 1]);
        for text in ["2", "1x4", "3+1+2", "0,1,0"] {
            assert_eq!(text.parse::<Nodes>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let fault = |text: &str, ranks| nodes(text, ranks).unwrap_err();
        insta::assert_snapshot!(fault("two", None), @r#""two" in "two" is no number of nodes; write 2x4 for 2 nodes of 4 ranks, 3+1+2 for the ranks of each node, 0,0,1,1 for the node of each rank, or 2 for so many nodes"#);
        insta::assert_snapshot!(fault("2x", None), @r#""" in "2x" is no number of ranks; write 2x4 for 2 nodes of 4 ranks, 3+1+2 for the ranks of each node, 0,0,1,1 for the node of each rank, or 2 for so many nodes"#);
        insta::assert_snapshot!(fault("2x0", None), @r#"the number of ranks is 0 in "2x0", wanted 1 to 1048576"#);
        insta::assert_snapshot!(fault("0", None), @r#"the number of nodes is 0 in "0", wanted 1 to 1048576"#);
        insta::assert_snapshot!(fault("1048577x1", None), @r#"the number of nodes is 1048577 in "1048577x1", wanted 1 to 1048576"#);
        insta::assert_snapshot!(fault("1024x1024+1", None), @r#"more than 1048576 ranks in "1024x1024+1""#);
        insta::assert_snapshot!(fault("0,-1", None), @r#""-1" in "0,-1" is no number of a node; write 2x4 for 2 nodes of 4 ranks, 3+1+2 for the ranks of each node, 0,0,1,1 for the node of each rank, or 2 for so many nodes"#);
        insta::assert_snapshot!(fault("0,2", None), @"node_of_rank names node 2 but not node 1; expected nodes from 0 without a gap");
        insta::assert_snapshot!(fault("3+1", Some(5)), @"3+1 are 4 ranks, not 5");
        insta::assert_snapshot!(fault("3", Some(2)), @"2 ranks are too few for 3 nodes");
        insta::assert_snapshot!(fault("3", None), @"3 nodes of how many ranks?");
    }
}
