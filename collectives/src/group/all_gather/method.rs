//! Which algorithm, and in how many parts, where the caller leaves that open: by predicted cost.
//!
//! Every rank decides by itself. What it decides by is equal on all ranks, or the fingerprint of the
//! operation tells where it is not.

use peerlane_hal::{BackendId, LinkKind};

use crate::allgather::Shape;
use crate::cost::{self, Choice, Links, Question};
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

impl Method {
    /// What runs, and what it is predicted to take. `shape` is what the plan must be but for its parts.
    ///
    /// # Errors
    /// As [`cost::choose`].
    pub(super) fn choose(
        &self,
        topology: &Topology,
        layout: &Layout,
        shape: Shape,
        (backends, capturable): ((BackendId, Option<BackendId>), bool),
    ) -> Result<Choice, Error> {
        let known;
        let links = match &self.links {
            Some(links) => links,
            None => {
                known = of_backends(backends);
                &known
            }
        };
        let shard_bytes: Vec<u64> = layout.shards().iter().collect();
        let refused = match self.algorithm {
            Some(_) => Vec::new(),
            None => self.refused(topology, capturable),
        };
        cost::choose(&Question {
            topology,
            shard_bytes: &shard_bytes,
            shape,
            links,
            algorithm: self.algorithm,
            parts: self.parts,
            refused: &refused,
        })
    }

    /// What is not taken unless it is asked for.
    fn refused(&self, topology: &Topology, capturable: bool) -> Vec<(Algorithm, &'static str)> {
        let one_node = topology.nodes() == 1;
        let reason = |algorithm| match algorithm {
            Algorithm::Direct => None,
            Algorithm::Hierarchical | Algorithm::HierarchicalRing => {
                one_node.then_some("on one node it is direct with more lanes")
            }
            Algorithm::DoubleRing if one_node && capturable => {
                Some("a graph may not hold its second lane")
            }
            // Assumed figures are not good enough to leave what is the best wherever it was measured.
            _ => (one_node && self.links.is_none()).then_some("no links were measured"),
        };
        let all = Algorithm::ALL.iter();
        all.filter_map(|&algorithm| Some((algorithm, reason(algorithm)?))).collect()
    }
}

/// What is known of links without a measurement. By the backends and not by the links that a rank
/// has: ranks may reach their peers by unlike ones, and must decide alike.
fn of_backends((local, network): (BackendId, Option<BackendId>)) -> Links {
    Links::of_kinds(kind(local), network.map_or(LinkKind::Rdma, kind))
}

fn kind(backend: BackendId) -> LinkKind {
    match backend {
        BackendId::CUDA => LinkKind::NvLink,
        BackendId::ROCM => LinkKind::Xgmi,
        BackendId::RDMA => LinkKind::Rdma,
        _ => LinkKind::SharedMemory,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decided(method: &Method, nodes: &[u32], shard_bytes: u64) -> (Algorithm, u32) {
        let topology = Topology::of_nodes(nodes).unwrap();
        let layout = Layout::new(&vec![shard_bytes; nodes.len()], 1).unwrap();
        let shape = Shape { tiers: topology.nodes() > 1, ..Shape::default() };
        let backends = (BackendId::CUDA, shape.tiers.then_some(BackendId::RDMA));
        let choice = method.choose(&topology, &layout, shape, (backends, false)).unwrap();
        (choice.algorithm, choice.parts)
    }

    #[test]
    fn what_is_left_open_is_chosen_and_what_is_said_is_kept() {
        let open = Method::default();
        for bytes in [0, 341, 64 << 20] {
            assert_eq!(decided(&open, &[0], bytes), (Algorithm::Direct, 1));
            assert_eq!(decided(&open, &[0; 3], bytes), (Algorithm::Direct, 1));
        }
        let (algorithm, parts) = decided(&open, &[0, 0, 0, 0, 1, 1, 1, 1], 64 << 20);
        assert!(algorithm == Algorithm::Hierarchical && parts > 1, "{algorithm}, {parts}");
        let both = Method { algorithm: Some(Algorithm::Ring), parts: Some(3), links: None };
        assert_eq!(decided(&both, &[0; 4], 64 << 20), (Algorithm::Ring, 3));
    }

    #[test]
    fn the_links_decide() {
        let nodes = [0, 0, 0, 0, 1, 1, 1, 1];
        let of = |links| {
            let algorithm = Some(Algorithm::Hierarchical);
            decided(&Method { algorithm, links, ..Method::default() }, &nodes, 8 << 20).1
        };
        let mut links = of_backends((BackendId::CUDA, Some(BackendId::RDMA)));
        assert!(of(None) > 1 && of(Some(links.clone())) == of(None));
        links.local.put_seconds = 1.0;
        assert_eq!(of(Some(links)), 1, "what is put at a second a piece is not cut");
    }
}
