//! A registration: memory that has a generation, and how it leaves its process.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use super::adopted::Adopted;
use super::borrowed::{Borrowed, Kind, inspect};
use super::device::RegionDevice;
use super::key::{Reach, Why};
use super::mapped::{Mapped, allow};
use super::physical::Physical;
use super::pinned::{HostView, Pinned};
use super::plain::Plain;
use crate::device::{DevicePtr, Fault, IpcHandle};
use crate::handover::Handover;
use crate::retire;
use peerlane_hal::Rank;
use peerlane_hal::Role;

/// Memory behind a registration.
#[derive(Debug)]
pub(super) enum Backing<D: RegionDevice> {
    /// Allocated here, as virtual memory.
    Mapped(Mapped<D>),
    /// Allocated here, where there is no virtual memory.
    Plain(Plain<D>),
    /// Allocated here, on the host.
    Host(Pinned<D>),
    /// The caller's own, of a device.
    Borrowed(Borrowed),
    /// The caller's own, of the host.
    Adopted(Adopted),
    /// No bytes at all.
    Nothing,
}

/// What another process opens.
#[derive(Debug)]
enum Exported<D: RegionDevice> {
    Nothing,
    Private(Why),
    /// Physical memory; the region begins `head` bytes into the first segment.
    Segments {
        head: u64,
        parts: Vec<Physical<D>>,
    },
    /// An allocation; the region begins `head` bytes into it.
    Ipc {
        head: u64,
        handle: IpcHandle,
    },
    /// Memory of the host; the region begins `head` bytes into the descriptor.
    Host {
        head: u64,
    },
}

/// One registration; importers in this process share it.
#[derive(Debug)]
pub(super) struct Registration<D: RegionDevice> {
    pub(super) context: Arc<D>,
    pub(super) address: DevicePtr,
    pub(super) bytes: u64,
    pub(super) owner: Rank,
    pub(super) role: Role,
    backing: Backing<D>,
    /// Filled by the first export: memory that is only put from never needs it.
    exported: OnceLock<Exported<D>>,
}

impl<D: RegionDevice> Registration<D> {
    /// Allocates memory, exportable as a descriptor where the device has virtual memory.
    pub(super) fn allocate(
        context: &Arc<D>,
        bytes: u64,
        owner: Rank,
        role: Role,
        strict: bool,
    ) -> Result<Self, D::Error> {
        let context = Arc::clone(context);
        let own_flags = role == Role::Flags && context.has_flag_memory();
        if !own_flags && context.has_virtual_memory() {
            let part = match Physical::create(&context, bytes) {
                // The attribute said yes and the deed was refused, as in some virtual machines.
                Err(error) if D::is_refusal(&error) && !strict => None,
                created => Some(created?),
            };
            if let Some(part) = part {
                let parts = vec![part];
                let mapped = Mapped::map(&context, &parts)?;
                let address = mapped.address();
                let exported = OnceLock::from(Exported::Segments { head: 0, parts });
                let backing = Backing::Mapped(mapped);
                return Ok(Self { context, address, bytes, owner, role, backing, exported });
            }
        }
        let plain = match own_flags {
            true => Plain::allocate_flags(&context, bytes)?,
            false => Plain::allocate(&context, bytes)?,
        };
        let address = plain.address();
        let (backing, exported) = (Backing::Plain(plain), OnceLock::new());
        Ok(Self { context, address, bytes, owner, role, backing, exported })
    }

    /// Allocates memory of the host, for peers that do not reach this device.
    pub(super) fn allocate_on_host(
        context: &Arc<D>,
        bytes: u64,
        owner: Rank,
        role: Role,
    ) -> Result<Self, D::Error> {
        let pinned = Pinned::create(context, bytes, owner)?;
        let (context, address) = (Arc::clone(context), pinned.view().address);
        let (backing, exported) =
            (Backing::Host(pinned), OnceLock::from(Exported::Host { head: 0 }));
        Ok(Self { context, address, bytes, owner, role, backing, exported })
    }

    /// Registers the caller's memory at `address`.
    pub(super) fn borrow(
        context: &Arc<D>,
        address: DevicePtr,
        bytes: u64,
        owner: Rank,
        role: Role,
    ) -> Result<Self, D::Error> {
        let backing = match bytes {
            0 => Backing::Nothing,
            _ => Backing::Borrowed(inspect(context, address, bytes)?),
        };
        if role == Role::Flags && bytes > 0 {
            context.check_flags(address)?;
        }
        let (context, exported) = (Arc::clone(context), OnceLock::new());
        Ok(Self { context, address, bytes, owner, role, backing, exported })
    }

    /// Registers the caller's host memory.
    pub(super) fn adopt(
        context: &Arc<D>,
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
    pub(super) fn export(&self) -> Result<Reach, D::Error> {
        if self.exported.get().is_none() {
            let exported = self.make_exported()?;
            // Two at once come to the same.
            let _ = self.exported.set(exported);
        }
        Ok(match self.exported.get() {
            None | Some(Exported::Nothing) => Reach::Nothing,
            Some(Exported::Private(why)) => Reach::Private(*why),
            Some(Exported::Segments { head, parts }) => {
                let segments = parts.iter().map(Physical::bytes).collect();
                Reach::Segments { head: *head, segments }
            }
            Some(Exported::Ipc { head, handle }) => Reach::Ipc { head: *head, handle: *handle },
            Some(Exported::Host { head }) => Reach::Host { head: *head },
        })
    }

    fn make_exported(&self) -> Result<Exported<D>, D::Error> {
        let _current = self.context.enter_relaxed()?;
        let ipc = |base| -> Result<Exported<D>, D::Error> {
            let handle = self.context.ipc_handle(base)?;
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
                Kind::Plain => ipc(borrowed.extents[0].address),
                Kind::Other => Ok(Exported::Private(Why::Pool)),
                Kind::Virtual => self.export_segments(borrowed),
            },
        }
    }

    fn export_segments(&self, borrowed: &Borrowed) -> Result<Exported<D>, D::Error> {
        let mut parts = Vec::with_capacity(borrowed.extents.len());
        for extent in &borrowed.extents {
            match Physical::retain(&self.context, *extent)? {
                Some(part) if part.is_exportable()? => parts.push(part),
                _ => return Ok(Exported::Private(Why::NoHandle)),
            }
        }
        let head = self.address - borrowed.extents[0].address;
        Ok(Exported::Segments { head, parts })
    }

    /// Lets the device of another rank of this process reach the memory; where it does.
    pub(super) fn allow(&self, reader: &D) -> Result<DevicePtr, D::Error> {
        if self.context.device() == reader.device() {
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

    fn allow_device(&self, reader: &D) -> Result<(), D::Error> {
        let allow = |address, bytes| allow(reader, address, bytes);
        match &self.backing {
            // The host's memory is there for all devices.
            Backing::Nothing | Backing::Host(_) | Backing::Adopted(_) => Ok(()),
            Backing::Mapped(mapped) => allow(mapped.address(), mapped.bytes()),
            Backing::Plain(_) => reader.enable_peer(&self.context),
            Backing::Borrowed(borrowed) => match borrowed.kind {
                Kind::Plain => reader.enable_peer(&self.context),
                Kind::Virtual => {
                    borrowed.extents.iter().try_for_each(|it| allow(it.address, it.bytes))
                }
                Kind::Other => {
                    let (peer, why) = (self.owner, Why::Pool.text::<D::Vendor>().to_owned());
                    Err(Fault::PrivateMemory { peer, why }.into())
                }
            },
        }
    }
}

impl<D: RegionDevice> Drop for Registration<D> {
    fn drop(&mut self) {
        // The caller's own memory is given up before it can be gone; ours nobody misses.
        let ours = matches!(self.backing, Backing::Plain(_) | Backing::Host(_));
        if ours && self.context.frees_wait() {
            let backing = std::mem::replace(&mut self.backing, Backing::Nothing);
            retire::later(&self.context, backing);
        }
    }
}

impl<D: RegionDevice> Handover for Registration<D> {
    fn descriptors(&self) -> Option<u32> {
        match self.exported.get()? {
            Exported::Private(_) => None,
            // Nothing to hand over, but the asker learns that the memory lives.
            Exported::Nothing | Exported::Ipc { .. } => Some(0),
            Exported::Segments { parts, .. } => u32::try_from(parts.len()).ok(),
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
        let Some(Exported::Segments { parts, .. }) = self.exported.get() else {
            return Err("the memory has no descriptors".to_owned());
        };
        let part = parts.get(index as usize).ok_or("there is no such segment")?;
        let _current = self.context.enter_relaxed().map_err(|error| error.to_string())?;
        part.export().map_err(|error| error.to_string())
    }
}
