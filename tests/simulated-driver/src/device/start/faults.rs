//! Defines faults of the kernel and schedules that bring them out.

use crate::device::session::Session;
use crate::device::settings::Setting;

/// The device whose blocks and stores no hold delays.
const UNHELD_DEVICE: u32 = 0;

/// One fault of the kernel, which tests must find. The values are those of `KERNEL_MUTANT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KernelMutant {
    /// A signal does not follow the stores before it.
    NoFence = 1,
    /// A signal is stored before the data of the op ahead of it.
    FlagFirst,
    /// A word of a slot gets the tag of the start before.
    StaleTag,
    /// A reader compares only the tag of the first half of a word.
    FirstHalf,
    /// Targets of odd starts are those of even starts.
    EvenTargets,
    /// A wait ends at the value of the start before.
    OlderStart,
    /// Every block waits for the first blocks of the peers.
    FirstBlock,
    /// The first block that ends, not the last one, ends the start.
    FirstLeaves,
    /// A wait compares with the low 16 bits of its value.
    ShortValue,
    /// A reader takes every tag that is not smaller.
    LaterTag,
    /// The parts of a reduction are those of one block less.
    OtherParts,
    /// Contributions are added in another order.
    ArrivalOrder,
    /// The last word of a slot is passed over if it is not whole.
    NoTail,
    /// A launch that waits does not look at the word of aborts.
    NoAbort,
    /// A block that found an abort goes on without its waits.
    StoresAfterAbort,
    /// The first block that ends tells the host that the start is done.
    EarlyDone,
    /// A launch behind an abort runs like any other one.
    NotGone,
    /// A wait for the start before ends at once.
    IgnoresLast,
}

impl KernelMutant {
    pub(super) fn is_on(self) -> bool {
        Setting::KernelMutant.value() == self as u64
    }
}

/// A schedule of a kernel that its memory model allows, but which is rare. It holds on all devices
/// but the first one, so that a rank on that device meets late peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hold {
    /// Stores are not delivered, so no fence ends.
    Stores = 1,
    /// The second half of a word of a slot is not delivered.
    Halves,
    /// Only the first block runs.
    Blocks,
    /// A block begins when the block before it has ended.
    Turns,
}

impl Hold {
    pub(super) fn is_on(self, session: &Session) -> bool {
        Setting::KernelHold.value() == self as u64 && session.device() != UNHELD_DEVICE
    }
}
