//! Binds the ranks that this program spawns to cores.
//!
//! Each rank is bound to one core in turn, as launchers do. Without it the system may run two ranks
//! on one core and leave another core idle. Ranks that share cores use batch scheduling. Then
//! waking a rank on another core does not preempt the rank that runs there. Such a preemption costs
//! both ranks several times the duration of a small all-gather.

use std::io;
use std::sync::OnceLock;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::error::{Failure, Result};

/// The ways in which spawned ranks are bound to cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Bind {
    /// Bind each rank to one core in turn, or to the cores near its GPU
    Core,
    /// Move ranks that crowd on a core apart, without binding them, as the library does
    Auto,
    /// Do not bind or move ranks
    None,
}

impl Bind {
    /// Returns how the host backend of a rank treats its threads. A bound thread stays.
    pub(crate) fn of_threads(self) -> peerlane::host::Bind {
        match self {
            Self::Core | Self::Auto => peerlane::host::Bind::Auto,
            Self::None => peerlane::host::Bind::None,
        }
    }
}

/// Returns the number of cores that this process could use when it started.
pub(crate) fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Binds this process, which is rank `rank` of `ranks` on this machine, to one core. Must be called
/// before the process starts threads.
pub(crate) fn bind(rank: usize, ranks: usize) -> Result<()> {
    let shared = ranks > cores();
    let refused = |what: &str, error| refused(format!("cannot {what} of rank {rank}"), error);
    let allowed: Vec<usize> =
        allowed().map_err(|error| refused("read the allowed cores", error))?.collect();
    let Some(&core) = allowed.get(rank % allowed.len().max(1)) else { return Ok(()) };
    bind_to(&[core]).map_err(|error| refused("bind the process", error))?;
    if shared {
        schedule_as_batch().map_err(|error| refused("set the scheduling policy", error))
    } else {
        Ok(())
    }
}

/// Binds this process, which is rank `rank` of `ranks` on this machine, to its share of the cores
/// near a PCI device. Nothing is bound if the system does not report these cores, or if this
/// process may use none of them. Must be called before the process starts threads.
pub(crate) fn bind_near(pci_bus_id: &str, rank: usize, ranks: usize) -> Result<()> {
    let path = format!("/sys/bus/pci/devices/{}/local_cpulist", pci_bus_id.to_ascii_lowercase());
    let Ok(list) = std::fs::read_to_string(path) else { return Ok(()) };
    let refused = |error| refused(format!("cannot bind to the cores near {pci_bus_id}"), error);
    let near: Vec<usize> = core_list(&list).collect();
    let near: Vec<usize> = allowed().map_err(refused)?.filter(|core| near.contains(core)).collect();
    match share(&near, rank, ranks) {
        [] => Ok(()),
        own => bind_to(own).map_err(refused),
    }
}

fn refused(what: String, error: io::Error) -> Failure {
    Failure::io(what, &error).with_advice("run with --bind none")
}

/// Returns the cores that this process may use, in order.
fn allowed() -> io::Result<impl Iterator<Item = usize>> {
    let allowed = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(move |&core| allowed.is_set(core)))
}

fn bind_to(cores: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    cores.iter().for_each(|core| set.set(*core));
    Ok(sched_setaffinity(None, &set)?)
}

/// Returns a rank's equal share of the cores, or all cores if there are fewer cores than ranks.
fn share(cores: &[usize], rank: usize, ranks: usize) -> &[usize] {
    match cores.len() / ranks.max(1) {
        0 => cores,
        part => cores.chunks_exact(part).nth(rank).unwrap_or(cores),
    }
}

/// Parses a list of core numbers such as `0-3,8`; invalid entries are skipped.
fn core_list(text: &str) -> impl Iterator<Item = usize> {
    text.trim()
        .split(',')
        .filter_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some(first.parse().ok()?..=last.parse().ok()?)
        })
        .flatten()
}

fn schedule_as_batch() -> io::Result<()> {
    let priority = libc::sched_param { sched_priority: 0 };
    // SAFETY: the call reads `priority`, which outlives the call; process 0 is the caller.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &priority) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
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
    fn an_unknown_pci_device_binds_nothing() {
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
