//! Measured all-gathers, for fits.

use serde::{Deserialize, Serialize};

use super::predict::touched_bytes;
use super::sums::ClusterSums;
use crate::plan::{Algorithm, FlagOrder};
use crate::schedule::Shape;
use crate::topology::Topology;

/// A measured all-gather of equal shards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Chunks of a shard.
    pub chunks: u32,
    /// Whether the operation was in place.
    pub in_place: bool,
    /// The number of outputs.
    pub outputs: u32,
    /// The order of flags.
    pub flags: FlagOrder,
    /// Whether network lanes reached the other nodes.
    pub tiers: bool,
    /// The bytes of each shard.
    pub shard_bytes: u64,
    /// The median time of a start in the fastest of several rounds.
    pub seconds: f64,
}

impl Sample {
    /// Returns the shape of the plan.
    pub fn shape(&self) -> Shape {
        let &Self { chunks, in_place, outputs, flags, tiers, .. } = self;
        Shape { chunks, in_place, outputs, flags, tiers, ..Shape::default() }
    }

    pub(super) fn touched_bytes(&self, topology: &Topology) -> u64 {
        let shards = vec![self.shard_bytes; topology.ranks()];
        touched_bytes(&ClusterSums::new(topology, &shards), self.shape())
    }

    /// Returns whether ranks forward what they receive.
    pub(super) fn passes_on(&self) -> bool {
        !matches!(self.algorithm, Algorithm::Direct | Algorithm::Pull)
    }

    pub(super) fn is_plain_direct(&self) -> bool {
        self.algorithm == Algorithm::Direct && !self.tiers
    }
}
