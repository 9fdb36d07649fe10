//! Determines the host memory that this process can still allocate.

use std::fmt;
use std::fs;
use std::io;

use super::control_groups::ControlGroups;

/// The total and the available memory of this machine, read from `/proc/meminfo`.
#[derive(Clone, Copy, Debug)]
pub struct MemoryInfo {
    /// The size of the machine's memory in bytes.
    pub total_bytes: u64,
    /// The memory in bytes that can be allocated without swapping.
    pub available_bytes: u64,
}

impl MemoryInfo {
    /// Reads the memory sizes of this machine from `/proc/meminfo`.
    ///
    /// # Errors
    /// Returns the error of reading the file.
    pub fn read() -> io::Result<Self> {
        let text = fs::read_to_string("/proc/meminfo")?;
        let bytes = |name: &str| {
            let kib = text.lines().find_map(|line| line.strip_prefix(name));
            let kib =
                kib.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
            kib.map_or(0, |kib| kib * 1024)
        };
        Ok(Self { total_bytes: bytes("MemTotal:"), available_bytes: bytes("MemAvailable:") })
    }
}

/// The memory that this process can allocate before the kernel ends a process, and what limits it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AvailableMemory {
    /// The memory in bytes that can be allocated without swapping.
    pub bytes: u64,
    limit: MemoryLimit,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum MemoryLimit {
    Machine,
    Group { limit_bytes: u64, file: String },
}

impl AvailableMemory {
    /// Determines what the machine and the control groups of this process leave.
    ///
    /// # Errors
    /// Returns the error of reading `/proc/meminfo`.
    pub fn read() -> io::Result<Self> {
        let machine = Self::of_machine(MemoryInfo::read()?.available_bytes);
        let group = Self::of_control_groups();
        Ok(group.filter(|group| group.bytes < machine.bytes).unwrap_or(machine))
    }

    /// Determines what the tightest control group of this process leaves; `None` without a limit.
    pub fn of_control_groups() -> Option<Self> {
        let group = ControlGroups::of_process().memory()?;
        let file = group.file.display().to_string();
        let limit = MemoryLimit::Group { limit_bytes: group.limit_bytes, file };
        Some(Self { bytes: group.available_bytes, limit })
    }

    /// Creates the value for a machine with `bytes` bytes of available memory, whose control groups have no limit.
    pub fn of_machine(bytes: u64) -> Self {
        Self { bytes, limit: MemoryLimit::Machine }
    }
}

/// Says how much is available, and where.
impl fmt::Display for AvailableMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes are available ", self.bytes)?;
        match &self.limit {
            MemoryLimit::Machine => f.write_str("on this machine"),
            MemoryLimit::Group { limit_bytes, file } => {
                write!(f, "in the control group, whose limit is {limit_bytes} bytes ({file})")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_a_control_group_is_named() {
        let file = "/sys/fs/cgroup/job/memory.max".to_owned();
        let limit = MemoryLimit::Group { limit_bytes: 268_435_456, file };
        assert_eq!(
            AvailableMemory { bytes: 1000, limit }.to_string(),
            "1000 bytes are available in the control group, whose limit is 268435456 bytes \
             (/sys/fs/cgroup/job/memory.max)"
        );
    }

    #[test]
    fn the_available_memory_is_at_most_that_of_the_machine() {
        let available = AvailableMemory::read().unwrap();
        assert!(available.bytes > 0);
        assert!(available.bytes <= MemoryInfo::read().unwrap().total_bytes);
    }
}
