//! `peerlane allgather`: measures and checks all-gathers between real processes.

use peerlane::bootstrap::environment::Environment;
use peerlane::bootstrap::tcp::Tcp;
use peerlane::collective::Collective;

use crate::cublas;
use crate::error::{Failure, Result};
use crate::memory::{self, Need};
use crate::nccl::Nccl;
use crate::nodes::Nodes;
use crate::ranks::placement::{self, Bind};
use crate::ranks::{self, Origin};

mod backend;
mod clock;
mod content;
mod dtype;
mod engine;
mod event;
mod figures;
mod gpu;
mod limit;
mod measure;
mod method;
mod options;
mod place;
mod rank;
mod screen;
mod settings;
mod setup;
mod shape;
mod sweep;
mod tiers;
mod timeline;

pub(crate) use backend::{Backend, Devices};
use backend::{Chosen, Crew};
pub(crate) use method::{AlgorithmChoice, parse_algorithm};
pub(crate) use options::{Options, parse_ranks};
use screen::Screen;

/// Joins the group of a launcher, or spawns one.
///
/// # Errors
/// Whatever ends the run.
pub(crate) fn run(options: &Options) -> Result<()> {
    options.check()?;
    if options.vs.is_some() {
        leave_multicast_off();
    }
    match Origin::of(options.spawned_by)? {
        Origin::Person => spawn(options),
        Origin::Program(environment) => run_spawned(options, &environment),
        Origin::Launcher(environment) => join(options, &environment),
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
    let crew = Crew { local_ranks: Some(environment.ranks), spread: false };
    let chosen = Chosen::of(options, crew)?;
    let rank = environment.rank.index();
    if options.bind == Bind::Core {
        match chosen.seat(rank) {
            None => placement::bind(rank, environment.ranks)?,
            Some(seat) => placement::bind_near(&seat.pci_bus_id, rank, environment.ranks)?,
        }
    }
    let bootstrap = Tcp::join(environment, options.deadline())?;
    rank::run(options, &chosen, Some(rank), bootstrap, &mut |event| ranks::write_to_parent(&event))
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
    let spread = environment.local_ranks.is_some() && local_ranks < environment.ranks;
    let crew = Crew { local_ranks: Some(local_ranks), spread };
    let chosen = Chosen::of(options, crew)?;
    setup::check(options, chosen.name(), environment.ranks)?;
    need(options, &chosen, environment.ranks, local_ranks).check(memory::available_bytes())?;
    let deadline = options.deadline();
    if environment.rank.0 != 0 {
        let bootstrap = Tcp::join(environment, deadline)?;
        return rank::run(options, &chosen, local_rank, bootstrap, &mut |_| Ok(()));
    }
    let mut screen = Screen::open(options, chosen.note.as_deref())?;
    let bootstrap = Tcp::join(environment, deadline)?;
    let show = &mut |event| screen.show(event);
    let result = rank::run(options, &chosen, local_rank, bootstrap, show);
    let shown = screen.finish();
    result.and(shown)
}

/// As the parent of one process per rank.
fn spawn(options: &Options) -> Result<()> {
    let ranks = options.ranks.or(options.tiers.nodes.as_ref().and_then(Nodes::ranks));
    let chosen = Chosen::of(options, Crew { local_ranks: ranks, spread: false })?;
    let ranks = ranks.unwrap_or(chosen.ranks_default());
    setup::check(options, chosen.name(), ranks)?;
    libraries(options)?;
    need(options, &chosen, ranks, ranks).check(memory::available_bytes())?;
    let mut screen = Screen::open(options, chosen.note.as_deref())?;
    let result = ranks::spawn(ranks, options.timeout, &mut screen);
    let shown = screen.finish();
    result.and(shown)
}

/// Looks for what the ranks will load, so that what is missing is said once.
fn libraries(options: &Options) -> Result<()> {
    if options.vs.is_some() {
        Nccl::open(options.nccl.as_deref())?;
    }
    if options.beside.is_some() {
        cublas::WANTED.open(options.cublas.as_deref())?;
    }
    Ok(())
}

/// What `local_ranks` of the ranks allocate in the host memory of this machine.
fn need(options: &Options, chosen: &Chosen, ranks: usize, local_ranks: usize) -> Need {
    if !chosen.seats.is_empty() {
        return Need { ranks: local_ranks as u64, total_bytes: 0, input_bytes: 0 };
    }
    let sweep = options.sweep(ranks);
    let largest = sweep.shard_lengths().last().copied().unwrap_or(0);
    // Gathers of all algorithms stand side by side.
    let nodes = options.tiers.topology(ranks).ok().flatten().map_or(1, |nodes| nodes.nodes());
    let gathers = options.method.algorithms(nodes, options.collective).len() as u64;
    let shard = match options.collective {
        _ if options.in_place => 0,
        Collective::AllGather => sweep.shard_bytes(largest),
        _ => sweep.total_bytes(largest),
    };
    Need {
        ranks: local_ranks as u64,
        total_bytes: sweep.total_bytes(largest).saturating_mul(gathers),
        input_bytes: shard.saturating_mul(gathers),
    }
}
