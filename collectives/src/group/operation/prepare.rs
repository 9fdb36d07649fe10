//! Prepares an operation with all ranks: plans it, exchanges offers and keys, imports memory, and confirms that all ranks have.

use std::sync::Arc;

use peerlane_hal::{Deadline, DynRegion, EngineRequirements, ErrorKind, Region};

use super::bound::Finished;
use super::builder::OperationSpec;
use super::draft::{Draft, GroupContext, Terms};
use super::request::{Asked, Request, Target};
use crate::collective::Collective;
use crate::error::Error;
use crate::group::Group;
use crate::group::agreement::{Offer, agree};
use crate::group::options::check_timeout;
use crate::group::side::Side;
use crate::group::window::{Active, Entry};
use crate::plan::{FlagOrder, Tier};
use crate::run::buffers::BufferId;
use crate::schedule::Shape;

/// The largest output in bytes for which two outputs are the default. Above it, the second output costs more cache than the
/// saved flags are worth: docs/adr/0007.
const TWO_OUTPUTS_BYTES_MAX: u64 = 256 << 10;
/// The same limit for engines with batched flags, such as GPUs. Saving one phase of flags saves 7 to 20 µs up to this size, and
/// 1 % beyond it (docs/perf/cuda-allgather.md).
const TWO_OUTPUTS_BATCHED_BYTES_MAX: u64 = 256 << 20;

/// Prepares an operation with all ranks. Returns what its handle is made from, and its entry among the users of windows.
pub(super) fn prepare(
    group: &mut Group,
    spec: OperationSpec,
) -> Result<(Finished, Option<Entry>), Error> {
    group.shared.check()?;
    group.prepared += 1;
    let name = format!("{} {}", spec.collective.name(), group.prepared);
    // A zero timeout is refused with all ranks, so that none waits for this one.
    let patience = if spec.timeout.is_zero() { group.timeout() } else { spec.timeout };
    let deadline = Deadline::after(patience);
    let context = GroupContext {
        rank: group.rank(),
        topology: group.topology.clone(),
        refusal: group.refusal.clone(),
        shared: Arc::clone(&group.shared),
    };
    let (shared, users) = (Arc::clone(&group.shared), Arc::clone(&group.users));

    let drafted = draft(group, context, spec).and_then(|draft| Ok((draft.offer()?, draft)));
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
    Ok((finished, uses))
}

/// Plans the operation on this rank and sets up its memory and engines.
fn draft(
    group: &mut Group,
    context: GroupContext,
    spec: OperationSpec,
) -> Result<Draft<'_>, Error> {
    let OperationSpec {
        operation,
        collective,
        dtype,
        in_place,
        capturable,
        any_engine,
        strict,
        traced,
        timeout,
        ..
    } = spec;
    check_timeout(timeout)?;
    if let Err(text) = collective.check(group.ranks(), in_place) {
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    let layout_of =
        |ranks, chunks| spec.shards.layout(dtype, ranks, chunks)?.for_collective(collective);
    let mut layout = layout_of(group.ranks(), spec.method.chunks.unwrap_or(1))?;
    let asked = Asked {
        target: &spec.target,
        source: spec.source.as_ref(),
        in_place,
        inputs: spec.inputs.len(),
        outputs: spec.output_buffers.len(),
    };
    let mut request = Request::new(dtype, &asked, &layout, context.rank, &context.shared)?;
    request.fields.extend(spec.shards.fields(&layout));
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
        let text = "trace and capturable are both set, expected at most one: replays of a graph \
                    cannot be traced";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    let takes_turns = request.takes_turns() && !capturable;
    let outputs = spec.outputs.unwrap_or_else(|| {
        let is_small = layout.total_bytes() <= two_outputs_bytes_max;
        let own = spec.output_buffers.is_empty();
        // A second output saves `ready` flags only if every rank provides data.
        let saves = !matches!(collective, Collective::Broadcast { .. });
        if saves && is_small && !in_place && takes_turns && own { 2 } else { 1 }
    });
    if outputs > 1 && !takes_turns {
        // A graph writes to the same place at each replay; the caller's places are where they are.
        let what = if capturable {
            "a capturable operation"
        } else {
            "an operation with given output buffers"
        };
        let text = format!("outputs is {outputs}, expected 1 in {what}");
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    let tiers = group.network.is_some();
    let shape = Shape { collective, chunks: layout.chunks(), in_place, outputs, flags, tiers };
    let links = (&group.links, group.links_measured);
    let (topology, method) = (&context.topology, &spec.method);
    let choice = method.choose(topology, &layout, (shape, capturable), links)?;
    if choice.chunks != layout.chunks() {
        layout = layout_of(topology.ranks(), choice.chunks)?;
    }
    let (algorithm, shape) = (choice.algorithm, Shape { chunks: choice.chunks, ..shape });
    let rank = context.rank;
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
    let planned = terms.plan(&context)?;
    let buffering = planned.buffering;
    let need = |buffer| match buffer {
        BufferId::OUTPUT if outputs > 1 => buffering.output_bytes(),
        buffer => terms.request.need(&terms.layout, rank, buffer),
    };
    // What a list does not use is the caller's affair.
    let exact = !matches!(spec.target, Target::List(_));
    let (mut outputs, mut inputs) = (spec.output_buffers.into_iter(), spec.inputs.into_iter());
    for buffer in terms.request.buffers() {
        let (given, exact) =
            if buffer.is_output() { (outputs.next(), exact) } else { (inputs.next(), true) };
        match terms.request.window(buffer) {
            Some(window) => window.lend(Tier::Local, buffer, &mut local)?,
            None => give(&mut local, buffer, given, need(buffer), exact)?,
        }
    }
    let network = group.network.as_mut().map(Side::new);
    Draft::new(context, terms, planned, local, caps, network)
}

/// Uses the caller's region, or allocates one. A region may be longer than `bytes` unless `exact` is set.
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
