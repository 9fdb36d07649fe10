//! `peerlane allgather`: measures and checks all-gathers between real processes.

use std::process::Command;

use peerlane::bootstrap::environment::Environment;
use peerlane::bootstrap::tcp::{Hub, Tcp};

use crate::error::{Failure, Result};
use crate::memory::{self, Need};

mod circle;
mod clock;
mod data;
mod event;
mod ground;
mod limit;
mod measure;
mod options;
mod outcome;
mod placement;
mod rank;
mod screen;
mod settings;
mod spawn;
mod statistics;
mod sweep;

pub(crate) use options::{AlgorithmChoice, Options, parse_algorithm, parse_ranks};
use placement::Bind;
use screen::Screen;

/// Joins the group of a launcher, or spawns one.
///
/// # Errors
/// Whatever ends the run.
pub(crate) fn run(options: &Options) -> Result<()> {
    options.check()?;
    options.backend.check()?;
    if let Some(parent) = options.spawned_by {
        spawn::die_with_parent(parent)?;
    }
    let Some(environment) = Environment::from_env()? else { return spawn(options) };
    if options.spawned_by.is_some() {
        if options.bind == Bind::Core {
            placement::bind(environment.rank.index(), environment.ranks)?;
        }
        let bootstrap = Tcp::join(&environment, options.deadline())?;
        return rank::run(options, bootstrap, &mut |event| event::write_to_parent(&event));
    }
    join(options, &environment)
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
    need(options, environment.ranks, local_ranks).check(memory::available_bytes())?;
    let deadline = options.deadline();
    if environment.rank.0 != 0 {
        return rank::run(options, Tcp::join(environment, deadline)?, &mut |_| Ok(()));
    }
    let mut screen = Screen::open(options)?;
    let bootstrap = Tcp::join(environment, deadline)?;
    let result = rank::run(options, bootstrap, &mut |event| screen.show(event));
    let shown = screen.finish();
    result.and(shown)
}

/// As the parent of one process per rank.
fn spawn(options: &Options) -> Result<()> {
    let ranks = options.ranks.unwrap_or(Options::RANKS_DEFAULT);
    need(options, ranks, ranks).check(memory::available_bytes())?;
    let mut screen = Screen::open(options)?;
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

/// What `local_ranks` of the ranks allocate on this machine.
fn need(options: &Options, ranks: usize, local_ranks: usize) -> Need {
    let sweep = options.sweep(ranks);
    let largest = sweep.shard_lengths().last().copied().unwrap_or(0);
    let input_bytes = if options.in_place { 0 } else { sweep.shard_bytes(largest) };
    Need { ranks: local_ranks as u64, total_bytes: sweep.total_bytes(largest), input_bytes }
}
