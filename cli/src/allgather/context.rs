//! What a rank has before it opens its fabrics.

use super::options::Options;
use super::printer::Sink;
use super::topology::RankTopology;
use crate::ranks::comm::Comm;

/// A rank whose options are equal to those of all ranks.
pub(super) struct RankContext<'a> {
    pub(super) options: &'a Options,
    pub(super) comm: Comm,
    pub(super) rank_topology: &'a RankTopology,
    pub(super) seed: u64,
    pub(super) sink: Sink<'a>,
}
