//! An operation of which everything is exchanged: its report, and then its executor.

use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{Caps, ErrorKind, Rank};

use super::draft::{Ground, Planned, Sides, Terms};
use crate::error::Error;
use crate::group::report::{Fallback, LaneReport, LinkReport, Report, TierReport};
use crate::group::watch::Watch;
use crate::plan::{LaneId, Tier};
use crate::run::course::Course;
use crate::run::lane::Lane;
use crate::run::port::Bound;
use crate::run::prepared::Prepared;
use crate::run::program::Program;
use crate::window::{HostView, Views};

/// A lane that is bound, and what its engine can do.
pub(super) struct BoundLane {
    pub(super) id: LaneId,
    pub(super) tier: Tier,
    pub(super) program: Program,
    pub(super) caps: Caps,
}

/// Everything is exchanged; only this rank's executor is missing.
pub(super) struct Ready<'g> {
    ground: Ground,
    terms: Terms,
    planned: Planned,
    sides: Sides<'g>,
    lanes: Vec<BoundLane>,
    report: Report,
}

/// What the handle of an operation is made from.
pub(super) struct Finished {
    pub(super) prepared: Prepared,
    pub(super) view: Arc<dyn HostView>,
    pub(super) report: Report,
    pub(super) timeout: Duration,
    /// Where the own shard begins in the region that holds it, in bytes.
    pub(super) offset: u64,
}

impl<'g> Ready<'g> {
    pub(super) fn new(
        ground: Ground,
        terms: Terms,
        planned: Planned,
        sides: Sides<'g>,
        lanes: Vec<BoundLane>,
    ) -> Result<Self, Error> {
        let report = report(&ground, &terms, &planned, &sides, &lanes);
        if terms.strict {
            // That a thread drives lanes matters to starts on a stream only, and is refused there.
            let refused =
                |fallback: &&Fallback| terms.capturable || !matches!(fallback, Fallback::Driven(_));
            if let Some(fallback) = report.fallbacks.iter().find(refused) {
                let text = format!("strict is set, and there is a fallback: {fallback}");
                return Err(Error::new(ErrorKind::Unavailable, text));
            }
        }
        Ok(Self { ground, terms, planned, sides, lanes, report })
    }

    pub(super) fn finish(self, name: String) -> Finished {
        let Self { ground, terms, planned, sides, lanes, report } = self;
        let (me, plan, turns) = (ground.rank, &planned.plan, planned.turns);
        let offset = if plan.in_place { terms.layout.shard_offset(me) } else { 0 };
        let waits = lanes.iter().flat_map(|lane| lane.program.waits.iter().copied()).collect();
        let (local_ports, local) = sides.local.finish(turns);
        let (network_ports, network) = match sides.network {
            Some(network) => {
                let (ports, view) = network.finish(turns);
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
            Lane::new(lane.program, port, lane.id == LaneId::HOME)
        });
        let lanes = lanes.collect();
        let views = Views { local: Arc::clone(&local), network };
        let writers = terms.writers(&ground);
        let watch = Arc::new(Watch::new(name, me, terms.timeout, waits, writers, views));
        // SAFETY: the layout puts every cell inside the windows' buffers, whose lengths were
        // checked on both sides; ports keep the windows; `verify` has passed the plans.
        let course = unsafe { Course::new(lanes, terms.capturable) };
        let prepared = Prepared::new(course, ground.shared, watch);
        Finished { prepared, view: local, report, timeout: terms.timeout, offset }
    }
}

fn report(
    ground: &Ground,
    terms: &Terms,
    planned: &Planned,
    sides: &Sides<'_>,
    lanes: &[BoundLane],
) -> Report {
    let plan = &planned.plan;
    // Once everything is imported a fabric knows where the peers' memory lies.
    let links: Vec<_> = Rank::all(ground.topology.ranks())
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
            queued_waits: lane.caps.queued_wait,
            polled: lane.caps.polled,
        })
        .collect();
    let slow =
        links.iter().filter(|link| link.kind.is_fallback()).map(|&link| Fallback::Link(link));
    let driven = lane_reports.iter().filter(|lane| !lane.queued_waits || lane.polled);
    // Where even lane 0 is driven, there are no streams to start on.
    let streams = lane_reports.first().is_some_and(|home| home.queued_waits && !home.polled);
    let driven = driven.filter(|_| streams).map(|&lane| Fallback::Driven(lane));
    let fallbacks = slow.chain(driven).collect();
    let tiers = sides.iter().map(|(tier, _)| tier_report(ground.rank, tier, lanes)).collect();
    Report {
        algorithm: plan.algorithm,
        ranks: ground.topology.ranks(),
        parts: plan.parts,
        outputs: plan.outputs,
        flags: plan.flags,
        capturable: terms.capturable,
        shard_bytes: terms.layout.shard_bytes(ground.rank),
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
            Bound::Put { peer, bytes, .. } | Bound::Get { peer, bytes, .. } if peer == me => {
                report.own_bytes += bytes;
            }
            Bound::Put { bytes, .. } => report.put_bytes += bytes,
            Bound::Get { bytes, .. } => report.got_bytes += bytes,
            Bound::Signal { .. } | Bound::Wait { .. } => {}
        }
    }
    report
}
