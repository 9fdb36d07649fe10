//! Prepares operations together with all ranks: plans them, agrees on them, allocates and imports
//! their memory.
//!
//! One agreement is enough for memory of the heap and of windows. A second one confirms that every
//! rank has imported the buffers of callers, and that no rank needs a fallback or cannot record the
//! operation into a graph.

use std::cmp::Reverse;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use peerlane_hal::{
    Caps, Command, Commands, CopyEngine, Deadline, DynEngine, ErrorKind, Fabric, Rank, Reducer,
    Region as _, Space,
};
use serde::{Deserialize, Serialize};

use super::State;
use super::fused::FusedPlan;
use super::handles::Chunks;
use super::lens::BlockLens;
use super::memory::{Memory, Origin, Origins, check_windows};
use super::plan::{GroupInfo, OperationPlan, has_engine};
use super::prepared::{Prepared, SharedAllocation};
use super::report::{BoundLane, report};
use super::request::{Method, OperationSpec};
use super::resize::{Resizing, StartPlan};
use crate::error::Error;
use crate::group::agreement::{Offer, agree, blob, decode, encode};
use crate::group::heap::{Demand, Dropped, NewInboxes};
use crate::group::options::check_label;
use crate::group::report::{Fallback, PlanRange, Report};
use crate::group::stats::{CountedBuffers, MemoryKind, summed};
use crate::group::tracker::{FusedStart, PartCell, StartTracker};
use crate::group::{Group, Setup};
use crate::layout::Placement;
use crate::plan::{LaneId, Source, Tier};
use crate::run::buffers::{
    BufferId, CROSS_TIER_FLAGS, OperationBuffers, RankRegions, Start, TierBuffers,
};
use crate::run::executor::{Executor, ExecutorOptions};
use crate::run::lane::{Adder, Lane};
use crate::run::program::{Binding, FlagTiers, Program, is_tiered};
use crate::run::queue::{Queue, copies_rows};
use crate::verify;

/// Holds what a rank tells the others about operations that are prepared, apart from the values
/// that must be equal.
#[derive(Serialize, Deserialize)]
struct Announcement {
    /// The allocations of the heap that this rank has dropped.
    dropped: Vec<Dropped>,
    operations: Vec<OperationMemory>,
}

#[derive(Serialize, Deserialize)]
struct OperationMemory {
    placement: Placement,
    origins: Origins,
    /// Whether this rank polls flags, for each tier.
    polled: [bool; 2],
    /// The kind of engines that this rank could not create, and the reason.
    failed: Option<(String, String)>,
}

/// Prepares operations in one agreement. Collective.
pub(super) fn prepare(group: &mut Group, specs: Vec<OperationSpec>) -> Result<Vec<State>, Error> {
    group.runtime.life.check()?;
    let mut labels = specs.iter().filter_map(|spec| spec.label.as_deref());
    if let Err(error) = labels.try_for_each(check_label) {
        return Err(group.refuse(error));
    }

    // An operation whose starts have a short timeout still has the time of the group to be
    // prepared.
    let timeouts = specs.iter().map(|spec| spec.timeout);
    let deadline = Deadline::after(timeouts.fold(group.timeout(), Duration::max));

    // It counts when the ranks have agreed. A rank that refuses the call does not know which count
    // would change.
    let number = group.prepared + 1;
    let names = names(&specs, number);
    let name = match &names[..] {
        [] => return Ok(Vec::new()),
        [name] => name.clone(),
        names => format!("{} operations {number}", names.len()),
    };

    let specs = specs.into_iter().zip(&names);
    let specs = specs.map(|(spec, name)| agree_lens(group, spec, name, deadline));
    let specs: Vec<_> = specs.collect::<Result<_, Error>>()?;

    let Agreed { mut preparations, announced, own_dropped } =
        agree_engines(group, &specs, &names, &name, deadline)?;
    group.prepared = number;

    let (dropped, mut operations): (Vec<_>, Vec<_>) = announced
        .into_iter()
        .map(|of_rank| (of_rank.dropped, of_rank.operations.into_iter()))
        .unzip();

    // This comes before the allocation below, which can then use the blocks that are free.
    group.heap.free_dropped(&dropped, own_dropped);
    let runtime = Arc::clone(&group.runtime);

    let mut origins: Vec<Vec<Origins>> = Vec::with_capacity(preparations.len());
    for (preparation, name) in preparations.iter_mut().zip(&names) {
        let of_ranks = operations.iter_mut().filter_map(Iterator::next).collect();
        origins.push(preparation.place(name, of_ranks)?);
    }
    allocate(group, &mut preparations, deadline)?;

    let epoch_base = group.heap.epoch_base();
    let reports: Result<Vec<_>, Error> = preparations
        .iter_mut()
        .zip(&origins)
        .map(|(preparation, origins)| preparation.bind(group, origins, epoch_base, deadline))
        .collect();

    let has_imports = origins.iter().flatten().flat_map(Origins::values);
    let has_imports = has_imports.into_iter().any(|origin| matches!(origin, Origin::Own(_)));
    let is_checked = |preparation: &Preparation| {
        let spec = &preparation.operation.spec;
        // No peer may put into slots before they are cleared.
        let is_fused = preparation.operation.fused.is_some();
        is_fused || spec.strict || spec.capturable || spec.collective.is_reduction()
    };
    if has_imports || preparations.iter().any(is_checked) {
        let recordable = preparations.iter().map(|one| u8::from(one.is_recordable())).collect();
        let vote = reports.as_ref().map(|_| Offer::default().blob(recordable));
        // No rank signals before every rank has imported every buffer. After an error the memory
        // lives until all ranks know of it, because they may still be importing it.
        let votes =
            agree(&runtime, &format!("{name}, import"), vote.map_err(Error::clone), deadline)?;
        for (index, report) in reports.iter().flatten().enumerate() {
            if report.capturable {
                check_recordable(report, index, &votes)?;
            }
        }
    }

    let prepared = preparations.into_iter().zip(reports?).zip(names);
    let states = prepared
        .map(|((preparation, report), name)| preparation.finish(group, report, name))
        .collect();

    runtime.work.order.note_prepared(number);
    Ok(states)
}

/// Holds preparations whose engines all ranks have created.
struct Agreed {
    preparations: Vec<Preparation>,
    announced: Vec<Announcement>,
    /// The number of allocations that this rank has announced as dropped.
    own_dropped: usize,
}

/// Plans operations and creates their engines, until all ranks have those of one kind for each
/// operation.
///
/// If a rank cannot create engines of the chosen kind, all ranks learn it in the agreement, and
/// choose again without that kind. So there are at most as many rounds as kinds.
fn agree_engines(
    group: &mut Group,
    specs: &[OperationSpec],
    names: &[String],
    name: &str,
    deadline: Deadline,
) -> Result<Agreed, Error> {
    let runtime = Arc::clone(&group.runtime);
    let mut failed: Vec<Vec<(String, String)>> = vec![Vec::new(); specs.len()];

    loop {
        let dropped = group.heap.dropped();
        let own_dropped = dropped.len();
        let preparations = specs.iter().zip(&failed);
        let preparations =
            preparations.map(|(spec, failed)| Preparation::new(group, spec.clone(), failed));
        let preparations: Result<Vec<_>, Error> = preparations.collect();

        // An error is offered, too, so that all ranks return it.
        let offer = preparations.as_ref().map_err(Error::clone).map(|preparations| {
            let operations = preparations.iter().map(Preparation::memory).collect();
            let offer = Offer::default().blob(encode(&Announcement { dropped, operations }));

            preparations.iter().zip(names).fold(offer, |offer, (preparation, name)| {
                let prefix = if names.len() > 1 { format!("{name}, ") } else { String::new() };
                preparation.fields(offer, &prefix)
            })
        });
        let offers = agree(&runtime, name, offer, deadline)?;

        let preparations = preparations?;
        let announced = announcements(&offers, preparations.len())?;
        let mut is_complete = true;
        for (rank, announcement) in Rank::all(announced.len()).zip(&announced) {
            for (failed, operation) in failed.iter_mut().zip(&announcement.operations) {
                let Some((kind, why)) = &operation.failed else { continue };
                is_complete = false;
                // Of several ranks, the lowest is named.
                if failed.iter().all(|(known, _)| known != kind) {
                    failed.push((kind.clone(), format!("rank {rank} could not create it: {why}")));
                }
            }
        }

        if is_complete {
            return Ok(Agreed { preparations, announced, own_dropped });
        }
    }
}

/// Returns the names of operations for error texts. `number` counts the calls that prepare
/// operations.
fn names(specs: &[OperationSpec], number: u64) -> Vec<String> {
    let name = |(index, spec): (usize, &OperationSpec)| {
        let name = match (spec.name, spec.collective.name()) {
            (Some(name), _) => name.to_owned(),
            (None, name) if specs.len() > 1 => format!("{name} {number}.{}", index + 1),
            (None, name) => format!("{name} {number}"),
        };

        match &spec.label {
            Some(label) => format!("{name} \"{label}\""),
            None => name,
        }
    };
    specs.iter().enumerate().map(name).collect()
}

/// Decodes the announcements of all ranks.
fn announcements(offers: &[Offer], operations: usize) -> Result<Vec<Announcement>, Error> {
    let announced = Rank::all(offers.len()).zip(offers).map(|(peer, offer)| {
        let announced: Announcement = decode("description of the memory", offer, peer, 0)?;
        if announced.operations.len() == operations {
            return Ok(announced);
        }

        let text = format!(
            "rank {peer} prepares {} operations, expected {operations} as on this rank",
            announced.operations.len()
        );
        Err(Error::new(ErrorKind::Mismatch, text).with_peer(peer))
    });
    announced.collect()
}

/// Takes the blocks of all operations from the heap, which grows until they fit.
fn allocate(
    group: &mut Group,
    preparations: &mut [Preparation],
    deadline: Deadline,
) -> Result<(), Error> {
    loop {
        let heap = &mut group.heap;
        // The operation with the largest inbox comes first, so that others can share its inbox.
        let mut memories: Vec<_> = preparations.iter_mut().map(|one| &mut one.memory).collect();
        memories.sort_by_key(|memory| Reverse(memory.heap_inbox_bytes()));
        let mut missing: Vec<Demand> = Vec::new();
        let mut inboxes = NewInboxes::default();
        for memory in memories {
            let demands = memory.allocate(heap);
            let demands =
                demands.into_iter().filter(|demand| inboxes.needs(*demand, memory.written()));
            missing.extend(demands);
        }
        if missing.is_empty() {
            return Ok(());
        }

        group.grow_heap(&missing, deadline)?;
    }
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
    let offers = agree(&group.runtime, &label, offer, deadline)?;
    Ok(OperationSpec { lens: BlockLens::agreed(name, &offers)?, ..spec })
}

/// Returns the same error on all ranks if one of them cannot record the operation into a graph.
fn check_recordable(report: &Report, index: usize, votes: &[Offer]) -> Result<(), Error> {
    for (rank, vote) in Rank::all(votes.len()).zip(votes) {
        if blob(vote, rank, 0)?.get(index) != Some(&1) {
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

/// Holds an operation that is being prepared: its plan, its memory, and the engines of its lanes.
struct Preparation {
    operation: OperationPlan,
    refusal: Option<Arc<str>>,
    memory: Memory,
    /// The engines of the lanes that need one, in the order of the lanes, until they are in
    /// `queues`.
    engines: Vec<DynEngine>,
    /// The kind of engines that this rank could not create, and the reason.
    failed: Option<(String, String)>,
    queues: Vec<Queue>,
    lanes: Vec<BoundLane>,
    buffers: Option<TierBuffers>,
    /// The plans of shorter starts, largest first.
    shorter: Vec<(PlanRange, Preparation)>,
}

impl Preparation {
    /// Plans an operation with engines of a kind that is not in `failed`, and creates the engines.
    fn new(
        group: &mut Group,
        spec: OperationSpec,
        failed: &[(String, String)],
    ) -> Result<Self, Error> {
        let mut operation = OperationPlan::new(spec, &mut group_info(group, failed))?;
        let mut plans = Vec::new();

        for range in operation.shorter(&group_info(group, failed))? {
            // The buffers of the caller belong to the memory of the longest plan.
            let (algorithm, chunks) = (Some(range.algorithm), Some(range.chunks));
            let (form, engine) = (range.form, Some(range.engine.clone()));
            let links = operation.spec.method.links.clone();
            let method = Method { algorithm, chunks, links, form, transfer: None, engine };
            let spec = operation.spec.clone();
            let (inputs, output_buffers) = Default::default();
            // Only a plan for starts that all ranks have entered is for the longest starts. It is
            // the one for two outputs, which needs no flags that say that an output is free.
            let outputs = if range.is_for_all() { Some(2) } else { spec.outputs };
            let spec = OperationSpec { method, inputs, output_buffers, outputs, ..spec };
            let mut plan = OperationPlan::new(spec, &mut group_info(group, failed))?;
            plan.shorten(range.bytes_max)?;

            if range.is_for_all() && !verify::can_follow(&operation.plan, &plan.plan) {
                continue;
            }
            // All plans share their flags, so they use the same tiers.
            if is_tiered(&plan.plan) == is_tiered(&operation.plan) {
                operation.share_flags(&plan);
                plans.push((range, plan));
            }
        }

        // The first kind that fails is the one that all ranks go on without, if another one may be
        // used.
        let has_others =
            operation.spec.method.engine.is_none() && group.setup.engines.len() > failed.len() + 1;
        let mut failure = None;
        let mut create = |plan: &OperationPlan| match engines(group, plan) {
            Ok(engines) => Ok(engines),
            Err(error) if has_others && is_of_kind(&error) => {
                failure.get_or_insert((plan.engine.name().to_owned(), error.to_string()));
                Ok(Vec::new())
            }
            Err(error) => Err(error),
        };
        let engines = create(&operation)?;
        let shorter = plans.into_iter().map(|(range, plan)| {
            let engines = create(&plan)?;
            Ok((range, plan, engines))
        });
        let shorter: Vec<_> = shorter.collect::<Result<_, Error>>()?;

        let memory = Memory::new(&mut operation, group.fabrics())?;
        if operation.fused.is_some() && memory.is_on_host() {
            let why = "the buffers are in memory of the host, expected memory of a device";
            if !has_others {
                return Err(Error::new(ErrorKind::Unavailable, why));
            }
            failure.get_or_insert((operation.engine.name().to_owned(), why.to_owned()));
        }
        let refusal = group.setup.refusal.clone();

        // By now the flags of the longest plan have room for those of all shorter ones.
        let shorter = shorter.into_iter().map(|(range, mut plan, engines)| {
            plan.share_flags(&operation);
            let refusal = refusal.clone();
            (range, Self::from_plan(plan, engines, Memory::default(), refusal))
        });
        let shorter = shorter.collect();
        let preparation = Self::from_plan(operation, engines, memory, refusal);
        Ok(Self { shorter, failed: failure, ..preparation })
    }

    fn from_plan(
        operation: OperationPlan,
        engines: Vec<DynEngine>,
        memory: Memory,
        refusal: Option<Arc<str>>,
    ) -> Self {
        let (queues, lanes, shorter) = (Vec::new(), Vec::new(), Vec::new());
        let (failed, buffers) = (None, None);
        Self { operation, refusal, memory, engines, failed, queues, lanes, buffers, shorter }
    }

    /// Returns the tiers and engines of the lanes that have an engine.
    fn engines(&self) -> impl Iterator<Item = (LaneId, Tier, Caps)> {
        let plan = &self.operation.plan;
        let used = plan.lane_ids().filter(|&id| has_engine(plan, id));
        let lane =
            |(id, engine): (LaneId, &DynEngine)| (id, plan.lanes[id.index()].tier, *engine.caps());
        used.zip(&self.engines).map(lane)
    }

    /// Adds the values that must be equal on all ranks.
    fn fields(&self, mut offer: Offer, prefix: &str) -> Offer {
        let OperationPlan { spec, plan, request, engine, topology, digest_bits, .. } =
            &self.operation;

        let mut add = |name: &str, value: String| {
            offer = std::mem::take(&mut offer).field(&format!("{prefix}{name}"), value);
        };
        add("dtype", spec.dtype.to_string());
        for (name, value) in &request.fields {
            add(name, value.clone());
        }
        add("collective", plan.collective.to_string());
        if plan.collective.is_reduction() {
            add("operator", spec.operator.to_string());
        }

        add("engine", engine.name().to_owned());
        if let Some(FusedPlan { transfer, blocks, .. }) = self.operation.fused {
            add("launch", format!("{}, {blocks} blocks", transfer.name()));
        }
        add("algorithm", plan.algorithm.to_string());
        if let Some(form) = self.operation.choice.form {
            add("form", form.name().to_owned());
        }
        add("chunks", plan.chunks.to_string());
        add("in_place", plan.in_place.to_string());
        add("outputs", self.operation.buffering.outputs().to_string());
        add("flags", plan.flags.to_string());
        add("handles", spec.handles.to_string());
        add("capturable", spec.capturable.to_string());
        add("strict", spec.strict.to_string());
        add("beside_compute", spec.beside_compute.to_string());
        add("resizable", spec.resizable.to_string());
        add("columns", format!("{:?}", spec.columns));
        if spec.resizable {
            add("bits that compare starts", digest_bits.to_string());
            let begin = spec.source.as_ref().map_or(0, |(_, begin)| *begin);
            add("begin of the input in the window", begin.to_string());
        }

        let shorter = self.shorter.iter().filter(|(range, _)| !range.is_for_all());
        for (PlanRange { bytes_max, form, algorithm, chunks, engine }, _) in shorter {
            let form = form.map_or(String::new(), |form| format!(", {}", form.name()));
            let plan = format!("{algorithm}{form}, {chunks} chunks, {engine}");
            add(&format!("plan up to {bytes_max} bytes"), plan);
        }
        add("streams", self.operation.requirements(Tier::Local).streams.to_string());
        add("timeout", format!("{:?}", spec.timeout));
        add("topology", topology.to_string());
        offer
    }

    fn memory(&self) -> OperationMemory {
        // The plans of an operation share their flags.
        let shorter = self.shorter.iter().map(|(_, shorter)| &shorter.operation);
        let plans: Vec<_> = [&self.operation].into_iter().chain(shorter).collect();
        let polled =
            [Tier::Local, Tier::Network].map(|tier| plans.iter().any(|one| one.polls(tier)));

        let placement = self.operation.request.places.clone();
        let (origins, failed) = (self.memory.origins.clone(), self.failed.clone());
        OperationMemory { placement, origins, polled, failed }
    }

    /// Records the placements of all ranks and the blocks that the operation needs, and returns
    /// where the buffers of all ranks are.
    fn place(&mut self, name: &str, memories: Vec<OperationMemory>) -> Result<Vec<Origins>, Error> {
        let polled = [0, 1].map(|tier| memories.iter().any(|memory| memory.polled[tier]));
        let (placements, origins): (Vec<_>, Vec<_>) =
            memories.into_iter().map(|memory| (memory.placement, memory.origins)).unzip();
        check_windows(name, &self.operation, &origins)?;

        for (_, shorter) in &mut self.shorter {
            let layout = shorter.operation.layout.clone();
            shorter.operation.layout = layout.with_placements(placements.clone())?;
        }

        let layout = self.operation.layout.clone();
        self.operation.layout = layout.with_placements(placements)?;

        self.memory.plan_blocks(&self.operation, &origins, polled);
        Ok(origins)
    }

    /// Binds the plan to its memory, and reports how the operation will run.
    fn bind(
        &mut self,
        group: &Group,
        origins: &[Origins],
        epoch_base: u64,
        deadline: Deadline,
    ) -> Result<Report, Error> {
        let OperationPlan { plan, following, fused, spec, layout, flag_tiers, flags, .. } =
            &self.operation;
        let fused = *fused;
        let resizable = spec.resizable;
        let with_origins = spec.traced || spec.resizable;
        let flags = *flags;
        let on_host = self.memory.is_on_host();
        let reduction = spec.reduction().ok().flatten();

        let bound = |(id, tier, caps): (LaneId, Tier, Caps)| {
            let rows = copies_rows(&caps, on_host);
            let binding = Binding {
                plan,
                layout,
                flags,
                flag_tiers,
                reduction,
                with_origins,
                handles: spec.handles,
                resizable,
                rows,
            };
            let mut program = binding.bind(id);
            if let Some(fused) = fused.filter(|_| tier == Tier::Local) {
                program.fuse(plan, layout, fused.inboxes());
            }

            // It has one lane, and so no flags between tiers.
            let following = following.as_ref().map(|following| {
                let flag_tiers = &FlagTiers::new(following, []);
                let mut program = Binding { plan: following, flag_tiers, ..binding }.bind(id);
                if let Some(fused) = fused {
                    program.fuse(following, layout, fused.inboxes());
                }
                program
            });

            // The loop below sets these four when it has the engine of the lane.
            let (has_streams, compute_bytes, reducer, launch) = (false, 0, None, None);
            BoundLane {
                id,
                tier,
                program,
                following,
                caps,
                has_streams,
                compute_bytes,
                reducer,
                launch,
            }
        };
        self.lanes = self.engines().map(bound).collect();
        self.lanes.iter().try_for_each(check_alignment)?;

        let fabrics = group.fabrics();
        let commands = self
            .lanes
            .iter()
            .flat_map(|lane| lane.program.commands.iter().map(move |command| (lane.tier, command)));
        self.memory.import(&self.operation, fabrics, commands, origins, deadline)?;

        let on_tier =
            |tier| Arc::new(self.memory.buffers_on_tier(tier, &self.operation, epoch_base));
        let network = is_tiered(plan).then(|| on_tier(Tier::Network));
        let buffers = TierBuffers { local: on_tier(Tier::Local), network };

        let starts: &[Start] = match spec.capturable && fused.is_none() {
            true => &[Start::Eager(1), Start::Captured(0)],
            false => &[Start::Eager(1)],
        };
        let backend = |tier| match (tier, &group.setup.network) {
            (Tier::Network, Some(network)) => network.backend(),
            _ => group.setup.fabric.backend(),
        };

        for (lane, mut engine) in self.lanes.iter_mut().zip(std::mem::take(&mut self.engines)) {
            let slice_ops_max = if spec.traced { 1 } else { lane.caps.slice_ops_max };
            lane.has_streams = engine.streams().is_some();
            let view = buffers.on_tier(lane.tier);
            let view = view.expect("every lane has buffers on its tier");

            if lane.program.adds() {
                let reducer = engine.prepare_reduce();
                let reducer = reducer.map_err(|e| Error::of_fabric("prepare additions", e))?;
                lane.reducer = reducer;
                check_adder(spec, (reducer, lane.caps.kind), layout.ranks(), view)?;
            }

            let mut queue = Queue::new(engine, backend(lane.tier), Arc::clone(view))?;
            if let Some(fused) = fused.filter(|_| lane.tier == Tier::Local) {
                let programs = fused.programs(plan, following.as_ref());
                let counter_word = self.operation.flags.words();
                lane.launch =
                    Some(lane.compile(&mut queue, (fused, programs), (counter_word, resizable))?);
            }

            let bytes = starts
                .iter()
                .map(|&start| compute_bytes(&mut queue, &lane.program, slice_ops_max, start));
            lane.compute_bytes = bytes.max().unwrap_or(0);
            self.queues.push(queue);
        }
        self.buffers = Some(buffers);

        let report = report(&self.operation, self.refusal.as_ref(), fabrics, &self.lanes);
        if spec.strict {
            // A thread that drives lanes matters only to starts on a stream, and `start_on` refuses
            // such a start.
            let refused =
                |fallback: &&Fallback| spec.capturable || !matches!(fallback, Fallback::Driven(_));
            if let Some(fallback) = report.fallbacks.iter().find(refused) {
                let text = format!("strict is set, but the operation needs a fallback: {fallback}");
                return Err(Error::new(ErrorKind::Unavailable, text));
            }
        }

        for (_, shorter) in &mut self.shorter {
            shorter.memory = self.memory.shared();
            shorter.bind(group, origins, epoch_base, deadline)?;
        }

        let shorter = self.shorter.iter().map(|(range, _)| range);
        let shorter = shorter.filter(|range| !range.is_for_all()).cloned().collect();
        let memory = summed(self.memory.held(), group.setup.selection.device);
        Ok(Report { shorter, memory, ..report })
    }

    /// Returns whether a graph can record the operation.
    ///
    /// A graph contains only lane 0, and a thread drives the other lanes. So the host must be able
    /// to read their flags, and a graph that waits must not hold up their copies.
    fn is_recordable(&self) -> bool {
        if !self.shorter.iter().all(|(_, shorter)| shorter.is_recordable()) {
            return false;
        }

        let armed = || self.lanes.iter().filter(|lane| !takes_stream(lane.id));
        if armed().any(|lane| lane.has_streams) {
            return false;
        }

        armed().flat_map(|lane| &lane.program.waits).all(|wait| {
            self.memory.has_host_flags(wait.tier, wait.place.region == CROSS_TIER_FLAGS)
        })
    }

    /// Creates the executors of the operation, and registers the operation as a user of its
    /// windows.
    fn finish(mut self, group: &Group, report: Report, name: String) -> State {
        let allocation = Arc::new(Mutex::new(self.memory.take_allocation()));
        let buffers = self.memory.held().into_iter();
        let buffers = buffers.filter(|held| held.kind == MemoryKind::Buffers);
        let buffers = buffers.map(|held| (held.space, held.bytes));
        let buffers = CountedBuffers::new(&group.buffer_bytes, buffers);
        let shorter = std::mem::take(&mut self.shorter);
        let (prepared, local, operation) = self.executor(group, &name, &allocation);

        let OperationPlan { request, layout, plan, spec, rank, .. } = operation;
        let mut trackers = vec![Arc::clone(prepared.tracker())];
        let from = if plan.in_place { Source::Output } else { Source::Input };
        let chunks = Chunks::new(spec.handles, &plan, &prepared);
        let mut plans = vec![StartPlan::in_use(plan, &layout)];

        for (PlanRange { bytes_max, .. }, shorter) in shorter {
            let (prepared, _, operation) = shorter.executor(group, &name, &allocation);
            trackers.push(Arc::clone(prepared.tracker()));
            let OperationPlan { plan, layout, .. } = operation;
            plans.push(StartPlan::idle(bytes_max, plan, layout, prepared));
        }

        let windows =
            [BufferId::INPUT, BufferId::OUTPUT].map(|buffer| request.window(buffer).cloned());
        let bytes = windows.each_ref().map(|window| window.as_ref().map(|window| window.bytes()));
        let resizing = spec
            .resizable
            .then(|| Resizing::new(spec.dtype, plans, (&layout, rank), bytes, &prepared));

        let uses = (!request.extents.is_empty()).then(|| {
            let activity =
                move || trackers.iter().map(|tracker| tracker.activity()).max().unwrap_or_default();
            group.users.add_operation(name, request.extents.clone(), spec.resizable, activity)
        });

        State {
            prepared,
            last: Start::Eager(0),
            view: local,
            report,
            timeout: spec.timeout,
            dtype: spec.dtype,
            layout,
            rank,
            from,
            output_buffers: request.outputs(),
            windows,
            uses,
            resizing,
            chunks,
            _buffers: buffers,
        }
    }

    /// Creates the executor of one plan of the operation.
    fn executor(
        self,
        group: &Group,
        name: &str,
        allocation: &SharedAllocation,
    ) -> (Prepared, Arc<OperationBuffers>, OperationPlan) {
        let Self { operation, queues, lanes, buffers, .. } = self;
        let spec = &operation.spec;

        let waits = lanes.iter().flat_map(BoundLane::waits).copied().collect();
        let launch = lanes.iter().find_map(|lane| lane.launch.as_ref());
        let fused = operation.fused.zip(launch).map(|(fused, launch)| FusedStart {
            progress: Arc::clone(&launch.progress),
            words: fused.signalled_words(),
        });
        let buffers = buffers.expect("the plan is bound before it is finished");
        let lanes = lanes.into_iter().zip(queues).map(|(lane, queue)| {
            let adder = match lane.reducer {
                _ if !lane.program.adds() => Adder::None,
                None => Adder::Thread,
                Some(_) => Adder::Engine,
            };
            let fused = lane.launch.map(|launch| launch.lane);
            let lane =
                Lane::new(lane.id, (lane.program, lane.following, adder), queue, spec.traced);
            match fused {
                Some(fused) => lane.fused(fused),
                None => lane,
            }
        });
        let lanes = lanes.collect();

        let local = Arc::clone(&buffers.local);
        let layout = &operation.layout;
        let mut ranks = Rank::all(layout.ranks());
        let moves_data = spec.resizable || ranks.any(|rank| layout.input_bytes(rank) > 0);

        let tracker = StartTracker::new(
            (name.to_owned(), group.prepared),
            operation.rank,
            spec.timeout,
            waits,
            operation.writers(),
            buffers,
            spec.resizable.then(|| PartCell::new(operation.pairs())),
        );
        let tracker = if moves_data { tracker } else { tracker.without_data() }.with_fused(fused);

        let OperationSpec { capturable, strict, traced, handles, .. } = *spec;
        let options = ExecutorOptions { capturable, strict, traced, has_handles: handles.any() };
        // Lengths of pairs come from the caller's data and not from its code, so ranks disagree
        // easily.
        let checks_starts = spec.checks_starts || operation.pairs().is_some();
        // SAFETY: the layout puts every cell inside the buffers, whose lengths were checked on both
        // sides; queues keep the regions; `verify` has passed the plans. The caller of
        // `OperationBuilder::capturable` keeps the operation longer than the replays of its graphs.
        let executor = unsafe { Executor::new(lanes, options) };

        let runtime = Arc::clone(&group.runtime);
        let allocation = Arc::clone(allocation);
        let prepared = Prepared::new(executor, runtime, tracker, checks_starts, allocation);
        (prepared, local, operation)
    }
}

fn group_info<'a>(group: &'a mut Group, failed: &'a [(String, String)]) -> GroupInfo<'a> {
    let rank = group.rank();
    let Group { setup, runtime, proofs, .. } = group;
    let Setup { network, topology, engines, .. } = setup;
    let tiers = network.is_some();
    GroupInfo { rank, topology, runtime, engines, failed, tiers, proofs }
}

/// Creates the engines of the lanes that need one, in the order of the lanes.
fn engines(group: &Group, operation: &OperationPlan) -> Result<Vec<DynEngine>, Error> {
    let Setup { fabric, network, .. } = &group.setup;
    let plan = &operation.plan;

    let used = plan.lane_ids().filter(|&id| has_engine(plan, id));
    let engine = |id: LaneId| {
        let tier = plan.lanes[id.index()].tier;
        let fabric = network.as_ref().filter(|_| tier == Tier::Network).unwrap_or(fabric);
        let engine = fabric.engine(operation.requirements(tier));
        engine.map_err(|error| Error::of_fabric("create an engine", error))
    };
    used.map(engine).collect()
}

/// Returns whether an error of creating engines can be one of their kind, so that engines of
/// another kind may do.
fn is_of_kind(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::OutOfMemory)
}

fn compute_bytes(queue: &mut Queue, program: &Program, slice_ops_max: usize, start: Start) -> u64 {
    let slices = program.slices(slice_ops_max);
    let slices = slices.map(|commands| Commands { commands, sources: &program.sources });
    slices.map(|commands| queue.compute_bytes(commands, start)).sum()
}

/// Checks that the engine can make the copies of a lane.
fn check_alignment(lane: &BoundLane) -> Result<(), Error> {
    let Caps { put_align_bytes: align, kind, .. } = lane.caps;

    let is_odd = |command: &&Command| match **command {
        Command::Copy { remote, local, bytes, .. } => {
            [remote.offset, local.offset, bytes].iter().any(|number| !number.is_multiple_of(align))
        }
        Command::Reduce { .. } | Command::Signal { .. } | Command::Wait { .. } => false,
    };
    let Some(odd) = lane.program.commands.iter().find(is_odd) else { return Ok(()) };

    let text = format!(
        "the operation has a copy of {} bytes, but {kind} engines copy multiples of {align} bytes from and to multiples of \
         {align} (put_align_bytes); use blocks and places that are multiples of {align} bytes",
        odd.bytes()
    );
    Err(Error::new(ErrorKind::InvalidArgument, text))
}

/// Checks that the engine or a thread of this rank can add the contributions.
fn check_adder(
    spec: &OperationSpec,
    (reducer, kind): (Option<Reducer>, &str),
    ranks: usize,
    buffers: &OperationBuffers,
) -> Result<(), Error> {
    let name = spec.collective.with_article();
    let unavailable = |text| Err(Error::new(ErrorKind::Unavailable, text));

    if let Some(Reducer { sources_max, .. }) = reducer {
        if ranks > sources_max {
            let text =
                format!("{name} has {ranks} ranks, expected at most {sources_max} on this device");
            return unavailable(text);
        }
        return Ok(());
    }

    let on_device = |buffer: &&RankRegions| buffer.memory().0.space() == Space::Device;
    if buffers.data_buffers().find(on_device).is_some() {
        return unavailable(format!(
            "{name} adds in device memory, but {kind} engines of this fabric do not add; use memory of the host"
        ));
    }

    if spec.capturable {
        let text = format!("capturable is set, expected it off, because a thread adds in {name}");
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(())
}

/// Returns whether a lane runs on the caller's stream.
///
/// Only lane 0 does, so that its last wait does not hold up another lane in the same hardware
/// queue.
fn takes_stream(lane: LaneId) -> bool {
    lane == LaneId::HOME
}
