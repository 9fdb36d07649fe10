//! Determines the host memory that this process can still allocate.

use std::fmt;
use std::fs;
use std::io;
use std::thread;
use std::time::Duration;

use peerlane_hal::Deadline;
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::control_groups::ControlGroups;

/// Processes take turns if the memory that is left has no room for this many allocations.
const TIGHT_ALLOCATIONS: u64 = 64;
/// Limits the wait for the lock, because a process that holds it can be stopped.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);
const LOCK_PAUSE: Duration = Duration::from_millis(1);

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

    /// Excludes other processes of the control group from allocations of their own until the lock is dropped, if they could
    /// otherwise exceed the limit together. `bytes` is the size of one allocation.
    ///
    /// Returns `None` if memory is plentiful, without a group, and if another process holds the lock for too long.
    pub(crate) fn lock_if_tight(&self, bytes: u64) -> Option<GroupLock> {
        let MemoryLimit::Group { file, .. } = &self.limit else { return None };
        if self.bytes / TIGHT_ALLOCATIONS >= bytes {
            return None;
        }

        let file = fs::File::open(file).ok()?;
        let deadline = Deadline::after(LOCK_TIMEOUT);
        loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Some(GroupLock(file)),
                Err(Errno::WOULDBLOCK | Errno::INTR) if !deadline.has_passed() => {
                    thread::sleep(LOCK_PAUSE);
                }
                Err(_) => return None,
            }
        }
    }

    /// Creates the value for a machine with `bytes` bytes of available memory, whose control groups have no limit.
    pub fn of_machine(bytes: u64) -> Self {
        Self { bytes, limit: MemoryLimit::Machine }
    }
}

/// The lock of a control group, which lies on the file that holds its limit.
#[derive(Debug)]
pub(crate) struct GroupLock(fs::File);

impl Drop for GroupLock {
    fn drop(&mut self) {
        // A child that was forked meanwhile has a copy of the descriptor.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
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
    fn processes_take_turns_where_memory_is_tight() {
        let file = std::env::temp_dir().join(format!("peerlane-turns-{}", std::process::id()));
        fs::write(&file, "").unwrap();
        let limit = MemoryLimit::Group { limit_bytes: 1 << 30, file: file.display().to_string() };
        let available = AvailableMemory { bytes: 64 << 20, limit };
        assert!(available.lock_if_tight(1 << 20).is_none());
        let held = available.lock_if_tight(2 << 20);
        assert!(held.is_some() && available.lock_if_tight(2 << 20).is_none());
        drop(held);
        assert!(available.lock_if_tight(2 << 20).is_some());
        assert!(AvailableMemory::of_machine(0).lock_if_tight(1).is_none());
        fs::remove_file(&file).unwrap();
    }

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
