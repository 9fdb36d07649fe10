//! Windows: memory of every rank that operations and channels use.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Mutex;

use peerlane::Window;

use crate::group::{GROUPS, GroupHandle};
use crate::handle::{Table, clear, lock};
use crate::status::{Failure, Status, call};

/// Registered memory of the same size on every rank.
#[derive(Debug)]
pub struct WindowHandle(());

pub(crate) struct WindowObject {
    /// `None` after the window was released.
    window: Mutex<Option<Window<u8>>>,
}

pub(crate) static WINDOWS: Table<WindowObject> = Table::new("window", 3);

impl WindowObject {
    pub(crate) fn with<R>(
        &self,
        body: impl FnOnce(&Window<u8>) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        let window = lock(&self.window);
        body(window.as_ref().ok_or_else(|| Failure::argument("the window was released"))?)
    }
}

/// Stores a window, and writes its handle to `to`.
///
/// # Safety
/// `to` is valid for writes.
unsafe fn give(window: Window<u8>, to: *mut *mut WindowHandle) -> Result<(), Failure> {
    let object = WindowObject { window: Mutex::new(Some(window)) };
    // SAFETY: the contract of this function says that `to` is valid for writes.
    unsafe { WINDOWS.give(object, to) }
}

/// Allocates a window of `bytes` bytes on every rank: device memory if the group uses GPUs. Collective.
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
        unsafe { clear(window, "window") }?;
        let of_group = GROUPS.get(group.addr())?;
        let opened = of_group.with(|group| Ok(group.window::<u8>(bytes)?))?;
        // SAFETY: the contract of this function says that `window` points to a handle; NULL has been refused.
        unsafe { give(opened, window) }
    })
}

/// Opens a window over memory of the caller, such as an arena that `cuMemAlloc` has allocated, of equal size on every rank. Collective.
///
/// The memory must stay allocated until `peerlane_window_release` has returned, or until all ranks have destroyed a group that has
/// ended with an error. On the host backend it must be memory that other processes can map, unless the ranks are threads.
///
/// # Safety
/// `memory` has `bytes` bytes, which only operations and channels over the window access while they are open. `window` is NULL or
/// points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_window_over(
    group: *mut GroupHandle,
    memory: *mut c_void,
    bytes: usize,
    window: *mut *mut WindowHandle,
) -> Status {
    call(|| {
        // SAFETY: the contract of this function says that `window` is NULL or points to a handle.
        unsafe { clear(window, "window") }?;
        let memory = NonNull::new(memory.cast::<u8>())
            .ok_or_else(|| Failure::argument("memory is NULL, expected an address"))?;
        let opened = GROUPS.get(group.addr())?.with(|group| {
            // SAFETY: the contract of this function says that there are `bytes` bytes, who accesses them, and how long they stay.
            let buffer = unsafe { group.register_at::<u8>(memory, bytes) }?;
            Ok(group.window_over(buffer)?)
        });
        // SAFETY: the contract of this function says that `window` points to a handle; NULL has been refused.
        unsafe { give(opened?, window) }
    })
}

/// Writes the address and the size of the window on this rank; either may be NULL. The address is a device address on GPUs.
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
            // SAFETY: the contract of this function says that both are NULL or point to such values.
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
        // SAFETY: it is not NULL, and the contract of this function says that it is valid for writes then.
        unsafe { address.write(memory.base.as_ptr().cast()) };
    }
    if !bytes.is_null() {
        // SAFETY: it is not NULL, and the contract of this function says that it is valid for writes then.
        unsafe { bytes.write(usize::try_from(memory.bytes).unwrap_or(usize::MAX)) };
    }
}

/// Gives the memory of a window back on all ranks and destroys its handle. Collective. Destroy its operations and channels before.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_window_release(
    group: *mut GroupHandle,
    window: *mut WindowHandle,
) -> Status {
    call(|| {
        let of_group = GROUPS.get(group.addr())?;
        let object = WINDOWS.remove(window.addr())?;
        let window = lock(&object.window).take();
        let window = window.ok_or_else(|| Failure::argument("the window was released"))?;
        of_group.with(|group| Ok(group.release(window).map_err(peerlane::Error::from)?))
    })
}
