//! Configures the simulated machine: from the environment when it starts, and by tests while it
//! runs.
//!
//! Every setting is a number or one of a few words. Its environment variable is its name with the
//! prefix [`PREFIX`].

use std::sync::atomic::{AtomicU64, Ordering};

/// Prefix of all environment variables.
pub(crate) const PREFIX: &str = "PEERLANE_SIM_";
/// Largest number of devices of a machine.
pub(crate) const DEVICES_MAX: usize = 16;

/// What settings of a copy of the library begin with, and the room for both. A copy is changed by
/// `harness::patch`.
pub(crate) const OWN_MARK: &[u8; 24] = b"settings of this copy:\0\0";
pub(crate) const OWN_BYTES: usize = 256;

static OWN: [u8; OWN_BYTES] = {
    let mut own = [0; OWN_BYTES];
    let mut at = 0;
    while at < OWN_MARK.len() {
        own[at] = OWN_MARK[at];
        at += 1;
    }
    own
};

#[derive(Clone, Copy, Debug)]
enum Values {
    /// From the first to the second, both inclusive.
    Number(u64, u64),
    Words(&'static [&'static str]),
}

macro_rules! settings {
    ($($(#[$doc:meta])* $setting:ident = $name:literal, $values:expr, $default:literal;)*) => {
        /// One property of the machine.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Setting {
            $($(#[$doc])* $setting,)*
        }

        impl Setting {
            const ALL: &[(Setting, &'static str, Values)] =
                &[$((Setting::$setting, $name, $values),)*];
        }

        static VALUES: [AtomicU64; Setting::ALL.len()] = [$(AtomicU64::new($default),)*];
    };
}

const ANY: Values = Values::Number(0, u64::MAX);
const OFF_ON: Values = Values::Words(&["off", "on"]);

/// In the order of `start::faults::KernelMutant`.
const KERNEL_MUTANTS: &[&str] = &[
    "none",
    "no-fence",
    "flag-first",
    "stale-tag",
    "first-half",
    "even-targets",
    "older-start",
    "first-block",
    "first-leaves",
    "short-value",
    "later-tag",
    "other-parts",
    "arrival-order",
    "no-tail",
    "no-abort",
    "stores-after-abort",
    "early-done",
    "not-gone",
    "ignores-last",
];

settings! {
    Devices = "DEVICES", Values::Number(0, DEVICES_MAX as u64), 4;
    CopyEngines = "COPY_ENGINES", Values::Number(1, 64), 3;
    /// The memory of each device, as each process counts it.
    MemoryMib = "MEMORY_MIB", Values::Number(1, 1 << 20), 4096;
    /// The unit of virtual memory management.
    GranularityKib = "GRANULARITY_KIB", Values::Number(4, 1 << 20), 2048;
    DriverVersion = "DRIVER_VERSION", Values::Number(1000, 99_990), 13_000;
    /// Numbered as the vendors number it.
    ComputeMode = "COMPUTE_MODE", Values::Words(&["default", "exclusive-thread", "prohibited", "exclusive"]), 0;
    /// Whether devices reach each other's memory.
    PeerAccess = "P2P", OFF_ON, 1;
    /// Devices of an island; only devices of one island reach each other.
    PeerIsland = "P2P_ISLAND", Values::Number(1, DEVICES_MAX as u64), 16;
    /// The best is 0.
    PeerRank = "P2P_RANK", Values::Number(0, 100), 0;
    /// Whether there is virtual memory management.
    VirtualMemory = "VMM", OFF_ON, 1;
    /// Whether that memory travels as file descriptors.
    Descriptors = "POSIX_FD", OFF_ON, 1;
    /// Handles for other nodes: not there; claimed, but refused when an allocation asks; there.
    FabricHandles = "FABRIC", Values::Words(&["none", "refused", "works"]), 1;
    /// Whether plain allocations can be shared between processes by handle.
    LegacyShare = "LEGACY_IPC", Values::Words(&["off", "on", "refused"]), 1;
    /// Whether queues write and await words of 64 bits.
    LongWords = "WORDS_64", OFF_ON, 1;
    /// Whether the driver accepts the text of kernels.
    Ptx = "PTX", Values::Words(&["accepted", "refused"]), 0;
    /// A fault of the kernels that run whole starts, see `start::faults`.
    KernelMutant = "KERNEL_MUTANT", Values::Words(KERNEL_MUTANTS), 0;
    /// What these kernels hold back on all devices but the first, see `start::faults`.
    KernelHold = "KERNEL_HOLD", Values::Words(&["none", "stores", "halves", "blocks", "turns"]), 0;
    /// How many starts these kernels count in addition, so that tests reach large numbers.
    KernelStarts = "KERNEL_STARTS", ANY, 0;
    /// The most words of a batch; the vendor asks for fewer than 256.
    BatchMax = "BATCH_MAX", Values::Number(1, 65_536), 255;
    /// The order of the words of a batch; `parallel` does all writes before it waits.
    BatchOrder = "BATCH_ORDER", Values::Words(&["kept", "parallel"]), 0;
    /// What happens to words that a queue writes to memory of others.
    PeerWrites = "PEER_WRITES", Values::Words(&["allow", "refuse", "drop"]), 0;
    /// Which copies do nothing but report success.
    DropCopies = "DROP_COPIES", Values::Words(&["none", "peer", "local", "all"]), 0;
    /// What happens to words while their queue is captured: `now` writes them at once.
    CapturedWords = "CAPTURED_WORDS", Values::Words(&["record", "refuse", "drop", "now"]), 0;
    /// Number of hardware queues that the queues of a session share, as by CUDA_DEVICE_MAX_CONNECTIONS; 0 if each has its own.
    Connections = "CONNECTIONS", Values::Number(0, 64), 0;
    /// Whether a running graph with many branches holds up the other queues of its session, as on an H200
    /// (docs/perf/cuda-release.md).
    BranchedGraphs = "BRANCHED_GRAPHS", Values::Words(&["free", "hold"]), 1;
    /// True if memory can be exported as dma-buf for NICs.
    DmaBuf = "DMABUF", OFF_ON, 1;
    /// When devices see the writes of NICs: always; after a flush; never reliably.
    NicWrites = "NIC_WRITES", Values::Words(&["ordered", "flush", "lost"]), 1;
    /// As `rocm_version.h` counts: 60400 is 6.4.
    RocmVersion = "ROCM_VERSION", Values::Number(50_000, 99_900), 70_200;
    HsaVersion = "HSA_VERSION", Values::Number(50_000, 99_900), 70_200;
    /// Whether the kernel's driver of AMD can be opened.
    KernelDriver = "KFD", Values::Words(&["missing", "denied", "there"]), 2;
    /// The order of HIP's ordinals, by that of the agents.
    HipOrder = "HIP_ORDER", Values::Words(&["same", "reversed"]), 0;
    /// Copies of HIP that ask for an engine.
    NoCu = "NO_CU", Values::Words(&["works", "drop", "refuse"]), 0;
    /// Which memory streams of HIP wait on.
    WaitMemory = "WAIT_MEMORY", Values::Words(&["any", "signal"]), 0;
    /// Whether giving memory back waits for the device, and a stream for what it holds, as HIP does.
    FreeWaits = "FREE_WAITS", OFF_ON, 1;
    /// Devices in a hive are joined by XGMI; so many make one.
    Hive = "HIVE", Values::Number(1, DEVICES_MAX as u64), 16;
    XgmiHops = "XGMI_HOPS", Values::Number(1, 8), 1;
    XgmiWeight = "XGMI_WEIGHT", Values::Number(1, 1000), 15;
    NumaNodes = "NUMA_NODES", Values::Number(1, 8), 2;
    /// Numbered engines that lead to the host, and those that lead to other devices.
    SdmaEngines = "SDMA_ENGINES", Values::Number(1, 8), 2;
    XgmiEngines = "XGMI_ENGINES", Values::Number(0, 14), 14;
    /// How many of them lead to one device.
    EnginesPerLink = "ENGINES_PER_LINK", Values::Number(1, 8), 2;
    /// How many times as long a copy takes on an engine that leads elsewhere.
    FarFactor = "FAR_FACTOR", Values::Number(1, 1000), 1;
    /// How many copies a numbered engine holds.
    SdmaQueue = "SDMA_QUEUE", Values::Number(1, 1 << 20), 4096;
    /// Larger copies never end on one engine; 0 for none.
    StallMib = "STALL_MIB", Values::Number(0, 1 << 20), 0;
    /// How many signals a process has at most.
    Signals = "SIGNALS", Values::Number(1, 1 << 20), 65_536;
    /// Shortest duration of a copy.
    CopyDelayMicros = "COPY_DELAY_US", Values::Number(0, 60_000_000), 0;
    CopyNanosPerKib = "COPY_NS_PER_KIB", Values::Number(0, 1_000_000_000), 0;
    /// The most that is added to a copy, to a batch of words and before an event, at random.
    JitterMicros = "JITTER_US", Values::Number(0, 60_000_000), 0;
    /// The most that is added to a copy to or from memory of others, at random: then puts that start
    /// together end apart, and whatever was to wait for them is seen to.
    PeerJitterMicros = "PEER_JITTER_US", Values::Number(0, 60_000_000), 0;
    Seed = "SEED", ANY, 1;
    /// How many commands a queue holds before a caller has to wait.
    QueueLength = "QUEUE_LENGTH", Values::Number(1, 1 << 20), 1024;
    /// How long a caller waits for a queue at most.
    PatienceMillis = "PATIENCE_MS", Values::Number(1, 86_400_000), 120_000;
    /// Byte that new memory holds; not zero, because no vendor promises zeroed memory.
    Junk = "JUNK", Values::Number(0, 255), 0xa5;
}

/// Returns whether a device can access the memory of another.
pub(crate) fn reaches(device: u32, other: u32) -> bool {
    let island = |device| u64::from(device) / Setting::PeerIsland.value();
    device == other || Setting::PeerAccess.is_on() && island(device) == island(other)
}

impl Setting {
    pub(crate) fn value(self) -> u64 {
        VALUES[self as usize].load(Ordering::Relaxed)
    }

    pub(crate) fn is_on(self) -> bool {
        self.value() == 1
    }

    /// Returns whether the setting has this value.
    pub(crate) fn is(self, word: &str) -> bool {
        let Values::Words(words) = Self::ALL[self as usize].2 else { return false };
        words.get(self.value() as usize) == Some(&word)
    }
}

/// Returns the settings of this copy of the library: `NAME=VALUE`, separated by commas.
fn own() -> String {
    // A volatile read, because the file may be changed after compilation.
    // SAFETY: a reference is valid to read.
    let own = unsafe { std::ptr::read_volatile(&raw const OWN) };
    let text = own[OWN_MARK.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

/// Applies the settings of this copy of the library, then those of the environment.
///
/// # Errors
/// Names the invalid variable and the expected values.
pub(crate) fn read_environment() -> Result<(), String> {
    for entry in own().split(',').filter(|entry| !entry.is_empty()) {
        let (name, text) =
            entry.split_once('=').ok_or_else(|| format!("{entry}: expected NAME=VALUE"))?;
        change(name, text)?;
    }
    for (_, name, _) in Setting::ALL {
        let variable = format!("{PREFIX}{name}");
        if let Some(text) = std::env::var_os(&variable) {
            change(name, &text.to_string_lossy())?;
        }
    }
    Ok(())
}

/// Changes the setting of this name, such as `COPY_ENGINES`.
///
/// # Errors
/// Names the expected values.
pub(crate) fn change(name: &str, text: &str) -> Result<(), String> {
    let found = Setting::ALL.iter().find(|(_, known, _)| *known == name);
    let Some((setting, _, values)) = found else {
        return Err(format!("the simulated driver has no setting {name}"));
    };
    VALUES[*setting as usize].store(parse(name, text, *values)?, Ordering::Relaxed);
    Ok(())
}

fn parse(name: &str, text: &str, values: Values) -> Result<u64, String> {
    match values {
        Values::Number(least, most) => {
            let number = text.trim().parse().ok();
            number.filter(|number| (least..=most).contains(number)).ok_or_else(|| {
                format!("{PREFIX}{name}={text}: expected a number from {least} to {most}")
            })
        }
        Values::Words(words) => {
            let found = words.iter().position(|word| *word == text.trim());
            found.map(|at| at as u64).ok_or_else(|| {
                format!("{PREFIX}{name}={text}: expected one of {}", words.join(", "))
            })
        }
    }
}
