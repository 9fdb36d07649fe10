//! Which algorithm, and in how many parts, where the caller leaves that open: by predicted cost.
//!
//! Every rank decides by itself. What it decides by is equal on all ranks, or the fingerprint of the
//! operation tells where it is not.

use crate::allgather::Shape;
use crate::cost::{self, Links, Question};
use crate::error::Error;
use crate::layout::Layout;
use crate::plan::Algorithm;
use crate::topology::Topology;

/// What the caller says of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Method {
    pub(super) algorithm: Option<Algorithm>,
    pub(super) parts: Option<u32>,
    pub(super) links: Option<Links>,
}

/// What was decided, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Decision {
    pub(super) algorithm: Algorithm,
    pub(super) parts: u32,
    pub(super) why: String,
}

/// What a graph takes: what drives another lane beside it is slower than any plan of one lane.
const BESIDE_GRAPHS: &[(Algorithm, &str)] = &[
    (Algorithm::DoubleRing, "it has a lane that no graph records"),
    (Algorithm::Hierarchical, "it has a lane that no graph records"),
    (Algorithm::HierarchicalRing, "it has a lane that no graph records"),
];

impl Method {
    /// The algorithm and the parts. `shape` is what the plan must be but for its parts; `known` are
    /// the group's links, and whether somebody has measured them.
    ///
    /// # Errors
    /// As [`cost::choose`].
    pub(super) fn decide(
        &self,
        topology: &Topology,
        layout: &Layout,
        (shape, capturable): (Shape, bool),
        (known, measured): (&Links, bool),
    ) -> Result<Decision, Error> {
        if let (Some(algorithm), Some(parts)) = (self.algorithm, self.parts) {
            return Ok(Decision { algorithm, parts, why: "the caller says so".to_owned() });
        }
        let (links, measured) = match &self.links {
            Some(links) => (links, true),
            None => (known, measured),
        };
        let one_lane = capturable && !shape.tiers && self.algorithm.is_none();
        let shard_bytes: Vec<u64> = layout.shards().iter().collect();
        let choice = cost::choose(&Question {
            topology,
            shard_bytes: &shard_bytes,
            shape,
            links,
            measured,
            algorithm: self.algorithm,
            parts: self.parts,
            refused: if one_lane { BESIDE_GRAPHS } else { &[] },
        })?;
        let why = choice.explain();
        Ok(Decision { algorithm: choice.algorithm, parts: choice.parts, why })
    }
}

#[cfg(test)]
mod tests {
    use peerlane_hal::LinkKind;

    use super::*;

    fn decided(method: &Method, nodes: &[u32], shard_bytes: u64) -> (Algorithm, u32) {
        let topology = Topology::of_nodes(nodes).unwrap();
        let layout = Layout::new(&vec![shard_bytes; nodes.len()], 1).unwrap();
        let shape = Shape { tiers: topology.nodes() > 1, ..Shape::default() };
        let known = Links::of_kinds(LinkKind::NvLink, LinkKind::Rdma);
        let decided = method.decide(&topology, &layout, (shape, false), (&known, true)).unwrap();
        (decided.algorithm, decided.parts)
    }

    #[test]
    fn what_is_left_open_is_chosen_and_what_is_said_is_kept() {
        let open = Method::default();
        assert_eq!(decided(&open, &[0, 0], 64), (Algorithm::Direct, 1));
        let (algorithm, parts) = decided(&open, &[0, 0, 0, 0, 1, 1, 1, 1], 64 << 20);
        assert!(algorithm == Algorithm::Hierarchical && parts > 1, "{algorithm}, {parts}");
        let ring = Method { algorithm: Some(Algorithm::Ring), ..open.clone() };
        let (algorithm, parts) = decided(&ring, &[0; 4], 64 << 20);
        assert!(algorithm == Algorithm::Ring && parts > 1, "{algorithm}, {parts}");
        let both = Method { algorithm: Some(Algorithm::Ring), parts: Some(3), links: None };
        assert_eq!(decided(&both, &[0; 4], 64 << 20), (Algorithm::Ring, 3));
    }

    #[test]
    fn the_links_decide() {
        let mut links = Links::of_kinds(LinkKind::NvLink, LinkKind::Rdma);
        links.local.put_seconds = 1.0;
        let method = Method { links: Some(links), ..Method::default() };
        let (_, parts) =
            decided(&Method { algorithm: Some(Algorithm::Ring), ..method }, &[0; 4], 64 << 20);
        assert_eq!(parts, 1, "a put that takes a second is not cut");
    }

    #[test]
    fn a_graph_gets_a_plan_of_one_lane() {
        let topology = Topology::of_nodes(&[0, 0, 0, 0, 1, 1, 1, 1]).unwrap();
        let layout = Layout::new(&[64 << 20; 8], 1).unwrap();
        let known = Links::of_kinds(LinkKind::NvLink, LinkKind::Rdma);
        let decided = Method::default()
            .decide(&topology, &layout, (Shape::default(), true), (&known, true))
            .unwrap();
        assert!(decided.why.contains("no graph records"), "{}", decided.why);
        assert!(BESIDE_GRAPHS.iter().all(|(refused, _)| *refused != decided.algorithm));
    }
}
