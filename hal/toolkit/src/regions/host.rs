//! Manages host memory that every process of the host can map and every device can access.
//!
//! Memory that is allocated here is a sealed memfd, mapped and registered with the driver. It
//! connects devices that do not reach each other: a put goes over PCI Express to the host, and the
//! reader fetches it from there.
//!
//! Host memory of the caller is registered where it is: flags that several fabrics of a rank share,
//! and memory that another fabric of the process has allocated. The driver takes whole pages and
//! takes none twice, so registrations of this process share them: the memory of one mapping is one
//! registration, and memory that the driver knows already, such as that of `cudaMallocHost` or
//! `hipHostMalloc`, is used as it is.
//!
//! # Spare memory
//! Flags of operations that can be recorded into graphs are in host memory, so that the host can
//! release a graph. To unregister them waits for every stream of the context, including one that
//! waits for a peer, and holds up the calls that would release that stream. So a dropped region
//! leaves short memory registered, for the next region of that length, or for the next import of
//! the same memory of the peer.

use std::any::Any;
use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Fault;
use crate::device::{DevicePtr, Pointee, RegionDevice, backend_id};
use crate::mapping::{self, LengthGuard, MappedSpan, Mapping};
use peerlane_hal::{BackendId, Rank, Role};

#[derive(Clone, Copy, Debug)]
pub(super) struct HostView {
    pub(super) base: NonNull<u8>,
    pub(super) address: DevicePtr,
}

impl HostView {
    pub(super) fn is_unified(self) -> bool {
        self.address == self.base.as_ptr() as DevicePtr
    }

    /// Copies bytes to the memory, `offset` bytes after its begin.
    ///
    /// # Safety
    /// The bytes to write are inside the memory, and nobody else accesses them.
    pub(super) unsafe fn write(self, offset: u64, bytes: &[u8]) {
        let to = self.base.as_ptr().wrapping_add(offset as usize);
        // SAFETY: the contract of this function.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Copies bytes from the memory, `offset` bytes after its begin.
    ///
    /// # Safety
    /// The bytes to read are inside the memory, and nobody writes them.
    pub(super) unsafe fn read(self, offset: u64, bytes: &mut [u8]) {
        let from = self.base.as_ptr().wrapping_add(offset as usize);
        // SAFETY: the contract of this function.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
    }
}

pub(super) fn device_pointer<D: RegionDevice>(
    reader: &D,
    start: NonNull<u8>,
) -> Result<DevicePtr, D::Error> {
    // SAFETY: registered for all devices (the callers' duty).
    unsafe { reader.host_pointer(start.cast()) }
}

/// Memory of at most this many bytes stays pinned after its region is dropped, for the next region.
const SPARE_BYTES_MAX: usize = 64 << 10;
/// The largest number of pinned mappings that no region uses; with more, the oldest is unpinned.
const SPARES_MAX: usize = 64;

/// The pinned mappings that no region uses and that a new region can take, the oldest first.
static SPARES: Mutex<Vec<Spare>> = Mutex::new(Vec::new());

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Own(u64),
    /// A memfd of another process, identified by its device and inode number, and the offset and
    /// length of the region in it.
    Peer((u64, u64), (u64, u64)),
    /// A file of another process that its caller created. It is never a spare: after its release
    /// the caller may remove its pages, which the device would still access.
    CallerOfPeer,
}

struct Spare {
    source: Source,
    backend: BackendId,
    /// The numbers of the context and of the driver's allocation, by which a destroyed context is
    /// detected.
    numbers: (usize, u64),
    pinned: Box<dyn Any + Send>,
}

#[derive(Debug)]
struct RegisteredMapping<D: RegionDevice> {
    context: Arc<D>,
    start: DevicePtr,
    mapping: Mapping,
}

impl<D: RegionDevice> Drop for RegisteredMapping<D> {
    fn drop(&mut self) {
        // An error means that the device is lost; the pages belong to the process.
        let Ok(_current) = self.context.enter_relaxed() else { return };
        // SAFETY: registered once by `PinnedHost::register`, and no longer in use: the region is
        // dropped, and the contract of `submit` keeps it until its tickets are complete.
        unsafe { self.context.unregister_host(self.mapping.base().cast()) };
    }
}

#[derive(Debug)]
pub(super) struct PinnedHost<D: RegionDevice> {
    source: Source,
    /// `None` only while the region is being dropped.
    memory: Option<RegisteredMapping<D>>,
    begin: usize,
    reusable: AtomicBool,
}

impl<D: RegionDevice> PinnedHost<D> {
    pub(super) fn create(context: &Arc<D>, bytes: u64, owner: Rank) -> Result<Self, D::Error> {
        let source = Source::Own(bytes.next_multiple_of(PAGE_BYTES as u64));
        if let Some(spare) = take_spare::<D>(context, source) {
            let (base, length) = (spare.mapping.base(), spare.mapping.mapped_bytes());
            // SAFETY: the mapping has that length, no region uses it, and no peer writes to it
            // (`allow_reuse`).
            unsafe { base.write_bytes(0, length) };
            return Ok(Self::new(source, spare, 0));
        }
        let mapping = Mapping::create(bytes).map_err(Fault::of_mapping(owner))?;
        Self::register(context, mapping, 0, source)
    }

    /// Maps and pins a part of a peer's file, which must hold the `bytes` bytes that begin `head`
    /// bytes after its start.
    pub(super) fn import(
        context: &Arc<D>,
        fd: OwnedFd,
        (head, bytes): (u64, u64),
        guard: LengthGuard,
        peer: Rank,
    ) -> Result<Self, D::Error> {
        let file = mapping::file_id(&fd).map_err(Fault::of_mapping(peer))?;
        let source = match guard {
            LengthGuard::Allocated => Source::Peer(file, (head, bytes)),
            LengthGuard::Sealed | LengthGuard::Promised => Source::CallerOfPeer,
        };
        if let Some(spare) = take_spare::<D>(context, source) {
            let begin = (head % PAGE_BYTES as u64) as usize;
            return Ok(Self::new(source, spare, begin));
        }

        let imported = Mapping::import(fd, head, bytes, guard).map_err(Fault::of_mapping(peer));
        let (mapping, begin) = imported?;
        Self::register(context, mapping, begin, source)
    }

    fn register(
        context: &Arc<D>,
        mapping: Mapping,
        begin: usize,
        source: Source,
    ) -> Result<Self, D::Error> {
        // SAFETY: whole pages, which stay mapped until they are unregistered.
        unsafe { context.register_host(mapping.base().cast(), mapping.mapped_bytes()) }?;
        let context = Arc::clone(context);
        let mut memory = RegisteredMapping { context, start: 0, mapping };
        memory.start = device_pointer(&*memory.context, memory.mapping.base())?;
        Ok(Self::new(source, memory, begin))
    }

    fn new(source: Source, memory: RegisteredMapping<D>, begin: usize) -> Self {
        // An import changes nothing in the memory of its peer.
        let reusable = AtomicBool::new(matches!(source, Source::Peer(..)));
        Self { source, memory: Some(memory), begin, reusable }
    }

    /// Lets another region reuse the pinned memory after this region is dropped.
    ///
    /// # Safety
    /// No peer writes to the memory any more.
    pub(super) unsafe fn allow_reuse(&self) {
        self.reusable.store(true, Ordering::Relaxed);
    }

    fn memory(&self) -> &RegisteredMapping<D> {
        self.memory.as_ref().expect("only a drop takes the memory")
    }

    pub(super) fn address_for(&self, reader: &D) -> Result<DevicePtr, D::Error> {
        Ok(device_pointer(reader, self.memory().mapping.base())? + self.begin as u64)
    }

    pub(super) fn view(&self) -> HostView {
        let RegisteredMapping { start, mapping, .. } = self.memory();
        let base = mapping.base().as_ptr().wrapping_add(self.begin);
        let base = NonNull::new(base).expect("a mapping does not wrap around");
        HostView { base, address: start + self.begin as u64 }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.memory().mapping.fd()
    }
}

impl<D: RegionDevice> Drop for PinnedHost<D> {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        if *self.reusable.get_mut() && memory.mapping.mapped_bytes() <= SPARE_BYTES_MAX {
            leave_spare(memory, self.source);
        }
    }
}

fn spares() -> MutexGuard<'static, Vec<Spare>> {
    SPARES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn take_spare<D: RegionDevice>(context: &D, source: Source) -> Option<RegisteredMapping<D>> {
    let mut all = spares();
    let fits = |spare: &Spare| {
        let place = (spare.source, spare.backend, spare.numbers.0);
        place == (source, backend_id::<D>(), context.id())
    };
    let spare = all.iter().rposition(fits).map(|index| all.remove(index))?;
    drop(all);
    let memory = spare.pinned.downcast::<RegisteredMapping<D>>().ok()?;
    // If the context was destroyed meanwhile, the registration is gone.
    let exists = context.allocation_number(memory.start) == Some(spare.numbers.1);
    exists.then_some(*memory)
}

fn leave_spare<D: RegionDevice>(memory: RegisteredMapping<D>, source: Source) {
    let Ok(current) = memory.context.enter_relaxed() else { return };
    let number = memory.context.allocation_number(memory.start);
    drop(current);
    let Some(number) = number else { return };
    let (backend, numbers) = (backend_id::<D>(), (memory.context.id(), number));
    let mut all = spares();
    all.push(Spare { source, backend, numbers, pinned: Box::new(memory) });
    let oldest = (all.len() > SPARES_MAX).then(|| all.remove(0));
    drop(all);
    drop(oldest);
}

const PAGE_BYTES: usize = 4096;

#[derive(Debug)]
pub(super) struct AdoptedHost {
    view: HostView,
    known: NonNull<u8>,
    /// Dropped before `span`, because pages are unregistered before they are unmapped.
    _pages: Option<RegisteredPages>,
    /// The location in a file that this process has mapped, or `None` if the memory is in none.
    span: Option<MappedSpan>,
}

// SAFETY: it only names memory. The contract of the ops governs concurrent access.
unsafe impl Send for AdoptedHost {}
// SAFETY: as above.
unsafe impl Sync for AdoptedHost {}

impl AdoptedHost {
    /// Pins the caller's host memory at `base`, unless the caller has pinned it already. Returns
    /// `None` for device memory and for memory that is not supported here. The context is current.
    ///
    /// # Errors
    /// Returns [`Fault::Argument`] if the driver knows only a part of the span, and the driver's
    /// error.
    pub(super) fn find<D: RegionDevice>(
        context: &Arc<D>,
        base: NonNull<u8>,
        bytes: u64,
        role: Role,
    ) -> Result<Option<Self>, D::Error> {
        let address = base.as_ptr() as u64;
        let span = mapping::find(base, bytes);
        if bytes == 0 || (role == Role::Data && span.is_none()) {
            return Ok(None);
        }
        let Some(last) = address.checked_add(bytes - 1) else { return Ok(None) };
        // The lock keeps other threads of this process from registering or unregistering pages.
        let mut all = registered();
        let backend = backend_id::<D>();
        let mut pages = RegisteredPages::share(&mut all, backend, base, bytes);
        if pages.is_none() {
            match (context.pointee(address)?, context.pointee(last)?) {
                // Registered elsewhere; the caller promised to keep it registered.
                (Pointee::Host, Pointee::Host) => {}
                (Pointee::Unknown, Pointee::Unknown) => {
                    pages = Some(RegisteredPages::register(&mut all, context, base, bytes)?);
                }
                (Pointee::Device(_) | Pointee::Managed, _) => return Ok(None),
                _ => {
                    let text = format!(
                        "cannot register {bytes} bytes at {address:#x}: only a part of them is \
                         page-locked host memory; expected all bytes or none"
                    );
                    return Err(Fault::Argument(text).into());
                }
            }
        }
        drop(all);
        let start = pages.as_ref().map(|pages| pages.start);
        let start = start.or(span.as_ref().map(|span| span.mapping_base)).unwrap_or(base);
        let adopted =
            Self { view: HostView { base, address: 0 }, span, known: start, _pages: pages };
        let address = adopted.address_for(&**context)?;
        Ok(Some(Self { view: HostView { base, address }, ..adopted }))
    }

    pub(super) fn view(&self) -> HostView {
        self.view
    }

    pub(super) fn address_for<D: RegionDevice>(&self, reader: &D) -> Result<DevicePtr, D::Error> {
        let head = self.view.base.as_ptr().addr() - self.known.as_ptr().addr();
        Ok(device_pointer(reader, self.known)? + head as u64)
    }

    pub(super) fn span(&self) -> Option<&MappedSpan> {
        self.span.as_ref()
    }

    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.span.as_ref().map(MappedSpan::fd)
    }
}

/// The host pages that this process has pinned, by the number of the backend and the address of the
/// first page.
static REGISTERED: Mutex<BTreeMap<Start, SharedPages>> = Mutex::new(BTreeMap::new());

type Start = (u16, usize);
type Registered<'a> = MutexGuard<'a, BTreeMap<Start, SharedPages>>;

fn registered() -> Registered<'static> {
    REGISTERED.lock().unwrap_or_else(PoisonError::into_inner)
}

struct SharedPages {
    bytes: usize,
    users: usize,
    /// Keeps the host pages pinned until dropped, as a type-erased [`HostRegistration`].
    _known: Box<dyn Send>,
}

struct HostRegistration<D: RegionDevice> {
    context: Arc<D>,
    start: NonNull<u8>,
}

// SAFETY: it names memory and does not access it.
unsafe impl<D: RegionDevice> Send for HostRegistration<D> {}

impl<D: RegionDevice> Drop for HostRegistration<D> {
    fn drop(&mut self) {
        // An error means that the device is lost; the pages belong to the process.
        let Ok(_current) = self.context.enter_relaxed() else { return };
        // SAFETY: registered once by `RegisteredPages::register`, and the last user is gone.
        unsafe { self.context.unregister_host(self.start.cast()) };
    }
}

/// A reference to pinned pages, which stay pinned until the last reference is dropped.
#[derive(Debug)]
struct RegisteredPages {
    backend: BackendId,
    start: NonNull<u8>,
}

impl RegisteredPages {
    fn share(
        all: &mut Registered<'_>,
        backend: BackendId,
        base: NonNull<u8>,
        bytes: u64,
    ) -> Option<Self> {
        let address = base.as_ptr().addr();
        let (&(_, start), shared) =
            all.range_mut((backend.0, 0)..=(backend.0, address)).next_back()?;
        let end = (address - start).checked_add(usize::try_from(bytes).ok()?)?;
        if end > shared.bytes {
            return None;
        }
        shared.users += 1;
        let before = address - start;
        let start = NonNull::new(base.as_ptr().wrapping_sub(before))?;
        Some(Self { backend, start })
    }

    /// Pins the whole mapping that holds the span, or else only the pages of the span.
    fn register<D: RegionDevice>(
        all: &mut Registered<'_>,
        context: &Arc<D>,
        base: NonNull<u8>,
        bytes: u64,
    ) -> Result<Self, D::Error> {
        let (start, length) = match mapping::find(base, bytes) {
            Some(span) => (span.mapping_base, span.mapped_bytes),
            None => {
                let before = base.as_ptr().addr() % PAGE_BYTES;
                let start = NonNull::new(base.as_ptr().wrapping_sub(before)).unwrap_or(base);
                (start, (before + bytes as usize).next_multiple_of(PAGE_BYTES))
            }
        };
        // SAFETY: whole pages around memory that stays allocated while it is registered (the
        // contract of `PeerMemory::register`).
        unsafe { context.register_host(start.cast(), length) }?;
        let known = HostRegistration { context: Arc::clone(context), start };
        let backend = backend_id::<D>();
        let shared = SharedPages { bytes: length, users: 1, _known: Box::new(known) };
        all.insert((backend.0, start.as_ptr().addr()), shared);
        Ok(Self { backend, start })
    }
}

impl Drop for RegisteredPages {
    fn drop(&mut self) {
        let mut all = registered();
        let start = (self.backend.0, self.start.as_ptr().addr());
        let Some(shared) = all.get_mut(&start) else { return };
        shared.users -= 1;
        if shared.users == 0 {
            // Unregistered under the lock, so that no other thread registers the pages meanwhile.
            all.remove(&start);
        }
    }
}
