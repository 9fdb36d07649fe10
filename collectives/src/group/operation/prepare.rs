//! Prepares a collective operation together with all ranks: plans it, exchanges remote keys, and imports memory.

use std::collections::BTreeSet;
use std::sync::Arc;

use peerlane_hal::{Caps, Deadline, DynRegion, ErrorKind, Rank, Region};

use super::State;
use super::lens::BlockLens;
use super::plan::{GroupInfo, OperationPlan};
use super::prepared::Prepared;
use super::report::{BoundLane, report};
use super::request::{OperationSpec, Target};
use crate::error::Error;
use crate::group::Group;
use crate::group::agreement::blob;
use crate::group::agreement::{Offer, agree};
use crate::group::report::{Fallback, Report};
use crate::group::shared::Shared;
use crate::group::side::{Keys, Side, Sides};
use crate::group::tracker::StartTracker;
use crate::group::window::WindowUses;
use crate::layout::Placement;
use crate::plan::{Lane as PlanLane, LaneId, Plan, Source, Tier};
use crate::run::buffers::{BufferId, Start, TierBuffers};
use crate::run::executor::{Executor, ExecutorOptions};
use crate::run::lane::Lane;
use crate::run::port;
use crate::run::program::{Binding, is_tiered};
use crate::schedule::schedule;

pub(super) fn prepare(group: &mut Group, spec: OperationSpec) -> Result<State, Error> {
    group.shared.check()?;
    group.prepared += 1;
    let name = format!("{} {}", spec.collective.name(), group.prepared);
    // A zero timeout is refused with all ranks, so that none waits for this one.
    let timeout = if spec.timeout.is_zero() { group.timeout() } else { spec.timeout };
    let deadline = Deadline::after(timeout);
    let (shared, users) = (Arc::clone(&group.shared), Arc::clone(&group.users));

    let spec = agree_lens(group, spec, &name, deadline)?;
    let mut preparation = Preparation::new(group, spec);
    let offer = preparation.as_ref().map_err(Error::clone).and_then(Preparation::offer);
    let offers = agree(&shared, &name, offer, deadline)?;
    // After an error, the preparation lives until all ranks know of it, because they may still be importing its memory.
    let report = match &mut preparation {
        Ok(preparation) => preparation.import(&offers, deadline),
        Err(error) => Err(error.clone()),
    };
    let is_recordable = preparation.as_ref().is_ok_and(Preparation::is_recordable);
    let vote = report.as_ref().map(|_| Offer::default().blob(vec![u8::from(is_recordable)]));
    // Nobody signals before every rank has imported every flag.
    let votes = agree(&shared, &format!("{name}, import"), vote.map_err(Error::clone), deadline)?;
    let (preparation, report) = (preparation?, report?);
    if report.capturable {
        check_recordable(&report, &votes)?;
    }
    Ok(preparation.finish(report, name, &users))
}

fn agree_lens(
    group: &Group,
    spec: OperationSpec,
    name: &str,
    deadline: Deadline,
) -> Result<OperationSpec, Error> {
    let Some(offer) = spec.lens.offer(group.ranks()) else { return Ok(spec) };
    let label = format!("{name}, lengths of blocks");
    let offer = offer.map(|offer| offer.field("dtype", spec.dtype));
    let offers = agree(&group.shared, &label, offer, deadline)?;
    Ok(OperationSpec { lens: BlockLens::agreed(name, &offers)?, ..spec })
}

/// Returns the same error on all ranks if one of them cannot record the operation into a graph.
fn check_recordable(report: &Report, votes: &[Offer]) -> Result<(), Error> {
    for (rank, vote) in Rank::all(votes.len()).zip(votes) {
        if blob(vote, rank, 0)? != [1] {
            let text = format!(
                "{} cannot be captured: a graph contains only one lane of each rank, and rank {rank} has another \
                 one that a thread cannot drive; use direct or ring, or remove `capturable()`",
                report.algorithm
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text).with_peer(rank));
        }
    }
    Ok(())
}

struct Preparation<'g> {
    operation: OperationPlan,
    shared: Arc<Shared>,
    refusal: Option<Arc<str>>,
    sides: Sides<'g>,
    caps: Vec<Caps>,
    lanes: Vec<BoundLane>,
}

impl<'g> Preparation<'g> {
    fn new(group: &'g mut Group, spec: OperationSpec) -> Result<Self, Error> {
        let rank = group.rank();
        let Group { fabric, network, topology, links, links_measured, mixed, .. } = group;
        let (shared, refusal) = (Arc::clone(&group.shared), group.refusal.clone());
        let info = GroupInfo {
            rank,
            topology,
            shared: &shared,
            links: (links, *links_measured),
            mixed: *mixed,
            tiers: network.is_some(),
        };
        let mut local = Side::new(fabric);
        let (mut operation, caps) = OperationPlan::new(spec, &info, &mut local)?;
        lend_buffers(&mut operation, &mut local)?;
        let network = network.as_mut().map(Side::new).filter(|_| is_tiered(&operation.plan));
        let sides = Sides { local, network };
        let lanes = Vec::new();
        let mut preparation = Self { operation, shared, refusal, sides, caps: vec![caps], lanes };
        preparation.set_up()?;
        Ok(preparation)
    }

    fn set_up(&mut self) -> Result<(), Error> {
        let Self { operation, sides, caps, .. } = self;
        let (plan, flag_bytes) = (&operation.plan, operation.buffering.flag_bytes());
        for id in plan.lane_ids().filter(|&id| id != LaneId::HOME && has_engine(plan, id)) {
            caps.push(sides.of(plan.lanes[id.index()].tier)?.engine(operation.requirements)?);
        }
        sides.local.allocate(BufferId::Flags, flag_bytes)?;
        if let Some(network) = &mut sides.network {
            for buffer in operation.request.buffers() {
                match operation.request.window(buffer) {
                    Some(window) => window.lend(Tier::Network, buffer, network)?,
                    None => network.register(buffer, &sides.local)?,
                }
            }
            network.allocate(BufferId::Flags, flag_bytes)?;
            network.allocate(BufferId::CrossTierFlags, flag_bytes)?;
            sides.local.register(BufferId::CrossTierFlags, network)?;
        }
        Ok(())
    }

    /// Offers the remote keys of the local fabric first, and then those of the network.
    pub(super) fn offer(&self) -> Result<Offer, Error> {
        let OperationPlan { spec, plan, request, .. } = &self.operation;
        let gets = schedule(plan.algorithm).gets;
        // The keys of a window have been exchanged, and nobody but gets reads the input of a peer.
        let told =
            |buffer: &BufferId| request.window(*buffer).is_none() && (gets || buffer.is_output());
        let mut buffers: Vec<_> = request.buffers().filter(told).collect();
        buffers.push(BufferId::Flags);
        let blob = |keys: Keys| postcard::to_stdvec(&keys).expect("plain data always encodes");
        let places = postcard::to_stdvec(&request.places).expect("plain data always encodes");
        let mut offer = Offer::default().field("dtype", spec.dtype);
        for (name, value) in &request.fields {
            offer = offer.field(name, value);
        }
        let offer = offer
            .field("collective", plan.collective)
            .field("algorithm", plan.algorithm)
            .field("chunks", plan.chunks)
            .field("in_place", plan.in_place)
            .field("outputs", plan.outputs)
            .field("flags", plan.flags)
            .field("capturable", spec.capturable)
            .field("streams", self.operation.requirements.streams)
            .field("timeout", format_args!("{:?}", spec.timeout))
            .field("topology", &self.operation.topology)
            .blob(places)
            .blob(blob(self.sides.local.keys(&buffers)?));
        let Some(network) = &self.sides.network else { return Ok(offer) };
        buffers.push(BufferId::CrossTierFlags);
        Ok(offer.blob(blob(network.keys(&buffers)?)))
    }

    fn import(&mut self, offers: &[Offer], deadline: Deadline) -> Result<Report, Error> {
        let Self { operation, sides, .. } = self;
        operation.layout = operation.layout.clone().with_placements(places_of(offers)?)?;
        let OperationPlan { plan, spec, layout, flag_tiers, flags, .. } = &*operation;
        let binding =
            Binding { plan, layout, flags: *flags, flag_tiers, with_origins: spec.traced };
        let used = plan.lane_ids().filter(|&id| has_engine(plan, id));
        let bound = |(id, &caps): (LaneId, &Caps)| {
            let (tier, program) = (plan.lanes[id.index()].tier, binding.bind(id));
            BoundLane { id, tier, program, caps, has_streams: false, compute_bytes: 0 }
        };
        self.lanes = used.zip(&self.caps).map(bound).collect();
        for tier in sides.iter().map(|(tier, _)| tier).collect::<Vec<_>>() {
            let side = sides.of(tier)?;
            let keys = keys_of(offers, tier)?;
            let lanes = self.lanes.iter().filter(|lane| lane.tier == tier);
            let steps = lanes.flat_map(|lane| &lane.program.steps);
            // Data before flags, so that an error of the caller's memory is found first.
            for (buffer, peer) in steps.filter_map(named).collect::<BTreeSet<_>>() {
                let bytes = operation.peer_bytes(peer, buffer);
                side.import(peer, buffer, &keys[peer.index()], bytes, deadline)?;
            }
        }
        self.query_engines()?;
        let Self { operation, sides, .. } = self;
        let report = report(operation, self.refusal.as_ref(), sides, &self.lanes);
        if operation.spec.strict {
            // That a thread drives lanes matters to starts on a stream only, and is refused there.
            let refused = |fallback: &&Fallback| {
                operation.spec.capturable || !matches!(fallback, Fallback::Driven(_))
            };
            if let Some(fallback) = report.fallbacks.iter().find(refused) {
                let text = format!("strict is set, but the operation needs a fallback: {fallback}");
                return Err(Error::new(ErrorKind::Unavailable, text));
            }
        }
        Ok(report)
    }

    fn query_engines(&mut self) -> Result<(), Error> {
        let (spec, buffering) = (&self.operation.spec, self.operation.buffering);
        let starts: &[Start] = match spec.capturable {
            true => &[Start::Eager(1), Start::Captured],
            false => &[Start::Eager(1)],
        };
        let mut engines = [0, 0];
        for lane in &mut self.lanes {
            let number = &mut engines[usize::from(lane.tier == Tier::Network)];
            let (engine, slice_ops_max) =
                (*number, if spec.traced { 1 } else { lane.caps.slice_ops_max });
            *number += 1;
            let (side, program) = (self.sides.of(lane.tier)?, &lane.program);
            lane.has_streams = side.has_streams(engine);
            let bytes = starts.iter().map(|&start| {
                side.compute_bytes(engine, program.slices(slice_ops_max), start, buffering)
            });
            lane.compute_bytes = bytes.max().unwrap_or(0);
        }
        Ok(())
    }

    /// A graph can record an operation only if a thread can drive every lane that does not support streams. The host
    /// must be able to read its flags, and a graph that waits must not hold up its copies.
    fn is_recordable(&self) -> bool {
        let armed = || self.lanes.iter().filter(|lane| !takes_stream(lane.id));
        if armed().any(|lane| lane.has_streams) {
            return false;
        }
        armed().flat_map(|lane| &lane.program.waits).all(|wait| {
            let mut sides = self.sides.iter().filter(|(tier, _)| *tier == wait.tier);
            sides.all(|(_, side)| side.has_host_flags(wait.address.buffer()))
        })
    }

    fn finish(self, report: Report, name: String, users: &Arc<WindowUses>) -> State {
        let Self { operation, shared, sides, lanes, .. } = self;
        let (rank, buffering, spec) = (operation.rank, operation.buffering, &operation.spec);
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
            Lane::new(lane.id, lane.program, port, takes_stream(lane.id))
        });
        let lanes = lanes.collect();
        let views = TierBuffers { local: Arc::clone(&local), network };
        let writers = operation.writers();
        let tracker =
            Arc::new(StartTracker::new(name.clone(), rank, spec.timeout, waits, writers, views));
        let OperationSpec { capturable, strict, traced, timeout, .. } = *spec;
        // SAFETY: the layout puts every cell inside the windows' buffers, whose lengths were
        // checked on both sides; ports keep the windows; `verify` has passed the plans.
        let executor =
            unsafe { Executor::new(lanes, ExecutorOptions { capturable, strict, traced }) };
        let OperationPlan { request, layout, plan, .. } = operation;
        let uses = (!request.extents.is_empty()).then(|| {
            let tracker = Arc::clone(&tracker);
            users.enter(name, request.extents.clone(), move || tracker.activity())
        });
        State {
            prepared: Prepared::new(executor, shared, tracker),
            view: local,
            report,
            timeout,
            layout,
            rank,
            from: if plan.in_place { Source::Output } else { Source::Input },
            output_buffers: request.outputs(),
            windows: [BufferId::INPUT, BufferId::OUTPUT]
                .map(|buffer| request.window(buffer).cloned()),
            uses,
        }
    }
}

/// Only lane 0 runs on the caller's stream, so that its last wait does not hold up another lane in the same hardware
/// queue.
fn takes_stream(lane: LaneId) -> bool {
    lane == LaneId::HOME
}

fn lend_buffers(operation: &mut OperationPlan, local: &mut Side<'_>) -> Result<(), Error> {
    let outputs = std::mem::take(&mut operation.spec.output_buffers);
    let inputs = std::mem::take(&mut operation.spec.inputs);
    // A list need not use all of a buffer.
    let exact = !matches!(operation.spec.target, Target::List(_));
    let (mut outputs, mut inputs) = (outputs.into_iter(), inputs.into_iter());
    for buffer in operation.request.buffers() {
        let (given, exact) =
            if buffer.is_output() { (outputs.next(), exact) } else { (inputs.next(), true) };
        match operation.request.window(buffer) {
            Some(window) => window.lend(Tier::Local, buffer, local)?,
            None => give(local, buffer, given, operation.own_bytes(buffer), exact)?,
        }
    }
    Ok(())
}

/// A region that the caller supplies may be longer than `bytes` unless `exact` is set.
fn give(
    side: &mut Side<'_>,
    buffer: BufferId,
    given: Option<DynRegion>,
    bytes: u64,
    exact: bool,
) -> Result<(), Error> {
    let Some(region) = given else { return side.allocate(buffer, bytes) };
    if region.bytes() < bytes || (exact && region.bytes() != bytes) {
        let least = if exact { "" } else { "at least " };
        let text = format!("{buffer} has {} bytes, expected {least}{bytes} bytes", region.bytes());
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    side.insert(buffer, region);
    Ok(())
}

fn named(step: &port::BoundStep) -> Option<(BufferId, Rank)> {
    match *step {
        port::BoundStep::Put { peer, dst, .. } => Some((dst.buffer, peer)),
        port::BoundStep::Get { peer, src, .. } => Some((src.buffer, peer)),
        port::BoundStep::Signal { peer, flag } => Some((flag.buffer(), peer)),
        port::BoundStep::Wait { .. } => None,
    }
}

fn keys_of(offers: &[Offer], tier: Tier) -> Result<Vec<Keys>, Error> {
    let index = 1 + usize::from(tier == Tier::Network);
    let keys = |(peer, offer)| {
        postcard::from_bytes(blob(offer, peer, index)?).map_err(|error| {
            let text = format!(
                "cannot decode the remote keys of rank {peer}: {error}; run the same Peerlane on \
                 all ranks"
            );
            Error::new(ErrorKind::InvalidKey, text).with_peer(peer)
        })
    };
    Rank::all(offers.len()).zip(offers).map(keys).collect()
}

fn places_of(offers: &[Offer]) -> Result<Vec<Placement>, Error> {
    let places = |(peer, offer)| {
        postcard::from_bytes(blob(offer, peer, 0)?).map_err(|error| {
            let text = format!(
                "cannot decode the buffer positions of rank {peer}: {error}; run the same Peerlane \
                 on all ranks"
            );
            Error::new(ErrorKind::Mismatch, text).with_peer(peer)
        })
    };
    Rank::all(offers.len()).zip(offers).map(places).collect()
}

fn has_engine(plan: &Plan, id: LaneId) -> bool {
    let first_of_network = plan.lanes.iter().position(|lane| lane.tier == Tier::Network);
    let is_silent = |lane: &PlanLane| lane.tier != Tier::Network || lane.steps.is_empty();
    let hears = first_of_network == Some(id.index()) && plan.lanes.iter().all(is_silent);
    id == LaneId::HOME || hears || !plan.lanes[id.index()].steps.is_empty()
}
