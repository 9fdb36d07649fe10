//! The ranks of a measurement: processes that this program spawns on this machine, or that a launcher
//! has started.

use std::process::Command;
use std::time::Duration;

use peerlane::bootstrap::environment::Environment;
use peerlane::bootstrap::tcp::Hub;

use crate::error::{Failure, Result};

pub(crate) mod circle;
pub(crate) mod data;
pub(crate) mod ground;
pub(crate) mod placement;
pub(crate) mod settings;
pub(crate) mod spawn;
pub(crate) mod statistics;

mod outcome;

pub(crate) use spawn::{Audience, write_to_parent};

/// Who has started this process.
#[derive(Debug)]
pub(crate) enum Origin {
    /// People: it spawns the ranks.
    Person,
    /// This program, as one of its ranks.
    Program(Environment),
    /// A launcher, as one of its ranks.
    Launcher(Environment),
}

impl Origin {
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
            (None, _) => Self::Person,
            (Some(environment), Some(_)) => Self::Program(environment),
            (Some(environment), None) => Self::Launcher(environment),
        })
    }
}

/// Spawns so many ranks of this program with the words that it was started with, and passes what they
/// say to `audience` until all have ended.
///
/// # Errors
/// If one fails: which, and how.
pub(crate) fn spawn(ranks: usize, timeout: Duration, audience: &mut impl Audience) -> Result<()> {
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
    spawn::run(ranks, timeout, command, audience)
}

/// Seconds above 0.
///
/// # Errors
/// A text that says what they can be.
pub(crate) fn parse_timeout(text: &str) -> std::result::Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "wanted seconds, such as 30 or 0.5".to_owned())?;
    let timeout = Duration::try_from_secs_f64(seconds)
        .map_err(|_| "wanted seconds above 0, such as 30 or 0.5".to_owned())?;
    if timeout.is_zero() {
        return Err("no rank can answer within no time; wanted seconds above 0".to_owned());
    }
    Ok(timeout)
}
