//! Which algorithm an operation has, and in how many parts.

use peerlane_hal::Rank;

use crate::allgather::Shape;
use crate::cost::{Links, Question, choose};
use crate::error::Error;
use crate::layout::Layout;
use crate::plan::Algorithm;
use crate::topology::Topology;

/// What the caller said of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) algorithm: Option<Algorithm>,
    pub(super) parts: Option<u32>,
    pub(super) capturable: bool,
}

/// What was chosen, and why.
#[derive(Clone, Debug)]
pub(super) struct Chosen {
    pub(super) algorithm: Algorithm,
    pub(super) parts: u32,
    pub(super) why: String,
}

impl Wanted {
    /// What is said is done; the rest is what should be the fastest.
    pub(super) fn choose(
        self,
        topology: &Topology,
        layout: &Layout,
        shape: Shape,
        (links, measured): (&Links, bool),
    ) -> Result<Chosen, Error> {
        if let (Some(algorithm), Some(parts)) = (self.algorithm, self.parts) {
            return Ok(Chosen { algorithm, parts, why: "the caller says so".to_owned() });
        }
        let shards: Vec<u64> =
            Rank::all(layout.ranks()).map(|rank| layout.shard_bytes(rank)).collect();
        let refused = if self.capturable && self.algorithm.is_none() && !shape.tiers {
            BESIDE_IN_GRAPHS
        } else {
            &[]
        };
        let question = Question {
            topology,
            shard_bytes: &shards,
            shape,
            links,
            measured,
            algorithm: self.algorithm,
            parts: self.parts,
            refused,
        };
        let choice = choose(&question)?;
        Ok(Chosen { algorithm: choice.algorithm, parts: choice.parts, why: choice.explain() })
    }
}

/// Only lane 0 is recorded; what drives another lane beside a graph is slower than any plan of one
/// lane.
const BESIDE_IN_GRAPHS: &[(Algorithm, &str)] = &[
    (Algorithm::DoubleRing, "it has a lane that no graph records"),
    (Algorithm::Hierarchical, "it has a lane that no graph records"),
    (Algorithm::HierarchicalRing, "it has a lane that no graph records"),
];
