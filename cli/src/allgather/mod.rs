//! `peerlane allgather`: measures and checks all-gathers between real processes.

use peerlane::bootstrap::environment::Environment;
use peerlane::bootstrap::tcp::Tcp;

use crate::cublas;
use crate::error::{Failure, Result};
use crate::memory::{self, Need};
use crate::nccl::Nccl;
use crate::options::Nodes;
use crate::ranks::affinity::{self, Bind};
use crate::ranks::{self, LaunchedBy};

mod backend;
mod content;
mod gpu;
mod limit;
mod measure;
mod method;
mod options;
mod printer;
mod rank;
mod row;
mod setup;
mod shape;
mod timeline;
mod timer;
mod topology;

pub(crate) use backend::{Backend, Devices};
use backend::{LaunchInfo, Selected};
pub(crate) use options::Options;
use printer::Printer;

/// Joins the group of a launcher, or spawns one.
///
/// # Errors
/// Whatever ends the run.
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

/// NCCL's multicast over NVLink (NVLS) reserves what all processes of a machine share, and copies
/// between GPUs are compared here. Whoever has set the variable has decided otherwise.
fn leave_multicast_off() {
    const VARIABLE: &str = "NCCL_NVLS_ENABLE";
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: the program has no other thread yet.
        unsafe { std::env::set_var(VARIABLE, "0") };
    }
}

/// As a rank that this program has spawned.
fn run_spawned(options: &Options, environment: &Environment) -> Result<()> {
    let launch = LaunchInfo { local_ranks: Some(environment.ranks), multi_host: false };
    let selected = Selected::of(options, launch)?;
    let rank = environment.rank.index();
    if options.run.bind == Bind::Core {
        match selected.slot(rank) {
            None => affinity::bind(rank, environment.ranks)?,
            Some(slot) => affinity::bind_near(&slot.pci_bus_id, rank, environment.ranks)?,
        }
    }
    let bootstrap = Tcp::join(environment, options.deadline())?;
    rank::run(options, &selected, Some(rank), bootstrap, &mut |event| {
        ranks::write_to_parent(&event)
    })
}

/// As a rank that somebody else has started; rank 0 prints.
fn join(options: &Options, environment: &Environment) -> Result<()> {
    if let Some(ranks) = options.ranks.filter(|ranks| *ranks != environment.ranks) {
        return Err(Failure::usage(format!(
            "--ranks is {ranks}, the launcher has started {}",
            environment.ranks
        ))
        .with_advice("leave --ranks out; or unset RANK and WORLD_SIZE to spawn ranks here"));
    }
    // Launchers that do not say how many ranks this machine has are taken for one a machine.
    let local_ranks = environment.local_ranks.unwrap_or(1) as usize;
    let local_rank = environment.local_rank.map(|rank| rank as usize);
    let multi_host = environment.local_ranks.is_some() && local_ranks < environment.ranks;
    let launch = LaunchInfo { local_ranks: Some(local_ranks), multi_host };
    let selected = Selected::of(options, launch)?;
    setup::check(options, selected.name(), environment.ranks)?;
    need(options, &selected, environment.ranks, local_ranks).check(memory::available_bytes())?;
    let deadline = options.deadline();
    if environment.rank.0 != 0 {
        let bootstrap = Tcp::join(environment, deadline)?;
        return rank::run(options, &selected, local_rank, bootstrap, &mut |_| Ok(()));
    }
    let mut screen = Printer::open(options, selected.note.as_deref())?;
    let bootstrap = Tcp::join(environment, deadline)?;
    let show = &mut |event| screen.show(event);
    let result = rank::run(options, &selected, local_rank, bootstrap, show);
    let shown = screen.finish();
    result.and(shown)
}

/// As the parent of one process per rank.
fn spawn(options: &Options) -> Result<()> {
    let ranks = options.ranks.or(options.tiers.nodes.as_ref().and_then(Nodes::ranks));
    let selected = Selected::of(options, LaunchInfo { local_ranks: ranks, multi_host: false })?;
    let ranks = ranks.unwrap_or(selected.ranks_default());
    setup::check(options, selected.name(), ranks)?;
    libraries(options)?;
    need(options, &selected, ranks, ranks).check(memory::available_bytes())?;
    let mut screen = Printer::open(options, selected.note.as_deref())?;
    let result = ranks::spawn(ranks, options.run.timeout, &mut screen);
    let shown = screen.finish();
    result.and(shown)
}

/// Looks for what the ranks will load, so that what is missing is said once.
fn libraries(options: &Options) -> Result<()> {
    if options.vs.is_some() {
        Nccl::open(options.nccl.as_deref())?;
    }
    if options.beside.is_some() {
        cublas::LIBRARY.open(options.cublas.as_deref())?;
    }
    Ok(())
}

/// What `local_ranks` of the ranks allocate in the host memory of this machine.
fn need(options: &Options, selected: &Selected, ranks: usize, local_ranks: usize) -> Need {
    if !selected.slots.is_empty() {
        return Need { ranks: local_ranks as u64, total_bytes: 0, input_bytes: 0 };
    }
    let sweep = options.sweep(ranks);
    let largest = sweep.shard_lengths().last().copied().unwrap_or(0);
    // Gathers of all algorithms stand side by side.
    let nodes = options.tiers.topology(ranks).ok().flatten().map_or(1, |nodes| nodes.nodes());
    let gathers = options.method.algorithms(nodes).len() as u64;
    let shard = if options.in_place { 0 } else { sweep.shard_bytes(largest) };
    Need {
        ranks: local_ranks as u64,
        total_bytes: sweep.total_bytes(largest).saturating_mul(gathers),
        input_bytes: shard.saturating_mul(gathers),
    }
}
