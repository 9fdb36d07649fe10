//! Proves that the plans of an algorithm are correct for any number of ranks.
//!
//! For few ranks, all plans are made and verified. For more, one rank represents its orbit: plans
//! are made one by one, each is compared with the rotated plan of its representative, and dropped.
//! Two sets of plans that differ only by a rotation of the ranks have the same faults, so what is
//! proven of the representatives holds for all ranks whose plans were compared. Beyond a budget not
//! all plans are compared.
//!
//! If too many plans have no such symmetry, all are made one by one and only summed up, and the
//! plans for some of the nodes are followed. The selection of ranks and nodes depends on the
//! topology alone, so all ranks of a group come to the same proof. The [`Coverage`] of the proof
//! states what was done.

use std::ops::ControlFlow;

use peerlane_hal::Rank;

use super::copies;
use super::fault::{Fault, Location, Position};
use super::plan_set::{self, PlanSet};
use super::symmetry::Symmetry;
use super::{Coverage, Proof, follow, verify};
use crate::collective::Collective;
use crate::plan::{Algorithm, Cell, Flag, Plan, Step, Tier};
use crate::schedule::{self, Shape};
use crate::topology::Topology;

/// Limits on the number of steps that a proof of plans processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// The number of steps of all ranks up to which the proof checks every plan in full.
    pub followed_steps: usize,
    /// The number of steps of all ranks up to which the proof checks plans without a symmetry in
    /// full.
    pub asymmetric_steps: usize,
    /// The number of steps of all ranks up to which every plan, and not only a sample, is compared.
    ///
    /// A plan is compared with that of its representative. Plans without a symmetry are summed up
    /// instead.
    pub compared_steps: usize,
}

impl Default for Budget {
    /// Returns limits that keep a proof below 1 s and 150 MB up to 16,384 ranks, in a release build
    /// on a slow core.
    fn default() -> Self {
        Self { followed_steps: 100_000, asymmetric_steps: 1_000_000, compared_steps: 32_000_000 }
    }
}

impl Budget {
    /// A budget without limits, which makes the proof check every plan in full.
    pub const UNLIMITED: Self = Self {
        followed_steps: usize::MAX,
        asymmetric_steps: usize::MAX,
        compared_steps: usize::MAX,
    };
}

/// The number of vector clock entries that cost about as much memory and time as one step.
const CLOCK_ENTRIES_PER_STEP: usize = 16;
/// The number of plans whose steps are counted to estimate the steps of all ranks.
const ESTIMATE_PLANS: usize = 16;

/// Proves that the plans of `algorithm` for all ranks of `topology` are correct.
///
/// The plans are those that [`plan`](schedule::plan) makes.
///
/// # Errors
/// The first fault found; [`Fault::NotPlanned`] if there are no such plans.
pub fn prove(
    algorithm: Algorithm,
    topology: &Topology,
    shape: Shape,
    budget: Budget,
) -> Result<Proof, Fault> {
    let source = PlanSource { algorithm, topology, shape };
    let steps = source.estimated_steps()?;
    let ranks = topology.ranks();

    // Each followed rank needs a clock with an entry for every rank, so with many ranks the clocks
    // cost more than the steps.
    let clock_steps = ranks.saturating_mul(ranks) / CLOCK_ENTRIES_PER_STEP;
    let work = steps.max(clock_steps);
    if work <= budget.followed_steps {
        return source.verify_all();
    }

    // The share of plans that can be compared equals the share of steps that the budget allows.
    let compared = budget.compared_steps.saturating_mul(ranks) / steps.max(1);
    let sample = Sample::new(topology, compared);

    for symmetry in Symmetry::candidates(topology, shape.tiers) {
        if let ControlFlow::Break(proof) = source.verify_representatives(symmetry, &sample)? {
            return Ok(proof);
        }
    }

    // No symmetry holds, so plans cannot stand for each other.
    if work <= budget.asymmetric_steps {
        return source.verify_all();
    }
    source.verify_sample(&sample, budget.followed_steps)
}

/// Makes the plans of an algorithm on demand, and verifies them.
#[derive(Clone, Copy)]
struct PlanSource<'a> {
    algorithm: Algorithm,
    topology: &'a Topology,
    shape: Shape,
}

impl<'a> PlanSource<'a> {
    /// Returns a source of plans of the same algorithm and shape for a smaller `topology`.
    fn for_topology(&self, topology: &'a Topology) -> Self {
        let collective = match self.shape.collective.root() {
            // A root that the smaller topology lacks becomes its last rank.
            Some(root) => {
                let last = Rank::at(topology.ranks() - 1);
                self.shape.collective.with_root(root.min(last))
            }
            None => self.shape.collective,
        };

        Self { topology, shape: Shape { collective, ..self.shape }, ..*self }
    }

    fn plan(&self, rank: Rank) -> Result<Plan, Fault> {
        let plan = schedule::plan(self.algorithm, self.topology, rank, self.shape);
        plan.map_err(|error| Fault::NotPlanned { reason: error.to_string() })
    }

    /// Estimates the number of steps of all ranks from a sample of plans.
    fn estimated_steps(&self) -> Result<usize, Fault> {
        let sample = Sample::new(self.topology, ESTIMATE_PLANS);
        let mut steps = 0;
        for rank in sample.ranks() {
            steps += self.plan(rank)?.lanes.iter().map(|lane| lane.steps.len()).sum::<usize>();
        }

        Ok(steps.saturating_mul(self.topology.ranks()) / sample.ranks().count())
    }

    /// Creates and verifies the plans of all ranks, without relying on a symmetry.
    fn verify_all(&self) -> Result<Proof, Fault> {
        let ranks = Rank::all(self.topology.ranks());
        let plans = ranks.map(|rank| self.plan(rank)).collect::<Result<Vec<_>, _>>()?;

        let proof = verify(&plans)?;
        plans.iter().try_for_each(|plan| self.check_reach(plan))?;

        Ok(proof)
    }

    /// Verifies only the plan of one rank per orbit, if `symmetry` holds for the sampled plans.
    ///
    /// Returns `Continue` if they do not have it, so that the caller tries the next symmetry.
    fn verify_representatives(
        &self,
        symmetry: Symmetry,
        sample: &Sample,
    ) -> Result<ControlFlow<Proof>, Fault> {
        let representatives = symmetry.representatives();
        let plans: Vec<Plan> =
            representatives.iter().map(|&rank| self.plan(rank)).collect::<Result<_, _>>()?;

        for rank in sample.ranks() {
            // What is required of the representative must be required of the rank, too.
            let representative = &plans[symmetry.representative_index(rank)];
            if !symmetry.keeps_goal(representative, rank)
                || !symmetry.matches(representative, &self.plan(rank)?)
            {
                return Ok(ControlFlow::Continue(()));
            }
        }

        let first = plan_set::check(&plans, symmetry.ranks(), &representatives)?;
        plans.iter().try_for_each(|plan| self.check_reach(plan))?;

        let set = PlanSet::new(&plans, symmetry);
        let flags = follow(&set)?;

        // All orbits have the same number of ranks, and rotated plans have the same steps and
        // flags.
        let orbit = set.symmetry.orbit();
        let mut proof = Proof::new(first, &set, &flags);
        proof.steps *= orbit;
        proof.flags *= orbit;
        proof.additions *= orbit;

        let compared = sample.ranks().count();
        proof.coverage = Coverage::BySymmetry { followed: representatives, compared };
        Ok(ControlFlow::Break(proof))
    }

    /// Adds up hashes of the sampled plans, and verifies all plans of a smaller topology.
    fn verify_sample(&self, sample: &Sample, followed_steps: usize) -> Result<Proof, Fault> {
        let ranks = self.topology.ranks();
        let mut sums = Sums::default();
        for rank in sample.ranks() {
            let plan = self.plan(rank)?;
            plan_set::check(std::slice::from_ref(&plan), ranks, &[rank])?;
            self.check_reach(&plan)?;
            check_own_additions(&plan)?;
            sums.add(&plan);
        }

        // What one rank adds another subtracts, so the sums of correct plans are 0 only over all
        // ranks.
        let summed = sample.ranks().count();
        if summed == ranks {
            sums.check()?;
        }

        // The limit on the ranks shrinks until their plans fit the budget, but not below 2, because
        // one rank alone sends nothing.
        let mut subset = self.fitting_nodes(ranks);
        let mut ranks_max = subset.ranks();
        let proof = loop {
            let source = PlanSource::for_topology(self, &subset);
            if source.estimated_steps()? <= followed_steps || ranks_max <= 2 {
                break source.verify_all()?;
            }
            ranks_max = ranks_max / 2 + 1;
            subset = self.fitting_nodes(ranks_max);
        };

        let Sums { steps, flags, additions, .. } = sums;
        let coverage = Coverage::Sampled { summed, ranks: subset.ranks(), nodes: subset.nodes() };
        Ok(Proof { ranks: Rank::at(ranks).0, steps, flags, additions, coverage, ..proof })
    }

    /// Returns a topology of some of the nodes, with at most `ranks_max` ranks, that the algorithm
    /// can be used on.
    fn fitting_nodes(&self, ranks_max: usize) -> Topology {
        let mut smaller = (1..=ranks_max).rev().map(|most| some_nodes(self.topology, most));
        let fits = |subset: &Topology| {
            let PlanSource { algorithm, shape, .. } = PlanSource::for_topology(self, subset);
            schedule::misfit(algorithm, subset, shape).is_none()
        };

        smaller.find(fits).expect("every algorithm can be used for one rank")
    }

    /// Checks that the fabric of each lane of `plan` reaches the peers of the lane's steps.
    fn check_reach(&self, plan: &Plan) -> Result<(), Fault> {
        if !self.shape.tiers {
            return Ok(());
        }

        let rank = plan.rank;
        let topology = self.topology;
        for (id, lane) in plan.lane_ids().zip(&plan.lanes) {
            for (at, &step) in lane.steps.iter().enumerate() {
                let (Step::Put { peer, .. } | Step::Get { peer, .. } | Step::Signal { peer, .. }) =
                    step
                else {
                    continue;
                };

                let is_same_node = topology.node(peer) == topology.node(rank);
                let is_reached = match lane.tier {
                    Tier::Local => is_same_node,
                    // A network lane also signals lanes of its own rank.
                    Tier::Network => !is_same_node || peer == rank,
                };

                if !is_reached {
                    let position = Position::Step(at + 1);
                    let location = Location { rank, lane: id, position, step };
                    return Err(Fault::OutOfReach { location, peer, tier: lane.tier });
                }
            }
        }

        Ok(())
    }
}

/// Checks that `plan` adds the contributions that its collective states, in the stated order.
fn check_own_additions(plan: &Plan) -> Result<(), Fault> {
    if !plan.collective.is_reduction() {
        return Ok(());
    }

    let set = PlanSet::new(std::slice::from_ref(plan), Symmetry::none(plan.ranks as usize));
    copies::check_additions(&set, copies::additions(&set)).map(|_| ())
}

/// Accumulates hash sums over the plans of all ranks, which reveal missing or superfluous copies
/// and signals.
///
/// Every copy into an output adds the hash of its cell, and every cell that the output requires
/// subtracts it. In the same way, a signal adds the hash of its flag, and a wait subtracts it.
/// Unless all plans together copy every required cell once and signal every flag that they wait
/// for, a sum differs from 0 in all but one of 2^64 cases.
#[derive(Debug, Default)]
struct Sums {
    cell_sum: u64,
    flag_sum: u64,
    steps: usize,
    flags: usize,
    additions: usize,
}

impl Sums {
    /// Adds the hashes of the steps of `plan`, and subtracts those of the cells that its rank
    /// requires.
    fn add(&mut self, plan: &Plan) {
        let &Plan { collective, rank, ranks, chunks, in_place, .. } = plan;
        for cell in plan_set::copied_cells(collective, rank, ranks, chunks, in_place) {
            self.cell_sum = self.cell_sum.wrapping_sub(hash_of_cell(rank, cell));
        }

        if collective.reduces(rank) {
            self.require_contributions(plan);
        }

        for lane in plan.lane_ids() {
            for step in plan.closed_lane(lane, |_| true) {
                self.add_step(collective, rank, step);
            }
        }
    }

    /// Subtracts the hashes of the copies and additions that `rank` needs for the block that it
    /// reduces.
    ///
    /// The additions of all contributions to a cell count as the copy of the cell to the output.
    fn require_contributions(&mut self, plan: &Plan) {
        let &Plan { collective, rank, ranks, in_place, .. } = plan;
        for chunk in 0..plan.chunks {
            // `add` has subtracted the hash of the cell, but no step copies the cell.
            let reduced = hash_of_cell(rank, Cell { block: rank, chunk });
            self.cell_sum = self.cell_sum.wrapping_add(reduced);

            // No step puts a rank's own contribution into its inbox, but one adds it.
            for from in collective.additions(rank, ranks, in_place) {
                let cell = Cell { block: from, chunk };
                let copied = if from == rank { 0 } else { hash_of_contribution(rank, cell) };
                let added = hash_of_addition(rank, cell);

                self.cell_sum = self.cell_sum.wrapping_sub(copied).wrapping_sub(added);
            }
        }
    }

    /// Adds or subtracts the hash of `step`, which `rank` executes, and counts the step.
    fn add_step(&mut self, collective: Collective, rank: Rank, step: Step) {
        self.steps += 1;

        match step {
            Step::Put { peer, cell, .. } if step.contributes(collective) => {
                self.cell_sum = self.cell_sum.wrapping_add(hash_of_contribution(peer, cell));
            }
            Step::Put { peer, cell, .. } => {
                self.cell_sum = self.cell_sum.wrapping_add(hash_of_cell(peer, cell));
            }
            Step::Reduce { cell, from } => {
                self.additions += 1;
                let contribution = Cell { block: from, chunk: cell.chunk };
                self.cell_sum = self.cell_sum.wrapping_add(hash_of_addition(rank, contribution));
            }
            Step::Get { cell, .. } => {
                self.cell_sum = self.cell_sum.wrapping_add(hash_of_cell(rank, cell));
            }
            Step::Signal { peer, flag } => {
                self.flag_sum = self.flag_sum.wrapping_add(hash_of_flag(peer, flag));
            }
            Step::Wait { flag } => {
                // A flag has one wait in a start, so there are as many flags as waits.
                self.flags += 1;
                self.flag_sum = self.flag_sum.wrapping_sub(hash_of_flag(rank, flag));
            }
        }
    }

    fn check(&self) -> Result<(), Fault> {
        let mismatch = |what| Err(Fault::SumMismatch { what });
        match (self.cell_sum, self.flag_sum) {
            (0, 0) => Ok(()),
            (0, _) => mismatch("expected one signal for each wait"),
            _ => mismatch("expected one copy for each required cell of each output"),
        }
    }
}

fn hash_of_cell(owner: Rank, Cell { block, chunk }: Cell) -> u64 {
    // The last word keeps the hashes of cells, contributions and additions apart.
    hash([owner.0, block.0, chunk, 0])
}

fn hash_of_contribution(owner: Rank, Cell { block, chunk }: Cell) -> u64 {
    hash([owner.0, block.0, chunk, u32::MAX])
}

fn hash_of_addition(owner: Rank, Cell { block, chunk }: Cell) -> u64 {
    hash([owner.0, block.0, chunk, u32::MAX - 1])
}

/// Returns a hash of `flag` and its reader, which is the same for the signal and the wait.
fn hash_of_flag(reader: Rank, flag: Flag) -> u64 {
    let (kind, lane, rank, chunk) = match flag {
        Flag::Arrived { cell: Cell { block, chunk }, lane } => (1, lane, block, chunk),
        Flag::Ready { from, lane } => (2, lane, from, 0),
        Flag::Taken { by, lane } => (3, lane, by, 0),
        Flag::Go { lane } => (4, lane, reader, 0),
        Flag::Sent { lane } => (5, lane, reader, 0),
        Flag::Free { from, lane } => (6, lane, from, 0),
        Flag::Contributed { cell: Cell { block, chunk }, lane } => (7, lane, block, chunk),
    };

    hash([reader.0, rank.0, chunk, lane.0, kind])
}

/// Returns a hash of `numbers`.
fn hash<const COUNT: usize>(numbers: [u32; COUNT]) -> u64 {
    // `mix` maps 0 to 0, and a hash of 0 would not change a sum. The increment moves that case to
    // other numbers.
    numbers.iter().fold(SPLIT_MIX_INCREMENT, |hash, &number| mix(hash ^ u64::from(number)))
}

/// Selects the ranks whose plans a proof compares or sums up, if it cannot process all plans.
///
/// The selection depends only on the topology, so all ranks of a group make the same selection.
#[derive(Clone, Debug)]
struct Sample {
    ranks: Vec<Rank>,
}

impl Sample {
    /// Selects at most `ranks_max` ranks of `topology`, but at least the first and the last.
    fn new(topology: &Topology, ranks_max: usize) -> Self {
        let ranks = topology.ranks();
        if ranks_max >= ranks {
            return Self { ranks: Rank::all(ranks).collect() };
        }

        // The first and the last rank are always included, because the ends of rings and of rows
        // are special cases.
        let mut selected = vec![Rank(0), Rank::at(ranks - 1)];
        let mut random = SplitMix64::new(topology);
        selected.extend((2..ranks_max).map(|_| Rank::at(random.below(ranks))));
        selected.sort_unstable();
        selected.dedup();

        Self { ranks: selected }
    }

    fn ranks(&self) -> impl Iterator<Item = Rank> + '_ {
        self.ranks.iter().copied()
    }
}

/// Returns a topology of some nodes of `topology`, with at most `ranks_max` ranks.
///
/// It has ranks of the smallest node, of the largest node and of pseudo-random others. Ranks of the
/// first and of the last of them are left out if there are too many.
fn some_nodes(topology: &Topology, ranks_max: usize) -> Topology {
    let nodes = topology.nodes();
    let members = |node: usize| topology.members(Rank::at(node).0);
    let by_size = |node: &usize| members(*node).len();
    let extremes = [(0..nodes).min_by_key(by_size), (0..nodes).max_by_key(by_size)];

    // Random draws may miss nodes, so all nodes follow in order and fill the rest.
    let mut random = SplitMix64::new(topology);
    let candidates = (0..4 * nodes).map(|_| random.below(nodes)).chain(0..nodes);

    // One node alone sends nothing over the network, so the first one leaves half for others.
    let ranks_max = ranks_max.max(1);
    let first_max = if nodes > 1 { ranks_max.div_ceil(2) } else { ranks_max };
    let mut selected: Vec<(usize, usize)> = Vec::new();
    let mut ranks_left = ranks_max;
    for node in extremes.into_iter().flatten().chain(candidates) {
        let most = if selected.is_empty() { first_max } else { ranks_left };
        let kept = members(node).len().min(most);
        if kept > 0 && selected.iter().all(|&(other, _)| other != node) {
            ranks_left -= kept;
            selected.push((node, kept));
        }
    }
    selected.sort_unstable();

    let kept = |(node, kept): (usize, usize)| members(node).iter().take(kept).copied();
    let mut ranks: Vec<(Rank, usize)> =
        selected.iter().flat_map(|&node| kept(node).map(move |rank| (rank, node.0))).collect();
    ranks.sort_unstable();

    // The nodes keep their order and are numbered without gaps, as a topology requires.
    let new_number = |node| Rank::at(selected.partition_point(|&(other, _)| other < node)).0;
    let node_of_rank: Vec<u32> = ranks.into_iter().map(|(_, node)| new_number(node)).collect();

    Topology::of_nodes(&node_of_rank).expect("there is a rank, and the nodes are numbered anew")
}

/// The increment of SplitMix64, which is 2^64 divided by the golden ratio.
const SPLIT_MIX_INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// Generates the same pseudo-random numbers in every version and on every machine, by SplitMix64.
struct SplitMix64(u64);

impl SplitMix64 {
    /// Creates a generator that is seeded by the node of every rank in `topology`.
    fn new(topology: &Topology) -> Self {
        let mut random = Self(topology.ranks() as u64);
        for &node in topology.node_of_rank() {
            random.0 = random.next() ^ u64::from(node);
        }

        random
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(SPLIT_MIX_INCREMENT);
        mix(self.0)
    }

    fn below(&mut self, limit: usize) -> usize {
        // The limits are far below 2^64, so the bias of the remainder does not matter.
        usize::try_from(self.next() % limit as u64).expect("below a usize")
    }
}

/// Returns `number` with its bits mixed by the output function of SplitMix64.
fn mix(number: u64) -> u64 {
    let first = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let second = (first ^ (first >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    second ^ (second >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::LaneId;

    #[test]
    fn flags_of_swapped_chunks_have_another_sum() {
        let lane = LaneId::HOME;
        let arrived = |chunk| Flag::Arrived { cell: Cell { block: Rank(1), chunk }, lane };
        let contributed = |chunk| Flag::Contributed { cell: Cell { block: Rank(1), chunk }, lane };
        let sum = |flags: [Flag; 2]| {
            flags.iter().fold(0_u64, |sum, &flag| sum.wrapping_add(hash_of_flag(Rank(0), flag)))
        };
        assert_ne!(sum([arrived(0), contributed(1)]), sum([arrived(1), contributed(0)]));
    }

    #[test]
    fn a_sample_of_nodes_has_ranks_of_two_nodes() {
        let topology: Topology = "1+5+5".parse().unwrap();
        for topology in [topology, "8+8".parse().unwrap(), "3x72".parse().unwrap()] {
            for ranks_max in 2..=topology.ranks() {
                let subset = some_nodes(&topology, ranks_max);
                assert!(subset.nodes() >= 2, "{ranks_max}: {subset}");
                // The first node may leave more ranks than the others have.
                assert!(subset.ranks() <= ranks_max, "{ranks_max}: {subset}");
            }
            assert_eq!(some_nodes(&topology, 1).ranks(), 1);
        }
    }
}
