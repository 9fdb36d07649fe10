//! From a description to a prepared operation, together with all ranks: draft, agree, import, vote.

use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{Deadline, ErrorKind, Fabric, Region};

use super::AllGather;
use super::draft::{Draft, Ground, Terms};
use crate::allgather::Shape;
use crate::element::Element;
use crate::error::Error;
use crate::group::agreement::{Offer, agree};
use crate::group::buffer::Buffer;
use crate::group::options::check_timeout;
use crate::group::side::{FabricSide, Side};
use crate::group::{Group, Local};
use crate::layout::Layout;
use crate::plan::{Algorithm, FlagOrder};
use crate::window::BufferId;

/// Results up to this size use two outputs in turn unless told otherwise: there the second phase of
/// flags costs more than what a second output takes from the cache: docs/adr/0007.
const TWO_OUTPUTS_BYTES_MAX: u64 = 256 << 10;
/// The same where flags come in batches, as on devices: a phase less saves a round between devices,
/// which is 7 to 20 µs of a gather up to this size, and 1 % beyond (docs/perf/cuda-allgather.md).
const TWO_OUTPUTS_BATCHED_BYTES_MAX: u64 = 256 << 20;

/// What the builder was told.
pub(super) struct Wish<F: Fabric, T> {
    pub(super) shard_len: usize,
    pub(super) algorithm: Algorithm,
    pub(super) parts: u32,
    pub(super) in_place: bool,
    pub(super) outputs: Option<u32>,
    pub(super) capturable: bool,
    pub(super) strict: bool,
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
    let ground = Ground {
        rank: group.rank(),
        topology: group.topology.clone(),
        shared: Arc::clone(&group.shared),
    };
    let shared = Arc::clone(&group.shared);

    let drafted = draft(group, ground, wish).and_then(|draft| Ok((draft.offer()?, draft)));
    let (offer, draft) = match drafted {
        Ok((offer, draft)) => (Ok(offer), Ok(draft)),
        Err(error) => (Err(error.clone()), Err(error)),
    };
    let offers = agree(&shared, &name, offer, deadline)?;
    let ready = draft.and_then(|draft| draft.import(&offers, deadline));
    let vote = ready.as_ref().map(|_| Offer::default()).map_err(Error::clone);
    // Nobody signals before every rank has imported every flag.
    agree(&shared, &format!("{name}, import"), vote, deadline)?;
    Ok(AllGather::new(ready?.finish(name)))
}

/// Everything that needs no other rank, as far as it needs types.
fn draft<F: Fabric, T: Element>(
    group: &mut Group<F>,
    ground: Ground,
    wish: Wish<F, T>,
) -> Result<Draft<'_>, Error> {
    let Wish { algorithm, parts, in_place, capturable, strict, timeout, .. } = wish;
    check_timeout(timeout)?;
    let bytes = shard_bytes::<T>(wish.shard_len)?;
    let layout = Layout::new(&vec![bytes; group.ranks()], parts)?;
    let mut local = FabricSide::new(&mut group.fabric);
    // Of lane 0. Only an engine knows what engines can do, and the plan depends on that.
    let caps = local.engine()?;
    let (flags, two_outputs_bytes_max) = match caps.flags_batched {
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
    let shape = Shape { parts, in_place, outputs, flags, tiers: group.network.is_some() };
    let terms = Terms { algorithm, shape, layout, dtype: T::DTYPE, capturable, strict, timeout };
    let planned = terms.plan(&ground)?;
    give(&mut local, BufferId::OUTPUT, wish.output, planned.turns.output_bytes())?;
    match (in_place, wish.input) {
        (true, None) => {}
        (false, input) => give(&mut local, BufferId::INPUT, input, bytes)?,
        (true, Some(_)) => {
            let text = "in place there is no input buffer; the shard lies in the output";
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
    }
    let network = group.network.as_deref_mut().map(|network| network.side());
    Draft::new(ground, terms, planned, Box::new(local), caps, network)
}

/// The length of a shard of `len` elements in bytes.
pub(in crate::group) fn shard_bytes<T: Element>(len: usize) -> Result<u64, Error> {
    let bytes = len.checked_mul(T::DTYPE.bytes()).filter(|bytes| isize::try_from(*bytes).is_ok());
    bytes.map(|bytes| bytes as u64).ok_or_else(|| {
        let text = format!("shard_len is {len}, too many elements of {}", T::DTYPE);
        Error::new(ErrorKind::InvalidArgument, text)
    })
}

/// The caller's region, or a new one.
fn give<F: Fabric, T: Element>(
    side: &mut FabricSide<'_, F>,
    buffer: BufferId,
    given: Option<Buffer<Local<F>, T>>,
    bytes: u64,
) -> Result<(), Error> {
    let Some(given) = given else { return side.allocate(buffer, bytes) };
    let region = given.into_region();
    if region.bytes() != bytes {
        let text = format!("{buffer} has {} bytes, wanted {bytes}", region.bytes());
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    side.insert(buffer, region);
    Ok(())
}
