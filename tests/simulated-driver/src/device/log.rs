//! Logs the copies of numbered engines, for tests of where copies ran and which overlapped.

use std::sync::{Mutex, OnceLock};
use std::time::Instant;

use super::sync::lock;

/// A copy by an engine.
///
/// Devices are numbered as the machine numbers them. Times are nanoseconds since a start of this
/// process.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Device of the engine.
    pub device: u64,
    /// Number of the engine; [`Transfer::COMPUTE`] for compute units.
    pub engine: u64,
    /// Device that the bytes came from, or [`Transfer::HOST`].
    pub source: u64,
    /// Device that the bytes went to, or [`Transfer::HOST`].
    pub destination: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// When the copy was submitted.
    pub submitted_ns: u64,
    /// When everything that the copy depends on was done, and the engine began.
    pub start_ns: u64,
    /// When the bytes were copied.
    pub end_ns: u64,
    /// 1 if the engine is not one of those that lead to the other device.
    pub far: u64,
}

impl Transfer {
    /// Number in place of an engine: the copy ran on compute units.
    pub const COMPUTE: u64 = u64::MAX;
    /// Number in place of a device: host memory.
    pub const HOST: u64 = u64::MAX;
}

static LOG: Mutex<Vec<Transfer>> = Mutex::new(Vec::new());

/// Returns the time of this process.
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
