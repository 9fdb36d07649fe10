//! One rank of a run: opens the group, agrees with the others, and measures size by size.

use peerlane::bootstrap::Bootstrap;
use peerlane::hal::Fabric;
use peerlane::{Element, Group, host};
use peerlane_layers::Wrapped;

use super::backend::Chosen;
use super::circle::Circle;
use super::clock::Pace;
use super::cuda;
use super::dtype::of_dtype;
use super::event::{Event, Sink};
use super::limit::Limit;
use super::measure::Bench;
use super::options::Options;
use super::settings::Settings;
use super::setup::Setup;
use super::tiers;
use crate::error::{Failure, Result};

/// Runs this rank, which has the number `local_rank` on this machine, over `bootstrap`; on rank 0,
/// `sink` hears of the progress.
///
/// # Errors
/// Whatever ends the run on this rank.
pub(crate) fn run(
    options: &Options,
    chosen: &Chosen,
    local_rank: usize,
    bootstrap: impl Bootstrap + 'static,
    sink: Sink<'_>,
) -> Result<()> {
    let circle = Circle::new(bootstrap, options.timeout);
    let seed = Settings::of(options, chosen.name).agree(&circle)?;
    match chosen.seat(local_rank) {
        None => on_host(options, circle, seed, sink),
        Some(seat) => cuda::run(options, circle, seat, seed, sink),
    }
}

fn on_host(options: &Options, circle: Circle, seed: u64, sink: Sink<'_>) -> Result<()> {
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
            let group = tiers::open(options, &circle, local, network)?;
            with_group(options, circle, seed, group, ways, sink)
        }
        Some(layer) => {
            let slow = |fabric| Wrapped::new(fabric, layer);
            let group = tiers::open(options, &circle, slow(local), network)?;
            with_group(options, circle, seed, group, ways.into_iter().map(slow).collect(), sink)
        }
    }
}

fn with_group<F: Fabric>(
    options: &Options,
    circle: Circle,
    seed: u64,
    group: Group<F>,
    ways: Vec<F>,
    sink: Sink<'_>,
) -> Result<()> {
    let setup = Setup::of(options, &circle, &group)?;
    let limit = if ways.is_empty() { None } else { Some(Limit::open(ways, &circle)?) };
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
