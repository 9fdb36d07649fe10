//! `peerlane allgather`: measures and checks all-gathers between real processes.

use std::process::Command;

use peerlane::bootstrap::environment::Environment;
use peerlane::bootstrap::tcp::{Hub, Tcp};

use crate::cublas;
use crate::error::{Failure, Result};
use crate::memory::{self, Need};
use crate::nccl::Nccl;
use crate::nodes::Nodes;

mod backend;
mod circle;
mod clock;
mod content;
mod cuda;
mod data;
mod dtype;
mod event;
mod figures;
mod ground;
mod limit;
mod measure;
mod method;
mod options;
mod outcome;
mod placement;
mod rank;
mod screen;
mod settings;
mod setup;
mod shape;
mod spawn;
mod statistics;
mod sweep;
mod tiers;
mod timeline;

use backend::Chosen;
pub(crate) use backend::{Backend, Devices};
pub(crate) use method::{AlgorithmChoice, parse_algorithm};
pub(crate) use options::{Options, parse_ranks};
use placement::Bind;
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
    if let Some(parent) = options.spawned_by {
        spawn::die_with_parent(parent)?;
    }
    let Some(environment) = Environment::from_env()? else { return spawn(options) };
    if options.spawned_by.is_some() {
        return run_spawned(options, &environment);
    }
    join(options, &environment)
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
    let chosen = Chosen::of(options, Some(environment.ranks))?;
    let rank = environment.rank.index();
    if options.bind == Bind::Core {
        match chosen.seat(rank) {
            None => placement::bind(rank, environment.ranks)?,
            Some(seat) => placement::bind_near(&seat.pci_bus_id, rank, environment.ranks)?,
        }
    }
    let bootstrap = Tcp::join(environment, options.deadline())?;
    rank::run(options, &chosen, rank, bootstrap, &mut |event| event::write_to_parent(&event))
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
    let local_rank = environment.local_rank.unwrap_or(0) as usize;
    let chosen = Chosen::of(options, Some(local_ranks))?;
    setup::check(options, chosen.name, environment.ranks)?;
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
    let chosen = Chosen::of(options, ranks)?;
    let ranks = ranks.unwrap_or(chosen.ranks_default());
    setup::check(options, chosen.name, ranks)?;
    libraries(options)?;
    need(options, &chosen, ranks, ranks).check(memory::available_bytes())?;
    let mut screen = Screen::open(options, chosen.note.as_deref())?;
    let program = std::env::current_exe()
        .map_err(|error| Failure::io("cannot find this program's own file", &error))?;
    let hub = Hub::bind("127.0.0.1:0", ranks)?;
    let address = hub.address().to_string();
    let command = |rank: usize| {
        let mut command = Command::new(&program);
        command
            .args(std::env::args_os().skip(1))
            .arg(format!("--spawned-by={}", std::process::id()))
            .env("PEERLANE_HUB", &address)
            .envs([("RANK", rank), ("LOCAL_RANK", rank)].map(|(name, n)| (name, n.to_string())))
            .envs(["WORLD_SIZE", "LOCAL_WORLD_SIZE"].map(|name| (name, ranks.to_string())));
        command
    };
    let result = spawn::run(ranks, options.timeout, command, &mut screen);
    drop(hub);
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
    let gathers = options.method.algorithms(nodes).len() as u64;
    let shard = if options.in_place { 0 } else { sweep.shard_bytes(largest) };
    Need {
        ranks: local_ranks as u64,
        total_bytes: sweep.total_bytes(largest).saturating_mul(gathers),
        input_bytes: shard.saturating_mul(gathers),
    }
}
