//! From a description to a prepared operation, together with all ranks: draft, agree, import, vote.

use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{
    CopyEngine, Deadline, ErrorKind, Fabric, PeerMemory, Rank, Region, RemoteKey, Role,
};

use super::AllGather;
use crate::allgather::{self, Shape};
use crate::element::Element;
use crate::error::Error;
use crate::group::agreement::{Offer, agree};
use crate::group::buffer::Buffer;
use crate::group::options::{blob, check_timeout};
use crate::group::report::{LaneReport, LinkReport, Report};
use crate::group::watch::Watch;
use crate::group::{Group, Local};
use crate::layout::{FlagLayout, Layout};
use crate::plan::{Algorithm, FlagOrder, LaneId, Plan};
use crate::run::course::Course;
use crate::run::lane::Lane;
use crate::run::port::Bind;
use crate::run::prepared::Prepared;
use crate::run::program::Program;
use crate::run::turns::Turns;
use crate::verify::{Proof, verify};
use crate::window::{HostView, Peer, Window};

/// Results up to this size use two outputs in turn unless told otherwise: there the second phase of
/// flags costs more than what a second output takes from the cache: docs/adr/0007.
const TWO_OUTPUTS_BYTES_MAX: u64 = 256 << 10;
/// The same where flags come in batches, as on devices: a phase less saves a round between devices,
/// which is 7 to 20 µs of a gather up to this size, and 1 % beyond (docs/perf/cuda-allgather.md).
const TWO_OUTPUTS_BATCHED_BYTES_MAX: u64 = 256 << 20;
/// What an offer brings along, in this order.
const OUTPUT_KEY: usize = 0;
const FLAGS_KEY: usize = 1;

/// What the builder was told.
pub(super) struct Wish<F: Fabric, T> {
    pub(super) shard_len: usize,
    pub(super) algorithm: Algorithm,
    pub(super) parts: u32,
    pub(super) in_place: bool,
    pub(super) outputs: Option<u32>,
    pub(super) capturable: bool,
    pub(super) timeout: Duration,
    pub(super) input: Option<Buffer<Local<F>, T>>,
    pub(super) output: Option<Buffer<Local<F>, T>>,
}

pub(super) fn prepare<F: Fabric, T: Element>(
    group: &mut Group<F>,
    wish: Wish<F, T>,
) -> Result<AllGather<T>, Error> {
    group.shared.check()?;
    group.prepared += 1;
    let name = format!("all-gather {}", group.prepared);
    // A zero timeout is refused with all ranks, so that none waits for this one.
    let patience = if wish.timeout.is_zero() { group.timeout() } else { wish.timeout };
    let deadline = Deadline::after(patience);
    let shared = Arc::clone(&group.shared);

    let drafted = Draft::new(group, wish).and_then(|draft| Ok((draft.offer(group)?, draft)));
    let (offer, draft) = match drafted {
        Ok((offer, draft)) => (Ok(offer), Ok(draft)),
        Err(error) => (Err(error.clone()), Err(error)),
    };
    let offers = agree(&shared, &name, offer, deadline)?;
    let ready = draft.and_then(|draft| draft.import(group, &offers, deadline));
    let vote = ready.as_ref().map(|_| Offer::default()).map_err(Error::clone);
    // Nobody signals before every rank has imported every flag.
    agree(&shared, &format!("{name}, import"), vote, deadline)?;
    Ok(ready?.finish(group, name))
}

/// Everything that needs no other rank.
struct Draft<F: Fabric> {
    timeout: Duration,
    capturable: bool,
    layout: Layout,
    flag_layout: FlagLayout,
    turns: Turns,
    plans: Vec<Plan>,
    proof: Proof,
    dtype: crate::element::DType,
    input: Option<Local<F>>,
    output: Local<F>,
    flags: Local<F>,
    /// Of lane 0. Only an engine knows what engines can do, and the plan depends on that.
    home: F::Engine,
}

impl<F: Fabric> Draft<F> {
    fn new<T: Element>(group: &mut Group<F>, wish: Wish<F, T>) -> Result<Self, Error> {
        let Wish { algorithm, parts, in_place, capturable, timeout, .. } = wish;
        check_timeout(timeout)?;
        let ranks = group.ranks();
        let bytes = shard_bytes::<T>(wish.shard_len)?;
        let layout = Layout::new(&vec![bytes; ranks], parts)?;
        let home = make_engine(group)?;
        let (flags, two_outputs_bytes_max) = match home.caps().flags_batched {
            true => (FlagOrder::Batched, TWO_OUTPUTS_BATCHED_BYTES_MAX),
            false => (FlagOrder::Prompt, TWO_OUTPUTS_BYTES_MAX),
        };
        let outputs = wish.outputs.unwrap_or_else(|| {
            let small = layout.total_bytes() <= two_outputs_bytes_max;
            if small && !in_place && !capturable && wish.output.is_none() { 2 } else { 1 }
        });
        if capturable && outputs > 1 {
            // A graph writes to the same place at each replay.
            let text = format!("outputs is {outputs}, wanted 1 of a capturable all-gather");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let shape = Shape { parts, in_place, outputs, flags, tiers: false };
        let plans = allgather::plans(algorithm, group.topology(), shape)?;
        let proof = verify(&plans).map_err(|fault| {
            let text = format!("the plan of {algorithm} is faulty: {fault}");
            Error::new(ErrorKind::Other, text).with_source(fault)
        })?;
        let lanes = plans.iter().map(|plan| plan.lanes.len()).max().unwrap_or(1);
        let flag_layout = FlagLayout::new(ranks, parts, lanes);
        let turns = Turns::new(outputs, layout.total_bytes(), flag_layout.words(), capturable);
        let turns = turns.ok_or_else(|| {
            let text = format!("{outputs} outputs of {} bytes overflow", layout.total_bytes());
            Error::new(ErrorKind::InvalidArgument, text)
        })?;
        let flags = group.fabric.memory().allocate(turns.flag_bytes(), Role::Flags);
        let flags = flags.map_err(|error| Error::of_backend("allocate flags", error))?;
        let output = given_or_new("output", wish.output, turns.output_bytes(), group)?;
        let input = match (in_place, wish.input) {
            (true, None) => None,
            (false, input) => Some(given_or_new("input", input, bytes, group)?),
            (true, Some(_)) => {
                let text = "in place there is no input buffer; the shard lies in the output";
                return Err(Error::new(ErrorKind::InvalidArgument, text));
            }
        };
        let dtype = T::DTYPE;
        Ok(Self {
            timeout,
            capturable,
            layout,
            flag_layout,
            turns,
            plans,
            proof,
            dtype,
            input,
            output,
            flags,
            home,
        })
    }

    /// The fingerprint and the keys.
    fn offer(&self, group: &Group<F>) -> Result<Offer, Error> {
        let (memory, plan) = (group.fabric.memory(), &self.plans[group.rank().index()]);
        let key = |region| {
            let key = memory.export(region).map_err(|error| Error::of_backend("export", error))?;
            Ok::<_, Error>(key.encode())
        };
        Ok(Offer::default()
            .field("operation", "all-gather")
            .field("dtype", self.dtype)
            .field("shard_bytes", self.layout.shard_bytes(group.rank()))
            .field("algorithm", plan.algorithm)
            .field("parts", plan.parts)
            .field("in_place", plan.in_place)
            .field("outputs", plan.outputs)
            .field("flags", plan.flags)
            .field("capturable", self.capturable)
            .field("timeout", format_args!("{:?}", self.timeout))
            .field("topology", group.topology())
            .blob(key(&self.output)?)
            .blob(key(&self.flags)?))
    }

    fn import(
        self,
        group: &mut Group<F>,
        offers: &[Offer],
        deadline: Deadline,
    ) -> Result<Ready<F>, Error> {
        let memory = group.fabric.memory();
        let mut peers = Vec::with_capacity(offers.len());
        for (index, offer) in offers.iter().enumerate() {
            let peer = Rank::at(index);
            let import =
                |index, bytes| import(memory, peer, blob(offer, peer, index)?, bytes, deadline);
            let output = import(OUTPUT_KEY, self.turns.output_bytes())?;
            let flags = import(FLAGS_KEY, self.turns.flag_bytes())?;
            peers.push(Peer { output, flags });
        }
        let mut engines = vec![self.home];
        for _ in self.plans[group.rank().index()].lanes.iter().skip(1) {
            engines.push(make_engine(group)?);
        }
        let Self { timeout, capturable, layout, flag_layout, turns, plans, proof, .. } = self;
        let (input, output, flags) = (self.input, self.output, self.flags);
        let window = Arc::new(Window { input, output, flags, peers, turns });
        Ok(Ready { timeout, capturable, layout, flag_layout, plans, proof, window, engines })
    }
}

fn make_engine<F: Fabric>(group: &mut Group<F>) -> Result<F::Engine, Error> {
    group.fabric.engine().map_err(|error| Error::of_backend("make an engine", error))
}

fn import<M: PeerMemory>(
    memory: &M,
    peer: Rank,
    key: &[u8],
    bytes: u64,
    deadline: Deadline,
) -> Result<M::Remote, Error> {
    let what = format!("import the memory of rank {peer}");
    let key =
        M::Key::decode(key).map_err(|error| Error::of_backend(&what, error).with_peer(peer))?;
    if key.region_bytes() != bytes {
        let text = format!("{what}: it has {} bytes, wanted {bytes}", key.region_bytes());
        return Err(Error::new(ErrorKind::Mismatch, text).with_peer(peer));
    }
    let imported = memory.import(peer, &key, deadline);
    imported.map_err(|error| Error::of_backend(&what, error).with_peer(peer))
}

/// The length of a shard of `len` elements in bytes.
pub(in crate::group) fn shard_bytes<T: Element>(len: usize) -> Result<u64, Error> {
    let bytes = len.checked_mul(T::DTYPE.bytes()).filter(|bytes| isize::try_from(*bytes).is_ok());
    bytes.map(|bytes| bytes as u64).ok_or_else(|| {
        let text = format!("shard_len is {len}, too many elements of {}", T::DTYPE);
        Error::new(ErrorKind::InvalidArgument, text)
    })
}

fn given_or_new<F: Fabric, T: Element>(
    name: &str,
    given: Option<Buffer<Local<F>, T>>,
    bytes: u64,
    group: &Group<F>,
) -> Result<Local<F>, Error> {
    let Some(given) = given else {
        let region = group.fabric.memory().allocate(bytes, Role::Data);
        return region.map_err(|error| Error::of_backend(format!("allocate the {name}"), error));
    };
    let region = given.into_region();
    if region.bytes() != bytes {
        let text = format!("the {name} has {} bytes, wanted {bytes}", region.bytes());
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(region)
}

/// Everything is exchanged; only this rank's executor is missing.
struct Ready<F: Fabric> {
    timeout: Duration,
    capturable: bool,
    layout: Layout,
    flag_layout: FlagLayout,
    plans: Vec<Plan>,
    proof: Proof,
    window: Arc<Window<F::Memory>>,
    engines: Vec<F::Engine>,
}

impl<F: Fabric> Ready<F> {
    fn finish<T: Element>(self, group: &Group<F>, name: String) -> AllGather<T> {
        let (me, backend) = (group.rank(), group.fabric.backend());
        let mut lanes = Vec::new();
        for (index, engine) in self.engines.into_iter().enumerate() {
            let lane = LaneId(Rank::at(index).0);
            let program = Program::bind(&self.plans, me, lane, &self.layout, &self.flag_layout);
            let port = Bind::new(engine, backend, Arc::clone(&self.window));
            // An engine may put its work straight onto the stream, where two lanes would be one
            // queue, and the last wait of lane 0 would hold up the other.
            lanes.push(Lane::new(program, Box::new(port), lane == LaneId::HOME));
        }
        let plan = &self.plans[me.index()];
        // Once everything is imported a fabric knows where the peers' memory lies.
        let links = Rank::all(group.ranks()).filter_map(|peer| group.fabric.link(peer));
        let links = links.map(|link| LinkReport { peer: link.peer, kind: link.kind }).collect();
        let report = Report {
            links,
            algorithm: plan.algorithm,
            ranks: group.ranks(),
            parts: plan.parts,
            outputs: plan.outputs,
            flags: plan.flags,
            capturable: self.capturable,
            shard_bytes: self.layout.shard_bytes(me),
            total_bytes: self.layout.total_bytes(),
            lanes: lanes
                .iter()
                .map(|lane| LaneReport { backend, queued_waits: lane.queues_waits() })
                .collect(),
            proof: self.proof.to_string(),
        };
        let offset = if plan.in_place { self.layout.shard_offset(me) } else { 0 };
        let waits = lanes.iter().flat_map(|lane| lane.program().waits.iter().copied()).collect();
        let view: Arc<dyn HostView> = Arc::clone(&self.window) as _;
        let watch = Arc::new(Watch::new(name, me, self.timeout, waits, Arc::clone(&view)));
        // SAFETY: the layout puts every cell inside the window's buffers, whose lengths were
        // checked on both sides; ports keep the window; `verify` has passed the plans.
        let course = unsafe { Course::new(lanes, Arc::clone(&watch), self.capturable) };
        let prepared = Prepared::new(course, Arc::clone(&group.shared), watch);
        AllGather::new(prepared, view, report, self.timeout, offset)
    }
}
