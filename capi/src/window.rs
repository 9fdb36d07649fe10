//! Windows: memory of every rank that operations and channels use.

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Mutex;

use peerlane::{Error, Group, Window};

use crate::group::{GROUPS, GroupHandle};
use crate::handle::{Table, clear, lock};
use crate::status::{Failure, Status, call};

/// Registered memory of the same size on every rank.
#[derive(Debug)]
pub struct WindowHandle(());

pub(crate) struct WindowObject {
    /// `None` after the window was released or destroyed.
    window: Mutex<Option<Window<u8>>>,
    /// The handle of the group that the window belongs to.
    group: usize,
}

pub(crate) static WINDOWS: Table<WindowObject> = Table::new("window", 3);

impl WindowObject {
    pub(crate) fn with<R>(
        &self,
        body: impl FnOnce(&Window<u8>) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        let window = lock(&self.window);
        body(window.as_ref().ok_or_else(released)?)
    }

    /// Releases the window. If that fails, the object still has it.
    fn release(&self, group: &mut Group) -> Result<(), Failure> {
        let mut place = lock(&self.window);
        let Some(window) = place.take() else {
            return Err(group.refuse(released().into()).into());
        };
        group.release(window).map_err(|failed| {
            *place = Some(failed.window);
            Failure::from(failed.error)
        })
    }

    /// Takes the window from a handle that is destroyed.
    pub(crate) fn take(&self) -> Option<Window<u8>> {
        lock(&self.window).take()
    }
}

fn released() -> Failure {
    Failure::argument("the window was released")
}

/// Opens a window of a group, and writes its handle to `to`.
///
/// # Safety
/// `to` is NULL or valid for writes.
unsafe fn open<A>(
    group: *mut GroupHandle,
    to: *mut *mut WindowHandle,
    arguments: impl FnOnce(&Group) -> Result<A, Failure>,
    body: impl FnOnce(&mut Group, A) -> Result<Window<u8>, Error>,
) -> Result<(), Failure> {
    // SAFETY: the contract of this function says that `to` is NULL or valid for writes.
    let cleared = unsafe { clear(to, "window") };
    let group = group.addr();
    let checked = |of_group: &Group| {
        cleared?;
        arguments(of_group)
    };
    // The window has its handle before another thread can close the group, which removes the
    // handles of its windows.
    GROUPS.get(group)?.collective(checked, |of_group, arguments| {
        let window = Mutex::new(Some(body(of_group, arguments)?));
        // SAFETY: the contract of this function says that `to` is valid for writes; NULL has been
        // refused.
        unsafe { WINDOWS.store_into(WindowObject { window, group }, to) }
    })
}

/// Drops the windows of a group that has been closed or destroyed, and invalidates their handles.
pub(crate) fn drop_windows(group: usize) {
    for object in WINDOWS.remove_all(|object| object.group == group) {
        drop(object.take());
    }
}

/// Allocates a window of `bytes` bytes on every rank: device memory if the group uses GPUs.
/// Collective.
///
/// # Safety
/// `window` is NULL or points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_window_allocate(
    group: *mut GroupHandle,
    bytes: usize,
    window: *mut *mut WindowHandle,
) -> Status {
    call(|| {
        // SAFETY: the contract of this function says that `window` is NULL or points to a handle.
        unsafe { open(group, window, |_| Ok(()), |group, ()| group.window(bytes)) }
    })
}

/// Opens a window over memory of the caller, such as an arena that `cuMemAlloc` has allocated, of
/// equal size on every rank. Collective.
///
/// The memory must stay allocated until `peerlane_window_release` has returned `PEERLANE_STATUS_OK`
/// on this rank, or until all ranks have destroyed a group that has ended with an error. A release
/// that has failed is not enough, nor is `peerlane_window_destroy`. On the host backend it must be
/// memory that other processes can map, unless the ranks are threads: see
/// `peerlane_window_over_descriptor`.
///
/// # Safety
/// `memory` has `bytes` bytes, which only operations and channels over the window access while they
/// are open. `window` is NULL or points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_window_over(
    group: *mut GroupHandle,
    memory: *mut c_void,
    bytes: usize,
    window: *mut *mut WindowHandle,
) -> Status {
    call(|| {
        let register = |group: &Group| {
            let memory = NonNull::new(memory.cast::<u8>())
                .ok_or_else(|| Failure::argument("memory is NULL, expected an address"))?;
            // SAFETY: the contract of this function says that there are `bytes` bytes, who accesses
            // them, and how long they stay.
            Ok(unsafe { group.register_at::<u8>(memory, bytes) }?)
        };
        // SAFETY: the contract of this function says that `window` is NULL or points to a handle.
        unsafe { open(group, window, register, Group::window_over) }
    })
}

/// Opens a window over a part of a file of the caller, so that ranks in other processes can use it.
/// Collective.
///
/// The file is a memfd, or a file of /dev/shm or of a hugetlbfs, open for reading and writing. The
/// part has `bytes` bytes, which is equal on all ranks, from `offset` on, a multiple of the file's
/// page size. The library maps it for itself, at the address that `peerlane_window_memory` returns;
/// the caller's own mapping of the file shows the same bytes. The descriptor may be closed after
/// the call. A memfd that can be sealed gets the seal F_SEAL_SHRINK, which lasts as long as the
/// file.
///
/// Until the memory is given back as described at `peerlane_window_over`, the file must not be
/// shortened, and no hole may be punched into it (`fallocate`, MADV_REMOVE): a process that
/// accesses a page behind the end of the file is killed by SIGBUS.
///
/// # Safety
/// `descriptor` is open or negative. The file keeps its pages as long as said above, and only
/// operations and channels over the window access the part while they are open. `window` is NULL or
/// points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_window_over_descriptor(
    group: *mut GroupHandle,
    descriptor: c_int,
    offset: u64,
    bytes: usize,
    window: *mut *mut WindowHandle,
) -> Status {
    call(|| {
        let register = |group: &Group| {
            if descriptor < 0 {
                return Err(Failure::argument(format!(
                    "descriptor is {descriptor}, expected an open file descriptor"
                )));
            }
            // SAFETY: it is not negative, and the contract of this function says that it is open
            // then.
            let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
            // SAFETY: the contract of this function says that the file keeps its pages, and who
            // accesses them.
            Ok(unsafe { group.register_descriptor::<u8>(descriptor, offset, bytes) }?)
        };
        // SAFETY: the contract of this function says that `window` is NULL or points to a handle.
        unsafe { open(group, window, register, Group::window_over) }
    })
}

/// Writes the address and the size of the window on this rank; either may be NULL. The address is a
/// device address on GPUs.
///
/// # Safety
/// `address` and `bytes` are NULL or point to such values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_window_memory(
    window: *const WindowHandle,
    address: *mut *mut c_void,
    bytes: *mut usize,
) -> Status {
    call(|| {
        WINDOWS.get(window.addr())?.with(|window| {
            let memory = window.memory(0..window.len())?;
            // SAFETY: the contract of this function says that both are NULL or point to such
            // values.
            unsafe { write(&memory, address, bytes) };
            Ok(())
        })
    })
}

/// Writes an address and a number of bytes, where the pointers are not NULL.
///
/// # Safety
/// `address` and `bytes` are NULL or valid for writes.
pub(crate) unsafe fn write(
    memory: &peerlane::MemoryRange,
    address: *mut *mut c_void,
    bytes: *mut usize,
) {
    if !address.is_null() {
        // SAFETY: it is not NULL, and the contract of this function says that it is valid for
        // writes then.
        unsafe { address.write(memory.base.as_ptr().cast()) };
    }
    if !bytes.is_null() {
        // SAFETY: it is not NULL, and the contract of this function says that it is valid for
        // writes then.
        unsafe { bytes.write(usize::try_from(memory.bytes).unwrap_or(usize::MAX)) };
    }
}

/// Ends the use of a window on all ranks, so that its memory is free again, and destroys its
/// handle. Collective. Destroy its operations and channels before.
///
/// If it fails, nothing has changed on any rank: the handle stays valid, the memory stays in use,
/// and the call can be repeated, for example after the operation that still uses the window has
/// been destroyed. Once the group has ended with an error, no release succeeds any more; then
/// destroy the window.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_window_release(
    group: *mut GroupHandle,
    window: *mut WindowHandle,
) -> Status {
    call(|| {
        GROUPS
            .get(group.addr())?
            .collective(|_| WINDOWS.get(window.addr()), |group, object| object.release(group))?;
        // If another thread has destroyed the handle meanwhile, there is nothing to remove.
        drop(WINDOWS.remove(window.addr()));
        Ok(())
    })
}

/// Destroys the handle of a window without the other ranks, which can still use the window.
///
/// The memory on this rank stays allocated until the group has been closed or destroyed, and until
/// the operations over the window have been destroyed; `peerlane_window_release` gives it back
/// earlier. Closing or destroying a group destroys the handles of its windows, too.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_window_destroy(window: *mut WindowHandle) -> Status {
    call(|| {
        let object = WINDOWS.remove(window.addr())?;
        let Some(window) = object.take() else { return Ok(()) };
        // Without its group, nothing needs the window any more, and it is dropped here.
        if let Ok(group) = GROUPS.get(object.group) {
            group.keep(window);
        }
        Ok(())
    })
}
