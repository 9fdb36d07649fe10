//! Chooses the copy size from which copies bypass the processor caches.
//!
//! A copy through the cache is faster as long as source and destination stay in a cache that is faster than
//! memory. On AMD's processors this is the last level, which the ranks share. On others it is the second level:
//! the last level of Intel's servers is as slow as memory for copies (docs/perf/host-copy.md).

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

/// The copy size in bytes that bypasses the cache if the cache sizes are unknown.
const DEFAULT_BYTES: u64 = 2 << 20;

#[derive(Clone, Copy, Debug, Default)]
struct Caches {
    second_bytes: u64,
    last_bytes: u64,
    /// The number of processors that share the last-level cache.
    last_shared_by: usize,
}

/// Returns the smallest copy in bytes that bypasses the cache, for a machine with `ranks` ranks.
///
/// The files of the machine are read once for each process, because every operation opens an engine.
pub(crate) fn streaming_bytes_min(ranks: usize) -> u64 {
    static MACHINE: OnceLock<(Caches, bool, usize)> = OnceLock::new();
    let (caches, is_amd, processors) = *MACHINE.get_or_init(|| {
        let folder = Path::new("/sys/devices/system/cpu/cpu0/cache");
        let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
        (Caches::read(folder), is_amd(), count(&online))
    });
    caches.streaming_bytes_min(is_amd, ranks, processors)
}

impl Caches {
    /// Reads the cache sizes that Linux reports for one processor; a size that cannot be read is 0.
    fn read(folder: &Path) -> Self {
        let mut caches = Self::default();
        for index in 0.. {
            let file = |name: &str| {
                let text = fs::read_to_string(folder.join(format!("index{index}")).join(name));
                text.map(|text| text.trim().to_owned())
            };
            let Ok(level) = file("level") else { return caches };
            let bytes = file("size").ok().and_then(|size| bytes(&size)).unwrap_or(0);
            match level.as_str() {
                "2" => caches.second_bytes = bytes,
                "3" => {
                    caches.last_bytes = bytes;
                    caches.last_shared_by = file("shared_cpu_list").map_or(0, |list| count(&list));
                }
                _ => {}
            }
        }
        caches
    }

    fn streaming_bytes_min(self, last_is_fast: bool, ranks: usize, processors: usize) -> u64 {
        // Ranks spread evenly over the caches of the last level.
        let sharing = (ranks * self.last_shared_by).div_ceil(processors.max(1)).max(1) as u64;
        let last_bytes = if last_is_fast { self.last_bytes / sharing } else { 0 };
        match self.second_bytes.max(last_bytes) {
            0 => DEFAULT_BYTES,
            bytes => bytes / 2,
        }
    }
}

/// Parses a cache size such as `32768K`.
fn bytes(size: &str) -> Option<u64> {
    let (number, shift) = match size.strip_suffix('K') {
        Some(number) => (number, 10),
        None => size.strip_suffix('M').map_or((size, 0), |number| (number, 20)),
    };
    number.parse::<u64>().ok()?.checked_shl(shift)
}

/// Counts the processors of a list such as `0-3,8`.
fn count(list: &str) -> usize {
    let ranges = list.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)? + 1)
    });
    ranges.sum()
}

fn is_amd() -> bool {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let vendor = text.lines().find_map(|line| line.strip_prefix("vendor_id")?.split_once(": "));
    vendor.is_some_and(|(_, vendor)| vendor == "AuthenticAMD")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_threshold_follows_the_cache_that_is_fast() {
        let epyc = Caches { second_bytes: MIB, last_bytes: 32 * MIB, last_shared_by: 2 };
        // Measured: equal at 8 MiB with 2 ranks and at 4 MiB with 4 ranks.
        assert_eq!(epyc.streaming_bytes_min(true, 2, 2), 8 * MIB);
        assert_eq!(epyc.streaming_bytes_min(true, 4, 2), 4 * MIB);
        let of_eight = Caches { last_shared_by: 8, ..epyc };
        assert_eq!(of_eight.streaming_bytes_min(true, 8, 64), 16 * MIB);
        assert_eq!(of_eight.streaming_bytes_min(true, 64, 64), 2 * MIB);
        // Measured: equal at 1 MiB with 2 and 4 ranks.
        let xeon = Caches { second_bytes: 2 * MIB, last_bytes: 300 * MIB, last_shared_by: 16 };
        assert_eq!(xeon.streaming_bytes_min(false, 2, 16), MIB);
        assert_eq!(xeon.streaming_bytes_min(false, 16, 16), MIB);
        assert_eq!(Caches::default().streaming_bytes_min(true, 2, 2), DEFAULT_BYTES);
    }

    #[test]
    fn linux_texts_are_read() {
        assert_eq!(
            (bytes("32768K"), bytes("2M"), bytes("x")),
            (Some(32 * MIB), Some(2 * MIB), None)
        );
        assert_eq!((count("0-15\n"), count("0-3,8"), count("7"), count("")), (16, 5, 1, 0));
        assert!(Caches::read(Path::new("/no/such/folder")).last_bytes == 0);
    }
}
