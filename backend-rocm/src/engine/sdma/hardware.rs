//! What the queue asks of the runtime; its logic runs without one too.

use std::fmt;
use std::time::Duration;

use peerlane_toolkit::device::Fault;

use super::placement::SdmaId;

/// Which way bytes go between this rank and a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Put,
    Get,
}

/// One copy of the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copy {
    /// The rank at the other end, oneself too.
    pub(crate) peer: usize,
    pub(crate) direction: Direction,
    /// The engine that is to do it; otherwise the runtime chooses.
    pub(crate) on: Option<SdmaId>,
    pub(crate) span: Span,
}

/// Where bytes go and where they come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) dst: u64,
    pub(crate) src: u64,
    pub(crate) bytes: u64,
}

impl Span {
    /// The part that begins at `at`.
    pub(super) fn part(self, at: u64, bytes: u64) -> Self {
        Self { dst: self.dst + at, src: self.src + at, bytes }
    }

    /// Whether one of the two must come after the other: they do not only read the same bytes.
    pub(super) fn meets(self, other: Self) -> bool {
        let meet = |one: u64, two: u64| one < two + other.bytes && two < one + self.bytes;
        meet(self.dst, other.dst) || meet(self.dst, other.src) || meet(self.src, other.dst)
    }
}

/// What became of a copy that was given to the runtime.
#[derive(Debug)]
pub(crate) enum Given<E> {
    /// It is on its way.
    Taken,
    /// The runtime has no room for it now.
    Exhausted,
    /// The runtime does not take it, or not for this engine.
    Refused(E),
}

/// Completion signals and copies. A *slot* is one signal, and one word beside it that engines read;
/// it stands at 1 while a copy runs, at 0 when it is complete, and below if it failed.
pub(crate) trait Hardware: fmt::Debug + Send + 'static {
    type Error: peerlane_hal::Error + Clone + From<Fault>;

    /// How many slots there are.
    fn slots(&self) -> usize;

    /// Whether a copy really waits for the signals of others; otherwise it is given once they are 0.
    fn waits_for_signals(&self) -> bool;

    /// Sets the signal to 1; no copy depends on it.
    fn arm(&self, slot: usize);

    /// What the signal holds. What was copied is visible once it is 0.
    fn value(&self, slot: usize) -> i64;

    /// Sets the signal to 0 where the runtime did not, so that copies behind it run.
    fn excuse(&self, slot: usize);

    /// Lets `time` pass.
    fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }

    /// Stores the word of a slot and tells where engines read it; no copy reads it now.
    fn store_word(&self, slot: usize, value: u64) -> u64;

    /// Gives a copy to the runtime, to run once the signals of `after` are 0, and to complete `slot`.
    ///
    /// # Safety
    /// The spans are valid, and nobody races for them, until the slot is complete.
    unsafe fn copy(&mut self, copy: &Copy, after: &[usize], slot: usize) -> Given<Self::Error>;

    /// Why a copy failed, from what its signal held.
    fn failure(&self, copy: &Copy, value: i64) -> Self::Error;

    /// Something of it is still in use by the device: nothing is ever freed.
    fn abandon(&mut self);
}
