//! Chooses the algorithm and the number of chunks by predicted cost, unless the caller has set them.
//!
//! Every rank chooses by itself from values that are equal on all ranks. If a choice differs, the exchange of offers reports it.

use crate::cost::{self, Choice, Links, Question};
use crate::error::Error;
use crate::layout::Layout;
use crate::plan::Algorithm;
use crate::schedule::{Shape, schedule};
use crate::topology::Topology;

/// The caller's choices.
#[derive(Clone, Debug, Default)]
pub(super) struct Method {
    pub(super) algorithm: Option<Algorithm>,
    pub(super) chunks: Option<u32>,
    pub(super) links: Option<Links>,
}

impl Method {
    /// Returns the chosen algorithm and its predicted cost.
    ///
    /// `shape` contains everything but the number of chunks; `known` contains the links of the group, and whether they were measured.
    ///
    /// # Errors
    /// As [`cost::choose`].
    pub(super) fn choose(
        &self,
        topology: &Topology,
        layout: &Layout,
        (shape, capturable): (Shape, bool),
        (known, measured): (&Links, bool),
    ) -> Result<Choice, Error> {
        let (links, measured) = match &self.links {
            Some(links) => (links, true),
            None => (known, measured),
        };
        let block_bytes = layout.average_blocks();
        let in_graph = capturable && !shape.tiers;
        let refused = match self.algorithm {
            Some(_) => Vec::new(),
            None => refused(&shape, topology.nodes(), links, (in_graph, measured)),
        };
        cost::choose(&Question {
            topology,
            block_bytes: &block_bytes,
            shape,
            links,
            measured,
            algorithm: self.algorithm,
            chunks: self.chunks,
            refused: &refused,
        })
    }
}

/// Returns the algorithms that are used only on request, with the reasons.
fn refused(
    shape: &Shape,
    nodes: usize,
    links: &Links,
    (in_graph, measured): (bool, bool),
) -> Vec<(Algorithm, &'static str)> {
    let reason = |algorithm| {
        let schedule = schedule(algorithm);
        // Assumed rates are not good enough to leave what is the best wherever it was measured.
        let is_assumed =
            nodes == 1 && !measured && (schedule.needs_measurements)(shape.collective, links);
        if in_graph && (schedule.lane_count)(nodes, shape.tiers) > 1 {
            return Some("one of its lanes cannot be recorded into a graph");
        }
        is_assumed.then_some("no links were measured")
    };
    let all = Algorithm::ALL.iter();
    all.filter_map(|&algorithm| Some((algorithm, reason(algorithm)?))).collect()
}

#[cfg(test)]
mod tests {
    use peerlane_hal::LinkKind;

    use super::*;
    use crate::collective::Collective;

    fn known() -> Links {
        Links::of_kinds(LinkKind::NvLink, LinkKind::Rdma)
    }

    fn decided(method: &Method, nodes: &[u32], block_bytes: u64) -> (Algorithm, u32) {
        let topology = Topology::of_nodes(nodes).unwrap();
        let layout =
            Layout::new(Collective::AllGather, &vec![block_bytes; nodes.len()], 1).unwrap();
        let shape = Shape { tiers: topology.nodes() > 1, ..Shape::default() };
        let choice = method.choose(&topology, &layout, (shape, false), (&known(), false)).unwrap();
        (choice.algorithm, choice.chunks)
    }

    #[test]
    fn what_is_left_open_is_chosen_and_what_is_said_is_kept() {
        let open = Method::default();
        for bytes in [0, 341, 64 << 20] {
            assert_eq!(decided(&open, &[0], bytes), (Algorithm::Direct, 1));
            assert_eq!(decided(&open, &[0; 3], bytes), (Algorithm::Direct, 1));
        }
        let (algorithm, chunks) = decided(&open, &[0, 0, 0, 0, 1, 1, 1, 1], 64 << 20);
        assert!(algorithm == Algorithm::Hierarchical && chunks > 1, "{algorithm}, {chunks}");
        let links = Some(known());
        let ring = Method { algorithm: Some(Algorithm::Ring), links, ..open.clone() };
        assert_eq!(decided(&ring, &[0; 4], 64 << 20).0, Algorithm::Ring);
        let both = Method { algorithm: Some(Algorithm::Ring), chunks: Some(3), links: None };
        assert_eq!(decided(&both, &[0; 4], 64 << 20), (Algorithm::Ring, 3));
    }

    #[test]
    fn the_links_decide() {
        let nodes = [0, 0, 0, 0, 1, 1, 1, 1];
        let of = |links| {
            let algorithm = Some(Algorithm::Hierarchical);
            decided(&Method { algorithm, links, ..Method::default() }, &nodes, 8 << 20).1
        };
        let mut links = known();
        assert!(of(Some(links.clone())) > 1);
        links.local.put_seconds = 1.0;
        assert_eq!(of(Some(links)), 1, "what is put at a second a piece is not cut");
    }

    #[test]
    fn a_graph_gets_a_plan_of_one_lane() {
        let topology = Topology::of_nodes(&[0, 0, 0, 0, 1, 1, 1, 1]).unwrap();
        let layout = Layout::new(Collective::AllGather, &[64 << 20; 8], 1).unwrap();
        let choose = |measured| {
            let shape = (Shape::default(), true);
            Method::default().choose(&topology, &layout, shape, (&known(), measured)).unwrap()
        };
        for choice in [choose(false), choose(true)] {
            assert!(choice.explain().contains("cannot be recorded into a graph"), "{choice}");
            assert!(matches!(choice.algorithm, Algorithm::Direct | Algorithm::Ring), "{choice}");
        }
    }
}
