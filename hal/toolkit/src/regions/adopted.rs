//! Memory of the host that the caller owns: flags that several fabrics of a rank share, and what
//! another fabric of the process has allocated on the host.
//!
//! The driver takes whole pages, and takes none twice, so that registrations of this process share
//! them: memory of one mapping is one piece for the driver, and what the driver knows already, such as
//! memory of `cudaMallocHost` or `hipHostMalloc`, is used as it is.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::device::{Pointee, RegionDevice, backend};
use super::pinned::{HostView, device_pointer};
use crate::device::{DevicePtr, Fault};
use crate::mapping::{self, Place};
use peerlane_hal::BackendId;
use peerlane_hal::Role;

const PAGE_BYTES: usize = 4096;

/// Host memory that the driver knows, as long as this lives.
#[derive(Debug)]
pub(super) struct Adopted {
    view: HostView,
    /// Where it is in a memfd of this process, if it is in one.
    place: Option<Place>,
    /// The start of what the driver was told; where it was told by somebody else, of the region.
    known: NonNull<u8>,
    _pages: Option<Pages>,
}

// SAFETY: it names memory; who may touch which byte when is the contract of the ops.
unsafe impl Send for Adopted {}
// SAFETY: as above.
unsafe impl Sync for Adopted {}

impl Adopted {
    /// Takes host memory at `base`; `None` if it is of a device, or nothing that is taken here. The
    /// context is current.
    pub(super) fn find<D: RegionDevice>(
        context: &Arc<D>,
        base: NonNull<u8>,
        bytes: u64,
        role: Role,
    ) -> Result<Option<Self>, D::Error> {
        let address = base.as_ptr() as u64;
        let place = mapping::find(base, bytes);
        if bytes == 0 || (role == Role::Data && place.is_none()) {
            return Ok(None);
        }
        let Some(last) = address.checked_add(bytes - 1) else { return Ok(None) };
        // Nobody of this process registers or gives back meanwhile.
        let mut all = registered();
        let backend = backend::<D>();
        let mut pages = Pages::share(&mut all, backend, base, bytes);
        if pages.is_none() {
            match (context.pointee(address)?, context.pointee(last)?) {
                // By somebody else, who keeps it as the caller has promised.
                (Pointee::Host, Pointee::Host) => {}
                (Pointee::Unknown, Pointee::Unknown) => {
                    pages = Some(Pages::register(&mut all, context, base, bytes)?);
                }
                (Pointee::Device(_) | Pointee::Managed, _) => return Ok(None),
                _ => {
                    let text = format!(
                        "cannot register {bytes} bytes at {address:#x}: the driver knows only a part \
                         of them as host memory"
                    );
                    return Err(Fault::Argument(text).into());
                }
            }
        }
        drop(all);
        let start = pages.as_ref().map(|pages| pages.start);
        let start = start.or(place.as_ref().map(|place| place.mapping_base)).unwrap_or(base);
        let adopted =
            Self { view: HostView { base, address: 0 }, place, known: start, _pages: pages };
        let address = adopted.address_for(&**context)?;
        Ok(Some(Self { view: HostView { base, address }, ..adopted }))
    }

    pub(super) fn view(&self) -> HostView {
        self.view
    }

    /// Where a device of this process reaches it; that context is current.
    pub(super) fn address_for<D: RegionDevice>(&self, reader: &D) -> Result<DevicePtr, D::Error> {
        let head = self.view.base.as_ptr().addr() - self.known.as_ptr().addr();
        Ok(device_pointer(reader, self.known)? + head as u64)
    }

    /// The bytes of the memfd before the region, where another process can map it.
    pub(super) fn head(&self) -> Option<u64> {
        self.place.as_ref().map(|place| place.head)
    }

    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.place.as_ref().map(Place::fd)
    }
}

/// What this process has registered, by the backend's number and the first page.
static REGISTERED: Mutex<BTreeMap<Start, Shared>> = Mutex::new(BTreeMap::new());

type Start = (u16, usize);
type Registered<'a> = MutexGuard<'a, BTreeMap<Start, Shared>>;

fn registered() -> Registered<'static> {
    REGISTERED.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Shared {
    bytes: usize,
    users: usize,
    /// A [`Known`] of its vendor.
    _known: Box<dyn Send>,
}

/// Pages that a driver knows.
struct Known<D: RegionDevice> {
    context: Arc<D>,
    start: NonNull<u8>,
}

// SAFETY: it names memory, and does not look at it.
unsafe impl<D: RegionDevice> Send for Known<D> {}

impl<D: RegionDevice> Drop for Known<D> {
    fn drop(&mut self) {
        // Failures mean that the device is gone; the pages are the process's own.
        let Ok(_current) = self.context.enter_relaxed() else { return };
        // SAFETY: registered once by `Pages::register`; the last user is gone.
        unsafe { self.context.unregister_host(self.start.cast()) };
    }
}

/// One use of pages that are registered with the driver.
#[derive(Debug)]
struct Pages {
    backend: BackendId,
    start: NonNull<u8>,
}

impl Pages {
    /// Takes part in a registration that holds all of the span.
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

    /// Registers the mapping that holds the span, or its pages.
    fn register<D: RegionDevice>(
        all: &mut Registered<'_>,
        context: &Arc<D>,
        base: NonNull<u8>,
        bytes: u64,
    ) -> Result<Self, D::Error> {
        let (start, length) = match mapping::find(base, bytes) {
            Some(place) => (place.mapping_base, place.mapped_bytes),
            None => {
                let before = base.as_ptr().addr() % PAGE_BYTES;
                let start = NonNull::new(base.as_ptr().wrapping_sub(before)).unwrap_or(base);
                (start, (before + bytes as usize).next_multiple_of(PAGE_BYTES))
            }
        };
        // SAFETY: whole pages around memory that stays allocated while it is registered (the
        // contract of `PeerMemory::register`).
        unsafe { context.register_host(start.cast(), length) }?;
        let known = Known { context: Arc::clone(context), start };
        let backend = backend::<D>();
        let shared = Shared { bytes: length, users: 1, _known: Box::new(known) };
        all.insert((backend.0, start.as_ptr().addr()), shared);
        Ok(Self { backend, start })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let mut all = registered();
        let start = (self.backend.0, self.start.as_ptr().addr());
        let Some(shared) = all.get_mut(&start) else { return };
        shared.users -= 1;
        if shared.users == 0 {
            // Given back under the lock, so that nobody registers the pages meanwhile.
            all.remove(&start);
        }
    }
}
