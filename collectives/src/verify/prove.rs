//! Proves the plans that an algorithm makes, for as many ranks as there are.
//!
//! Plans of few ranks are all made and verified. For more, one rank stands for its orbit: plans are
//! made one by one, each is compared with the plan of the rank that stands for it, turned, and let go.
//! Two sets of plans that are equal but for a turn of all ranks have the same faults, so what is
//! proven of the ranks that stand for the others holds for all whose plans were compared. Beyond a
//! budget not all are compared.
//!
//! Where too many plans have no such order, all are made one by one and only [counted](super::count),
//! and the plans for some of the nodes are followed. Which ranks and nodes follows from the topology
//! alone, so that all ranks of a group come to the same proof. What was done is the proof's
//! [`Claim`].

use std::ops::ControlFlow;

use peerlane_hal::Rank;

use super::count::Count;
use super::fault::{Fault, Place, Position};
use super::program::Program;
use super::sample::{self, Sample};
use super::symmetry::Symmetry;
use super::{Claim, Proof, follow, shape, verify};
use crate::collective::Collective;
use crate::plan::{Algorithm, Plan, Step, Tier};
use crate::schedule::{self, Shape};
use crate::topology::Topology;

/// How much a proof may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effort {
    /// Up to so many steps of all ranks, all plans are made and followed.
    pub followed_steps: usize,
    /// The same for plans of which none stands for another.
    pub unlike_steps: usize,
    /// Plans with so many steps in all are compared with others or counted; of more, a sample.
    pub compared_steps: usize,
}

impl Default for Effort {
    /// Below 1 s and 150 MB up to 16,384 ranks, in a release build on a slow core.
    fn default() -> Self {
        Self { followed_steps: 100_000, unlike_steps: 1_000_000, compared_steps: 32_000_000 }
    }
}

impl Effort {
    /// All plans are followed, whatever it takes.
    pub const WHOLE: Self =
        Self { followed_steps: usize::MAX, unlike_steps: usize::MAX, compared_steps: usize::MAX };
}

/// Number of clocks that take as much memory and time as one step.
const CLOCKS_A_STEP: usize = 16;
/// So many plans tell how many steps there are in all.
const ESTIMATED: usize = 16;

/// Proves the plans that [`plan`](schedule::plan) makes for all ranks of a topology.
///
/// # Errors
/// The first fault found; [`Fault::NotPlanned`] if there are no such plans.
pub fn prove(
    algorithm: Algorithm,
    topology: &Topology,
    shape: Shape,
    effort: Effort,
) -> Result<Proof, Fault> {
    let family = Family { algorithm, topology, shape };
    let ranks = topology.ranks();
    // Following the plans keeps what every rank knows of every other rank.
    let clocks = ranks.saturating_mul(ranks) / CLOCKS_A_STEP;
    let steps = family.steps()?;
    let work = steps.max(clocks);
    if work <= effort.followed_steps {
        return family.verify_all();
    }
    let compared = effort.compared_steps.saturating_mul(ranks) / steps.max(1);
    let sample = Sample::new(topology, compared);
    let is_symmetric = shape.collective.is_symmetric();
    let symmetries = is_symmetric.then(|| Symmetry::candidates(topology, shape.tiers));
    for symmetry in symmetries.into_iter().flatten() {
        if let ControlFlow::Break(proof) = family.verify_turned(symmetry, &sample)? {
            return Ok(proof);
        }
    }
    if work <= effort.unlike_steps {
        return family.verify_all();
    }
    family.verify_some(&sample, effort.followed_steps)
}

/// The plans of all ranks, which are made when they are needed.
#[derive(Clone, Copy)]
struct Family<'a> {
    algorithm: Algorithm,
    topology: &'a Topology,
    shape: Shape,
}

impl<'a> Family<'a> {
    /// Returns the plans of the same collective for fewer ranks.
    fn on(&self, topology: &'a Topology) -> Self {
        let collective = match self.shape.collective {
            Collective::Broadcast { root } => {
                Collective::Broadcast { root: root.min(Rank::at(topology.ranks() - 1)) }
            }
            other => other,
        };
        Self { topology, shape: Shape { collective, ..self.shape }, ..*self }
    }

    fn plan(&self, rank: Rank) -> Result<Plan, Fault> {
        let plan = schedule::plan(self.algorithm, self.topology, rank, self.shape);
        plan.map_err(|error| Fault::NotPlanned { reason: error.to_string() })
    }

    /// About how many steps the plans of all ranks have.
    fn steps(&self) -> Result<usize, Fault> {
        let sample = Sample::new(self.topology, ESTIMATED);
        let mut steps = 0;
        for rank in sample.ranks() {
            steps += self.plan(rank)?.lanes.iter().map(|lane| lane.steps.len()).sum::<usize>();
        }
        Ok(steps.saturating_mul(self.topology.ranks()) / sample.ranks().count())
    }

    fn verify_all(&self) -> Result<Proof, Fault> {
        let ranks = Rank::all(self.topology.ranks());
        let plans = ranks.map(|rank| self.plan(rank)).collect::<Result<Vec<_>, _>>()?;
        let proof = verify(&plans)?;
        plans.iter().try_for_each(|plan| self.check_reach(plan))?;
        Ok(proof)
    }

    /// Follows the ranks that stand for others; goes on if they do not.
    fn verify_turned(
        &self,
        symmetry: Symmetry,
        sample: &Sample,
    ) -> Result<ControlFlow<Proof>, Fault> {
        let standing = symmetry.representatives();
        let plans: Vec<Plan> =
            standing.iter().map(|&rank| self.plan(rank)).collect::<Result<_, _>>()?;
        for rank in sample.ranks() {
            if !symmetry.matches(&plans[symmetry.number(rank)], &self.plan(rank)?) {
                return Ok(ControlFlow::Continue(()));
            }
        }
        let (orbit, ranks) = (symmetry.orbit(), symmetry.ranks());
        let first = shape::check(&plans, ranks, &standing)?;
        plans.iter().try_for_each(|plan| self.check_reach(plan))?;
        let program = Program::new(&plans, symmetry);
        let flags = follow(&program)?;
        let mut proof = Proof::new(first, &program, &flags);
        proof.steps *= orbit;
        proof.flags *= orbit;
        proof.claim = Claim::Turned { followed: standing, compared: sample.ranks().count() };
        Ok(ControlFlow::Break(proof))
    }

    /// Counts the plans of all ranks, or of a sample, and follows plans for some of the nodes.
    fn verify_some(&self, sample: &Sample, followed_steps: usize) -> Result<Proof, Fault> {
        let mut count = Count::default();
        let ranks = self.topology.ranks();
        for rank in sample.ranks() {
            let plan = self.plan(rank)?;
            shape::check(std::slice::from_ref(&plan), ranks, &[rank])?;
            self.check_reach(&plan)?;
            count.add(&plan);
        }
        let counted = sample.ranks().count();
        if counted == ranks {
            count.check()?;
        }
        let mut subset = sample::some_nodes(self.topology, ranks);
        let mut most = subset.ranks();
        let proof = loop {
            let family = Family::on(self, &subset);
            if family.steps()? <= followed_steps || most <= 2 {
                break family.verify_all()?;
            }
            most = most / 2 + 1;
            subset = sample::some_nodes(self.topology, most);
        };
        let claim = Claim::Counted { counted, ranks: subset.ranks(), nodes: subset.nodes() };
        Ok(Proof {
            ranks: Rank::at(ranks).0,
            steps: count.steps,
            flags: count.flags,
            claim,
            ..proof
        })
    }

    /// Checks that every step goes where the fabric of its lane does.
    fn check_reach(&self, plan: &Plan) -> Result<(), Fault> {
        if !self.shape.tiers {
            return Ok(());
        }
        let (rank, topology) = (plan.rank, self.topology);
        for (id, lane) in plan.lane_ids().zip(&plan.lanes) {
            for (at, &step) in lane.steps.iter().enumerate() {
                let (Step::Put { peer, .. } | Step::Get { peer, .. } | Step::Signal { peer, .. }) =
                    step
                else {
                    continue;
                };
                let same_node = topology.node(peer) == topology.node(rank);
                let reaches = match lane.tier {
                    Tier::Local => same_node,
                    Tier::Network => !same_node || peer == rank,
                };
                if !reaches {
                    let position = Position::Step(at + 1);
                    let place = Place { rank, lane: id, position, step };
                    return Err(Fault::OutOfReach { place, peer, tier: lane.tier });
                }
            }
        }
        Ok(())
    }
}
