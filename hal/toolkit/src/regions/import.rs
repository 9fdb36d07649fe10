//! Memory of other processes, opened once a process and device however often it is imported: the
//! driver opens a legacy handle once only, and address space is not endless either.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use super::device::RegionDevice;
use super::mapped::Mapped;
use super::pinned::Pinned;
use crate::device::{DevicePtr, IpcHandle};
use crate::handover::ProcessToken;
use peerlane_hal::{BackendId, Generation};

/// What tells two openings apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Identity {
    pub(super) backend: BackendId,
    pub(super) process: ProcessToken,
    pub(super) allocation: Allocation,
    /// Mappings are for one device to read.
    pub(super) device: i32,
}

/// An allocation of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Allocation {
    /// Its descriptors have no name that both sides know; the registration has.
    Registration(Generation),
    /// Every region of one allocation has the same handle.
    Ipc(IpcHandle),
}

/// Memory that is open in this process.
#[derive(Debug)]
pub(super) enum Opened<D: RegionDevice> {
    Mapped(Mapped<D>),
    Ipc { context: Arc<D>, address: DevicePtr },
    Host(Pinned<D>),
}

impl<D: RegionDevice> Opened<D> {
    /// Opens an IPC handle; the context is current.
    pub(super) fn ipc(context: &Arc<D>, handle: &IpcHandle) -> Result<Self, D::Error> {
        let address = context.open_ipc(handle)?;
        Ok(Self::Ipc { context: Arc::clone(context), address })
    }

    fn address(&self) -> DevicePtr {
        match self {
            Self::Mapped(mapped) => mapped.address(),
            Self::Ipc { address, .. } => *address,
            Self::Host(pinned) => pinned.view().address,
        }
    }

    /// Where this process finds it, if it is host memory.
    fn host(&self) -> Option<u64> {
        match self {
            Self::Host(pinned) => Some(pinned.view().base.as_ptr() as u64),
            Self::Mapped(_) | Self::Ipc { .. } => None,
        }
    }
}

impl<D: RegionDevice> Drop for Opened<D> {
    fn drop(&mut self) {
        let Self::Ipc { context, address } = self else { return };
        // Failures mean that the device is gone, and its memory with it.
        let Ok(_current) = context.enter_relaxed() else { return };
        // SAFETY: opened once by `ipc`; the last user is gone.
        unsafe { context.close_ipc(*address) };
    }
}

struct Shared {
    users: usize,
    address: DevicePtr,
    host: Option<u64>,
    /// An [`Opened`] of its vendor.
    _opened: Box<dyn Send>,
}

/// What is open; opened and closed under the lock, so that one handle is never open twice.
static OPEN: LazyLock<Mutex<HashMap<Identity, Shared>>> = LazyLock::new(Mutex::default);

/// One use of memory of another process.
#[derive(Debug)]
pub(super) struct Import {
    identity: Identity,
    address: DevicePtr,
    host: Option<u64>,
}

impl Import {
    /// Takes part in what is open, or opens it.
    pub(super) fn share<D: RegionDevice>(
        identity: Identity,
        open: impl FnOnce() -> Result<Opened<D>, D::Error>,
    ) -> Result<Self, D::Error> {
        let mut all = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shared) = all.get_mut(&identity) {
            shared.users += 1;
            return Ok(Self { identity, address: shared.address, host: shared.host });
        }
        let opened = open()?;
        let (address, host) = (opened.address(), opened.host());
        all.insert(identity, Shared { users: 1, address, host, _opened: Box::new(opened) });
        Ok(Self { identity, address, host })
    }

    pub(super) fn address(&self) -> DevicePtr {
        self.address
    }

    pub(super) fn host(&self) -> Option<u64> {
        self.host
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
