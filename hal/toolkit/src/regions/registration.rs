//! Registers device and host memory as regions, and exports it to other processes.
//!
//! A span of the caller may begin anywhere inside its allocation, so the start of the allocation is
//! looked up. Memory of the vendor's plain allocator is one allocation with an IPC handle. Mapped
//! memory, such as PyTorch's expandable segments, consists of several allocations one after the
//! other, each with its own handle. Memory of a stream-ordered pool has no handle.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use super::allocation::{Mapped, Physical, Plain, allow};
use super::host::{AdoptedHost, HostView, PinnedHost};
use super::key::{Access, PrivateReason};
use crate::Fault;
use crate::deferred_free;
use crate::device::{DevicePtr, Extent, IpcHandle, Pointee, RegionDevice, Vendor};
use crate::handover::Handover;
use crate::mapping::LengthGuard;
use peerlane_hal::{DynError, Rank, Role};

#[derive(Debug)]
pub(super) enum Backing<D: RegionDevice> {
    Mapped(Mapped<D>),
    Plain(Plain<D>),
    /// Host memory that Peerlane allocated.
    Host(PinnedHost<D>),
    Borrowed(Borrowed),
    /// Host memory that the caller allocated.
    Adopted(AdoptedHost),
    Nothing,
}

#[derive(Debug)]
enum Exported<D: RegionDevice> {
    Nothing,
    Private(PrivateReason),
    /// Physical memory that is exported as file descriptors; the region begins `head` bytes into
    /// the first segment.
    Segments {
        head: u64,
        segments: Vec<Physical<D>>,
    },
    /// An allocation with an IPC handle; the region begins `head` bytes into it.
    Ipc {
        head: u64,
        handle: IpcHandle,
    },
    /// Host memory in a file; the region begins `head` bytes into it.
    Host {
        head: u64,
        guard: LengthGuard,
    },
}

impl<D: RegionDevice> Exported<D> {
    const ALLOCATED_ON_HOST: Self = Self::Host { head: 0, guard: LengthGuard::Allocated };
}

/// Registered memory, which importers of the same process share.
#[derive(Debug)]
pub(super) struct Registration<D: RegionDevice> {
    pub(super) context: Arc<D>,
    pub(super) address: DevicePtr,
    pub(super) bytes: u64,
    pub(super) owner: Rank,
    pub(super) role: Role,
    backing: Backing<D>,
    /// The handle for other processes, created by the first export, because memory that is only a
    /// source of puts is never exported.
    exported: OnceLock<Exported<D>>,
}

impl<D: RegionDevice> Registration<D> {
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
            let segment = match Physical::create(&context, bytes) {
                // Some virtual machines report the feature and refuse the allocation.
                Err(error) if D::is_refusal(&error) && !strict => None,
                created => Some(created?),
            };
            if let Some(segment) = segment {
                let segments = vec![segment];
                let mapped = Mapped::map(&context, &segments)?;
                let address = mapped.address();
                let exported = OnceLock::from(Exported::Segments { head: 0, segments });
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

    pub(super) fn allocate_on_host(
        context: &Arc<D>,
        bytes: u64,
        owner: Rank,
        role: Role,
    ) -> Result<Self, D::Error> {
        let pinned = PinnedHost::create(context, bytes, owner)?;
        let (context, address) = (Arc::clone(context), pinned.view().address);
        let (backing, exported) =
            (Backing::Host(pinned), OnceLock::from(Exported::ALLOCATED_ON_HOST));
        Ok(Self { context, address, bytes, owner, role, backing, exported })
    }

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

    pub(super) fn adopt(
        context: &Arc<D>,
        adopted: AdoptedHost,
        bytes: u64,
        owner: Rank,
        role: Role,
    ) -> Self {
        let (context, address, exported) =
            (Arc::clone(context), adopted.view().address, OnceLock::new());
        let backing = Backing::Adopted(adopted);
        Self { context, address, bytes, owner, role, backing, exported }
    }

    /// Returns the number of bytes that the driver allocated for the region, which may exceed its
    /// length.
    pub(super) fn allocated_bytes(&self) -> u64 {
        match &self.backing {
            Backing::Mapped(mapped) => mapped.bytes(),
            _ => self.bytes,
        }
    }

    pub(super) fn host(&self) -> Option<HostView> {
        match &self.backing {
            Backing::Host(pinned) => Some(pinned.view()),
            Backing::Adopted(adopted) => Some(adopted.view()),
            _ => None,
        }
    }

    /// Lets another region reuse the memory after this registration is dropped, if it is host
    /// memory of the toolkit.
    ///
    /// # Safety
    /// No peer writes to the memory any more.
    pub(super) unsafe fn allow_reuse(&self) {
        if let Backing::Host(pinned) = &self.backing {
            // SAFETY: the caller guarantees that no peer writes to the memory any more.
            unsafe { pinned.allow_reuse() };
        }
    }

    pub(super) fn words(&self) -> Option<&[AtomicU64]> {
        let base = self.host().filter(|_| self.role == Role::Flags)?.base.as_ptr().cast();
        let count = self.bytes as usize / size_of::<u64>();
        // SAFETY: the region is aligned (`Memory::register` checks it, and a `Mapping` consists of
        // pages), lives as long as `self`, and flags are accessed as atomics only.
        Some(unsafe { std::slice::from_raw_parts(base, count) })
    }

    /// Exports the memory and returns how peers access it. From now on, other processes can request
    /// it.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub(super) fn export(&self) -> Result<Access, D::Error> {
        if self.exported.get().is_none() {
            let exported = self.make_exported()?;
            // Two concurrent exports have the same result.
            let _ = self.exported.set(exported);
        }
        Ok(match self.exported.get() {
            None | Some(Exported::Nothing) => Access::Nothing,
            Some(Exported::Private(why)) => Access::Private(*why),
            Some(Exported::Segments { head, segments }) => {
                let segments = segments.iter().map(Physical::bytes).collect();
                Access::Segments { head: *head, segments }
            }
            Some(Exported::Ipc { head, handle }) => Access::Ipc { head: *head, handle: *handle },
            Some(Exported::Host { head, guard }) => Access::Host { head: *head, guard: *guard },
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
            // Exported when it was allocated.
            Backing::Mapped(_) => Ok(Exported::Private(PrivateReason::NoHandle)),
            Backing::Host(_) => Ok(Exported::ALLOCATED_ON_HOST),
            Backing::Adopted(adopted) => Ok(match adopted.span() {
                Some(span) => Exported::Host { head: span.head, guard: span.guard() },
                None => Exported::Private(PrivateReason::Host),
            }),
            Backing::Plain(plain) => ipc(plain.address()),
            Backing::Borrowed(borrowed) => match borrowed.kind {
                AllocationKind::Plain => ipc(borrowed.extents[0].address),
                AllocationKind::Other => Ok(Exported::Private(PrivateReason::Pool)),
                AllocationKind::Virtual => self.export_segments(borrowed),
            },
        }
    }

    fn export_segments(&self, borrowed: &Borrowed) -> Result<Exported<D>, D::Error> {
        let mut segments = Vec::with_capacity(borrowed.extents.len());
        for extent in &borrowed.extents {
            match Physical::retain(&self.context, *extent)? {
                Some(segment) if segment.is_exportable()? => segments.push(segment),
                _ => return Ok(Exported::Private(PrivateReason::NoHandle)),
            }
        }
        let head = self.address - borrowed.extents[0].address;
        Ok(Exported::Segments { head, segments })
    }

    pub(super) fn permit(&self, reader: &D) -> Result<DevicePtr, D::Error> {
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
            // Host memory is accessible to all devices.
            Backing::Nothing | Backing::Host(_) | Backing::Adopted(_) => Ok(()),
            Backing::Mapped(mapped) => allow(mapped.address(), mapped.bytes()),
            Backing::Plain(_) => reader.enable_peer(&self.context),
            Backing::Borrowed(borrowed) => match borrowed.kind {
                AllocationKind::Plain => reader.enable_peer(&self.context),
                AllocationKind::Virtual => {
                    borrowed.extents.iter().try_for_each(|it| allow(it.address, it.bytes))
                }
                AllocationKind::Other => {
                    let (peer, why) =
                        (self.owner, PrivateReason::Pool.text::<D::Vendor>().to_owned());
                    Err(Fault::PrivateMemory { peer, why }.into())
                }
            },
        }
    }
}

impl<D: RegionDevice> Drop for Registration<D> {
    fn drop(&mut self) {
        // The caller's memory is unregistered before the caller can free it; memory that was
        // allocated here can be freed later.
        let allocated_here = matches!(self.backing, Backing::Plain(_) | Backing::Host(_));
        if allocated_here && self.context.frees_wait() {
            let backing = std::mem::replace(&mut self.backing, Backing::Nothing);
            deferred_free::drop_later(&self.context, backing);
        }
    }
}

impl<D: RegionDevice> Handover for Registration<D> {
    fn descriptors(&self) -> Option<u32> {
        match self.exported.get()? {
            Exported::Private(_) => None,
            // No descriptor is needed, but the importer learns that the memory is alive.
            Exported::Nothing | Exported::Ipc { .. } => Some(0),
            Exported::Segments { segments, .. } => u32::try_from(segments.len()).ok(),
            Exported::Host { .. } => Some(1),
        }
    }

    fn descriptor(&self, index: u32) -> Result<OwnedFd, DynError> {
        let host = match &self.backing {
            Backing::Host(pinned) => Some(pinned.fd()),
            Backing::Adopted(adopted) => adopted.fd(),
            _ => None,
        };
        // A region of host memory is in one file.
        if let Some(fd) = host {
            let what = "cannot duplicate the file descriptor of the memory";
            let failed = |error| DynError::new(Fault::io(what)(error));
            return fd.try_clone_to_owned().map_err(failed);
        }

        let Some(Exported::Segments { segments, .. }) = self.exported.get() else {
            let text = "the memory has no file descriptors that a peer can map";
            return Err(DynError::new(Fault::Argument(text.to_owned())));
        };
        let Some(segment) = segments.get(index as usize) else {
            let text = "a peer asked for a segment that the memory does not have";
            return Err(DynError::new(Fault::Argument(text.to_owned())));
        };

        let _current = self.context.enter_relaxed().map_err(DynError::new)?;
        segment.export().map_err(DynError::new)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AllocationKind {
    Plain,
    Virtual,
    /// A stream-ordered pool, or an allocator that is newer than this crate.
    Other,
}

/// The allocations that a span of the caller's device memory covers, at least one, in address
/// order.
#[derive(Debug)]
pub(super) struct Borrowed {
    pub(super) kind: AllocationKind,
    pub(super) extents: Vec<Extent>,
}

#[derive(Clone, Copy, Debug)]
struct Span {
    address: DevicePtr,
    bytes: u64,
}

impl Span {
    fn refuse<T>(self, why: &str) -> Result<T, Fault> {
        let Self { address, bytes } = self;
        Err(Fault::Argument(format!("cannot register {bytes} bytes at {address:#x}: {why}")))
    }
}

/// Finds the allocations that hold `address..address + bytes`, where `bytes` is at least 1.
///
/// # Errors
/// Returns [`Fault::Argument`] if the span is not memory of this device or leaves its allocation.
pub(super) fn inspect<D: RegionDevice>(
    context: &Arc<D>,
    address: DevicePtr,
    bytes: u64,
) -> Result<Borrowed, D::Error> {
    let span = Span { address, bytes };
    let Some(end) = address.checked_add(bytes) else {
        return Ok(span.refuse("the end exceeds the 64-bit address space")?);
    };
    check_device_memory(&**context, span)?;

    let Some(first) = context.extent(address)? else {
        return Ok(span.refuse(
            "the driver knows no allocation at this address; check that the memory was not freed",
        )?);
    };
    let kind = kind(context, first)?;

    // Only mapped memory goes on in another allocation, which begins where the last one ends.
    let mut extents = vec![first];
    let mut reached = first.end();
    while reached < end {
        let next = match kind {
            AllocationKind::Virtual => {
                context.extent(reached)?.filter(|next| next.address == reached)
            }
            AllocationKind::Plain | AllocationKind::Other => None,
        };
        let Some(next) = next.filter(|next| next.bytes > 0) else {
            let first = first.address;
            return Ok(span.refuse(&format!(
                "they end at {end:#x}, but the allocation at {first:#x} ends at {reached:#x}"
            ))?);
        };

        if self::kind(context, next)? != AllocationKind::Virtual {
            let why = format!(
                "the memory from {reached:#x} on was allocated by another kind of allocator, \
                 expected one kind for all bytes"
            );
            return Ok(span.refuse(&why)?);
        }

        reached = next.end();
        extents.push(next);
    }
    Ok(Borrowed { kind, extents })
}

/// Checks that the driver knows the first byte of a span as memory of this device.
fn check_device_memory<D: RegionDevice>(context: &D, span: Span) -> Result<(), D::Error> {
    let refuse = |why: &str| Ok(span.refuse(why)?);
    match context.pointee(span.address)? {
        Pointee::Device(Some(number)) if number == context.device() => Ok(()),
        Pointee::Device(Some(number)) => {
            let expected = context.label();
            refuse(&format!("the memory belongs to device {number}, expected {expected}"))
        }

        Pointee::Device(None) => refuse("the driver does not report the device of the memory"),
        Pointee::Host => refuse("the memory is host memory, expected device memory"),
        Pointee::Managed => refuse(&format!(
            "the memory is managed memory, which the driver migrates; expected memory of {}",
            D::Vendor::ALLOCATOR
        )),
        Pointee::Other(kind) => {
            refuse(&format!("the memory has the type {kind}, expected device memory"))
        }
        Pointee::Unknown => refuse(
            "the driver does not know this address, which is host memory or was freed; expected \
             device memory",
        ),
    }
}

fn kind<D: RegionDevice>(context: &Arc<D>, extent: Extent) -> Result<AllocationKind, D::Error> {
    if context.has_ipc_handle(extent.address)? {
        return Ok(AllocationKind::Plain);
    }
    let physical = Physical::retain(context, extent)?;
    Ok(if physical.is_some() { AllocationKind::Virtual } else { AllocationKind::Other })
}
