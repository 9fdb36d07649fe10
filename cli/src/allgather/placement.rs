//! Where the ranks that this program spawns run.
//!
//! Each is bound to a core, in turn, as launchers do: left alone, the system may put two ranks on one
//! core and leave another idle. Ranks that share cores are scheduled as a batch: then to wake a rank
//! of another core does not interrupt the one that runs there, which costs both of them several times
//! what a small gather takes.

use std::sync::OnceLock;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::error::{Failure, Result};

/// Whether spawned ranks are bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Bind {
    /// Each to a core, in turn.
    Core,
    /// Not at all: the system moves them as it likes.
    None,
}

/// The cores that this process might use when it was started.
pub(crate) fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Binds this process, which is `rank` of `ranks` on this machine. Called before it has threads.
///
/// # Errors
/// If the system refuses.
pub(crate) fn bind(rank: usize, ranks: usize) -> Result<()> {
    let shared = ranks > cores();
    let refused = |what: &str, error: std::io::Error| {
        Failure::io(format_args!("cannot {what} of rank {rank}"), &error)
            .with_advice("run with --bind none")
    };
    let allowed =
        sched_getaffinity(None).map_err(|errno| refused("read the cores", errno.into()))?;
    let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
    let Some(&core) = allowed.get(rank % allowed.len().max(1)) else { return Ok(()) };
    let mut own = CpuSet::new();
    own.set(core);
    sched_setaffinity(None, &own).map_err(|errno| refused("set the core", errno.into()))?;
    if shared {
        schedule_as_batch().map_err(|error| refused("set the scheduling", error))
    } else {
        Ok(())
    }
}

fn schedule_as_batch() -> std::io::Result<()> {
    let priority = libc::sched_param { sched_priority: 0 };
    // SAFETY: the call reads the parameter, which lives until it returns; 0 is this process.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &priority) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}
