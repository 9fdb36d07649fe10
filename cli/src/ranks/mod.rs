//! The ranks of a measurement: processes that this program spawns on this machine, or that a launcher
//! has started.

use std::process::Command;
use std::time::Duration;

use peerlane::bootstrap::environment::Environment;
use peerlane::bootstrap::tcp::Hub;

use crate::error::{Failure, Result};

pub(crate) mod affinity;
pub(crate) mod bare_fabric;
pub(crate) mod comm;
pub(crate) mod data;
pub(crate) mod spawn;
pub(crate) mod statistics;

pub(crate) use spawn::{OutputHandler, write_to_parent};

/// Who has started this process.
#[derive(Debug)]
pub(crate) enum LaunchedBy {
    /// People: it spawns the ranks.
    User,
    /// This program, as one of its ranks.
    Program(Environment),
    /// A launcher, as one of its ranks.
    Launcher(Environment),
}

impl LaunchedBy {
    /// As the environment says, and the hidden option that spawned ranks are given: the process that
    /// spawned this one.
    ///
    /// # Errors
    /// If a variable of the launcher is wrong, or the parent is gone.
    pub(crate) fn of(spawned_by: Option<u32>) -> Result<Self> {
        if let Some(parent) = spawned_by {
            spawn::die_with_parent(parent)?;
        }
        Ok(match (Environment::from_env()?, spawned_by) {
            (None, _) => Self::User,
            (Some(environment), Some(_)) => Self::Program(environment),
            (Some(environment), None) => Self::Launcher(environment),
        })
    }
}

/// Spawns so many ranks of this program with the words that it was started with, and passes what they
/// say to `handler` until all have ended.
///
/// # Errors
/// If one fails: which, and how.
pub(crate) fn spawn(
    ranks: usize,
    timeout: Duration,
    handler: &mut impl OutputHandler,
) -> Result<()> {
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
    spawn::run(ranks, timeout, command, handler)
}
