//! Chooses the algorithm of a collective operation, creates this rank's plan, and verifies the
//! plans of all ranks.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use peerlane_hal::{Caps, EngineRequirements, ErrorKind, Rank};

use super::lens;
use super::request::{Method, OperationSpec, Request, Target};
use crate::collective::Collective;
use crate::cost::{self, Choice, Links, Question};
use crate::error::Error;
use crate::group::options::check_timeout;
use crate::group::report::PlanRange;
use crate::group::runtime::Runtime;
use crate::layout::{BlockBytes, CHUNK_ALIGN_BYTES, FlagLayout, Layout};
use crate::plan::{Algorithm, FlagOrder, Plan};
use crate::run::buffers::{BufferId, DoubleBuffering, digest_bits};
use crate::run::program::{FlagTiers, FlagWriters, is_tiered};
use crate::schedule::{self, Shape, schedule};
use crate::topology::Topology;
use crate::verify::{self, Budget};

/// Above this output size, a second output costs more cache than the saved flags are worth
/// (docs/adr/0007).
const TWO_OUTPUTS_BYTES_MAX: u64 = 256 << 10;
/// Saving one phase of flags with a second output saves 7 to 20 µs up to this output size on GPUs,
/// and 1 % beyond it (docs/perf/cuda-allgather.md).
const TWO_OUTPUTS_BATCHED_BYTES_MAX: u64 = 256 << 20;

pub(super) struct GroupInfo<'a> {
    pub(super) rank: Rank,
    pub(super) topology: &'a Topology,
    pub(super) runtime: &'a Arc<Runtime>,
    pub(super) links: (&'a Links, bool),
    pub(super) mixed: bool,
    pub(super) tiers: bool,
    pub(super) proofs: &'a mut Proofs,
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
    pub(super) requirements: EngineRequirements,
    pub(super) choice: Choice,
    shape: Shape,
    pub(super) layout: Layout,
    pub(super) plan: Plan,
    pub(super) flag_tiers: FlagTiers,
    pub(super) flags: FlagLayout,
    pub(super) buffering: DoubleBuffering,
    /// The number of low bits of a flag that hold the digest of lengths and places, if starts can
    /// have their own.
    pub(super) digest_bits: u32,
    pub(super) proof: Arc<str>,
    /// Whether this plan or another one of the operation reads from peers.
    pub(super) gets: bool,
    can_get: bool,
}

/// An operation has at most this number of plans, because each has engines of its own.
const PLANS_MAX: usize = 4;

impl OperationPlan {
    /// Creates the plan of this rank together with its first copy engine, because the plan depends
    /// on what that engine supports.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a specification that does not fit the
    /// group, and the error of the engine.
    pub(super) fn new(
        spec: OperationSpec,
        group: &mut GroupInfo<'_>,
        engine: impl FnOnce(EngineRequirements) -> Result<Caps, Error>,
    ) -> Result<Self, Error> {
        let (rank, topology) = (group.rank, group.topology);
        let in_place = spec.in_place;
        check(&spec, topology.ranks())?;
        let mut collective = spec.collective;
        let mut blocks = spec.lens.in_bytes(spec.dtype, topology.ranks())?;
        let (links, tiers) = (spec.method.links.as_ref().unwrap_or(group.links.0), group.tiers);
        // In place, additions would overwrite what other lanes still send.
        let can_be_whole = collective == Collective::AllReduce && !in_place;
        let is_whole = can_be_whole && adds_whole(&blocks, topology, tiers, links);
        if is_whole {
            // Every rank adds everything.
            collective = Collective::ReduceScatter;
        } else if collective == Collective::AllReduce {
            blocks = parts(&blocks)?;
        }
        let layout_of = |chunks| {
            let layout = Layout::of_blocks(collective, blocks.clone(), chunks)?;
            let layout = if is_whole { layout.with_shared_input() } else { layout };
            match spec.columns {
                Some(columns) => layout.with_columns(columns, spec.dtype.bytes() as u64),
                None => Ok::<_, Error>(layout),
            }
        };
        let mut layout = layout_of(spec.method.chunks.unwrap_or(1))?;
        let mut request = Request::new(&spec, &layout, rank, group.runtime)?;
        request.fields.extend(lens::fields(&blocks));
        let streams = spec.capturable || !spec.any_engine;
        let (_, copy_bytes_max) = layout.block_bytes_min_max();
        let requirements = EngineRequirements {
            streams,
            copy_bytes_max,
            priority: spec.priority,
            beside_compute: spec.beside_compute,
        };
        let caps = engine(requirements)?;
        // Plans are alike on all ranks, and every engine can set flags one by one.
        let batched = caps.flags_batched && !group.mixed;
        let flags = if batched { FlagOrder::Batched } else { FlagOrder::Prompt };
        let gets = caps.gets;
        let outputs = outputs(&spec, &request, &layout, flags)?;
        let (chunks, tiers) = (layout.chunks(), group.tiers);
        let shape = Shape { collective, chunks, in_place, outputs, flags, tiers };
        let blocks_of_ranks = layout.average_blocks();
        let choice = choose(
            &spec.method,
            topology,
            &blocks_of_ranks,
            Needs {
                shape,
                capturable: spec.capturable,
                gets,
                has_neighbors: has_neighbors(&spec),
                returns_own_block: spec.beside_compute && !in_place,
            },
            group.links,
        )?;
        if choice.chunks != layout.chunks() {
            layout = layout_of(choice.chunks)?;
        }
        let (algorithm, shape) = (choice.algorithm, Shape { chunks: choice.chunks, ..shape });
        let plan = schedule::plan(algorithm, topology, rank, shape)?;
        let proof = group.proofs.prove(algorithm, topology, shape)?;
        let flag_tiers = FlagTiers::new(&plan, &node_plans(&plan, algorithm, group, shape)?);
        let flags = FlagLayout::new(topology.ranks(), shape.chunks, plan.lanes.len());
        let flags = flags.for_collective(collective);
        let bytes = layout.output_bytes_max();
        let buffering = DoubleBuffering::new(outputs, bytes, flags.words(), spec.capturable);
        let buffering = buffering.and_then(|one| one.with_inbox(layout.inbox_bytes_max()));
        let buffering = buffering.ok_or_else(|| {
            let text = format!("{outputs} outputs of {bytes} bytes exceed the address space");
            Error::new(ErrorKind::InvalidArgument, text)
        })?;
        Ok(Self {
            spec,
            rank,
            topology: topology.clone(),
            request,
            requirements,
            choice,
            shape,
            layout,
            plan,
            flag_tiers,
            flags,
            buffering,
            digest_bits: digest_bits(caps.signal_growth_max),
            proof,
            gets: schedule(algorithm).gets,
            can_get: gets,
        })
    }

    /// Chooses plans for starts that are shorter than the longest, largest first. All ranks choose
    /// alike.
    pub(super) fn shorter(&self, links: (&Links, bool)) -> Result<Vec<PlanRange>, Error> {
        let Method { algorithm, chunks, .. } = self.spec.method;
        let mut shorter: Vec<PlanRange> = Vec::new();
        let Some(lengths) = self.layout.lengths().filter(|_| self.spec.resizable) else {
            return Ok(shorter);
        };
        let mut last = (self.choice.algorithm, self.choice.chunks);
        let is_fixed = algorithm.is_some() && chunks.is_some();
        let most = if is_fixed { 0 } else { lengths.max() };
        let least = self.spec.dtype.bytes() as u64;
        let halvings = (1..u64::BITS).take_while(|&halvings| most >> halvings >= least);
        for halvings in halvings {
            let blocks: Vec<u64> = lengths.iter().map(|bytes| bytes >> halvings).collect();
            let shape = Shape { chunks: 1, ..self.shape };
            let needs = Needs {
                shape,
                capturable: self.spec.capturable,
                gets: self.can_get,
                has_neighbors: has_neighbors(&self.spec),
                returns_own_block: self.spec.beside_compute && !self.shape.in_place,
            };
            let choice = choose(&self.spec.method, &self.topology, &blocks, needs, links)?;
            let now = (choice.algorithm, choice.chunks);
            // Few chunks more or less make little difference.
            let differs = now.0 != last.0 || now.1 < last.1 && (now.1 == 1 || now.1 <= last.1 / 4);
            if differs && shorter.len() + 1 < PLANS_MAX {
                let (algorithm, chunks) = now;
                let bytes_max = lengths.total() >> halvings;
                shorter.push(PlanRange { bytes_max, algorithm, chunks });
                last = now;
            }
        }
        Ok(shorter)
    }

    /// Uses flags with room for those of `other`, so that plans can share flags: a flag with one
    /// name has one word.
    pub(super) fn share_flags(&mut self, other: &Self) {
        self.gets |= other.gets;
        self.flags = self.flags.max(other.flags);
        let bytes = self.layout.output_bytes_max();
        let buffering = DoubleBuffering::new(1, bytes, self.flags.words(), self.spec.capturable);
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
            BufferId::OUTPUT if self.plan.outputs > 1 => self.buffering.output_bytes(),
            BufferId::Inbox => self.peer_bytes(self.rank, buffer),
            buffer => self.request.need(&self.layout, self.rank, buffer),
        }
    }

    /// Returns the bytes of a buffer that Peerlane allocates for `rank`, once the placements of all
    /// ranks are known.
    pub(super) fn block_bytes(&self, rank: Rank, buffer: BufferId) -> u64 {
        match buffer {
            BufferId::OUTPUT if self.plan.outputs > 1 => self.buffering.output_bytes(),
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
            BufferId::Inbox => match layout.inbox_bytes(peer) {
                0 => 0,
                bytes => self.buffering.inbox_bytes(bytes),
            },
        }
    }
}

fn check(spec: &OperationSpec, ranks: usize) -> Result<(), Error> {
    check_timeout(spec.timeout)?;

    if let Err(text) = spec.collective.check(ranks, spec.in_place) {
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    if spec.collective.is_reduction() {
        check_reduction(spec)?;
    }

    if spec.capturable && spec.traced {
        let text = "trace and capturable are both set, expected at most one: replays of a graph \
                    cannot be traced";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }

    if spec.resizable {
        check_resizable(spec)?;
    }
    if spec.columns.is_some() {
        check_columns(spec)?;
    }
    Ok(())
}

fn check_reduction(spec: &OperationSpec) -> Result<(), Error> {
    spec.reduction()?;
    let what = if spec.lens.tensor_count() > 1 {
        "there are several tensors, expected one"
    } else if matches!(spec.target, Target::List(_)) {
        "destinations are given, expected one output buffer or a window"
    } else if spec.resizable {
        "resizable is set, expected it off"
    } else if spec.output_buffers.len() > 1 {
        "there are several output buffers, expected one"
    } else {
        return Ok(());
    };
    let text = format!("{what} in {}", spec.collective.with_article());
    Err(Error::new(ErrorKind::InvalidArgument, text))
}

/// Returns whether an all-reduce is predicted to be faster if every rank sends its whole input to
/// all others and adds everything, than if each rank adds one part and passes it on.
fn adds_whole(whole: &BlockBytes, topology: &Topology, tiers: bool, links: &Links) -> bool {
    let predicted = |collective, blocks: &BlockBytes| {
        let layout = Layout::of_blocks(collective, blocks.clone(), 1)?;
        let shape = Shape { collective, tiers, ..Shape::default() };
        let blocks = layout.average_blocks();
        cost::predict(Algorithm::Direct, topology, shape, &blocks, links)
    };
    let in_parts = parts(whole).and_then(|parts| predicted(Collective::AllReduce, &parts));
    match (predicted(Collective::ReduceScatter, whole), in_parts) {
        (Ok(whole), Ok(in_parts)) => whole.picoseconds <= in_parts.picoseconds,
        _ => false,
    }
}

/// Returns the lengths of the parts of an all-reduce. Rank i adds the contributions to part i.
fn parts(blocks: &BlockBytes) -> Result<BlockBytes, Error> {
    let lengths = match blocks {
        BlockBytes::ByRank(lengths) => lengths.uniform().map(|bytes| (bytes, lengths.ranks())),
        _ => None,
    };
    let Some((bytes, ranks)) = lengths else {
        let text = "the lengths of an all-reduce differ between ranks, expected one length";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    };

    // Parts begin at multiples of the alignment of chunks, and the last ones can be shorter.
    let units = u128::from(bytes.div_ceil(CHUNK_ALIGN_BYTES));
    let end = |rank: usize| {
        let units = units * rank as u128 / ranks as u128;
        u64::try_from(units)
            .map_or(bytes, |units| bytes.min(units.saturating_mul(CHUNK_ALIGN_BYTES)))
    };
    let parts: Vec<u64> = (0..ranks).map(|rank| end(rank + 1) - end(rank)).collect();
    BlockBytes::by_rank(&parts)
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

fn check_resizable(spec: &OperationSpec) -> Result<(), Error> {
    let what = if spec.traced {
        "trace is set, expected it off"
    } else if matches!(spec.target, Target::List(_)) {
        "destinations are given, expected one output buffer or a window"
    } else if spec.lens.tensor_count() > 1 {
        "there are several tensors, expected one"
    } else if spec.outputs.is_some_and(|outputs| outputs > 1) {
        "outputs is 2, expected 1"
    } else {
        return Ok(());
    };
    let text = format!("{what} for an operation that is resizable");
    Err(Error::new(ErrorKind::InvalidArgument, text))
}

fn outputs(
    spec: &OperationSpec,
    request: &Request,
    layout: &Layout,
    flags: FlagOrder,
) -> Result<u32, Error> {
    let bytes_max = match flags {
        FlagOrder::Batched => TWO_OUTPUTS_BATCHED_BYTES_MAX,
        FlagOrder::Prompt => TWO_OUTPUTS_BYTES_MAX,
    };
    let takes_turns = request.takes_turns() && !spec.capturable && !spec.resizable;
    let outputs = spec.outputs.unwrap_or_else(|| {
        let is_small = layout.output_bytes_max() <= bytes_max;
        let own = spec.output_buffers.is_empty();
        if is_small && !spec.in_place && takes_turns && own { 2 } else { 1 }
    });
    if outputs > 1 && !takes_turns {
        // A graph writes to the same memory at each replay, and the caller's buffers do not
        // alternate.
        let what = match spec.capturable {
            true => "a capturable operation",
            false => "an operation with given output buffers",
        };
        let text = format!("outputs is {outputs}, expected 1 in {what}");
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(outputs)
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

/// What a plan must have, and what it may use.
#[derive(Clone, Copy)]
struct Needs {
    /// Everything but the number of chunks.
    shape: Shape,
    capturable: bool,
    /// Whether the engines of both tiers can get.
    gets: bool,
    /// Whether blocks of different ranks are neighbors in the output, unless a rank has a list.
    has_neighbors: bool,
    /// Whether the own block returns over the link from a peer to which it was put.
    returns_own_block: bool,
}

/// Returns whether blocks of different ranks are neighbors in the output, as far as all ranks know.
///
/// A rank does not know whether others give a list of destinations, so lists do not count.
fn has_neighbors(spec: &OperationSpec) -> bool {
    spec.lens.tensor_count() == 1 && spec.columns.is_none()
}

/// Returns the algorithm and chunks that `method` asks for, or those with the shortest predicted
/// time.
///
/// Every rank chooses by itself, from values that are equal on all ranks. `known` are the links of
/// the group, and whether they were measured.
fn choose(
    method: &Method,
    topology: &Topology,
    block_bytes: &[u64],
    needs: Needs,
    (known, measured): (&Links, bool),
) -> Result<Choice, Error> {
    let (links, measured) = match &method.links {
        Some(links) => (links, true),
        None => (known, measured),
    };
    let algorithm = match method.algorithm {
        // Direct moves the same bytes, with the engines of the other ranks.
        Some(one) if !needs.gets && schedule(one).gets => Some(Algorithm::Direct),
        other => other,
    };
    let refused = match algorithm {
        Some(_) if algorithm == method.algorithm => Vec::new(),
        _ => refused(&needs, topology.nodes(), links, measured),
    };

    cost::choose(&Question {
        topology,
        block_bytes,
        shape: needs.shape,
        links,
        measured,
        algorithm,
        chunks: method.chunks,
        refused: &refused,
    })
}

/// Returns the algorithms that the operation cannot use, or that would not be as fast as estimated.
fn refused(
    needs: &Needs,
    nodes: usize,
    links: &Links,
    measured: bool,
) -> Vec<(Algorithm, &'static str)> {
    let &Needs { shape, capturable, gets, has_neighbors, returns_own_block } = needs;
    let in_graph = capturable && !shape.tiers;

    let reason = |algorithm| {
        let schedule = schedule(algorithm);
        if schedule.gets && !gets {
            return Some("not all engines of this rank have gets");
        }
        if schedule.gets && returns_own_block {
            return Some("beside compute, the own block returns over the link from a put");
        }
        if schedule.joins_blocks && !has_neighbors {
            return Some("blocks of different ranks are not neighbors in the output");
        }
        // Assumed rates are not good enough to leave what is the best wherever it was measured.
        let is_assumed =
            nodes == 1 && !measured && (schedule.needs_measurements)(shape.collective, links);
        if in_graph && (schedule.lane_count)(nodes, shape.tiers) > 1 {
            return Some("one of its lanes cannot be recorded into a graph");
        }
        is_assumed.then_some("no links were measured")
    };
    let all = Algorithm::ALL.iter();
    all.filter_map(|&algorithm| Some((algorithm, reason(algorithm)?))).collect()
}

#[cfg(test)]
mod tests {
    use peerlane_hal::LinkKind;

    use super::*;

    fn known() -> Links {
        Links::of_kinds(LinkKind::NvLink, LinkKind::Rdma)
    }

    fn needs(shape: Shape) -> Needs {
        let (capturable, returns_own_block) = (false, false);
        Needs { shape, capturable, gets: true, has_neighbors: true, returns_own_block }
    }

    fn decided(method: &Method, nodes: &[u32], block_bytes: u64) -> (Algorithm, u32) {
        let topology = Topology::of_nodes(nodes).unwrap();
        let blocks = vec![block_bytes; nodes.len()];
        let shape = Shape { tiers: topology.nodes() > 1, ..Shape::default() };
        let choice = choose(method, &topology, &blocks, needs(shape), (&known(), false)).unwrap();
        (choice.algorithm, choice.chunks)
    }

    #[test]
    fn what_is_left_open_is_chosen_and_what_is_said_is_kept() {
        let open = Method::default();
        for bytes in [0, 341, 64 << 20] {
            assert_eq!(decided(&open, &[0], bytes), (Algorithm::Direct, 1));
            assert_eq!(decided(&open, &[0; 3], bytes), (Algorithm::Direct, 1));
        }
        let (algorithm, chunks) = decided(&open, &[0, 0, 0, 0, 1, 1, 1, 1], 64 << 20);
        assert!(algorithm == Algorithm::Hierarchical && chunks > 1, "{algorithm}, {chunks}");
        let links = Some(known());
        let ring = Method { algorithm: Some(Algorithm::Ring), links, ..open.clone() };
        assert_eq!(decided(&ring, &[0; 4], 64 << 20).0, Algorithm::Ring);
        let both = Method { algorithm: Some(Algorithm::Ring), chunks: Some(3), links: None };
        assert_eq!(decided(&both, &[0; 4], 64 << 20), (Algorithm::Ring, 3));
    }

    #[test]
    fn short_all_reduces_add_everything_on_every_rank() {
        let links = [LinkKind::SharedMemory, LinkKind::NvLink];
        let links = links.map(|local| Links::of_kinds(local, LinkKind::Rdma));
        let longest = |nodes: &[u32]| {
            let topology = Topology::of_nodes(nodes).unwrap();
            let whole = |power: u32, links: &Links| {
                let blocks = BlockBytes::by_rank(&vec![1 << power; nodes.len()]).unwrap();
                adds_whole(&blocks, &topology, topology.nodes() > 1, links)
            };
            links.each_ref().map(|links| (0..30).take_while(|power| whole(*power, links)).last())
        };
        let found = [&[0][..], &[0; 2], &[0; 4], &[0; 8], &[0, 0, 0, 0, 1, 1, 1, 1]].map(longest);
        // Powers of two, on shared memory and on NVLink. One rank alone moves nothing.
        let expected = [[29, 29], [13, 24], [11, 21], [11, 21], [13, 18]];
        assert_eq!(found, expected.map(|one| one.map(Some)));
    }

    #[test]
    fn the_links_decide() {
        let nodes = [0, 0, 0, 0, 1, 1, 1, 1];
        let of = |links| {
            let algorithm = Some(Algorithm::Hierarchical);
            decided(&Method { algorithm, links, ..Method::default() }, &nodes, 8 << 20).1
        };
        let mut links = known();
        assert!(of(Some(links.clone())) > 1);
        links.local.put_seconds = 1.0;
        assert_eq!(of(Some(links)), 1, "what is put at a second a piece is not cut");
    }

    #[test]
    fn engines_without_gets_put_instead() {
        let topology = Topology::of_nodes(&[0; 4]).unwrap();
        let method = Method { algorithm: Some(Algorithm::Pull), ..Method::default() };
        let chosen = |gets| {
            let needs = Needs { gets, ..needs(Shape::default()) };
            choose(&method, &topology, &[64; 4], needs, (&known(), true)).unwrap()
        };
        assert_eq!(chosen(true).algorithm, Algorithm::Pull);
        assert_eq!(chosen(false).algorithm, Algorithm::Direct);
        assert!(chosen(false).explain().contains("not all engines of this rank have gets"));
    }

    #[test]
    fn beside_compute_no_algorithm_is_chosen_that_only_gets() {
        let topology = Topology::of_nodes(&[0; 4]).unwrap();
        let method = Method::default();
        let needs = Needs { returns_own_block: true, ..needs(Shape::default()) };
        let choice = choose(&method, &topology, &[64 << 20; 4], needs, (&known(), true)).unwrap();
        assert_ne!(choice.algorithm, Algorithm::Pull);
        assert!(choice.explain().contains("beside compute"), "{choice}");
    }

    #[test]
    fn a_graph_gets_a_plan_of_one_lane() {
        let topology = Topology::of_nodes(&[0, 0, 0, 0, 1, 1, 1, 1]).unwrap();
        let choose = |measured| {
            let needs = Needs { capturable: true, ..needs(Shape::default()) };
            let (method, links) = (Method::default(), known());
            choose(&method, &topology, &[64 << 20; 8], needs, (&links, measured)).unwrap()
        };
        for choice in [choose(false), choose(true)] {
            assert!(choice.explain().contains("cannot be recorded into a graph"), "{choice}");
            assert!(matches!(choice.algorithm, Algorithm::Direct | Algorithm::Ring), "{choice}");
        }
    }
}
