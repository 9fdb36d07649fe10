//! Creates the report of which algorithm, engines and links a prepared operation uses.

use std::collections::BTreeMap;
use std::sync::Arc;

use peerlane_hal::{Caps, Command, Direction, Fabric as _, Rank, Reducer};

use super::plan::OperationPlan;
use crate::group::report::{AdditionReport, Fallback, LaneReport, LinkReport, Report, TierReport};
use crate::group::segment::Fabrics;
use crate::plan::{LaneId, Tier};
use crate::run::program::{Program, is_tiered};

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
    let compute = tiers.iter().filter(|tier| tier.compute_bytes > 0);
    let compute = compute.map(|&tier| Fallback::Compute(tier));
    let additions = lanes.iter().filter_map(additions).map(Fallback::Additions);
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
        fallbacks,
        proof: operation.proof.to_string(),
        shorter: Vec::new(),
        memory: Vec::new(),
    }
}

/// Returns what adds the contributions of a lane, if compute units do.
fn additions(lane: &BoundLane) -> Option<AdditionReport> {
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
