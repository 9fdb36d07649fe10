//! Runs one rank: opens the group, compares the options with all ranks, and measures size by size.

use peerlane::bootstrap::Bootstrap;
use peerlane::hal::DynFabric;

use super::backend::Selected;
use super::context::RankContext;
use super::limit::Limit;
use super::measure::Measurement;
use super::options::{Options, settings};
use super::printer::{ProgressEvent, Sink};
use super::setup::Setup;
use super::target::Backend;
use super::timer::TimingOptions;
use super::topology::RankTopology;
use super::{gpu, topology};
use crate::error::Result;
use crate::ranks::comm::Comm;

/// Runs this rank over `bootstrap`. `local_rank` is its index on this machine, if the launcher
/// knows it. On rank 0, `sink` receives the progress.
pub(crate) fn run(
    options: &Options,
    selected: &Selected,
    local_rank: Option<usize>,
    bootstrap: impl Bootstrap + 'static,
    sink: Sink<'_>,
) -> Result<()> {
    let comm = Comm::new(bootstrap, options.run.timeout);
    let seed = settings(options, selected.name()).agree(&comm)?;
    let mut rank_topology = RankTopology::find(options, &comm, selected.backend)?;
    rank_topology.local_rank = local_rank.unwrap_or(rank_topology.local_rank);
    if let Some(text) = rank_topology.note(options).filter(|_| comm.rank().0 == 0) {
        sink(ProgressEvent::AutoChoice { text })?;
    }
    let context = RankContext { options, comm, rank_topology: &rank_topology, seed, sink };
    match selected.slot(rank_topology.local_rank) {
        Some(slot) => gpu::run(context, slot, selected.backend),
        None => on_host(context, selected.backend),
    }
}

/// Measures over the host backend, or over NICs, also between ranks of one host.
fn on_host(context: RankContext<'_>, backend: Backend) -> Result<()> {
    let RankContext { options, comm, rank_topology, seed, sink } = context;
    let limit_fabrics = limit_fabrics(options, &comm, rank_topology, backend)?;
    let group = topology::open(options, &comm, rank_topology, backend, None)?;
    let setup = Setup::of(options, &comm, rank_topology, &group)?;
    let limit = match limit_fabrics.is_empty() {
        true => None,
        false => Some(Limit::open(limit_fabrics, &comm, rank_topology.hosts)?),
    };
    let timing_options = TimingOptions { warmup: options.warmup, iterations: options.iterations };
    sweep(Measurement { setup, seed, timing_options, comm, group, limit, sink })
}

/// Opens the fabrics for `--limit`. On the host, one copies through the cache, the other with streaming
/// stores.
fn limit_fabrics(
    options: &Options,
    comm: &Comm,
    rank_topology: &RankTopology,
    backend: Backend,
) -> Result<Vec<DynFabric>> {
    if !options.limit {
        return Ok(Vec::new());
    }
    let layer = options.node_options.throttle_inside();
    let open = |streaming_bytes_min| -> Result<DynFabric> {
        let mut fabrics = topology::fabric_options(options, rank_topology);
        fabrics.host.streaming_bytes_min = streaming_bytes_min;
        let fabric = fabrics.open(backend.in_library(), comm.rank(), comm.ranks())?;
        Ok(topology::throttled(fabric, layer))
    };
    match backend {
        Backend::Host => Ok(vec![open(Some(u64::MAX))?, open(Some(0))?]),
        _ => Ok(vec![open(None)?]),
    }
}

fn sweep(mut measurement: Measurement<'_>) -> Result<()> {
    let options = measurement.setup.options;
    let lengths = options.sweep(measurement.comm.ranks()).block_lengths();
    measurement.report_event(ProgressEvent::Begin {
        rows: lengths.len() * measurement.setup.algorithms().len(),
    })?;
    for (index, length) in lengths.iter().enumerate() {
        measurement.size(index, *length)?;
    }
    if let Some(length) = lengths.last().filter(|_| options.trace.is_some()) {
        measurement.trace(*length)?;
    }
    // Imported regions must be dropped before the peers free them.
    drop(measurement.limit.take());
    Ok(measurement.group.close()?)
}
