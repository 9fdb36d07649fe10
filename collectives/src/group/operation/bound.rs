//! Creates the report and the executor of an operation whose regions have been imported.

use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{Caps, ErrorKind, Rank};

use super::draft::{GroupContext, Planned, Sides, Terms};
use super::prepared::Prepared;
use crate::error::Error;
use crate::group::report::{Fallback, LaneReport, LinkReport, Report, TierReport};
use crate::group::watch::Watch;
use crate::group::window::{Extent, Inner};
use crate::layout::Layout;
use crate::plan::{LaneId, Source, Tier};
use crate::run::buffers::{BufferId, OperationBuffers, TierBuffers};
use crate::run::executor::{Executor, ExecutorOptions};
use crate::run::lane::Lane;
use crate::run::port;
use crate::run::program::Program;

/// A lane with its program and the capabilities of its engine.
pub(super) struct BoundLane {
    pub(super) id: LaneId,
    pub(super) tier: Tier,
    pub(super) program: Program,
    pub(super) caps: Caps,
}

/// The lanes and the report of an operation, before it has an executor.
pub(super) struct Bound {
    lanes: Vec<BoundLane>,
    report: Report,
}

/// The parts of an [`Operation`](super::Operation), without its element type.
pub(super) struct Finished {
    pub(super) prepared: Prepared,
    pub(super) view: Arc<OperationBuffers>,
    pub(super) report: Report,
    pub(super) timeout: Duration,
    pub(super) watch: Arc<Watch>,
    pub(super) layout: Layout,
    pub(super) rank: Rank,
    /// The location of this rank's data before a start.
    pub(super) from: Source,
    pub(super) output_buffers: u32,
    /// The windows that are the input and the output, if they are.
    pub(super) windows: [Option<Arc<Inner>>; 2],
}

impl Bound {
    /// # Errors
    /// With `strict`, if there is a fallback.
    pub(super) fn new(
        context: &GroupContext,
        terms: &Terms,
        planned: &Planned,
        sides: &Sides<'_>,
        lanes: Vec<BoundLane>,
    ) -> Result<Self, Error> {
        let report = report(context, terms, planned, sides, &lanes);
        if terms.strict {
            // That a thread drives lanes matters to starts on a stream only, and is refused there.
            let refused =
                |fallback: &&Fallback| terms.capturable || !matches!(fallback, Fallback::Driven(_));
            if let Some(fallback) = report.fallbacks.iter().find(refused) {
                let text = format!("strict is set, but the operation needs a fallback: {fallback}");
                return Err(Error::new(ErrorKind::Unavailable, text));
            }
        }
        Ok(Self { lanes, report })
    }

    /// Creates the executor. Returns the parts of the operation, and the ranges of windows that it uses.
    pub(super) fn finish(
        self,
        context: GroupContext,
        terms: Terms,
        planned: &Planned,
        sides: Sides<'_>,
        name: String,
    ) -> (Finished, Vec<Extent>) {
        let Self { lanes, report } = self;
        let (me, buffering) = (context.rank, planned.buffering);
        let from = if planned.plan.in_place { Source::Output } else { Source::Input };
        let waits = lanes.iter().flat_map(|lane| lane.program.waits.iter().copied()).collect();
        let (local_ports, local) = sides.local.finish(buffering);
        let (network_ports, network) = match sides.network {
            Some(network) => {
                let (ports, view) = network.finish(buffering);
                (ports, Some(view))
            }
            None => (Vec::new(), None),
        };
        let (mut local_ports, mut network_ports) =
            (local_ports.into_iter(), network_ports.into_iter());
        let lanes = lanes.into_iter().map(|lane| {
            let ports = match lane.tier {
                Tier::Local => &mut local_ports,
                Tier::Network => &mut network_ports,
            };
            let port = ports.next().expect("every lane has had its engine made");
            // An engine may put its work straight onto the stream, where two lanes would be one
            // queue, and the last wait of lane 0 would hold up the other.
            Lane::new(lane.id, lane.program, port, lane.id == LaneId::HOME)
        });
        let lanes = lanes.collect();
        let views = TierBuffers { local: Arc::clone(&local), network };
        let writers = terms.writers(&context);
        let watch = Arc::new(Watch::new(name, me, terms.timeout, waits, writers, views));
        let options = {
            let Terms { capturable, strict, traced, .. } = terms;
            ExecutorOptions { capturable, strict, traced }
        };
        // SAFETY: the layout puts every cell inside the windows' buffers, whose lengths were
        // checked on both sides; ports keep the windows; `verify` has passed the plans.
        let executor = unsafe { Executor::new(lanes, options) };
        let prepared = Prepared::new(executor, context.shared, Arc::clone(&watch));
        let Terms { layout, timeout, request, .. } = terms;
        let windows =
            [BufferId::INPUT, BufferId::OUTPUT].map(|buffer| request.window(buffer).cloned());
        let view = local;
        let output_buffers = request.outputs();
        let finished = Finished {
            prepared,
            watch,
            view,
            report,
            timeout,
            layout,
            rank: me,
            from,
            output_buffers,
            windows,
        };
        (finished, request.extents)
    }
}

fn report(
    context: &GroupContext,
    terms: &Terms,
    planned: &Planned,
    sides: &Sides<'_>,
    lanes: &[BoundLane],
) -> Report {
    let plan = &planned.plan;
    // Once everything is imported a fabric knows where the peers' memory lies.
    let links: Vec<_> = Rank::all(context.topology.ranks())
        .flat_map(|peer| sides.iter().map(move |(tier, side)| (tier, side.link(peer))))
        .filter_map(|(tier, link)| {
            link.map(|link| LinkReport { peer: link.peer, tier, kind: link.kind })
        })
        .collect();
    let lane_reports: Vec<_> = lanes
        .iter()
        .map(|lane| LaneReport {
            lane: lane.id,
            tier: lane.tier,
            backend: sides.backend(lane.tier),
            kind: lane.caps.kind,
            queued_waits: lane.caps.queued_wait,
            polled: lane.caps.polled,
        })
        .collect();
    let slow =
        links.iter().filter(|link| link.kind.is_fallback()).map(|&link| Fallback::Link(link));
    let driven = lane_reports.iter().filter(|lane| !lane.is_queued());
    // Where even lane 0 is driven, there are no streams to start on.
    let streams = lane_reports.first().is_some_and(LaneReport::is_queued);
    let driven = driven.filter(|_| streams).map(|&lane| Fallback::Driven(lane));
    let staged = context.refusal.iter().filter(|_| sides.network.is_some());
    let staged = staged.map(|reason| Fallback::Staged { reason: Arc::clone(reason) });
    let fallbacks = staged.chain(slow).chain(driven).collect();
    let tiers = sides.iter().map(|(tier, _)| tier_report(context.rank, tier, lanes)).collect();
    Report {
        collective: plan.collective,
        algorithm: plan.algorithm,
        choice: terms.choice.clone(),
        ranks: context.topology.ranks(),
        chunks: plan.chunks,
        outputs: plan.outputs,
        flags: plan.flags,
        capturable: terms.capturable,
        shard_bytes: terms.layout.shard_bytes(context.rank),
        shortest_shard_bytes: terms.layout.shards().iter().min().unwrap_or(0),
        longest_shard_bytes: terms.layout.shards().iter().max().unwrap_or(0),
        tensors: terms.layout.tensors(),
        total_bytes: terms.layout.total_bytes(),
        links,
        lanes: lane_reports,
        tiers,
        fallbacks,
        proof: planned.proof.clone(),
    }
}

fn tier_report(me: Rank, tier: Tier, lanes: &[BoundLane]) -> TierReport {
    let mut report = TierReport { tier, put_bytes: 0, got_bytes: 0, own_bytes: 0 };
    let lanes = lanes.iter().filter(|lane| lane.tier == tier);
    for step in lanes.flat_map(|lane| &lane.program.steps) {
        match *step {
            port::BoundStep::Put { peer, bytes, .. } | port::BoundStep::Get { peer, bytes, .. }
                if peer == me =>
            {
                report.own_bytes += bytes;
            }
            port::BoundStep::Put { bytes, .. } => report.put_bytes += bytes,
            port::BoundStep::Get { bytes, .. } => report.got_bytes += bytes,
            port::BoundStep::Signal { .. } | port::BoundStep::Wait { .. } => {}
        }
    }
    report
}
