//! Creates the report of which algorithm, engines and links a prepared operation uses.

use std::collections::BTreeMap;
use std::sync::Arc;

use peerlane_hal::{
    Caps, Command, Direction, ErrorKind, Fabric as _, Launch, ProgressReader, Rank, Reducer,
};

use super::fused::FusedPlan;
use super::plan::OperationPlan;
use crate::cost::Transfer;
use crate::error::Error;
use crate::group::report::{AdditionReport, Fallback, LaneReport, LinkReport, Report, TierReport};
use crate::group::segment::Fabrics;
use crate::plan::{LaneId, Tier};
use crate::run::fused::crosses_tiers;
use crate::run::lane::{FusedLane, FusedPrograms};
use crate::run::program::{AwaitedFlag, Program, is_tiered};
use crate::run::queue::Queue;

pub(super) struct BoundLane {
    pub(super) id: LaneId,
    pub(super) tier: Tier,
    pub(super) program: Program,
    /// The program of captured starts behind the first one of a graph, if they alternate outputs.
    pub(super) following: Option<Program>,
    pub(super) caps: Caps,
    /// A graph that waits for a peer can block other work on the engine's streams.
    pub(super) has_streams: bool,
    pub(super) compute_bytes: u64,
    /// What adds contributions, if the engine does.
    pub(super) reducer: Option<Reducer>,
    /// What a start launches, if starts are fused.
    pub(super) launch: Option<BoundLaunch>,
}

/// The launches of a lane whose starts are fused.
pub(super) struct BoundLaunch {
    pub(super) launch: Launch,
    /// Tells how far the starts have come.
    pub(super) progress: ProgressReader,
    pub(super) lane: FusedLane,
}

impl BoundLane {
    /// Has the engine of the lane compile the programs of fused starts.
    pub(super) fn compile(
        &self,
        queue: &mut Queue,
        (fused, programs): (FusedPlan, FusedPrograms),
        (counter_word, resizable): (u64, bool),
    ) -> Result<BoundLaunch, Error> {
        let is_tagged = fused.transfer == Transfer::Tagged;
        let mut compile = |program: &Program, output| {
            let commands = program.launched_commands();
            if commands.commands.iter().any(crosses_tiers) {
                let text = "a launch would wait for lanes of the network between its copies";
                return Err(Error::new(ErrorKind::Unavailable, text));
            }
            queue.compile(commands, (fused.blocks, is_tagged), (output, counter_word))
        };

        let (mut launch, mut progress) = compile(&self.program, 0)?;
        let others = match (programs, &self.following) {
            (FusedPrograms::ByOutput, _) => vec![(&self.program, 1)],
            (FusedPrograms::ByIndex, Some(following)) => vec![(following, 0), (following, 1)],
            _ => Vec::new(),
        };
        for (program, output) in others {
            (launch, progress) = compile(program, output)?;
        }
        let resizable = resizable.then_some((fused.blocks, counter_word));
        Ok(BoundLaunch { launch, progress, lane: FusedLane { programs, resizable } })
    }

    /// Returns the flags by which the host finds what a start waits for.
    pub(super) fn waits(&self) -> impl Iterator<Item = &AwaitedFlag> {
        // The host does not know which start of a graph runs. All wait for what the later ones do.
        let following = self.following.as_ref().filter(|_| self.launch.is_some());
        following.unwrap_or(&self.program).waits.iter()
    }
}

pub(super) fn report(
    operation: &OperationPlan,
    refusal: Option<&Arc<str>>,
    fabrics: Fabrics<'_>,
    lanes: &[BoundLane],
) -> Report {
    let OperationPlan { plan, layout, rank, .. } = operation;
    let network = fabrics.network.filter(|_| is_tiered(plan));
    let network = network.map(|network| (Tier::Network, network));
    let tiers: Vec<_> = [(Tier::Local, fabrics.local)].into_iter().chain(network).collect();
    let backend = |tier: Tier| tiers[tier as usize].1.backend();
    // Once everything is imported a fabric knows where the peers' memory lies.
    let links: Vec<_> = Rank::all(operation.topology.ranks())
        .flat_map(|peer| tiers.iter().map(move |&(tier, _)| (tier, fabrics.link(tier, peer))))
        .filter_map(|(tier, link)| {
            link.map(|link| LinkReport { peer: link.peer, tier, kind: link.kind })
        })
        .collect();
    let lane_reports: Vec<_> = lanes
        .iter()
        .map(|lane| LaneReport::new(lane.id, lane.tier, backend(lane.tier), &lane.caps))
        .collect();
    let slow =
        links.iter().filter(|link| link.kind.is_fallback()).map(|&link| Fallback::Link(link));
    let driven = lane_reports.iter().filter(|lane| !lane.is_queued());
    // Where even lane 0 is driven, there are no streams to start on.
    let streams = lane_reports.first().is_some_and(LaneReport::is_queued);
    let driven = driven.filter(|_| streams).map(|&lane| Fallback::Driven(lane));
    let staged = refusal.iter().filter(|_| network.is_some());
    let staged = staged.map(|reason| Fallback::Staged { reason: Arc::clone(reason) });
    let tiers: Vec<_> = tiers.iter().map(|&(tier, _)| tier_report(*rank, tier, lanes)).collect();
    let launch = lanes.iter().find_map(|lane| lane.launch.as_ref()).map(|bound| bound.launch);
    let compute = tiers.iter().filter(|tier| tier.compute_bytes > 0 && launch.is_none());
    let compute = compute.map(|&tier| Fallback::Compute(tier));
    let additions = lanes.iter().filter(|_| launch.is_none());
    let additions = additions.filter_map(additions_of).map(Fallback::Additions);
    let fallbacks = staged.chain(slow).chain(additions).chain(compute).chain(driven).collect();
    let (shortest_block_bytes, longest_block_bytes) = layout.block_bytes_min_max();
    Report {
        collective: operation.spec.collective,
        algorithm: plan.algorithm,
        choice: operation.choice.clone(),
        ranks: operation.topology.ranks(),
        chunks: plan.chunks,
        outputs: operation.buffering.outputs(),
        flags: plan.flags,
        capturable: operation.spec.capturable,
        input_bytes: layout.input_bytes(*rank),
        output_bytes: layout.output_bytes(*rank),
        shortest_block_bytes,
        longest_block_bytes,
        tensors: layout.tensors(),
        total_bytes: layout.total_bytes(),
        links,
        lanes: lane_reports,
        tiers,
        launch,
        fallbacks,
        proof: operation.proof.to_string(),
        shorter: Vec::new(),
        memory: Vec::new(),
    }
}

/// Returns what adds the contributions of a lane, if compute units do.
fn additions_of(lane: &BoundLane) -> Option<AdditionReport> {
    let reducer = lane.reducer.filter(|reducer| reducer.blocks > 0)?;
    let mut targets = BTreeMap::new();
    for command in &lane.program.commands {
        if let Command::Reduce { dst, bytes, .. } = *command {
            targets.insert((dst.region, dst.offset), bytes);
        }
    }
    Some(AdditionReport { reducer, bytes: targets.values().sum() })
}

fn tier_report(me: Rank, tier: Tier, lanes: &[BoundLane]) -> TierReport {
    let lanes = lanes.iter().filter(|lane| lane.tier == tier);
    let compute_bytes = lanes.clone().map(|lane| lane.compute_bytes).sum();
    let mut report = TierReport { tier, put_bytes: 0, got_bytes: 0, own_bytes: 0, compute_bytes };
    for command in lanes.flat_map(|lane| &lane.program.commands) {
        let Command::Copy { direction, peer, .. } = *command else { continue };
        let total = match direction {
            _ if peer == me => &mut report.own_bytes,
            Direction::Put => &mut report.put_bytes,
            Direction::Get => &mut report.got_bytes,
        };
        *total += command.bytes();
    }
    report
}
