//! Plans an operation on this rank, and exchanges its memory with the other ranks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{BackendId, Caps, Deadline, EngineRequirements, ErrorKind, Rank};

use super::bound::{Bound, BoundLane, Finished};
use super::request::Request;
use crate::cost::Choice;
use crate::element::DType;
use crate::error::Error;
use crate::group::agreement::Offer;
use crate::group::options::blob;
use crate::group::shared::Shared;
use crate::group::side::{Keys, Side};
use crate::group::window::Extent;
use crate::layout::{FlagLayout, Layout, Placement};
use crate::plan::{Algorithm, Lane, LaneId, Plan, Step, Tier};
use crate::run::buffers::{BufferId, DoubleBuffering};
use crate::run::port;
use crate::run::program::{Binding, FlagTiers, FlagWriters, is_tiered};
use crate::schedule::{self, Shape};
use crate::topology::Topology;
use crate::verify::{self, Budget};

/// The parts of the group that an operation needs.
pub(super) struct GroupContext {
    pub(super) rank: Rank,
    pub(super) topology: Topology,
    /// The reason why the network cannot register this rank's memory, if it cannot.
    pub(super) refusal: Option<Arc<str>>,
    pub(super) shared: Arc<Shared>,
}

/// The properties of an operation after the choice of the algorithm.
pub(super) struct Terms {
    pub(super) operation: &'static str,
    pub(super) algorithm: Algorithm,
    pub(super) choice: Choice,
    pub(super) shape: Shape,
    /// The layout; it includes the placements of all ranks after the exchange.
    pub(super) layout: Layout,
    pub(super) request: Request,
    pub(super) dtype: DType,
    pub(super) capturable: bool,
    pub(super) requirements: EngineRequirements,
    pub(super) strict: bool,
    pub(super) traced: bool,
    pub(super) timeout: Duration,
}

/// The plan of this rank, and the values derived from it.
pub(super) struct Planned {
    pub(super) plan: Plan,
    flag_tiers: FlagTiers,
    flags: FlagLayout,
    pub(super) buffering: DoubleBuffering,
    pub(super) proof: String,
}

impl Terms {
    /// Creates the plan of this rank, and verifies the plans of all ranks.
    pub(super) fn plan(&self, context: &GroupContext) -> Result<Planned, Error> {
        let Self { algorithm, shape, layout, .. } = self;
        let topology = &context.topology;
        let plan = schedule::plan(*algorithm, topology, context.rank, *shape)?;
        let proof =
            verify::prove(*algorithm, topology, *shape, Budget::default()).map_err(|fault| {
                let text = format!(
                    "bug in Peerlane: the plan of {algorithm} failed its verification: {fault}; \
                     please report it"
                );
                Error::new(ErrorKind::Other, text).with_source(fault)
            })?;
        let mates = self.mates(context, &plan)?;
        let flag_tiers = FlagTiers::new(&plan, &mates);
        let flags = FlagLayout::new(context.topology.ranks(), shape.chunks, plan.lanes.len());
        let (outputs, bytes) = (shape.outputs, layout.total_bytes());
        let buffering = DoubleBuffering::new(outputs, bytes, flags.words(), self.capturable);
        let buffering = buffering.ok_or_else(|| {
            let text = format!("{outputs} outputs of {bytes} bytes exceed the address space");
            Error::new(ErrorKind::InvalidArgument, text)
        })?;
        Ok(Planned { plan, flag_tiers, flags, buffering, proof: proof.to_string() })
    }

    /// Returns the plans of the other ranks of this node, if flags can lie between tiers.
    fn mates(&self, context: &GroupContext, plan: &Plan) -> Result<Vec<Plan>, Error> {
        if !is_tiered(plan) {
            return Ok(Vec::new());
        }
        let topology = &context.topology;
        let mates = topology.members(topology.node(context.rank)).iter();
        let mates = mates.filter(|&&mate| mate != context.rank);
        mates.map(|&mate| schedule::plan(self.algorithm, topology, mate, self.shape)).collect()
    }

    pub(super) fn writers(&self, context: &GroupContext) -> FlagWriters {
        let (algorithm, shape, topology) = (self.algorithm, self.shape, context.topology.clone());
        FlagWriters::new(context.rank, context.topology.clone(), move |rank| {
            schedule::plan(algorithm, &topology, rank, shape).ok()
        })
    }

    /// Returns the minimum length of a buffer of `peer` in bytes.
    fn bytes(&self, buffering: &DoubleBuffering, peer: Rank, buffer: BufferId) -> u64 {
        let (layout, places) = (&self.layout, self.layout.placement(peer));
        let need = |needs: BTreeMap<u32, u64>, number| needs.get(&number).copied().unwrap_or(0);
        match buffer {
            BufferId::Input(number) => need(places.input_needs(layout, peer), number),
            BufferId::Output(number) => {
                buffering.buffer_bytes(need(places.output_needs(layout), number))
            }
            BufferId::Flags | BufferId::CrossTierFlags => buffering.flag_bytes(),
        }
    }
}

/// The setup of an operation on both fabrics.
pub(super) struct Sides<'g> {
    pub(super) local: Side<'g>,
    /// `None` if the plan has no lanes on the network.
    pub(super) network: Option<Side<'g>>,
}

impl<'g> Sides<'g> {
    pub(super) fn iter(&self) -> impl Iterator<Item = (Tier, &Side<'g>)> {
        let network = self.network.as_ref().map(|network| (Tier::Network, network));
        [(Tier::Local, &self.local)].into_iter().chain(network)
    }

    /// Returns the backend of the engines of a tier.
    pub(super) fn backend(&self, tier: Tier) -> BackendId {
        let network = self.network.as_ref().filter(|_| tier == Tier::Network);
        network.unwrap_or(&self.local).backend()
    }

    fn of(&mut self, tier: Tier) -> Result<&mut Side<'g>, Error> {
        match (tier, &mut self.network) {
            (Tier::Local, _) => Ok(&mut self.local),
            (Tier::Network, Some(network)) => Ok(network),
            (Tier::Network, None) => {
                let text = "the plan has network lanes, but the group has no network fabric; open \
                            it with `open_tiers`";
                Err(Error::new(ErrorKind::Other, text))
            }
        }
    }
}

/// An operation before the ranks have exchanged anything.
pub(super) struct Draft<'g> {
    context: GroupContext,
    terms: Terms,
    planned: Planned,
    sides: Sides<'g>,
    /// The capabilities of the engines, for each lane that has one.
    caps: Vec<Caps>,
}

impl<'g> Draft<'g> {
    /// Creates a draft. `local` holds the buffers, and the engine of lane 0 with these `caps`.
    pub(super) fn new(
        context: GroupContext,
        terms: Terms,
        planned: Planned,
        local: Side<'g>,
        caps: Caps,
        network: Option<Side<'g>>,
    ) -> Result<Self, Error> {
        let plan = &planned.plan;
        let flag_bytes = planned.buffering.flag_bytes();
        let mut sides = Sides { local, network: network.filter(|_| is_tiered(plan)) };
        let mut caps = vec![caps];
        for id in plan.lane_ids().filter(|&id| id != LaneId::HOME && has_engine(plan, id)) {
            caps.push(sides.of(plan.lanes[id.index()].tier)?.engine(terms.requirements)?);
        }
        sides.local.allocate(BufferId::Flags, flag_bytes)?;
        if let Some(network) = &mut sides.network {
            for buffer in terms.request.buffers() {
                match terms.request.window(buffer) {
                    Some(window) => window.lend(Tier::Network, buffer, network)?,
                    None => network.register(buffer, &sides.local)?,
                }
            }
            network.allocate(BufferId::Flags, flag_bytes)?;
            network.allocate(BufferId::CrossTierFlags, flag_bytes)?;
            sides.local.register(BufferId::CrossTierFlags, network)?;
        }
        Ok(Self { context, terms, planned, sides, caps })
    }

    /// Returns the offer for the other ranks: the values that must be equal, then the keys of the local fabric and of the network.
    pub(super) fn offer(&self) -> Result<Offer, Error> {
        let (plan, terms) = (&self.planned.plan, &self.terms);
        let (gets, request) = (has_gets(plan), &terms.request);
        // The keys of a window have been exchanged, and nobody but gets reads the input of a peer.
        let told =
            |buffer: &BufferId| request.window(*buffer).is_none() && (gets || buffer.is_output());
        let mut buffers: Vec<_> = request.buffers().filter(told).collect();
        buffers.push(BufferId::Flags);
        let blob = |keys: Keys| postcard::to_stdvec(&keys).expect("plain data always encodes");
        let places = postcard::to_stdvec(&request.places).expect("plain data always encodes");
        let mut offer =
            Offer::default().field("operation", terms.operation).field("dtype", terms.dtype);
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
            .field("capturable", terms.capturable)
            .field("streams", terms.requirements.streams)
            .field("timeout", format_args!("{:?}", terms.timeout))
            .field("topology", &self.context.topology)
            .blob(places)
            .blob(blob(self.sides.local.keys(&buffers)?));
        let Some(network) = &self.sides.network else { return Ok(offer) };
        buffers.push(BufferId::CrossTierFlags);
        Ok(offer.blob(blob(network.keys(&buffers)?)))
    }

    /// Binds the plan and imports the regions that its steps name.
    ///
    /// After an error, the draft must live until all ranks know of it, because they may still be importing its memory.
    pub(super) fn import(&mut self, offers: &[Offer], deadline: Deadline) -> Result<Bound, Error> {
        let (layout, places) = (self.terms.layout.clone(), places_of(offers)?);
        self.terms.layout = layout.with_placements(places)?;
        let Planned { plan, flag_tiers, flags, buffering, .. } = &self.planned;
        let binding = {
            let (layout, with_origins) = (&self.terms.layout, self.terms.traced);
            Binding { plan, layout, flags: *flags, flag_tiers, with_origins }
        };
        let lane = |id: LaneId| &plan.lanes[id.index()];
        let used = plan.lane_ids().filter(|&id| has_engine(plan, id));
        let bound = |(id, &caps): (LaneId, &Caps)| BoundLane {
            id,
            tier: lane(id).tier,
            program: binding.bind(id),
            caps,
        };
        let lanes: Vec<BoundLane> = used.zip(&self.caps).map(bound).collect();
        for tier in self.sides.iter().map(|(tier, _)| tier).collect::<Vec<_>>() {
            let side = self.sides.of(tier)?;
            let keys = keys_of(offers, tier)?;
            let lanes = lanes.iter().filter(|lane| lane.tier == tier);
            let steps = lanes.flat_map(|lane| &lane.program.steps);
            // Data before flags, so that what is wrong with the caller's memory is said first.
            for (buffer, peer) in steps.filter_map(named).collect::<BTreeSet<_>>() {
                let bytes = self.terms.bytes(buffering, peer, buffer);
                side.import(peer, buffer, &keys[peer.index()], bytes, deadline)?;
            }
        }
        Bound::new(&self.context, &self.terms, &self.planned, &self.sides, lanes)
    }

    /// Creates the executor and the report.
    pub(super) fn finish(self, bound: Bound, name: String) -> (Finished, Vec<Extent>) {
        let Self { context, terms, planned, sides, .. } = self;
        bound.finish(context, terms, &planned, sides, name)
    }
}

/// Returns the buffer and the rank that a step accesses, which can be this rank.
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

/// Returns the placements that the ranks have offered.
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

fn has_gets(plan: &Plan) -> bool {
    let mut steps = plan.lanes.iter().flat_map(|lane| &lane.steps);
    steps.any(|step| matches!(step, Step::Get { .. }))
}

/// Returns whether a lane needs an engine: because it has steps, or to poll a network engine that receives for lanes of the
/// other tier.
fn has_engine(plan: &Plan, id: LaneId) -> bool {
    let first_of_network = plan.lanes.iter().position(|lane| lane.tier == Tier::Network);
    let is_silent = |lane: &Lane| lane.tier != Tier::Network || lane.steps.is_empty();
    let hears = first_of_network == Some(id.index()) && plan.lanes.iter().all(is_silent);
    id == LaneId::HOME || hears || !plan.lanes[id.index()].steps.is_empty()
}
