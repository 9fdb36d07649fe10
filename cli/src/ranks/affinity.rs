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
    /// Each to a core, in turn; a rank with a GPU to the cores near that.
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

/// Binds this process, which is `rank` of `ranks` on this machine, to its share of the cores that the
/// system says are near the device at this place of the bus; not at all where it does not say, or where
/// none of them may be used. Called before it has threads.
///
/// # Errors
/// If the system refuses.
pub(crate) fn bind_near(pci_bus_id: &str, rank: usize, ranks: usize) -> Result<()> {
    let path = format!("/sys/bus/pci/devices/{}/local_cpulist", pci_bus_id.to_ascii_lowercase());
    let Ok(list) = std::fs::read_to_string(path) else { return Ok(()) };
    let refused = |error: std::io::Error| {
        Failure::io(format_args!("cannot bind to the cores near {pci_bus_id}"), &error)
            .with_advice("run with --bind none")
    };
    let allowed = sched_getaffinity(None).map_err(|errno| refused(errno.into()))?;
    let is_allowed = |core: &usize| *core < CpuSet::MAX_CPU && allowed.is_set(*core);
    let near: Vec<usize> = core_list(&list).filter(is_allowed).collect();
    let mut own = CpuSet::new();
    share(&near, rank, ranks).iter().for_each(|core| own.set(*core));
    if own.count() == 0 {
        return Ok(());
    }
    sched_setaffinity(None, &own).map_err(|errno| refused(errno.into()))
}

/// The cores of a rank: an equal part, or all if there are fewer cores than ranks.
fn share(cores: &[usize], rank: usize, ranks: usize) -> &[usize] {
    match cores.len() / ranks.max(1) {
        0 => cores,
        part => cores.chunks_exact(part).nth(rank).unwrap_or(cores),
    }
}

/// The numbers of a list such as `0-3,8`; what is no number is left out.
fn core_list(text: &str) -> impl Iterator<Item = usize> {
    text.trim()
        .split(',')
        .filter_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some(first.parse().ok()?..=last.parse().ok()?)
        })
        .flatten()
}

fn schedule_as_batch() -> std::io::Result<()> {
    let priority = libc::sched_param { sched_priority: 0 };
    // SAFETY: the call reads the parameter, which lives until it returns; 0 is this process.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &priority) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_cores_is_read() {
        let cores = |text| core_list(text).collect::<Vec<_>>();
        assert_eq!(cores("0-3,8\n"), [0, 1, 2, 3, 8]);
        assert_eq!(cores("5"), [5]);
        assert!(cores("").is_empty());
        assert_eq!(cores("x,1-y,7"), [7]);
    }

    #[test]
    fn a_device_that_the_system_does_not_know_binds_nothing() {
        assert_eq!(bind_near("ffff:ff:1f.7", 0, 1), Ok(()));
    }

    #[test]
    fn ranks_share_the_cores_near_their_devices() {
        let cores = [0, 1, 2, 3, 8, 9, 10];
        assert_eq!(share(&cores, 0, 3), [0, 1]);
        assert_eq!(share(&cores, 2, 3), [8, 9]);
        assert_eq!(share(&cores, 1, 1), cores);
        assert_eq!(share(&cores[..2], 1, 3), [0, 1]);
    }
}
