//! Implements `peerlane allgather`, which measures and checks collectives between processes.
//!
//! | file | holds |
//! | --- | --- |
//! | `options` | the command line |
//! | `algorithm` | options of algorithm and chunks |
//! | `shape` | blocks, lists and tensors, and the sizes of a sweep |
//! | `target` | options of the backend, its devices and engines |
//! | `node_options` | options of nodes and the fabric between them |
//! | `topology` | the nodes of the ranks, and opening their group |
//! | `backend` | the choice of backend and GPUs |
//! | `rank` | one rank from its start to its end |
//! | `setup` | how an all-gather is prepared |
//! | `operation` | the buffers of an operation as bytes |
//! | `measure`, `timer` | measuring, checking and timing size by size, on any memory |
//! | `host`, `limit` | operations and test data in host memory, and bare copies as the limit |
//! | `gpu` | GPU memory |
//! | `timeline` | traced starts |
//! | `row`, `printer` | rows and their output |

use peerlane::bootstrap::environment::Environment;
use peerlane::bootstrap::tcp::TcpBootstrap;
use peerlane::topology::Topology;
use peerlane_toolkit::limits::AvailableMemory;

use crate::cublas;
use crate::error::{Failure, Result};
use crate::memory::HostMemory;
use crate::nccl::Nccl;
use crate::options::Nodes;
use crate::ranks::affinity::{self, Bind};
use crate::ranks::{self, LaunchedBy};

mod algorithm;
mod backend;
pub(crate) mod gpu;
mod host;
mod limit;
mod measure;
mod node_options;
mod operation;
mod options;
mod printer;
mod rank;
mod row;
mod setup;
mod shape;
mod target;
mod timeline;
pub(crate) mod timer;
mod topology;

pub(crate) use backend::{GpuSlot, Selected};
pub(crate) use options::Options;
use printer::Printer;
pub(crate) use target::TargetOptions;

pub(crate) fn run(options: &Options) -> Result<()> {
    options.check()?;
    if options.vs.is_some() {
        leave_multicast_off();
    }
    match LaunchedBy::of(options.run.spawned_by)? {
        LaunchedBy::User => spawn(options),
        LaunchedBy::Program(environment) => run_spawned(options, &environment),
        LaunchedBy::Launcher(environment) => join(options, &environment),
    }
}

/// Disables NCCL's multicast over NVLink (NVLS) unless the user has set the variable. It reserves a
/// resource that all processes of a machine share, and this comparison is about copies between
/// GPUs.
fn leave_multicast_off() {
    const VARIABLE: &str = "NCCL_NVLS_ENABLE";
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: the process has only this thread yet.
        unsafe { std::env::set_var(VARIABLE, "0") };
    }
}

/// Runs a rank that the parent process of this program has spawned.
fn run_spawned(options: &Options, environment: &Environment) -> Result<()> {
    let selected = Selected::of_options(options, Some(environment.ranks))?;
    let rank = environment.rank.index();
    if options.run.bind == Bind::Core {
        match selected.slot(rank) {
            None => affinity::bind(rank, environment.ranks)?,
            Some(slot) => affinity::bind_near(&slot.pci_bus_id, rank, environment.ranks)?,
        }
    }
    let bootstrap = TcpBootstrap::join(environment, options.deadline())?;
    rank::run(options, &selected, Some(rank), bootstrap, &mut |event| {
        ranks::write_to_parent(&event)
    })
}

/// Runs a rank that a launcher has started; rank 0 prints the results.
fn join(options: &Options, environment: &Environment) -> Result<()> {
    if let Some(ranks) = options.target.ranks.filter(|ranks| *ranks != environment.ranks) {
        return Err(Failure::usage(format!(
            "--ranks is {ranks}, but the launcher has started {} ranks",
            environment.ranks
        ))
        .with_advice(
            "remove --ranks, or unset RANK and WORLD_SIZE to let peerlane spawn the ranks",
        ));
    }
    let local_ranks = environment.local_ranks.map(|ranks| ranks as usize);
    let local_rank = environment.local_rank.map(|rank| rank as usize);
    let selected = Selected::of_options(options, local_ranks)?;
    setup::check(options, selected.name(), environment.ranks)?;
    // Without a number from the launcher, one rank per machine is assumed.
    host_memory(options, &selected, environment.ranks, local_ranks.unwrap_or(1))
        .check(AvailableMemory::read().ok())?;
    let deadline = options.deadline();
    let printer = || Printer::open(options, selected.note.as_deref());
    ranks::print_on_rank_0(environment.rank, printer, |sink| {
        let bootstrap = TcpBootstrap::join(environment, deadline)?;
        rank::run(options, &selected, local_rank, bootstrap, sink)
    })
}

/// Spawns one process per rank on this machine and prints the results.
fn spawn(options: &Options) -> Result<()> {
    let (selected, ranks) = check_spawn(options)?;
    let printer = Printer::open(options, selected.note.as_deref())?;
    ranks::spawn(ranks, options.run.timeout, printer)
}

/// Checks that the ranks of this machine can run, and returns the backend and their number.
pub(crate) fn check_spawn(options: &Options) -> Result<(Selected, usize)> {
    let ranks = options.target.ranks.or(options.node_options.nodes.as_ref().and_then(Nodes::ranks));
    let selected = Selected::of_options(options, ranks)?;
    let ranks = ranks.unwrap_or(selected.ranks_default());
    setup::check(options, selected.name(), ranks)?;
    find_libraries(options)?;
    host_memory(options, &selected, ranks, ranks).check(AvailableMemory::read().ok())?;
    Ok((selected, ranks))
}

/// Loads the libraries that the ranks need once, so that a missing one is reported once.
fn find_libraries(options: &Options) -> Result<()> {
    if options.vs.is_some() {
        Nccl::open(options.nccl.as_deref())?;
    }
    if options.overlap.is_some() {
        cublas::LIBRARY.open(options.cublas.as_deref())?;
    }
    Ok(())
}

/// Returns the host memory that the ranks of this machine allocate at the largest size.
fn host_memory(
    options: &Options,
    selected: &Selected,
    ranks: usize,
    local_ranks: usize,
) -> HostMemory {
    if !selected.slots.is_empty() {
        let ranks = local_ranks as u64;
        return HostMemory { ranks, total_bytes: 0, input_bytes: 0, inbox_bytes: 0 };
    }
    let sweep = options.sweep(ranks);
    let largest = sweep.block_lengths().last().copied().unwrap_or(0);
    // The all-gathers of all algorithms are allocated at the same time.
    let nodes = options.node_options.topology(ranks).ok().flatten();
    let topology = nodes.or_else(|| Topology::flat(ranks).ok());
    let algorithms =
        topology.map(|one| options.algorithm.algorithms(&one, options.goal.collective));
    let operations = algorithms.map_or(1, |algorithms| algorithms.len() as u64);
    let total_bytes = sweep.total_bytes(largest);
    let collective = options.goal.collective;
    let has_one_block = collective.has_equal_outputs() && collective.only_provider().is_none();
    let input_bytes = match has_one_block {
        _ if options.in_place => 0,
        true => sweep.block_bytes(largest),
        false => total_bytes,
    };
    HostMemory {
        ranks: local_ranks as u64,
        total_bytes: total_bytes.saturating_mul(operations),
        input_bytes: input_bytes.saturating_mul(operations),
        inbox_bytes: setup::inbox_bytes_max(options, ranks, largest).saturating_mul(operations),
    }
}
