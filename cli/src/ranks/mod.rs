//! Runs the ranks of a measurement, spawned by this program or started by a launcher.
//!
//! | file | holds |
//! | --- | --- |
//! | `affinity` | binds ranks to cores |
//! | `bare_fabric` | a fabric without a group |
//! | `comm` | messages between ranks, and the comparison of their options |
//! | `data` | random test data of blocks |
//! | `spawn` | processes of ranks, and how they ended |
//! | `statistics` | medians and percentiles |

use std::process::Command;
use std::time::Duration;

use peerlane::Rank;
use peerlane::bootstrap::Secret;
use peerlane::bootstrap::environment::Environment;
use peerlane::bootstrap::tcp::HubOptions;

use crate::error::{Failure, Result};

pub(crate) mod affinity;
pub(crate) mod bare_fabric;
pub(crate) mod comm;
pub(crate) mod data;
pub(crate) mod spawn;
pub(crate) mod statistics;

pub(crate) use spawn::{OutputHandler, write_to_parent};

/// The program or user that has started this process.
#[derive(Debug)]
pub(crate) enum LaunchedBy {
    /// A user has started this process, which spawns the ranks.
    User,
    /// This program has spawned this process as one of its ranks.
    Program(Environment),
    /// A launcher such as torchrun has started this process as one of its ranks.
    Launcher(Environment),
}

impl LaunchedBy {
    /// Determines from the environment and from the hidden option of spawned ranks who has started
    /// this process.
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

/// Spawns `ranks` processes of this program with its own arguments and a random secret, and passes their output to
/// `printer` until all have ended.
pub(crate) fn spawn(
    ranks: usize,
    timeout: Duration,
    mut printer: impl OutputHandler,
) -> Result<()> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::io("cannot find the file of this program", &error))?;
    let secret = Secret::random()?;
    let hub = HubOptions::default().secret(secret.clone()).bind("127.0.0.1:0", ranks)?;
    let address = hub.address().to_string();
    let command = |rank: usize| {
        let mut command = Command::new(&program);
        command
            .args(std::env::args_os().skip(1))
            .arg(format!("--spawned-by={}", std::process::id()))
            .env("PEERLANE_HUB", &address)
            .env("PEERLANE_SECRET", secret.expose())
            .env_remove("PEERLANE_SECRET_FILE")
            .envs([("RANK", rank), ("LOCAL_RANK", rank)].map(|(name, n)| (name, n.to_string())))
            .envs(["WORLD_SIZE", "LOCAL_WORLD_SIZE"].map(|name| (name, ranks.to_string())));
        command
    };
    // The other ranks would wait until the timeout for one that could not join.
    let on_failure = |rank, how| hub.fail_start(Rank::at(rank), how);
    let result = spawn::run(ranks, timeout, command, &on_failure, &mut printer);
    let shown = printer.finish();
    result.and(shown)
}

/// Measures as a rank that a launcher has started; rank 0 prints the events of `measure`.
pub(crate) fn print_on_rank_0<P: OutputHandler>(
    rank: Rank,
    printer: impl FnOnce() -> Result<P>,
    measure: impl FnOnce(&mut dyn FnMut(P::Event) -> Result<()>) -> Result<()>,
) -> Result<()> {
    if rank.0 != 0 {
        return measure(&mut |_| Ok(()));
    }
    let mut printer = printer()?;
    let result = measure(&mut |event| printer.show(event));
    let shown = printer.finish();
    result.and(shown)
}
