//! Counts what the machine does, by device, for tests.

use std::sync::atomic::{AtomicI64, Ordering};

use super::settings::DEVICES_MAX;

macro_rules! counters {
    ($($(#[$doc:meta])* $counter:ident = $name:literal;)*) => {
        /// A counter of the machine.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Counter {
            $($(#[$doc])* $counter,)*
        }

        const NAMES: &[(&str, Counter)] = &[$(($name, Counter::$counter),)*];
    };
}

counters! {
    Copies = "copies";
    CopyBytes = "copy_bytes";
    /// Copies between host and device.
    HostCopies = "host_copies";
    /// Copies from host memory to host memory, which hold their caller.
    HostToHostCopies = "host_to_host_copies";
    /// Copies of HIP that requested an engine.
    NoCuCopies = "no_cu_copies";
    /// Copies by numbered engines, and those that never complete on any engine.
    SdmaCopies = "sdma_copies";
    StalledCopies = "stalled_copies";
    /// The most copies that needed an engine at once, running or waiting.
    MostCopiesAtOnce = "most_copies_at_once";
    /// The most copies that ran at once; never more than there are engines.
    MostCopiesRunning = "most_copies_running";
    /// Copies that found every engine taken.
    CopiesThatWaited = "copies_that_waited";
    /// Batches of words, and how many words they held.
    Batches = "batches";
    BatchedWords = "batched_words";
    /// Words outside a batch.
    SingleWords = "single_words";
    /// Waits for words that did not pass at once, and starts of kernels in which all blocks waited.
    BlockedWaits = "blocked_waits";
    Fills = "fills";
    /// Kernels that reduced memory.
    Reductions = "reductions";
    /// Kernels that ran whole starts.
    Starts = "starts";
    GraphLaunches = "graph_launches";
    DefaultStreamUses = "default_stream_uses";
    /// Objects that exist now.
    LiveAllocations = "live_allocations";
    LiveBytes = "live_bytes";
    OpenImports = "open_imports";
    LiveReservations = "live_reservations";
    LiveMappings = "live_mappings";
    LiveStreams = "live_streams";
    LiveEvents = "live_events";
    LiveGraphs = "live_graphs";
    LiveSignals = "live_signals";
    LiveContexts = "live_contexts";
    /// The time that callers spent inside the driver.
    HostNanos = "host_ns";
}

/// Index, after the last device, for what belongs to no device.
pub(crate) const NO_DEVICE: u32 = DEVICES_MAX as u32;

static COUNTS: [[AtomicI64; DEVICES_MAX + 1]; NAMES.len()] =
    [const { [const { AtomicI64::new(0) }; DEVICES_MAX + 1] }; NAMES.len()];

impl Counter {
    fn place(self, device: u32) -> &'static AtomicI64 {
        &COUNTS[self as usize][(device as usize).min(DEVICES_MAX)]
    }

    pub(crate) fn add(self, device: u32, count: i64) {
        self.place(device).fetch_add(count, Ordering::Relaxed);
    }

    /// Raises a counter to `value` if that is larger.
    pub(crate) fn peak(self, device: u32, value: i64) {
        self.place(device).fetch_max(value, Ordering::Relaxed);
    }
}

/// Returns the counter of one device, or the sum over all; `None` if no counter has this name.
pub(crate) fn read(name: &str, device: Option<u32>) -> Option<i64> {
    let (_, counter) = NAMES.iter().find(|(known, _)| *known == name)?;
    if let Some(device) = device {
        return Some(counter.place(device).load(Ordering::Relaxed));
    }
    let counts = COUNTS[*counter as usize].iter().map(|count| count.load(Ordering::Relaxed));
    if name.starts_with("most_") { counts.max() } else { Some(counts.sum()) }
}

/// Resets peaks and sums; counters of objects that exist stay.
pub(crate) fn reset() {
    let passing = NAMES.iter().filter(|(name, _)| !name.starts_with("live_"));
    for (_, counter) in passing.filter(|(_, counter)| *counter != Counter::OpenImports) {
        COUNTS[*counter as usize].iter().for_each(|count| count.store(0, Ordering::Relaxed));
    }
}
