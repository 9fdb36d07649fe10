//! Chooses the algorithm of a collective operation, creates this rank's plan, and verifies the
//! plans of all ranks.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use peerlane_hal::{EngineRequirements, ErrorKind, Rank};

use super::choice::{self, Needs, UsableEngines, Variant, needs_streams};
use super::fused::{self, FusedPlan};
use super::lens;
use super::request::{Method, OperationSpec, Request, Target};
use crate::collective::Collective;
use crate::cost::{self, Choice, Form, FormBlocks, Transfer};
use crate::error::Error;
use crate::group::engines::EngineKind;
use crate::group::options::check_timeout;
use crate::group::report::PlanRange;
use crate::group::runtime::Runtime;
use crate::layout::{CHUNK_ALIGN_BYTES, FLAG_WORDS, FlagLayout, Layout, StartBytes};
use crate::plan::{Algorithm, FlagOrder, Lane, LaneId, Plan, Tier};
use crate::run::buffers::{BufferId, DoubleBuffering, OutputCounts, digest_bits};
use crate::run::program::{FlagTiers, FlagWriters, is_tiered};
use crate::schedule::{self, Shape, schedule};
use crate::topology::Topology;
use crate::verify::{self, Budget};

/// Above this output size, a second output costs more cache than the saved flags are worth
/// (docs/adr/0007).
const TWO_OUTPUTS_BYTES_MAX: u64 = 256 << 10;
/// Saving one phase of flags with a second output saves 7 to 20 µs up to this output size on GPUs,
/// and 1 % beyond it (docs/perf/beside-nccl.md).
const TWO_OUTPUTS_BATCHED_BYTES_MAX: u64 = 256 << 20;
pub(super) struct GroupInfo<'a> {
    pub(super) rank: Rank,
    pub(super) topology: &'a Topology,
    pub(super) runtime: &'a Arc<Runtime>,
    pub(super) engines: &'a [EngineKind],
    /// The kinds of engines that a rank could not create for the operation, with the reasons.
    pub(super) failed: &'a [(String, String)],
    pub(super) tiers: bool,
    pub(super) proofs: &'a mut Proofs,
}

impl GroupInfo<'_> {
    /// Returns the kinds of engines, and those that a rank could not create.
    fn kinds(&self) -> (&[EngineKind], &[(String, String)]) {
        (self.engines, self.failed)
    }
}

/// The proofs of the plans of a group, so that plans of one shape are proven once.
#[derive(Debug, Default)]
pub(in crate::group) struct Proofs(HashMap<(Algorithm, Shape), Arc<str>>);

impl Proofs {
    fn prove(
        &mut self,
        algorithm: Algorithm,
        topology: &Topology,
        shape: Shape,
    ) -> Result<Arc<str>, Error> {
        if let Some(proof) = self.0.get(&(algorithm, shape)) {
            return Ok(Arc::clone(proof));
        }
        let proof = verify::prove(algorithm, topology, shape, Budget::default());
        let proof = proof.map_err(|fault| {
            let text = format!("the plan of {algorithm} is faulty: {fault}");
            Error::new(ErrorKind::Other, text).with_source(fault)
        })?;
        let proof: Arc<str> = proof.to_string().into();
        self.0.insert((algorithm, shape), Arc::clone(&proof));
        Ok(proof)
    }
}

pub(super) struct OperationPlan {
    pub(super) spec: OperationSpec,
    pub(super) rank: Rank,
    pub(super) topology: Topology,
    pub(super) request: Request,
    /// The kind of the engines that execute the plan.
    pub(super) engine: EngineKind,
    pub(super) choice: Choice,
    shape: Shape,
    pub(super) layout: Layout,
    /// The layouts of all forms in which the operation can run, in the number of chunks that the
    /// caller names, or else in one.
    forms: Vec<(Option<Form>, Layout)>,
    /// The length in bytes of the largest inbox of the plans of shorter starts.
    shorter_inbox_bytes: u64,
    pub(super) plan: Plan,
    /// The plan of captured starts behind the first one of a graph, if they alternate outputs.
    pub(super) following: Option<Plan>,
    /// How starts are fused, if they are.
    pub(super) fused: Option<FusedPlan>,
    pub(super) flag_tiers: FlagTiers,
    pub(super) flags: FlagLayout,
    pub(super) buffering: DoubleBuffering,
    /// The number of low bits of a flag that hold the digest of lengths and places, if starts can
    /// have their own.
    pub(super) digest_bits: u32,
    pub(super) proof: Arc<str>,
    /// Whether this plan or another one of the operation reads from peers.
    pub(super) gets: bool,
}

/// An operation has at most this number of plans, because each has engines of its own.
const PLANS_MAX: usize = 4;

impl OperationPlan {
    /// Chooses the engines and the algorithm of an operation, and creates the plan of this rank.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a specification that does not fit the
    /// group, and [`Unavailable`](ErrorKind::Unavailable) if no engine is left.
    pub(super) fn new(spec: OperationSpec, group: &mut GroupInfo<'_>) -> Result<Self, Error> {
        let (rank, topology) = (group.rank, group.topology);
        check(&spec, topology.ranks())?;

        let blocks = spec.lens.in_bytes(spec.dtype, topology.ranks())?;
        let mut forms = cost::forms(spec.collective, &blocks, spec.in_place)?;
        if let Some(form) = spec.method.form {
            check_form(form, &forms)?;
            forms.retain(|other| other.form == Some(form));
        }
        let forms = forms.into_iter().map(|blocks| FormRequest::new(blocks, &spec, group));
        let forms: Vec<_> = forms.collect::<Result<_, Error>>()?;

        // Each form with engines of each kind is a variant, whose plan has a shape of its own.
        let usable = UsableEngines::new(&spec, group.kinds(), (group.topology, group.tiers))?;
        let mut variants = Vec::new();
        for form in &forms {
            for &engine in &usable.engines {
                variants.extend(form.variants(&spec, engine, (topology, group.tiers))?);
            }
        }
        if let Some(transfer) = spec.method.transfer {
            variants.retain(|variant| variant.fused.is_some_and(|one| one.transfer == transfer));
            check_transfer(transfer, &variants, &usable.refused)?;
        }
        if variants.is_empty() {
            let text = "the starts of this operation cannot be fused, and no other kind of engines \
                        is left for it";
            return Err(Error::new(ErrorKind::Unavailable, text));
        }
        let choice = choice::choose(&spec.method, topology, &variants, &usable.refused)?;

        let is_chosen = |variant: &&Variant<'_>| {
            let transfer = variant.fused.map(|fused| fused.transfer);
            variant.form == choice.form
                && variant.engine.name() == choice.engine
                && transfer == choice.transfer
                && variant.fused.is_none_or(|fused| fused.algorithm == choice.algorithm)
        };
        let chosen = variants.iter().find(is_chosen).expect("a choice is one of its variants");
        let (engine, fused) = (chosen.engine.clone(), chosen.fused);
        let shape = Shape { chunks: choice.chunks, ..chosen.needs.shape };
        let algorithm = choice.algorithm;

        let mut plan = schedule::plan(algorithm, topology, rank, shape)?;
        let proof = group.proofs.prove(algorithm, topology, shape)?;
        // The plan of puts into slots is proven with outputs apart from inputs. Each rank takes
        // what is in its slots to its output by itself, so the output may hold the input.
        plan.in_place = spec.in_place;
        let flag_tiers = FlagTiers::new(&plan, &node_plans(&plan, algorithm, group, shape)?);
        let flags = FlagLayout::new(topology.ranks(), shape.chunks, plan.lanes.len());
        let flags = flags.for_collective(shape.collective);
        let flags = flags.for_blocks(fused.map_or(1, |fused| fused.blocks));

        let layouts = forms.iter().map(|form| (form.blocks.form, form.layout.clone())).collect();
        let form = forms.into_iter().find(|form| form.blocks.form == choice.form);
        let FormRequest { blocks, mut layout, mut request } = form.expect("its variant was chosen");
        if fused.is_some_and(|fused| fused.stride_bytes.is_some()) {
            request.add_inbox();
        }
        if choice.chunks != layout.chunks() {
            layout = layout_of(&blocks, &spec, choice.chunks)?;
        }

        let wanted = match fused {
            // Peers write only slots and inboxes, or outputs of ranks that have entered the start.
            Some(fused) if !fused.takes_turns() => {
                OutputCounts { eager: 1, captured: spec.capturable.into() }
            }
            _ => outputs(&spec, &request, &layout, shape.flags)?,
        };
        let following = match wanted.captured {
            2 => following_plan(&plan, group, shape)?,
            _ => None,
        };
        if spec.capturable && spec.outputs == Some(2) && following.is_none() {
            let text = format!(
                "outputs is 2, expected 1 in a capturable {} by the algorithm {algorithm}",
                spec.collective.name()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }

        let captured = if following.is_some() { 2 } else { spec.capturable.into() };
        let counts = OutputCounts { captured, ..wanted };
        let bytes = layout.output_bytes_max();
        let inbox_bytes = inbox_bytes(&layout, fused, |layout| layout.inbox_bytes_max());
        let buffering = match fused {
            // Behind the flags, the device counts the starts.
            Some(_) => {
                let words = flags.words().saturating_add(FLAG_WORDS);
                DoubleBuffering::new(counts, bytes, words).map(DoubleBuffering::fused)
            }
            None => DoubleBuffering::new(counts, bytes, flags.words()),
        };
        let buffering = buffering.and_then(|one| one.with_inbox(inbox_bytes));
        let buffering = buffering.ok_or_else(|| {
            let outputs = wanted.eager.max(captured);
            let text = format!("{outputs} outputs of {bytes} bytes exceed the address space");
            Error::new(ErrorKind::InvalidArgument, text)
        })?;

        Ok(Self {
            spec,
            rank,
            topology: topology.clone(),
            request,
            choice,
            shape,
            layout,
            forms: layouts,
            shorter_inbox_bytes: 0,
            plan,
            following,
            fused,
            flag_tiers,
            flags,
            buffering,
            digest_bits: digest_bits(engine.common.signal_growth_max),
            engine,
            proof,
            gets: schedule(algorithm).gets,
        })
    }

    /// Returns what the engines of a tier must have.
    pub(super) fn requirements(&self, tier: Tier) -> EngineRequirements {
        EngineRequirements {
            kind: self.engine.kind(tier),
            streams: needs_streams(&self.spec),
            priority: self.spec.priority,
            beside_compute: self.spec.beside_compute,
            fused_blocks: match self.fused {
                Some(fused) if tier == Tier::Local => fused.blocks,
                _ => 0,
            },
        }
    }

    /// Returns whether a lane of this rank on a tier has an engine that queues no waits.
    pub(super) fn polls(&self, tier: Tier) -> bool {
        let plan = &self.plan;
        let has_lane = |id: LaneId| has_engine(plan, id) && plan.lanes[id.index()].tier == tier;
        self.engine.polls(tier) && plan.lane_ids().any(has_lane)
    }

    /// Chooses plans for starts that are shorter than the longest, largest first. All ranks choose
    /// alike.
    pub(super) fn shorter(&self, group: &GroupInfo<'_>) -> Result<Vec<PlanRange>, Error> {
        let Method { algorithm, chunks, .. } = self.spec.method;
        if self.spec.lens.is_by_start() {
            return Ok(self.entered().into_iter().collect());
        }
        // Fused starts of all lengths are of one plan, because the device counts the starts of a
        // plan.
        let has_shorter = self.spec.resizable && self.fused.is_none();
        let Some(lengths) = self.layout.lengths().filter(|_| has_shorter) else {
            return Ok(Vec::new());
        };

        let usable = UsableEngines::new(&self.spec, group.kinds(), (group.topology, group.tiers))?;
        let has_choice = usable.engines.len() > 1 || self.forms.len() > 1;
        let is_fixed = algorithm.is_some() && chunks.is_some() && !has_choice;
        let most = match self.layout.has_one_length() {
            _ if is_fixed => 0,
            true => self.layout.data_bytes(),
            false => lengths.max(),
        };
        let least = self.spec.dtype.bytes() as u64;
        let halvings = (1..u64::BITS).take_while(|&halvings| most >> halvings >= least);

        // The plan of the longest starts comes first, for the comparisons.
        let range = |choice: Choice, bytes_max| {
            let Choice { form, algorithm, chunks, engine, .. } = choice;
            PlanRange { bytes_max, form, algorithm, chunks, engine }
        };
        let mut plans = vec![range(self.choice.clone(), u64::MAX)];
        for halvings in halvings {
            let variants = self.shorter_variants(&usable, halvings)?;
            let method = &self.spec.method;
            let choice = choice::choose(method, &self.topology, &variants, &usable.refused)?;

            let next = range(choice, self.layout.data_bytes() >> halvings);
            let last = plans.last().expect("the first plan is never removed");
            // Few chunks more or less make little difference.
            let chunks_max = last.chunks / 4;
            let has_fewer =
                next.chunks < last.chunks && (next.chunks == 1 || next.chunks <= chunks_max);
            if has_fewer || !next.is_similar(last) {
                plans.push(next);
            }
        }

        limit_plans(&mut plans, PLANS_MAX);
        plans.remove(0);
        Ok(plans)
    }

    /// Returns the description of the plan for starts of an all-to-all-v that all ranks have
    /// entered on the host when they begin, if it differs from this one.
    ///
    /// Their outputs are free then, as if another output was used in turn. A window has only one.
    fn entered(&self) -> Option<PlanRange> {
        let Choice { form, algorithm, chunks, ref engine, .. } = self.choice;
        let engine = engine.clone();
        let range = PlanRange { bytes_max: u64::MAX, form, algorithm, chunks, engine };
        (self.shape.outputs == 1 && self.request.takes_turns()).then_some(range)
    }

    /// Returns the variants for starts whose blocks are divided by two `halvings` times.
    fn shorter_variants<'a>(
        &self,
        usable: &UsableEngines<'a>,
        halvings: u32,
    ) -> Result<Vec<Variant<'a>>, Error> {
        let mut variants = Vec::new();
        for (form, longest) in &self.forms {
            let mut layout = longest.clone();
            let lengths = longest.lengths().expect("only lengths of pairs are missing");
            let of_rank = |rank| lengths.bytes(rank) >> halvings;
            layout.set_blocks(match (form, lengths.uniform()) {
                (Some(_), _) => StartBytes::Equal(longest.data_bytes() >> halvings),
                (None, Some(bytes)) => StartBytes::Equal(bytes >> halvings),
                (None, None) => StartBytes::ByRank(&of_rank),
            })?;

            let unfused = usable.engines.iter().filter(|engine| !engine.is_fused());
            for &engine in unfused {
                let collective = layout.collective();
                let shape = Shape { collective, chunks: 1, ..self.shape };
                let needs = Needs::new(&self.spec, shape, engine);
                let block_bytes = layout.average_blocks();
                let (form, fused) = (*form, None);
                variants.push(Variant { form, fused, block_bytes, engine, needs });
            }
        }
        Ok(variants)
    }

    /// Limits the plan to starts of `bytes_max` bytes, if its form has a layout of its own.
    pub(super) fn shorten(&mut self, bytes_max: u64) -> Result<(), Error> {
        match self.choice.form {
            // Copies of whole units of bytes have an alignment that every engine accepts.
            Some(_) => {
                let bytes = bytes_max.next_multiple_of(CHUNK_ALIGN_BYTES);
                let bytes = bytes.min(self.layout.data_bytes());
                self.layout.set_blocks(StartBytes::Equal(bytes))
            }
            None => Ok(()),
        }
    }

    /// Uses flags with room for those of `other`, so that plans can share flags: a flag with one
    /// name has one word. Plans share an inbox, too.
    pub(super) fn share_flags(&mut self, other: &Self) {
        self.gets |= other.gets;
        // Only plans of different forms have inboxes of different sizes, which are then equal on
        // all ranks.
        if other.choice.form.is_some() {
            let inbox_bytes = other.inbox_bytes(other.rank);
            self.shorter_inbox_bytes = self.shorter_inbox_bytes.max(inbox_bytes);
        }
        self.flags = self.flags.max(other.flags);
        let bytes = self.layout.output_bytes_max();
        let counts = OutputCounts { eager: 1, captured: self.spec.capturable.into() };
        let buffering = DoubleBuffering::new(counts, bytes, self.flags.words());
        self.buffering = buffering.expect("flags of two plans fit where those of each do");
    }

    /// Returns the number of ranks if each pair of ranks has lengths of its own.
    pub(super) fn pairs(&self) -> Option<usize> {
        self.layout.lengths().is_none().then(|| self.layout.ranks())
    }

    pub(super) fn writers(&self) -> FlagWriters {
        let (algorithm, shape) = (self.choice.algorithm, self.shape);
        let topology = self.topology.clone();
        FlagWriters::new(self.rank, self.topology.clone(), move |rank| {
            schedule::plan(algorithm, &topology, rank, shape).ok()
        })
    }

    pub(super) fn own_bytes(&self, buffer: BufferId) -> u64 {
        match buffer {
            BufferId::OUTPUT if self.buffering.outputs() > 1 => self.buffering.output_bytes(),
            BufferId::Inbox => self.peer_bytes(self.rank, buffer),
            buffer => self.request.need(&self.layout, self.rank, buffer),
        }
    }

    /// Returns the bytes of a buffer that Peerlane allocates for `rank`, once the placements of all
    /// ranks are known.
    pub(super) fn block_bytes(&self, rank: Rank, buffer: BufferId) -> u64 {
        match buffer {
            BufferId::OUTPUT if self.buffering.outputs() > 1 => self.buffering.output_bytes(),
            buffer => self.peer_bytes(rank, buffer),
        }
    }

    pub(super) fn peer_bytes(&self, peer: Rank, buffer: BufferId) -> u64 {
        let (layout, places) = (&self.layout, self.layout.placement(peer));
        let need = |needs: BTreeMap<u32, u64>, number| needs.get(&number).copied().unwrap_or(0);
        match buffer {
            BufferId::Input(number) => need(places.input_needs(layout, peer), number),
            BufferId::Output(number) => {
                self.buffering.buffer_bytes(need(places.output_needs(layout, peer), number))
            }
            BufferId::Inbox => match self.inbox_bytes(peer) {
                0 => 0,
                bytes => self.buffering.inbox_bytes(bytes),
            },
        }
    }

    /// Returns the length in bytes of the inbox of a rank for each output, in which every start
    /// with every plan has room.
    pub(super) fn inbox_bytes(&self, rank: Rank) -> u64 {
        let longest = match self.spec.resizable {
            true => self.layout.resizable_inbox_bytes(rank),
            false => inbox_bytes(&self.layout, self.fused, |layout| layout.inbox_bytes(rank)),
        };
        longest.max(self.shorter_inbox_bytes)
    }
}

/// Returns the length in bytes of an inbox, whose contributions have so many bytes in a layout.
fn inbox_bytes(
    layout: &Layout,
    fused: Option<FusedPlan>,
    of_contributions: impl Fn(&Layout) -> u64,
) -> u64 {
    let Some(fused) = fused else { return of_contributions(layout) };
    let bytes = match fused.stride_bytes {
        Some(stride) => stride.saturating_mul(layout.ranks() as u64),
        None => of_contributions(layout),
    };
    bytes.saturating_mul(fused.inbox_factor())
}

/// Removes plans of shorter starts until at most `most` plans are left; the first plan stays.
///
/// Another form, algorithm or kind of engines matters more than another number of chunks, and
/// longer starts more than shorter ones.
fn limit_plans(plans: &mut Vec<PlanRange>, most: usize) {
    while plans.len() > most {
        let is_like_last = |index: &usize| plans[*index].is_similar(&plans[index - 1]);
        let removed = (1..plans.len()).rev().find(is_like_last);
        plans.remove(removed.unwrap_or(plans.len() - 1));
    }
}

fn check(spec: &OperationSpec, ranks: usize) -> Result<(), Error> {
    check_timeout(spec.timeout)?;

    if let Err(text) = spec.collective.check(ranks, spec.in_place) {
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    if spec.collective.is_reduction() {
        spec.reduction()?;
    }

    if spec.capturable && spec.traced {
        let text = "trace and capturable are both set, expected at most one: replays of a graph \
                    cannot be traced";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }

    check_handles(spec)?;
    if spec.resizable {
        check_resizable(spec)?;
    }
    if spec.columns.is_some() {
        check_columns(spec)?;
    }
    Ok(())
}

/// Checks that the form that the caller names is one of those in which the operation can run.
fn check_form(form: Form, forms: &[FormBlocks]) -> Result<(), Error> {
    let known: Vec<_> = forms.iter().filter_map(|form| form.form).collect();
    if known.contains(&form) {
        return Ok(());
    }

    let expected = match &known[..] {
        [] => "none, because only an all-reduce has forms".to_owned(),
        [only, ..] => format!("\"{}\", because the operation runs in place", only.name()),
    };
    let text = format!("form is \"{}\", expected {expected}", form.name());
    Err(Error::new(ErrorKind::InvalidArgument, text))
}

/// Checks that starts can be fused with the transfer that the caller names.
fn check_transfer(
    transfer: Transfer,
    variants: &[Variant<'_>],
    refused: &[(String, String)],
) -> Result<(), Error> {
    if !variants.is_empty() {
        return Ok(());
    }

    let reasons = refused.iter().map(|(kind, why)| format!("{kind}: {why}"));
    let reasons = reasons.collect::<Vec<_>>().join("; ");
    let why = if reasons.is_empty() { "no kind of engines does" } else { &reasons };
    let text = format!(
        "transfer is \"{}\", expected none, because the starts of this operation are not fused so: {why}",
        transfer.name()
    );
    Err(Error::new(ErrorKind::InvalidArgument, text))
}

fn check_columns(spec: &OperationSpec) -> Result<(), Error> {
    let what = if spec.collective.is_reduction() {
        "the operation is a reduction, expected one that only copies"
    } else if spec.in_place {
        "in_place is set, expected it off"
    } else if spec.resizable {
        "resizable is set, expected it off"
    } else if spec.lens.tensor_count() > 1 || spec.inputs.len() > 1 || spec.output_buffers.len() > 1
    {
        "there are several tensors or buffers, expected one"
    } else if matches!(spec.target, Target::List(_)) {
        "destinations are given, expected one output buffer or a window"
    } else {
        return Ok(());
    };

    let text = format!("{what} for an input or output that is a matrix");
    Err(Error::new(ErrorKind::InvalidArgument, text))
}

/// Checks that starts of the operation can have the handles that the caller asks for.
fn check_handles(spec: &OperationSpec) -> Result<(), Error> {
    let collective = spec.collective;
    let gets = |algorithm: Algorithm| schedule(algorithm).gets;

    let text = if spec.handles.arrivals && collective.is_reduction() {
        format!(
            "arrivals are set, expected none: {} has one result, which is complete with the start",
            collective.with_article()
        )
    } else if spec.handles.departures && collective == Collective::AllReduce {
        "departures are set, expected none: an all-reduce is planned in different forms; use a \
         reduce-scatter and an all-gather"
            .to_owned()
    } else if let Some(algorithm) = spec.method.algorithm.filter(|&one| gets(one))
        && spec.handles.departures
    {
        format!(
            "algorithm is {algorithm}, whose ranks read the inputs of their peers, expected one whose ranks put, \
                 for an operation with departures"
        )
    } else {
        return Ok(());
    };

    Err(Error::new(ErrorKind::InvalidArgument, text))
}

fn check_resizable(spec: &OperationSpec) -> Result<(), Error> {
    let what = if spec.handles.any() {
        "arrivals or departures are set, expected none"
    } else if spec.traced {
        "trace is set, expected it off"
    } else if matches!(spec.target, Target::List(_)) {
        "destinations are given, expected one output buffer or a window"
    } else if spec.lens.tensor_count() > 1 {
        "there are several tensors, expected one"
    } else if spec.outputs.is_some_and(|outputs| outputs > 1) && !spec.lens.is_by_start() {
        "outputs is 2, expected 1"
    } else {
        return Ok(());
    };

    let text = format!("{what} for an operation that is resizable");
    Err(Error::new(ErrorKind::InvalidArgument, text))
}

/// Returns how many outputs starts should use in turn.
fn outputs(
    spec: &OperationSpec,
    request: &Request,
    layout: &Layout,
    flags: FlagOrder,
) -> Result<OutputCounts, Error> {
    let bytes_max = match flags {
        FlagOrder::Prompt | FlagOrder::Interleaved => TWO_OUTPUTS_BYTES_MAX,
        FlagOrder::Batched | FlagOrder::NetworkFirst => TWO_OUTPUTS_BATCHED_BYTES_MAX,
    };
    // The place of the output of another resizable operation is the caller's.
    let takes_turns = request.takes_turns() && (!spec.resizable || spec.lens.is_by_start());
    let outputs = spec.outputs.unwrap_or_else(|| {
        let is_small = !spec.resizable && layout.output_bytes_max() <= bytes_max;
        let own = spec.output_buffers.is_empty();
        if is_small && !spec.in_place && takes_turns && own { 2 } else { 1 }
    });
    if outputs > 1 && !takes_turns {
        // The caller's buffers do not alternate.
        let text =
            format!("outputs is {outputs}, expected 1 in an operation with given output buffers");
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }

    // An eager start may follow a replay, about which the host knows nothing. So it waits until all
    // ranks have entered it, and one output is enough for that.
    Ok(match spec.capturable {
        true => OutputCounts { eager: 1, captured: outputs },
        false => OutputCounts { eager: outputs, captured: 0 },
    })
}

/// Returns the plan of captured starts behind the first one of a graph, if starts of the operation
/// can alternate outputs.
///
/// A graph contains one lane of each rank, so the plan has no other one.
fn following_plan(
    first: &Plan,
    group: &mut GroupInfo<'_>,
    shape: Shape,
) -> Result<Option<Plan>, Error> {
    let Plan { algorithm, rank, in_place, .. } = *first;
    if first.lanes.len() > 1 || in_place || schedule(algorithm).gets {
        return Ok(None);
    }

    let shape = Shape { outputs: 2, ..shape };
    let plan = schedule::plan(algorithm, group.topology, rank, shape)?;
    group.proofs.prove(algorithm, group.topology, shape)?;
    Ok(verify::can_follow(first, &plan).then_some(plan))
}

fn node_plans(
    plan: &Plan,
    algorithm: Algorithm,
    group: &GroupInfo<'_>,
    shape: Shape,
) -> Result<Vec<Plan>, Error> {
    if !is_tiered(plan) {
        return Ok(Vec::new());
    }
    let topology = group.topology;
    let others = topology.members(topology.node(group.rank)).iter();
    let others = others.filter(|&&rank| rank != group.rank);
    others.map(|&rank| schedule::plan(algorithm, topology, rank, shape)).collect()
}

/// One form of an operation, with the request for its memory.
struct FormRequest {
    blocks: FormBlocks,
    /// The layout in the number of chunks that the caller names, or else in one.
    layout: Layout,
    request: Request,
}

impl FormRequest {
    fn new(blocks: FormBlocks, spec: &OperationSpec, group: &GroupInfo<'_>) -> Result<Self, Error> {
        let layout = layout_of(&blocks, spec, spec.method.chunks.unwrap_or(1))?;
        let mut request = Request::new(spec, &layout, group.rank, group.runtime)?;
        request.fields.extend(lens::fields(&blocks.blocks));
        Ok(Self { blocks, layout, request })
    }

    /// Returns the options of a plan in this form for engines of a kind.
    fn shape(
        &self,
        spec: &OperationSpec,
        engine: &EngineKind,
        tiers: bool,
    ) -> Result<Shape, Error> {
        // Plans are alike on all ranks, and every engine can set flags one by one.
        let batched = engine.common.flags_batched;
        let flags = match (spec.handles.any(), batched) {
            // Batched flags would tell of all blocks together, and wait for all to depart.
            (true, _) => FlagOrder::Interleaved,
            (false, true) => FlagOrder::Batched,
            (false, false) => FlagOrder::Prompt,
        };
        let outputs = outputs(spec, &self.request, &self.layout, flags)?.eager;

        let (collective, chunks) = (self.blocks.collective, self.layout.chunks());
        let (in_place, inboxes) = (spec.in_place, 1);
        Ok(Shape { collective, chunks, in_place, outputs, inboxes, flags, tiers })
    }

    /// Returns the variants of the form with engines of a kind.
    fn variants<'a>(
        &self,
        spec: &OperationSpec,
        engine: &'a EngineKind,
        (topology, tiers): (&Topology, bool),
    ) -> Result<Vec<Variant<'a>>, Error> {
        let form = self.blocks.form;
        let shape = self.shape(spec, engine, tiers)?;
        let plans = match engine.common.fused {
            Some(limits) => {
                let plans = fused::plans(spec, (form, &self.layout, topology), shape, limits);
                plans.into_iter().map(|(fused, shape)| (Some(fused), shape)).collect()
            }
            None => vec![(None, shape)],
        };

        let variants = plans.into_iter().map(|(fused, shape)| {
            let needs = Needs::new(spec, shape, engine);
            let block_bytes = self.layout.average_blocks();
            Variant { form, fused, block_bytes, engine, needs }
        });
        Ok(variants.collect())
    }
}

fn layout_of(blocks: &FormBlocks, spec: &OperationSpec, chunks: u32) -> Result<Layout, Error> {
    let layout = Layout::of_blocks(blocks.collective, blocks.blocks.clone(), chunks)?;
    let layout = match blocks.form {
        Some(Form::Whole) => layout.with_shared_input(),
        Some(Form::InParts) | None => layout,
    };
    match spec.columns {
        Some(columns) => layout.with_columns(columns, spec.dtype.bytes() as u64),
        None => Ok(layout),
    }
}

/// Returns whether a lane needs an engine: lane 0, each lane with steps, and the first lane of the
/// network if no lane of the network has steps.
pub(super) fn has_engine(plan: &Plan, id: LaneId) -> bool {
    let first_of_network = plan.lanes.iter().position(|lane| lane.tier == Tier::Network);
    let is_silent = |lane: &Lane| lane.tier != Tier::Network || lane.steps.is_empty();
    let hears = first_of_network == Some(id.index()) && plan.lanes.iter().all(is_silent);
    id == LaneId::HOME || hears || !plan.lanes[id.index()].steps.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_form_matters_more_than_another_number_of_chunks() {
        let [whole, parts] = [Form::Whole, Form::InParts];
        let limited = |plans: &[(Form, u32)]| {
            let range = |&(form, chunks)| PlanRange {
                bytes_max: 0,
                form: Some(form),
                algorithm: Algorithm::Direct,
                chunks,
                engine: "streams".to_owned(),
            };
            let mut plans: Vec<_> = plans.iter().map(range).collect();
            limit_plans(&mut plans, 3);
            plans.iter().map(|plan| (plan.form.unwrap(), plan.chunks)).collect::<Vec<_>>()
        };

        let few = [(parts, 8), (parts, 1), (whole, 1)];
        assert_eq!(limited(&few), few);
        let many = [(parts, 64), (parts, 16), (parts, 4), (whole, 4), (whole, 1)];
        assert_eq!(limited(&many), [(parts, 64), (parts, 16), (whole, 4)]);
        let changing = [(parts, 1), (whole, 1), (parts, 2), (whole, 2)];
        assert_eq!(limited(&changing), changing[..3]);
    }
}
