//! Determines the available host memory and checks whether a measurement fits.

use std::fs;
use std::path::Path;

use crate::error::{Failure, Result};
use crate::units::Size;

/// The memory in bytes that a process needs in addition to its buffers.
const PROCESS_BYTES: u64 = 8 << 20;

/// The host memory that a measurement allocates on this machine at its largest size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostMemory {
    pub(crate) ranks: u64,
    pub(crate) total_bytes: u64,
    /// The size of one rank's input in bytes, or 0 for an operation in place.
    pub(crate) input_bytes: u64,
}

impl HostMemory {
    /// Fails if the measurement needs more than the available memory; `None` is not checked.
    pub(crate) fn check(&self, available: Option<u64>) -> Result<()> {
        let Some(available) = available.filter(|available| self.bytes() > *available) else {
            return Ok(());
        };
        let Self { ranks, total_bytes, input_bytes } = *self;
        let plural = if ranks == 1 { "" } else { "s" };
        let failure = Failure::failed(format!(
            "the largest size needs {} of memory ({ranks} rank{plural}, each with an output of {} \
             and an input of {}), but only {} are available",
            Size(self.bytes()),
            Size(total_bytes),
            Size(input_bytes),
            Size(available)
        ));
        // The input is at most as long as the output, so half of the remaining memory always fits.
        let fits = (available / ranks.max(1)).saturating_sub(PROCESS_BYTES) / 2;
        Err(failure.with_advice(match fits.checked_ilog2() {
            Some(power) => {
                format!("lower --max-bytes, for instance to {}, or lower --ranks", Size(1 << power))
            }
            None => "lower --ranks".to_owned(),
        }))
    }

    fn bytes(&self) -> u64 {
        let rank = self.total_bytes.saturating_add(self.input_bytes).saturating_add(PROCESS_BYTES);
        rank.saturating_mul(self.ranks)
    }
}

/// Returns the bytes that are available without swapping, within the limits of the process's
/// control groups.
pub(crate) fn available_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let machine = field(&text, "MemAvailable:")?.checked_mul(1024)?;
    Some(control_group_bytes().map_or(machine, |group| group.min(machine)))
}

/// Returns the bytes that the tightest control group of the process leaves; `None` without a limit.
pub(crate) fn control_group_bytes() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root = Path::new("/sys/fs/cgroup");
    let group = root.join(group);
    let folders = group.ancestors().take_while(|folder| folder.starts_with(root));
    folders.filter_map(group_available_bytes).min()
}

/// Returns the memory limit of a control group minus the memory that it uses and cannot reclaim.
fn group_available_bytes(folder: &Path) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let limit: u64 = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    let cached = read("memory.stat").and_then(|text| field(&text, "inactive_file")).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(cached)))
}

/// Returns the number that follows `name` at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEED: HostMemory = HostMemory { ranks: 4, total_bytes: 64 << 20, input_bytes: 16 << 20 };

    #[test]
    fn enough_memory_passes() {
        assert_eq!(NEED.check(Some(4 * (88 << 20))), Ok(()));
        assert_eq!(NEED.check(None), Ok(()));
    }

    #[test]
    fn too_little_memory_is_refused_with_both_sizes() {
        insta::assert_snapshot!(NEED.check(Some(200 << 20)).unwrap_err(), @"
        error: the largest size needs 352 MiB of memory (4 ranks, each with an output of 64 MiB and an input of 16 MiB), but only 200 MiB are available
         help: lower --max-bytes, for instance to 16 MiB, or lower --ranks
        ");
        let endless = HostMemory { ranks: 2, total_bytes: u64::MAX, input_bytes: 0 };
        insta::assert_snapshot!(endless.check(Some(0)).unwrap_err(), @"
        error: the largest size needs 16.00 EiB of memory (2 ranks, each with an output of 16.00 EiB and an input of 0 B), but only 0 B are available
         help: lower --ranks
        ");
    }

    #[test]
    fn this_machine_has_memory() {
        assert!(available_bytes().is_none_or(|bytes| bytes > 0));
        assert_eq!(field("MemTotal: 9 kB\nMemAvailable:   7 kB\n", "MemAvailable:"), Some(7));
    }
}
