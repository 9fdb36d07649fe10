//! Runs one rank: opens the group, compares the options with all ranks, and measures size by size.

use peerlane::bootstrap::Bootstrap;
use peerlane::hal::DynFabric;
use peerlane::{Group, host};
use peerlane_layers::Wrapped;

use super::backend::{Backend, Selected};
use super::limit::Limit;
use super::measure::Measurement;
use super::options::{Options, settings};
use super::printer::{ProgressEvent, Sink};
use super::setup::Setup;
use super::timer::TimingOptions;
use super::topology::RankTopology;
use super::{gpu, topology};
use crate::error::{Failure, Result};
use crate::ranks::comm::Comm;

/// Runs this rank over `bootstrap`. `local_rank` is its index on this machine, if the launcher
/// knows it. On rank 0, `sink` receives the progress.
///
/// # Errors
/// If the options, the group or a measurement fail.
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
        None if selected.backend == Backend::Rdma => on_rdma(context),
        None => on_host(context),
    }
}

/// A rank whose options are equal to those of all ranks.
pub(super) struct RankContext<'a> {
    pub(super) options: &'a Options,
    pub(super) comm: Comm,
    pub(super) rank_topology: &'a RankTopology,
    pub(super) seed: u64,
    pub(super) sink: Sink<'a>,
}

fn on_host(context: RankContext<'_>) -> Result<()> {
    let RankContext { options, comm, rank_topology, .. } = &context;
    let (rank, ranks) = (comm.rank(), comm.ranks());
    let open = |streaming_bytes_min| {
        let options = host::Options { streaming_bytes_min, ..host::Options::default() };
        host::Fabric::open_with(rank, ranks, options).map_err(Failure::of_backend)
    };
    let fabric = |fabric| match options.node_options.throttle_inside() {
        None => DynFabric::new(fabric),
        Some(layer) => DynFabric::new(Wrapped::new(fabric, layer)),
    };
    // One fabric copies through the cache, the other with streaming stores.
    let limit_fabrics = match options.limit {
        true => vec![fabric(open(Some(u64::MAX))?), fabric(open(Some(0))?)],
        false => vec![],
    };
    // Two fabrics that are opened together wake each other's waiters.
    let local = open(None)?;
    let network = local.second(host::Options::default()).map_err(Failure::of_backend);
    let network = || network.map(DynFabric::new);
    let group = topology::open(options, comm, rank_topology, fabric(local), network)?;
    with_group(context, group, limit_fabrics)
}

/// Measures over NICs, also between ranks of one host.
fn on_rdma(context: RankContext<'_>) -> Result<()> {
    let RankContext { options, comm, rank_topology, .. } = &context;
    let nic_rank = rank_topology.nic_rank(comm);
    let open = || options.nics.open(nic_rank, None).map(DynFabric::new);
    let limit_fabrics = if options.limit { vec![open()?] } else { vec![] };
    let group = topology::open(options, comm, rank_topology, open()?, open)?;
    with_group(context, group, limit_fabrics)
}

fn with_group(context: RankContext<'_>, group: Group, limit_fabrics: Vec<DynFabric>) -> Result<()> {
    let RankContext { options, comm, rank_topology, seed, sink } = context;
    let setup = Setup::of(options, &comm, rank_topology, &group)?;
    let limit = if limit_fabrics.is_empty() {
        None
    } else {
        Some(Limit::open(limit_fabrics, &comm, rank_topology.hosts)?)
    };
    let timing_options = TimingOptions { warmup: options.warmup, iterations: options.iterations };
    let measurement = Measurement { setup, seed, timing_options, comm, group, limit, sink };
    sweep(measurement)
}

fn sweep(mut measurement: Measurement<'_>) -> Result<()> {
    let options = measurement.setup.options;
    let lengths = options.sweep(measurement.comm.ranks()).shard_lengths();
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
