//! Runs one rank, which compares its options with all ranks, opens the group and measures.

use peerlane::bootstrap::Bootstrap;

use super::backend::Selected;
use super::measure::RankContext;
use super::options::{Options, settings};
use super::printer::Sink;
use super::topology::RankTopology;
use super::{gpu, host};
use crate::error::Result;
use crate::ranks::comm::Comm;

/// Measures the collective as one rank of the group that `bootstrap` connects. `local_rank` is its
/// index on this machine, if the launcher knows it. On rank 0, `sink` receives the progress.
pub(crate) fn run(
    options: &Options,
    selected: &Selected,
    local_rank: Option<usize>,
    bootstrap: impl Bootstrap + 'static,
    sink: Sink<'_>,
) -> Result<()> {
    let comm = Comm::new(bootstrap, options.run.timeout);
    let measured = measure(options, selected, local_rank, comm.clone(), sink);
    measured.inspect_err(|failure| comm.report(failure))
}

fn measure(
    options: &Options,
    selected: &Selected,
    local_rank: Option<usize>,
    comm: Comm,
    sink: Sink<'_>,
) -> Result<()> {
    let seed = settings(options, selected.name()).agree(&comm)?;
    let mut rank_topology = RankTopology::find(options, &comm, selected.backend)?;
    rank_topology.local_rank = local_rank.unwrap_or(rank_topology.local_rank);
    let slot = selected.slot(rank_topology.local_rank);
    let device_name = slot.map_or_else(processor_name, |slot| slot.product.clone());
    let context =
        RankContext { options, comm, rank_topology: &rank_topology, device_name, seed, sink };
    match slot {
        Some(slot) => gpu::run(context, slot, selected.backend),
        None => host::run(context, selected.backend),
    }
}

/// Returns the model name of the processor, or its architecture if `/proc/cpuinfo` has no model
/// name.
fn processor_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = |line: &str| Some(line.strip_prefix("model name")?.split_once(": ")?.1.to_owned());
    text.lines().find_map(model).unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}
