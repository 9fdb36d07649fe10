//! What a device really does, by doing it: an attribute may say yes where the deed is refused, for
//! instance fabric handles without a channel to the fabric's manager.

use peerlane_toolkit::device::DeviceContext as _;
use peerlane_toolkit::regions::{Physical, Plain};

use super::Context;
use crate::error::Error;
use crate::memory::try_fabric;

/// What came of a trial allocation with each kind of handle; the error says why it is off.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HandleTrials {
    /// A file descriptor, which other processes of this host import. What
    /// [`Memory::allocate`](crate::Memory) prefers.
    pub posix: Result<(), Error>,
    /// A handle that other hosts of an NVLink domain import. Not used yet.
    pub fabric: Result<(), Error>,
    /// The legacy IPC handle, which is how memory of `cudaMalloc` travels.
    pub legacy: Result<(), Error>,
}

/// Allocates the least that the device gives, with each kind of handle, and exports it.
///
/// # Errors
/// The device cannot be opened.
pub fn try_handles(ordinal: u32) -> Result<HandleTrials, Error> {
    let context = Context::open(ordinal)?;
    let _current = context.enter_relaxed()?;
    Ok(HandleTrials {
        posix: Physical::create(&context, 1).and_then(|memory| memory.export()).map(drop),
        fabric: try_fabric(&context),
        legacy: Plain::allocate(&context, 1).and_then(|plain| plain.ipc_handle()).map(drop),
    })
}
