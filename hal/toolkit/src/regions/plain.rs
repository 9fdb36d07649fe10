//! Memory of the driver's plain allocator: where a device has no virtual memory management.

use std::sync::Arc;
use std::time::Duration;

use super::device::{RegionDevice, name_bytes};
use crate::device::{DevicePtr, IpcHandle};
use crate::retire;

/// How long an allocation waits for memory that is being given back.
const SETTLE: Duration = Duration::from_secs(2);

/// An allocation; freed when dropped.
#[derive(Debug)]
pub struct Plain<D: RegionDevice> {
    context: Arc<D>,
    address: DevicePtr,
}

impl<D: RegionDevice> Plain<D> {
    /// Allocates; the context is current.
    ///
    /// # Errors
    /// [`OutOfMemory`](peerlane_hal::ErrorKind::OutOfMemory), naming the bytes wanted, and the driver's refusal.
    pub fn allocate(context: &Arc<D>, bytes: u64) -> Result<Self, D::Error> {
        Self::of(context, bytes, |bytes| context.allocate(bytes))
    }

    /// The same of memory for flags.
    pub(super) fn allocate_flags(context: &Arc<D>, bytes: u64) -> Result<Self, D::Error> {
        Self::of(context, bytes, |bytes| context.allocate_flags(bytes))
    }

    fn of(
        context: &Arc<D>,
        bytes: u64,
        allocate: impl Fn(usize) -> Result<DevicePtr, D::Error>,
    ) -> Result<Self, D::Error> {
        // More than the address space holds is refused here, before a size wraps around.
        let Some(wanted) = i64::try_from(bytes).ok().and_then(|_| usize::try_from(bytes).ok())
        else {
            return Err(context.out_of_memory(bytes));
        };
        let allocated = match allocate(wanted.max(1)) {
            // What was given up may not be free yet.
            Err(error) if D::is_out_of_memory(&error) && retire::settle(&**context, SETTLE) => {
                allocate(wanted.max(1))
            }
            allocated => allocated,
        };
        let address = allocated.map_err(|error| name_bytes(&**context, bytes, error))?;
        Ok(Self { context: Arc::clone(context), address })
    }

    pub(super) fn address(&self) -> DevicePtr {
        self.address
    }

    /// What another process opens it with.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn ipc_handle(&self) -> Result<IpcHandle, D::Error> {
        self.context.ipc_handle(self.address)
    }
}

impl<D: RegionDevice> Drop for Plain<D> {
    fn drop(&mut self) {
        // Failures mean that the device is gone, and its memory with it.
        let Ok(_current) = self.context.enter_relaxed() else { return };
        // SAFETY: allocated by `allocate` and freed once; nobody uses it any more, as for a mapping.
        unsafe { self.context.free(self.address) };
    }
}
