//! From a description to a prepared operation, together with all ranks: draft, agree, import, vote.

use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{Deadline, EngineRequirements, ErrorKind, Region};

use super::Operation;
use super::draft::{Draft, Ground, Terms};
use super::method::Method;
use super::request::{Asked, Request, Target};
use super::shards::Shards;
use crate::collective::Collective;
use crate::element::Element;
use crate::error::Error;
use crate::group::Group;
use crate::group::agreement::{Offer, agree};
use crate::group::buffer::Buffer;
use crate::group::options::check_timeout;
use crate::group::side::Side;
use crate::group::window::{Active, Inner};
use crate::plan::{FlagOrder, Tier};
use crate::run::buffers::BufferId;
use crate::schedule::Shape;

/// Results up to this size use two outputs in turn unless told otherwise: there the second phase of
/// flags costs more than what a second output takes from the cache: docs/adr/0007.
const TWO_OUTPUTS_BYTES_MAX: u64 = 256 << 10;
/// The same where flags come in batches, as on devices: a phase less saves a round between devices,
/// which is 7 to 20 µs of a gather up to this size, and 1 % beyond (docs/perf/cuda-allgather.md).
const TWO_OUTPUTS_BATCHED_BYTES_MAX: u64 = 256 << 20;

/// What the builder was told.
pub(super) struct Wish<T> {
    pub(super) operation: &'static str,
    pub(super) collective: Collective,
    pub(super) shards: Shards,
    pub(super) target: Target,
    pub(super) method: Method,
    pub(super) in_place: bool,
    pub(super) outputs: Option<u32>,
    pub(super) capturable: bool,
    pub(super) any_engine: bool,
    pub(super) strict: bool,
    pub(super) traced: bool,
    pub(super) timeout: Duration,
    pub(super) inputs: Vec<Buffer<T>>,
    /// A window, and the element at which the own shard begins there.
    pub(super) source: Option<(Arc<Inner>, usize)>,
    pub(super) output_buffers: Vec<Buffer<T>>,
}

pub(super) fn prepare<T: Element>(group: &mut Group, wish: Wish<T>) -> Result<Operation<T>, Error> {
    group.shared.check()?;
    group.prepared += 1;
    let name = format!("{} {}", wish.collective.name(), group.prepared);
    // A zero timeout is refused with all ranks, so that none waits for this one.
    let patience = if wish.timeout.is_zero() { group.timeout() } else { wish.timeout };
    let deadline = Deadline::after(patience);
    let ground = Ground {
        rank: group.rank(),
        topology: group.topology.clone(),
        refusal: group.refusal.clone(),
        shared: Arc::clone(&group.shared),
    };
    let (shared, users) = (Arc::clone(&group.shared), Arc::clone(&group.users));

    let drafted = draft(group, ground, wish).and_then(|draft| Ok((draft.offer()?, draft)));
    let (offer, mut draft) = match drafted {
        Ok((offer, draft)) => (Ok(offer), Ok(draft)),
        Err(error) => (Err(error.clone()), Err(error)),
    };
    let offers = agree(&shared, &name, offer, deadline)?;
    let bound = match &mut draft {
        Ok(draft) => draft.import(&offers, deadline),
        Err(error) => Err(error.clone()),
    };
    let vote = bound.as_ref().map(|_| Offer::default()).map_err(Error::clone);
    // Nobody signals before every rank has imported every flag.
    agree(&shared, &format!("{name}, import"), vote, deadline)?;
    let (finished, extents) = draft?.finish(bound?, name.clone());
    let uses = (!extents.is_empty()).then(|| {
        let watch: Arc<dyn Active> = Arc::clone(&finished.watch) as _;
        users.enter(name, extents, watch)
    });
    Ok(Operation::new(finished, uses))
}

/// Everything that needs no other rank, as far as it needs types.
fn draft<T: Element>(group: &mut Group, ground: Ground, wish: Wish<T>) -> Result<Draft<'_>, Error> {
    let Wish {
        operation,
        collective,
        in_place,
        capturable,
        any_engine,
        strict,
        traced,
        timeout,
        ..
    } = wish;
    check_timeout(timeout)?;
    if let Err(text) = collective.check(group.ranks(), in_place) {
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    let layout_of =
        |ranks, chunks| wish.shards.layout::<T>(ranks, chunks)?.for_collective(collective);
    let mut layout = layout_of(group.ranks(), wish.method.chunks.unwrap_or(1))?;
    let asked = Asked {
        target: &wish.target,
        source: wish.source.as_ref(),
        in_place,
        inputs: wish.inputs.len(),
        outputs: wish.output_buffers.len(),
    };
    let mut request = Request::new::<T>(&asked, &layout, ground.rank, &ground.shared)?;
    request.fields.extend(wish.shards.fields(&layout));
    let mut local = Side::new(&mut group.fabric);
    // Of lane 0. Only an engine knows what engines can do, and the plan depends on that.
    let streams = capturable || !any_engine;
    let copy_bytes_max = layout.shards().iter().max().unwrap_or(0);
    let requirements = EngineRequirements { streams, copy_bytes_max };
    let caps = local.engine(requirements)?;
    // Plans are alike on all ranks; that flags come one by one every engine can.
    let (flags, two_outputs_bytes_max) = match caps.flags_batched && !group.mixed {
        true => (FlagOrder::Batched, TWO_OUTPUTS_BATCHED_BYTES_MAX),
        false => (FlagOrder::Prompt, TWO_OUTPUTS_BYTES_MAX),
    };
    if capturable && traced {
        let text = "trace is set for a capturable operation, whose replays cannot be traced; expected one of them";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    let takes_turns = request.takes_turns() && !capturable;
    let outputs = wish.outputs.unwrap_or_else(|| {
        let is_small = layout.total_bytes() <= two_outputs_bytes_max;
        let own = wish.output_buffers.is_empty();
        // A second output saves `ready` flags only if every rank provides data.
        let saves = !matches!(collective, Collective::Broadcast { .. });
        if saves && is_small && !in_place && takes_turns && own { 2 } else { 1 }
    });
    if outputs > 1 && !takes_turns {
        // A graph writes to the same place at each replay; the caller's places are where they are.
        let what =
            if capturable { "a capturable operation" } else { "an operation with given places" };
        let text = format!("outputs is {outputs}, expected 1 in {what}");
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    let tiers = group.network.is_some();
    let shape = Shape { collective, chunks: layout.chunks(), in_place, outputs, flags, tiers };
    let links = (&group.links, group.links_measured);
    let (topology, method) = (&ground.topology, &wish.method);
    let choice = method.choose(topology, &layout, (shape, capturable), links)?;
    if choice.chunks != layout.chunks() {
        layout = layout_of(topology.ranks(), choice.chunks)?;
    }
    let (algorithm, shape) = (choice.algorithm, Shape { chunks: choice.chunks, ..shape });
    let (dtype, rank) = (T::DTYPE, ground.rank);
    let terms = Terms {
        operation,
        algorithm,
        choice,
        shape,
        layout,
        request,
        dtype,
        capturable,
        requirements,
        strict,
        traced,
        timeout,
    };
    let planned = terms.plan(&ground)?;
    let buffering = planned.buffering;
    let need = |buffer| match buffer {
        BufferId::OUTPUT if outputs > 1 => buffering.output_bytes(),
        buffer => terms.request.need(&terms.layout, rank, buffer),
    };
    // What a list does not use is the caller's affair.
    let exact = !matches!(wish.target, Target::List(_));
    let (mut outputs, mut inputs) = (wish.output_buffers.into_iter(), wish.inputs.into_iter());
    for buffer in terms.request.buffers() {
        let (given, exact) =
            if buffer.is_output() { (outputs.next(), exact) } else { (inputs.next(), true) };
        match terms.request.window(buffer) {
            Some(window) => window.lend(Tier::Local, buffer, &mut local)?,
            None => give(&mut local, buffer, given, need(buffer), exact)?,
        }
    }
    let network = group.network.as_mut().map(Side::new);
    Draft::new(ground, terms, planned, local, caps, network)
}

/// The caller's region, or a new one; as long as it must be, or longer unless that is `exact`.
fn give<T: Element>(
    side: &mut Side<'_>,
    buffer: BufferId,
    given: Option<Buffer<T>>,
    bytes: u64,
    exact: bool,
) -> Result<(), Error> {
    let Some(given) = given else { return side.allocate(buffer, bytes) };
    let region = given.into_region();
    if region.bytes() < bytes || (exact && region.bytes() != bytes) {
        let least = if exact { "" } else { "at least " };
        let text = format!("{buffer} has {} bytes, expected {least}{bytes}", region.bytes());
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    side.insert(buffer, region);
    Ok(())
}
