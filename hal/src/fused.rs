//! Describes the launches of fused starts, in which an engine runs all ops of a start at once.

use std::fmt;
use std::sync::Arc;

/// By how much tagged data is longer than the data.
pub const SLOT_FACTOR: u64 = 2;

/// What starts of an operation launch on the compute units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The number of blocks of threads.
    pub blocks: u32,
    /// The number of threads in a block.
    pub threads: u32,
}

impl fmt::Display for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "1 launch of {} blocks of {} threads", self.blocks, self.threads)
    }
}

/// Limits of the fused starts of a kind of engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedLimits {
    /// The largest number of blocks of threads of a launch.
    pub blocks_max: u32,
    /// The number of threads in a block.
    pub threads: u32,
    /// The largest number of ranks, at least 2.
    pub ranks_max: usize,
    /// Whether ranks share a device. Their processes then take turns on it, so a start takes much
    /// longer, and callers use such engines only if they are told to.
    pub shares_device: bool,
}

/// How far the starts of a program have come, also those of graphs. Starts are counted from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FusedProgress {
    /// The number of the last start that has begun.
    pub begun: u64,
    /// The number of the last start that has ended, which is not larger.
    pub done: u64,
}

/// A function that tells how far the starts of a program have come, as long as its engine lives.
pub type ProgressReader = Arc<dyn Fn() -> FusedProgress + Send + Sync>;
