//! One rank of a run: opens the group, agrees with the others, and measures size by size.

use peerlane::bootstrap::Bootstrap;
use peerlane::hal::Fabric;
use peerlane::{Element, Group, host};
use peerlane_layers::Wrapped;

use super::backend::{Backend, Chosen};
use super::clock::Pace;
use super::dtype::of_dtype;
use super::event::{Event, Sink};
use super::gpu;
use super::limit::Limit;
use super::measure::Bench;
use super::options::Options;
use super::place::Place;
use super::settings;
use super::setup::Setup;
use super::tiers;
use crate::error::{Failure, Result};
use crate::ranks::circle::Circle;

/// Runs this rank over `bootstrap`, with the number that its launcher gave it among those of this
/// machine; on rank 0, `sink` hears of the progress.
///
/// # Errors
/// Whatever ends the run on this rank.
pub(crate) fn run(
    options: &Options,
    chosen: &Chosen,
    local_rank: Option<usize>,
    bootstrap: impl Bootstrap + 'static,
    sink: Sink<'_>,
) -> Result<()> {
    let circle = Circle::new(bootstrap, options.timeout);
    let seed = settings::of(options, chosen.name()).agree(&circle)?;
    let mut place = Place::find(options, &circle, chosen.backend)?;
    place.local_rank = local_rank.unwrap_or(place.local_rank);
    if let Some(text) = place.note(options).filter(|_| circle.rank().0 == 0) {
        sink(Event::Took { text })?;
    }
    let ready = Ready { options, circle, place: &place, seed, sink };
    match chosen.seat(place.local_rank) {
        Some(seat) => gpu::run(ready, seat, chosen.backend),
        None if chosen.backend == Backend::Rdma => on_rdma(ready),
        None => on_host(ready),
    }
}

/// A rank that has agreed with the others.
pub(super) struct Ready<'a> {
    pub(super) options: &'a Options,
    pub(super) circle: Circle,
    pub(super) place: &'a Place,
    pub(super) seed: u64,
    pub(super) sink: Sink<'a>,
}

fn on_host(ready: Ready<'_>) -> Result<()> {
    let Ready { options, circle, place, .. } = &ready;
    let (rank, ranks) = (circle.rank(), circle.ranks());
    let open = |streaming_bytes_min| {
        let options = host::Options { streaming_bytes_min, ..host::Options::default() };
        host::Fabric::open_with(rank, ranks, options).map_err(Failure::of_backend)
    };
    // All copies through the cache, and none.
    let ways = if options.limit { vec![open(Some(u64::MAX))?, open(Some(0))?] } else { vec![] };
    // Whoever waits on one of the two is woken over the other, too.
    let local = open(None)?;
    let network = local.beside(host::Options::default()).map_err(Failure::of_backend);
    let network = || network;
    match options.tiers.throttle_inside() {
        None => {
            let group = tiers::open(options, circle, place, local, network)?;
            with_group(ready, group, ways)
        }
        Some(layer) => {
            let slow = |fabric| Wrapped::new(fabric, layer);
            let group = tiers::open(options, circle, place, slow(local), network)?;
            let ways = ways.into_iter().map(slow).collect();
            with_group(ready, group, ways)
        }
    }
}

/// Every byte over network cards, also between ranks of one host.
fn on_rdma(ready: Ready<'_>) -> Result<()> {
    let Ready { options, circle, place, .. } = &ready;
    let holder = place.holder(circle);
    let open = || options.cards.open(holder, None);
    let ways = if options.limit { vec![open()?] } else { vec![] };
    let group = tiers::open(options, circle, place, open()?, open)?;
    with_group(ready, group, ways)
}

fn with_group<F: Fabric>(ready: Ready<'_>, group: Group<F>, ways: Vec<F>) -> Result<()> {
    let Ready { options, circle, place, seed, sink } = ready;
    let setup = Setup::of(options, &circle, place, &group)?;
    let limit = if ways.is_empty() { None } else { Some(Limit::open(ways, &circle, place.hosts)?) };
    let pace = Pace { warmup: options.warmup, iterations: options.iterations };
    let bench = Bench { setup, seed, pace, circle, group, limit, sink };
    of_dtype!(options.dtype, T => sweep::<T, F>(bench))
}

fn sweep<T: Element, F: Fabric>(mut bench: Bench<'_, F>) -> Result<()> {
    let options = bench.setup.options;
    let lengths = options.sweep(bench.circle.ranks()).shard_lengths();
    bench.tell(Event::Begin { rows: lengths.len() * bench.setup.algorithms().len() })?;
    for (index, length) in lengths.iter().enumerate() {
        bench.size::<T>(index, *length)?;
    }
    if let Some(length) = lengths.last().filter(|_| options.trace.is_some()) {
        bench.trace::<T>(*length)?;
    }
    // What the limit imported ends before its peers do.
    drop(bench.limit.take());
    Ok(bench.group.close()?)
}
