//! Measured all-gathers.

use serde::{Deserialize, Serialize};

use super::predict::touched_bytes;
use super::sums::ClusterSums;
use crate::plan::{Algorithm, FlagOrder};
use crate::schedule::Shape;
use crate::topology::Topology;

/// One all-gather with equal shards, and how long it took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Parts of a shard.
    pub parts: u32,
    /// Whether own shards lay in the output.
    pub in_place: bool,
    /// Outputs in turn.
    pub outputs: u32,
    /// Where the flags stood.
    pub flags: FlagOrder,
    /// Whether other nodes were reached by lanes of the network.
    pub tiers: bool,
    /// Each shard.
    pub shard_bytes: u64,
    /// The median time of a start, in the fastest of several rounds.
    pub seconds: f64,
}

impl Sample {
    /// What the plan was.
    pub fn shape(&self) -> Shape {
        let &Self { parts, in_place, outputs, flags, tiers, .. } = self;
        Shape { parts, in_place, outputs, flags, tiers, ..Shape::default() }
    }

    pub(super) fn touched_bytes(&self, topology: &Topology) -> u64 {
        let shards = vec![self.shard_bytes; topology.ranks()];
        touched_bytes(&ClusterSums::new(topology, &shards), self.shape())
    }

    /// Whether ranks put what others have put to them.
    pub(super) fn passes_on(&self) -> bool {
        !matches!(self.algorithm, Algorithm::Direct | Algorithm::Pull)
    }

    pub(super) fn is_plain_direct(&self) -> bool {
        self.algorithm == Algorithm::Direct && !self.tiers
    }
}
