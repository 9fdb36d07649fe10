//! A registration: memory that has a generation, and how it leaves its process.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use peerlane_hal::mechanics::handover::Handover;
use peerlane_hal::{Rank, Role};

use super::adopted::Adopted;
use super::borrowed::{Borrowed, Kind};
use super::handle::Handle;
use super::mapped::{self, Mapped};
use super::pinned::{HostView, Pinned};
use super::plain::{self, Plain};
use crate::device::Context;
use crate::error::Error;
use crate::key::{Reach, Why};
use crate::sys::{self, CUdeviceptr, CUipcMemHandle};

/// Memory behind a registration.
#[derive(Debug)]
pub(super) enum Backing {
    /// Allocated here, as virtual memory.
    Mapped(Mapped),
    /// Allocated here, where there is no virtual memory.
    Plain(Plain),
    /// Allocated here, on the host.
    Host(Pinned),
    /// The caller's own, of a device.
    Borrowed(Borrowed),
    /// The caller's own, of the host.
    Adopted(Adopted),
    /// No bytes at all.
    Nothing,
}

/// What another process opens.
#[derive(Debug)]
enum Exported {
    Nothing,
    Private(Why),
    /// Physical memory; the region begins `head` bytes into the first segment.
    Segments {
        head: u64,
        handles: Vec<Handle>,
    },
    /// An allocation; the region begins `head` bytes into it.
    Ipc {
        head: u64,
        handle: CUipcMemHandle,
    },
    /// Memory of the host; the region begins `head` bytes into the descriptor.
    Host {
        head: u64,
    },
}

/// One registration; importers in this process share it.
#[derive(Debug)]
pub(crate) struct Registration {
    pub(super) context: Arc<Context>,
    pub(super) address: CUdeviceptr,
    pub(super) bytes: u64,
    pub(super) owner: Rank,
    pub(super) role: Role,
    backing: Backing,
    /// Filled by the first export: memory that is only put from never needs it.
    exported: OnceLock<Exported>,
}

impl Registration {
    /// Allocates memory, exportable as a descriptor where the device has virtual memory.
    pub(super) fn allocate(
        context: &Arc<Context>,
        bytes: u64,
        owner: Rank,
        role: Role,
        strict: bool,
    ) -> Result<Self, Error> {
        let context = Arc::clone(context);
        let abilities = context.found.abilities;
        if abilities.virtual_memory
            && abilities.posix_handles
            && context.driver.mem_create.is_some()
        {
            let kind = sys::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
            let handle = match Handle::create(&context, bytes, kind) {
                // The attribute said yes and the deed was refused, as in some virtual machines.
                Err(error) if error.is_refusal() && !strict => None,
                created => Some(created?),
            };
            if let Some(handle) = handle {
                let handles = vec![handle];
                let mapped = Mapped::map(&context, &handles)?;
                let address = mapped.address();
                let exported = OnceLock::from(Exported::Segments { head: 0, handles });
                let backing = Backing::Mapped(mapped);
                return Ok(Self { context, address, bytes, owner, role, backing, exported });
            }
        }
        let plain = Plain::allocate(&context, bytes)?;
        let address = plain.address();
        let (backing, exported) = (Backing::Plain(plain), OnceLock::new());
        Ok(Self { context, address, bytes, owner, role, backing, exported })
    }

    /// Allocates memory of the host, for peers that do not reach this device.
    pub(super) fn allocate_on_host(
        context: &Arc<Context>,
        bytes: u64,
        owner: Rank,
        role: Role,
    ) -> Result<Self, Error> {
        let pinned = Pinned::create(context, bytes, owner)?;
        let (context, address) = (Arc::clone(context), pinned.view().address);
        let (backing, exported) =
            (Backing::Host(pinned), OnceLock::from(Exported::Host { head: 0 }));
        Ok(Self { context, address, bytes, owner, role, backing, exported })
    }

    /// Registers the caller's memory at `address`.
    pub(super) fn borrow(
        context: &Arc<Context>,
        address: CUdeviceptr,
        bytes: u64,
        owner: Rank,
        role: Role,
    ) -> Result<Self, Error> {
        let backing = match bytes {
            0 => Backing::Nothing,
            _ => Backing::Borrowed(super::borrowed::inspect(context, address, bytes)?),
        };
        let (context, exported) = (Arc::clone(context), OnceLock::new());
        Ok(Self { context, address, bytes, owner, role, backing, exported })
    }

    /// Registers the caller's host memory.
    pub(super) fn adopt(
        context: &Arc<Context>,
        adopted: Adopted,
        bytes: u64,
        owner: Rank,
        role: Role,
    ) -> Self {
        let (context, address, exported) =
            (Arc::clone(context), adopted.view().address, OnceLock::new());
        let backing = Backing::Adopted(adopted);
        Self { context, address, bytes, owner, role, backing, exported }
    }

    /// The bytes that the driver really holds for a region that was allocated here.
    pub(super) fn allocated_bytes(&self) -> u64 {
        match &self.backing {
            Backing::Mapped(mapped) => mapped.bytes(),
            _ => self.bytes,
        }
    }

    /// The memory, where it is of the host.
    pub(super) fn host(&self) -> Option<HostView> {
        match &self.backing {
            Backing::Host(pinned) => Some(pinned.view()),
            Backing::Adopted(adopted) => Some(adopted.view()),
            _ => None,
        }
    }

    /// Flags that the host sees.
    pub(super) fn words(&self) -> Option<&[AtomicU64]> {
        let base = self.host().filter(|_| self.role == Role::Flags)?.base.as_ptr().cast();
        let count = self.bytes as usize / size_of::<u64>();
        // SAFETY: the region is aligned (`Memory::register` checks it, `Mapping` has pages), lives as
        // long as `self`, and flags are touched as atomics only.
        Some(unsafe { std::slice::from_raw_parts(base, count) })
    }

    /// How peers reach the memory; from now on the server hands it out.
    pub(super) fn export(&self) -> Result<Reach, Error> {
        if self.exported.get().is_none() {
            let exported = self.make_exported()?;
            // Two at once come to the same.
            let _ = self.exported.set(exported);
        }
        Ok(match self.exported.get() {
            None | Some(Exported::Nothing) => Reach::Nothing,
            Some(Exported::Private(why)) => Reach::Private(*why),
            Some(Exported::Segments { head, handles }) => {
                let segments = handles.iter().map(Handle::bytes).collect();
                Reach::Segments { head: *head, segments }
            }
            Some(Exported::Ipc { head, handle }) => {
                Reach::Ipc { head: *head, handle: handle.reserved }
            }
            Some(Exported::Host { head }) => Reach::Host { head: *head },
        })
    }

    fn make_exported(&self) -> Result<Exported, Error> {
        let _current = self.context.enter_relaxed()?;
        let ipc = |base| -> Result<Exported, Error> {
            let handle = plain::ipc_handle(&self.context, base)?;
            Ok(Exported::Ipc { head: self.address - base, handle })
        };
        match &self.backing {
            Backing::Nothing => Ok(Exported::Nothing),
            // Exported when it was made.
            Backing::Mapped(_) => Ok(Exported::Private(Why::NoHandle)),
            Backing::Host(_) => Ok(Exported::Host { head: 0 }),
            Backing::Adopted(adopted) => Ok(match adopted.head() {
                Some(head) => Exported::Host { head },
                None => Exported::Private(Why::Host),
            }),
            Backing::Plain(plain) => ipc(plain.address()),
            Backing::Borrowed(borrowed) => match borrowed.kind {
                Kind::Legacy => ipc(borrowed.extents[0].address),
                Kind::Other => Ok(Exported::Private(Why::Pool)),
                Kind::Virtual => self.export_segments(borrowed),
            },
        }
    }

    fn export_segments(&self, borrowed: &Borrowed) -> Result<Exported, Error> {
        let mut handles = Vec::with_capacity(borrowed.extents.len());
        for extent in &borrowed.extents {
            match Handle::retain(&self.context, extent.address, extent.bytes)? {
                Some(handle) if handle.is_exportable()? => handles.push(handle),
                _ => return Ok(Exported::Private(Why::NoHandle)),
            }
        }
        let head = self.address - borrowed.extents[0].address;
        Ok(Exported::Segments { head, handles })
    }

    /// Lets the device of another rank of this process reach the memory; where it does.
    pub(super) fn allow(&self, reader: &Context) -> Result<CUdeviceptr, Error> {
        if self.context.device == reader.device {
            return Ok(self.address);
        }
        let _current = reader.enter_relaxed()?;
        match &self.backing {
            Backing::Host(pinned) => return pinned.address_for(reader),
            Backing::Adopted(adopted) => return adopted.address_for(reader),
            _ => {}
        }
        self.allow_device(reader)?;
        Ok(self.address)
    }

    fn allow_device(&self, reader: &Context) -> Result<(), Error> {
        let allow = |address, bytes| mapped::allow(&self.context, reader, address, bytes);
        match &self.backing {
            // The host's memory is there for all devices.
            Backing::Nothing | Backing::Host(_) | Backing::Adopted(_) => Ok(()),
            Backing::Mapped(mapped) => allow(mapped.address(), mapped.bytes()),
            Backing::Plain(_) => self.enable_peer_access(reader),
            Backing::Borrowed(borrowed) => match borrowed.kind {
                Kind::Legacy => self.enable_peer_access(reader),
                Kind::Virtual => {
                    borrowed.extents.iter().try_for_each(|it| allow(it.address, it.bytes))
                }
                Kind::Other => {
                    let (peer, why) = (self.owner, Why::Pool.text().to_owned());
                    Err(Error::PrivateMemory { peer, why })
                }
            },
        }
    }

    /// Once for all memory of two contexts that is not mapped; the reader's is current.
    fn enable_peer_access(&self, reader: &Context) -> Result<(), Error> {
        // SAFETY: both contexts are retained by who holds them.
        let code = unsafe { (reader.driver.ctx_enable_peer_access)(self.context.raw(), 0) };
        match code {
            sys::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => reader.check("cuCtxEnablePeerAccess", code),
        }
    }
}

impl Handover for Registration {
    fn descriptors(&self) -> Option<u32> {
        match self.exported.get()? {
            Exported::Private(_) => None,
            // Nothing to hand over, but the asker learns that the memory lives.
            Exported::Nothing | Exported::Ipc { .. } => Some(0),
            Exported::Segments { handles, .. } => u32::try_from(handles.len()).ok(),
            Exported::Host { .. } => Some(1),
        }
    }

    fn descriptor(&self, index: u32) -> Result<OwnedFd, String> {
        let host = match &self.backing {
            Backing::Host(pinned) => Some(pinned.fd()),
            Backing::Adopted(adopted) => adopted.fd(),
            _ => None,
        };
        if let Some(fd) = host {
            return fd.try_clone_to_owned().map_err(|error| {
                format!("cannot duplicate the descriptor of the memory: {error}")
            });
        }
        let Some(Exported::Segments { handles, .. }) = self.exported.get() else {
            return Err("the memory has no descriptors".to_owned());
        };
        let handle = handles.get(index as usize).ok_or("there is no such segment")?;
        let _current = self.context.enter_relaxed().map_err(|error| error.to_string())?;
        handle.export_fd().map_err(|error| error.to_string())
    }
}
