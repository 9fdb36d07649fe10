//! Memory of the host that the caller owns: flags that several fabrics of a rank share, and what
//! another fabric of the process has allocated on the host.
//!
//! The driver takes whole pages, and takes none twice, so that registrations of this process share
//! them: memory of one mapping is one piece for the driver, and what the driver knows already, such as
//! memory of `cudaMallocHost`, is used as it is.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use peerlane_hal::Role;
use peerlane_hal::mechanics::mapping::{self, Place};

use super::borrowed::memory_type;
use super::pinned::{HostView, device_pointer};
use crate::device::Context;
use crate::error::Error;
use crate::sys::{self, CUdeviceptr};

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
    pub(super) fn find(
        context: &Arc<Context>,
        base: NonNull<u8>,
        bytes: u64,
        role: Role,
    ) -> Result<Option<Self>, Error> {
        let address = base.as_ptr() as CUdeviceptr;
        let known = |address| Ok::<_, Error>(memory_type(context, address)?.map(|it| it as u32));
        let place = mapping::find(base, bytes);
        if bytes == 0 || (role == Role::Data && place.is_none()) {
            return Ok(None);
        }
        let Some(last) = address.checked_add(bytes - 1) else { return Ok(None) };
        // Nobody of this process registers or gives back meanwhile.
        let mut all = registered();
        let mut pages = Pages::share(&mut all, base, bytes);
        if pages.is_none() {
            match (known(address)?, known(last)?) {
                // By somebody else, who keeps it as the caller has promised.
                (Some(sys::MEMORYTYPE_HOST), Some(sys::MEMORYTYPE_HOST)) => {}
                (None, None) => pages = Some(Pages::register(&mut all, context, base, bytes)?),
                (Some(sys::MEMORYTYPE_DEVICE), _) => return Ok(None),
                _ => {
                    return Err(Error::Argument(format!(
                        "cannot register {bytes} bytes at {address:#x}: the driver knows only a part \
                         of them as host memory"
                    )));
                }
            }
        }
        drop(all);
        let start = pages.as_ref().map(|pages| pages.start);
        let start = start.or(place.as_ref().map(|place| place.mapping_base)).unwrap_or(base);
        let adopted =
            Self { view: HostView { base, address: 0 }, place, known: start, _pages: pages };
        let address = adopted.address_for(context)?;
        Ok(Some(Self { view: HostView { base, address }, ..adopted }))
    }

    pub(super) fn view(&self) -> HostView {
        self.view
    }

    /// Where a device of this process reaches it; that context is current.
    pub(super) fn address_for(&self, reader: &Context) -> Result<CUdeviceptr, Error> {
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

/// What this process has registered, by the first page.
static REGISTERED: Mutex<BTreeMap<usize, Shared>> = Mutex::new(BTreeMap::new());

type Registered<'a> = MutexGuard<'a, BTreeMap<usize, Shared>>;

fn registered() -> Registered<'static> {
    REGISTERED.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct Shared {
    context: Arc<Context>,
    bytes: usize,
    users: usize,
}

/// One use of pages that are registered with the driver.
#[derive(Debug)]
struct Pages {
    start: NonNull<u8>,
}

impl Pages {
    /// Takes part in a registration that holds all of the span.
    fn share(all: &mut Registered<'_>, base: NonNull<u8>, bytes: u64) -> Option<Self> {
        let address = base.as_ptr().addr();
        let (start, shared) = all.range_mut(..=address).next_back()?;
        let end = (address - start).checked_add(usize::try_from(bytes).ok()?)?;
        if end > shared.bytes {
            return None;
        }
        shared.users += 1;
        let before = address - start;
        Some(Self { start: NonNull::new(base.as_ptr().wrapping_sub(before))? })
    }

    /// Registers the mapping that holds the span, or its pages.
    fn register(
        all: &mut Registered<'_>,
        context: &Arc<Context>,
        base: NonNull<u8>,
        bytes: u64,
    ) -> Result<Self, Error> {
        let (start, length) = match mapping::find(base, bytes) {
            Some(place) => (place.mapping_base, place.mapped_bytes),
            None => {
                let before = base.as_ptr().addr() % PAGE_BYTES;
                let start = NonNull::new(base.as_ptr().wrapping_sub(before)).unwrap_or(base);
                (start, (before + bytes as usize).next_multiple_of(PAGE_BYTES))
            }
        };
        let flags = sys::MEMHOSTREGISTER_PORTABLE | sys::MEMHOSTREGISTER_DEVICEMAP;
        let host: *mut c_void = start.as_ptr().cast();
        // SAFETY: whole pages around memory that stays allocated while it is registered (the
        // contract of `PeerMemory::register`).
        let code = unsafe { (context.driver.mem_host_register)(host, length, flags) };
        context.check("cuMemHostRegister_v2", code)?;
        let shared = Shared { context: Arc::clone(context), bytes: length, users: 1 };
        all.insert(start.as_ptr().addr(), shared);
        Ok(Self { start })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let mut all = registered();
        let address = self.start.as_ptr().addr();
        let Some(shared) = all.get_mut(&address) else { return };
        shared.users -= 1;
        if shared.users > 0 {
            return;
        }
        let Some(Shared { context, .. }) = all.remove(&address) else { return };
        // Failures mean that the device is gone; the pages are the process's own.
        let Ok(_current) = context.enter_relaxed() else { return };
        // SAFETY: registered once by `register`; the last user is gone.
        let _ = unsafe { (context.driver.mem_host_unregister)(self.start.as_ptr().cast()) };
    }
}
