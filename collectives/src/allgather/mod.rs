//! Algorithms of the all-gather: pure functions from a topology to plans.
//!
//! Nothing here touches an engine, and nothing knows how many bytes a shard has: cells get their
//! bytes from the [layout](crate::layout).

use peerlane_hal::{ErrorKind, Rank};

use crate::error::Error;
#[cfg(doc)]
use crate::plan::Tier;
use crate::plan::{Algorithm, FlagOrder, OUTPUTS_MAX, PARTS_MAX, Plan};
use crate::topology::Topology;

mod direct;
mod hierarchical;
mod hierarchical_ring;
mod peers;
mod pull;
mod rails;
mod ring;
mod steps;

/// What a plan is for, beside algorithm and topology.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// How many parts each shard has, 1 to [`PARTS_MAX`].
    pub parts: u32,
    /// Whether the own shard lies in the output from the start.
    pub in_place: bool,
    /// How many outputs starts use in turn, 1 to [`OUTPUTS_MAX`]; in place one. With two, plans that
    /// push have no `ready`.
    pub outputs: u32,
    /// Where the flags stand.
    pub flags: FlagOrder,
    /// Whether ranks of other nodes are reached by lanes of [`Tier::Network`]; else one fabric reaches
    /// all ranks.
    pub tiers: bool,
}

impl Default for Shape {
    /// Whole shards, out of place, one output, prompt flags, one fabric.
    fn default() -> Self {
        Self { parts: 1, in_place: false, outputs: 1, flags: FlagOrder::Prompt, tiers: false }
    }
}

/// Whose lanes an algorithm makes, and for what.
#[derive(Clone, Copy, Debug)]
struct Task<'a> {
    topology: &'a Topology,
    rank: Rank,
    shape: Shape,
}

impl Task<'_> {
    /// Whether some ranks are reached by network lanes.
    fn has_network(&self) -> bool {
        self.shape.tiers && self.topology.nodes() > 1
    }

    /// Whether outputs may be overwritten only behind `ready`. With two outputs in turn, who has got
    /// a shard of the start before knows that its owner has entered that.
    fn says_ready(&self) -> bool {
        self.shape.outputs == 1
    }
}

/// The plan of `rank`.
///
/// # Errors
/// [`InvalidArgument`](ErrorKind::InvalidArgument) if the topology has no such rank, or a field of
/// the shape is out of its bounds.
pub fn plan(
    algorithm: Algorithm,
    topology: &Topology,
    rank: Rank,
    shape: Shape,
) -> Result<Plan, Error> {
    let invalid = |text| Err(Error::new(ErrorKind::InvalidArgument, text));
    if rank.index() >= topology.ranks() {
        return invalid(format!("rank is {rank}, expected a rank of {topology}"));
    }
    let Shape { parts, in_place, outputs, flags, tiers: _ } = shape;
    if !(1..=PARTS_MAX).contains(&parts) {
        return invalid(format!("parts is {parts}, expected 1 to {PARTS_MAX}"));
    }
    let outputs_max = if in_place { 1 } else { OUTPUTS_MAX };
    if !(1..=outputs_max).contains(&outputs) {
        let place = if in_place { "in place" } else { "out of place" };
        return invalid(format!("outputs is {outputs}, expected 1 to {outputs_max} {place}"));
    }
    let ranks = Rank::at(topology.ranks()).0;
    let task = &Task { topology, rank, shape };
    let lanes = match algorithm {
        Algorithm::Direct => direct::lanes(task),
        Algorithm::Pull => pull::lanes(task),
        Algorithm::Ring => ring::lanes(task),
        Algorithm::DoubleRing => ring::double_lanes(task),
        Algorithm::Hierarchical => hierarchical::lanes(task),
        Algorithm::HierarchicalRing => hierarchical_ring::lanes(task),
    };
    Ok(Plan { algorithm, rank, ranks, parts, in_place, outputs, flags, lanes })
}

/// The plans of all ranks, in rank order.
///
/// # Errors
/// As [`plan`].
pub fn plans(algorithm: Algorithm, topology: &Topology, shape: Shape) -> Result<Vec<Plan>, Error> {
    Rank::all(topology.ranks()).map(|rank| plan(algorithm, topology, rank, shape)).collect()
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    #[test]
    fn impossible_arguments_are_named() {
        let topology = Topology::of_nodes(&[0, 1, 1]).unwrap();
        let refused = |rank, parts, in_place, outputs| {
            let shape = Shape { parts, in_place, outputs, ..Shape::default() };
            let plan = plan(Algorithm::Direct, &topology, rank, shape);
            let error = plan.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            error.to_string()
        };
        let text = |rank, parts| refused(rank, parts, false, 1);
        assert_snapshot!(refused(Rank(0), 1, false, 3), @"outputs is 3, expected 1 to 2 out of place");
        assert_snapshot!(refused(Rank(0), 1, true, 2), @"outputs is 2, expected 1 to 1 in place");
        assert_snapshot!(text(Rank(3), 1), @"rank is 3, expected a rank of 3 ranks on 2 nodes");
        assert_snapshot!(text(Rank(0), 0), @"parts is 0, expected 1 to 65536");
        assert_snapshot!(text(Rank(0), 65537), @"parts is 65537, expected 1 to 65536");
    }
}
