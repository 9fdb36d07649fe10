//! Memory of other processes, opened once a process and device however often it is imported: the
//! driver opens a legacy handle once only, and address space is not endless either.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use peerlane_hal::Generation;
use peerlane_hal::mechanics::handover::ProcessToken;

use super::mapped::Mapped;
use super::pinned::Pinned;
use crate::device::Context;
use crate::error::Error;
use crate::sys::{self, CUdevice, CUdeviceptr, CUipcMemHandle};

/// What tells two openings apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Identity {
    pub(super) process: ProcessToken,
    pub(super) allocation: Allocation,
    /// Mappings are for one device to read.
    pub(super) device: CUdevice,
}

/// An allocation of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Allocation {
    /// Its descriptors have no name that both sides know; the registration has.
    Registration(Generation),
    /// Every region of one allocation has the same handle.
    Ipc([u8; 64]),
}

/// Memory that is open in this process.
#[derive(Debug)]
pub(super) enum Opened {
    Mapped(Mapped),
    Ipc { context: Arc<Context>, address: CUdeviceptr },
    Host(Pinned),
}

impl Opened {
    /// Opens a legacy handle; the context is current.
    pub(super) fn ipc(context: &Arc<Context>, handle: [u8; 64]) -> Result<Self, Error> {
        let mut address = 0;
        let handle = CUipcMemHandle { reserved: handle };
        let flags = sys::IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
        // SAFETY: the driver checks the handle; the result is stored in a local.
        let code = unsafe { (context.driver.ipc_open_mem_handle)(&raw mut address, handle, flags) };
        context.check("cuIpcOpenMemHandle_v2", code)?;
        Ok(Self::Ipc { context: Arc::clone(context), address })
    }

    fn address(&self) -> CUdeviceptr {
        match self {
            Self::Mapped(mapped) => mapped.address(),
            Self::Ipc { address, .. } => *address,
            Self::Host(pinned) => pinned.view().address,
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let Self::Ipc { context, address } = self else { return };
        // Failures mean that the device is gone, and its memory with it.
        let Ok(_current) = context.enter_relaxed() else { return };
        // SAFETY: opened once by `ipc`; the last user is gone.
        let _ = unsafe { (context.driver.ipc_close_mem_handle)(*address) };
    }
}

struct Shared {
    users: usize,
    opened: Opened,
}

/// What is open; opened and closed under the lock, so that one handle is never open twice.
static OPEN: LazyLock<Mutex<HashMap<Identity, Shared>>> = LazyLock::new(Mutex::default);

/// One use of memory of another process.
#[derive(Debug)]
pub(super) struct Import {
    identity: Identity,
    address: CUdeviceptr,
}

impl Import {
    /// Takes part in what is open, or opens it.
    pub(super) fn share(
        identity: Identity,
        open: impl FnOnce() -> Result<Opened, Error>,
    ) -> Result<Self, Error> {
        let mut all = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shared) = all.get_mut(&identity) {
            shared.users += 1;
            return Ok(Self { identity, address: shared.opened.address() });
        }
        let opened = open()?;
        let address = opened.address();
        all.insert(identity, Shared { users: 1, opened });
        Ok(Self { identity, address })
    }

    pub(super) fn address(&self) -> CUdeviceptr {
        self.address
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        let mut all = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(shared) = all.get_mut(&self.identity) else { return };
        shared.users -= 1;
        if shared.users == 0 {
            // Closed under the lock, see `OPEN`.
            all.remove(&self.identity);
        }
    }
}
