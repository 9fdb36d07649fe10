//! What the numbered engines did, for tests that look at where copies went and which overlapped.

use std::sync::{Mutex, OnceLock};
use std::time::Instant;

use super::sync::lock;

/// One copy by an engine. Devices are numbered as the machine does, times are of this process, in
/// nanoseconds.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Whose engine it was.
    pub device: u64,
    /// The number of the engine; [`Transfer::COMPUTE`] for compute units.
    pub engine: u64,
    /// Where the bytes came from, or [`Transfer::HOST`].
    pub source: u64,
    /// Where they went, or [`Transfer::HOST`].
    pub destination: u64,
    /// How many.
    pub bytes: u64,
    /// When the engine was told.
    pub submitted_ns: u64,
    /// When everything that the copy depends on was done, and the engine began.
    pub start_ns: u64,
    /// When the bytes were across.
    pub end_ns: u64,
    /// 1 where the engine is not one of those that lead to the other device.
    pub far: u64,
}

impl Transfer {
    /// In place of an engine: the copy ran on compute units.
    pub const COMPUTE: u64 = u64::MAX;
    /// In place of a device: memory of the host.
    pub const HOST: u64 = u64::MAX;
}

static LOG: Mutex<Vec<Transfer>> = Mutex::new(Vec::new());

/// The time of this process.
pub(crate) fn now_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    u64::try_from(START.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
}

pub(crate) fn write(transfer: Transfer) {
    lock(&LOG).push(transfer);
}

pub(crate) fn read() -> Vec<Transfer> {
    lock(&LOG).clone()
}

pub(crate) fn clear() {
    lock(&LOG).clear();
}
