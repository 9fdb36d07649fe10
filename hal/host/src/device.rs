//! Describes this machine as the only device of the host backend.

use std::fs;

use super::error::Error;
use peerlane_toolkit::limits::MemoryInfo;

/// This machine as a device, on which the processors copy the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The model name of the processor.
    pub name: String,
    /// The number of processors that this process may use.
    pub cores: usize,
    /// The size of the machine's memory in bytes.
    pub memory_bytes: u64,
    /// The memory in bytes that is available without swapping.
    pub available_bytes: u64,
}

/// Returns the only device of the host backend, which is this machine.
///
/// # Errors
/// Returns [`Error::System`] if `/proc` cannot be read.
pub fn discover() -> Result<Vec<Device>, Error> {
    let cpus =
        fs::read_to_string("/proc/cpuinfo").map_err(Error::io("cannot read /proc/cpuinfo"))?;
    let name = cpus
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let memory = MemoryInfo::read().map_err(Error::io("cannot read /proc/meminfo"))?;
    Ok(vec![Device {
        name,
        cores,
        memory_bytes: memory.total_bytes,
        available_bytes: memory.available_bytes,
    }])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_found() {
        let devices = discover().unwrap();
        assert_eq!(devices.len(), 1);
        assert!(devices[0].cores >= 1);
        assert!(devices[0].available_bytes <= devices[0].memory_bytes);
        assert!(devices[0].available_bytes > 0);
    }
}
