//! Creates the plan of each rank from the algorithm of a collective operation.
//!
//! A schedule is a pure function from a topology and a [`Shape`] to the [plan](Plan) of each rank.
//! It depends on no engine and on no lengths: the [layout](crate::layout) assigns bytes to cells.
//! Every schedule takes from the [`Collective`] which ranks provide data, so one file serves every
//! collective that can move in its pattern.
//!
//! To add a schedule, write one file with its lanes and its estimate, add a name to [`Algorithm`],
//! and add a row to the table below.

// The files of this module:
//
// | file | schedules | collectives |
// | --- | --- | --- |
// | `direct.rs` | direct, pull | all; pull no reductions |
// | `ring.rs` | ring, double ring | all-gather, broadcast (ring) |
// | `get_ring.rs` | get ring | all-gather, broadcast |
// | `hierarchical.rs` | hierarchical, hierarchical ring | all-gather |
// | `doubling.rs` | recursive doubling | all-gather, of a power of two of ranks |
// | `steps.rs` | | steps and the order of peers, for all schedules |
// | `estimate.rs` | | the time of a start as a closed formula, for all schedules |

use peerlane_hal::{ErrorKind, Rank};

use crate::collective::Collective;
use crate::error::Error;
use crate::links::Links;
#[cfg(doc)]
use crate::plan::Tier;
use crate::plan::{
    Algorithm, CHUNKS_MAX, FlagOrder, INBOXES_MAX, Lane, OUTPUTS_MAX, Plan, flag_sets,
};
use crate::topology::Topology;

mod direct;
mod doubling;
pub(crate) mod estimate;
mod get_ring;
mod hierarchical;
mod ring;
mod scatter;
mod steps;

use estimate::{ClusterSums, CostRequest, PathEstimate, Traffic};

/// The options of a plan, such as its collective operation, chunks and outputs. The algorithm is
/// not among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// The collective operation that the plan executes.
    pub collective: Collective,
    /// The number of chunks into which each block is cut, 1 to [`CHUNKS_MAX`].
    pub chunks: u32,
    /// Whether the operation runs in place, with a rank's own block already in its output.
    pub in_place: bool,
    /// The number of output buffers that the operation alternates between, 1 to [`OUTPUTS_MAX`]; 1
    /// in place.
    ///
    /// With two, no rank signals `ready` if every rank gets data from every other one in each
    /// start.
    pub outputs: u32,
    /// The number of inboxes that a reduction by the algorithm direct alternates between, 1 to
    /// [`INBOXES_MAX`]; 1 in all other cases.
    ///
    /// With two, no rank signals `ready`, although every start writes to the same output. Unless
    /// every rank gets data from every other one in each start, a rank signals `free`.
    pub inboxes: u32,
    /// The order of signals, waits and copies in the plan.
    pub flags: FlagOrder,
    /// Whether a network connects the nodes, as a tier of its own; otherwise one fabric connects
    /// all ranks.
    ///
    /// If so, the lanes to other nodes are of [`Tier::Network`].
    pub tiers: bool,
}

impl Default for Shape {
    /// Returns the shape of an all-gather of whole blocks, out of place, with one output and one
    /// inbox, prompt flags and one fabric.
    fn default() -> Self {
        Self {
            collective: Collective::AllGather,
            chunks: 1,
            in_place: false,
            outputs: 1,
            inboxes: 1,
            flags: FlagOrder::Prompt,
            tiers: false,
        }
    }
}

impl Shape {
    /// Returns the number of sets of flags that starts use in turn, each with an inbox in a
    /// reduction.
    pub const fn flag_sets(&self) -> u32 {
        flag_sets(self.outputs, self.inboxes)
    }
}

/// The arguments from which a schedule creates the lanes of one rank.
#[derive(Clone, Copy, Debug)]
struct PlanRequest<'a> {
    topology: &'a Topology,
    rank: Rank,
    shape: Shape,
}

impl PlanRequest<'_> {
    fn has_network(&self) -> bool {
        self.shape.tiers && self.topology.nodes() > 1
    }

    fn is_provider(&self, rank: Rank) -> bool {
        self.shape.collective.is_provider(rank)
    }
}

/// Holds the functions that plan and estimate one algorithm, and its properties.
#[doc(hidden)]
#[expect(missing_debug_implementations, reason = "it holds functions")]
pub struct Schedule {
    algorithm: Algorithm,
    /// Returns whether the algorithm can execute a collective.
    suits: fn(Collective) -> bool,
    /// Returns why the algorithm cannot be used on a topology, as an error, although it can execute
    /// the collective on others.
    fits: fn(&Topology, Shape) -> Result<(), &'static str>,
    /// Creates the lanes of one rank's plan, for a topology that fits.
    lanes: fn(&PlanRequest<'_>) -> Vec<Lane>,
    /// Returns the reason why a simpler algorithm has the same plans, or `None` if there is no such
    /// algorithm.
    pub(crate) redundant: fn(&ClusterSums) -> Option<&'static str>,
    /// Returns whether ranks forward received data, so that the number of chunks matters.
    pub(crate) forwards: fn(&ClusterSums) -> bool,
    /// Returns the number of chunks in a round, for a number of ranks. Only multiples are compared.
    pub(crate) chunks_in_round: fn(u64) -> u64,
    /// Whether ranks get blocks from their peers instead of putting them.
    pub gets: bool,
    /// Whether the estimate counts neighboring blocks of several ranks as one copy.
    pub joins_blocks: bool,
    /// Returns whether the algorithm may be preferred inside one node only if link rates were
    /// measured.
    pub needs_measurements: fn(Collective, &Links) -> bool,
    /// Returns the number of lanes for a number of nodes, with or without a network between them.
    pub lane_count: fn(usize, bool) -> usize,
    /// Estimates the time of the longest path through a rank, on a node with the given number of
    /// ranks.
    pub(crate) estimate: fn(&CostRequest<'_>, u64) -> PathEstimate,
    /// Returns how many bytes the operation moves inside nodes, and how many over the network, in
    /// this order.
    pub(crate) traffic: fn(&CostRequest<'_>) -> [Traffic; 2],
}

const SCHEDULES: [Schedule; 9] = [
    direct::DIRECT,
    direct::PULL,
    ring::RING,
    ring::DOUBLE_RING,
    hierarchical::HIERARCHICAL,
    hierarchical::HIERARCHICAL_RING,
    doubling::RECURSIVE_DOUBLING,
    scatter::SCATTER_ALL_GATHER,
    get_ring::GET_RING,
];

/// Returns the [`Schedule`] of `algorithm`, which holds its functions and properties.
#[doc(hidden)]
pub fn schedule(algorithm: Algorithm) -> &'static Schedule {
    const { &SCHEDULES }
        .iter()
        .find(|schedule| schedule.algorithm == algorithm)
        .expect("every algorithm has a schedule")
}

/// Describes how an algorithm moves data, by puts or gets, with or without forwarding, and in how
/// many lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Movement {
    /// Whether ranks read blocks from the memory of their peers, instead of writing to it.
    pub gets: bool,
    /// Whether ranks forward blocks that they have received.
    pub forwards: bool,
    /// The number of lanes, that is, sequences of steps, of each rank.
    pub lanes: usize,
}

/// Returns how an algorithm moves the data of an all-gather on `topology`.
pub fn movement(algorithm: Algorithm, topology: &Topology, tiers: bool) -> Movement {
    let schedule = schedule(algorithm);
    // Only the numbers of ranks and nodes decide whether data is forwarded, so the blocks are
    // empty.
    let sums = ClusterSums::new(topology, Collective::AllGather, &vec![0; topology.ranks()]);

    Movement {
        gets: schedule.gets,
        forwards: (schedule.forwards)(&sums),
        lanes: (schedule.lane_count)(topology.nodes(), tiers),
    }
}

/// Returns the algorithms that can execute a collective operation on some topology, the simplest
/// first.
pub fn algorithms(collective: Collective) -> impl Iterator<Item = Algorithm> {
    let all = Algorithm::ALL.iter().copied();
    all.filter(move |&algorithm| (schedule(algorithm).suits)(collective))
}

/// Returns the algorithms that can execute an operation of this shape on `topology`, the simplest
/// first.
pub fn fitting(topology: &Topology, shape: Shape) -> impl Iterator<Item = Algorithm> {
    algorithms(shape.collective).filter(move |&algorithm| {
        misfit(algorithm, topology, shape).is_none() && check_inboxes(algorithm, shape).is_ok()
    })
}

/// Returns why `algorithm` cannot be used on `topology`, or `None` if it can.
pub(crate) fn misfit(
    algorithm: Algorithm,
    topology: &Topology,
    shape: Shape,
) -> Option<&'static str> {
    (schedule(algorithm).fits)(topology, shape).err()
}

/// Checks that an algorithm can execute an operation of this shape on `topology`.
pub(crate) fn check_fits(
    algorithm: Algorithm,
    topology: &Topology,
    shape: Shape,
) -> Result<(), Error> {
    check_suits(algorithm, shape.collective)?;
    if let Err(text) = shape.collective.check(topology.ranks(), shape.in_place) {
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    check_inboxes(algorithm, shape)?;
    let Some(why) = misfit(algorithm, topology, shape) else { return Ok(()) };

    let known: Vec<_> = fitting(topology, shape).map(Algorithm::name).collect();
    let text = format!(
        "algorithm {algorithm} cannot be used for {topology}: {why}; expected {}",
        known.join(" or ")
    );
    Err(Error::new(ErrorKind::InvalidArgument, text))
}

fn check_suits(algorithm: Algorithm, collective: Collective) -> Result<(), Error> {
    if (schedule(algorithm).suits)(collective) {
        return Ok(());
    }

    let known = algorithms(collective).map(Algorithm::name).collect::<Vec<_>>().join(" or ");
    let name = collective.name();
    let text = format!("algorithm {algorithm} does not support {name}, expected {known}");
    Err(Error::new(ErrorKind::InvalidArgument, text))
}

/// Checks that plans of `algorithm` can alternate between as many inboxes as `shape` states.
pub(crate) fn check_inboxes(algorithm: Algorithm, shape: Shape) -> Result<(), Error> {
    let Shape { collective, inboxes, .. } = shape;

    // Only this algorithm leaves out the flags that a second inbox replaces, and only reductions
    // have inboxes.
    let alternates = algorithm == Algorithm::Direct && collective.is_reduction();
    let inboxes_max = if alternates { INBOXES_MAX } else { 1 };
    if (1..=inboxes_max).contains(&inboxes) {
        return Ok(());
    }

    let expected = if alternates { format!("1 to {inboxes_max}") } else { "1".to_owned() };
    let operation = collective.with_article();
    let text = format!(
        "inboxes is {inboxes}, expected {expected} in {operation} by the algorithm {algorithm}"
    );
    Err(Error::new(ErrorKind::InvalidArgument, text))
}

/// Creates the plan of one rank for a collective operation.
///
/// # Errors
/// [`InvalidArgument`](ErrorKind::InvalidArgument) if the topology has no such rank, the algorithm
/// cannot carry out the collective or cannot be used on the topology, or a field of the shape is
/// out of its bounds.
pub fn plan(
    algorithm: Algorithm,
    topology: &Topology,
    rank: Rank,
    shape: Shape,
) -> Result<Plan, Error> {
    let invalid = |text| Err(Error::new(ErrorKind::InvalidArgument, text));
    if rank.index() >= topology.ranks() {
        return invalid(format!("rank {rank} does not exist in the topology of {topology}"));
    }

    let Shape { collective, chunks, in_place, outputs, inboxes, flags, tiers: _ } = shape;
    check_fits(algorithm, topology, shape)?;
    if !(1..=CHUNKS_MAX).contains(&chunks) {
        return invalid(format!("chunks is {chunks}, expected 1 to {CHUNKS_MAX}"));
    }

    // In place, the output holds the input of the start, so a second one cannot take its turn.
    let outputs_max = if in_place { 1 } else { OUTPUTS_MAX };
    if !(1..=outputs_max).contains(&outputs) {
        let place = if in_place { "in place" } else { "out of place" };
        return invalid(format!("outputs is {outputs}, expected 1 to {outputs_max} {place}"));
    }

    let ranks = Rank::at(topology.ranks()).0;
    let lanes = (schedule(algorithm).lanes)(&PlanRequest { topology, rank, shape });
    Ok(Plan {
        collective,
        algorithm,
        rank,
        ranks,
        chunks,
        in_place,
        outputs,
        inboxes,
        flags,
        lanes,
    })
}

/// Creates the plans of all ranks of a topology, in rank order.
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
    fn every_algorithm_has_a_schedule() {
        assert_eq!(SCHEDULES.map(|schedule| schedule.algorithm), Algorithm::ALL);
    }

    /// Miri runs this test, and would report that a plan depends on an undefined root.
    #[test]
    fn plans_of_collectives_with_and_without_a_root_are_right() {
        let topology = Topology::flat(3).unwrap();
        for &collective in Collective::ALL {
            let shape = Shape { collective: collective.with_root(Rank(2)), ..Shape::default() };
            crate::verify::verify(&plans(Algorithm::Direct, &topology, shape).unwrap()).unwrap();
        }
    }

    #[test]
    fn impossible_arguments_are_named() {
        let topology = Topology::of_nodes(&[0, 1, 1]).unwrap();
        let error = |algorithm, rank, shape| {
            let error = plan(algorithm, &topology, rank, shape).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            error.to_string()
        };
        let refused = |rank, chunks, in_place, outputs| {
            let shape = Shape { chunks, in_place, outputs, ..Shape::default() };
            error(Algorithm::Direct, rank, shape)
        };
        let text = |rank, chunks| refused(rank, chunks, false, 1);
        assert_snapshot!(refused(Rank(0), 1, false, 3), @"outputs is 3, expected 1 to 2 out of place");
        assert_snapshot!(refused(Rank(0), 1, true, 2), @"outputs is 2, expected 1 to 1 in place");
        let inboxes = |algorithm, collective, inboxes| {
            error(algorithm, Rank(0), Shape { collective, inboxes, ..Shape::default() })
        };
        let [gather, scatter] = [Collective::AllGather, Collective::ReduceScatter];
        assert_snapshot!(inboxes(Algorithm::Direct, scatter, 3), @"inboxes is 3, expected 1 to 2 in a reduce-scatter by the algorithm direct");
        assert_snapshot!(inboxes(Algorithm::Direct, scatter, 0), @"inboxes is 0, expected 1 to 2 in a reduce-scatter by the algorithm direct");
        assert_snapshot!(inboxes(Algorithm::Direct, gather, 2), @"inboxes is 2, expected 1 in an all-gather by the algorithm direct");
        assert_snapshot!(inboxes(Algorithm::Ring, gather, 2), @"inboxes is 2, expected 1 in an all-gather by the algorithm ring");
        assert_snapshot!(text(Rank(3), 1), @"rank 3 does not exist in the topology of 3 ranks on 2 nodes");
        assert_snapshot!(text(Rank(0), 0), @"chunks is 0, expected 1 to 65536");
        assert_snapshot!(text(Rank(0), 65537), @"chunks is 65537, expected 1 to 65536");
        let of = |collective| Shape { collective, ..Shape::default() };
        let broadcast = |root| of(Collective::Broadcast { root: Rank(root) });
        let all_to_all = of(Collective::AllToAll);
        assert_snapshot!(error(Algorithm::Direct, Rank(0), broadcast(3)), @"root is 3, expected a rank below 3");
        assert_snapshot!(error(Algorithm::DoubleRing, Rank(0), broadcast(0)), @"algorithm double-ring does not support broadcast, expected direct or pull or ring or scatter-all-gather or get-ring");
        assert_snapshot!(error(Algorithm::Ring, Rank(0), all_to_all), @"algorithm ring does not support all-to-all, expected direct or pull");
        let in_place = Shape { in_place: true, ..all_to_all };
        assert_snapshot!(error(Algorithm::Direct, Rank(0), in_place), @"in_place is true, expected false: an all-to-all cannot run in place");
    }
}
