//! Words that the engine and the host share, and words on the device that signals are copied from.
//!
//! They are never freed, because freeing may wait for every stream of the context, also for one that
//! waits for a peer. An engine that goes leaves them to the next one of its context. A context that
//! was destroyed meanwhile took its memory with it; the number that the driver gives each allocation
//! tells whether it is still the same.

use std::alloc::Layout;
use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::queue::OwnStream;
use crate::device::Context;
use crate::error::Error;
use crate::sys::{self, CUdeviceptr};

/// Words of 64 bits in a page.
pub(super) const PAGE_WORDS: usize = 1 << 11;
const PAGE_BYTES: usize = PAGE_WORDS * size_of::<u64>();

/// The bytes of a page, where memory is registered by whole pages of the system.
#[repr(C, align(4096))]
struct Aligned([u8; PAGE_BYTES]);

/// Pages that nobody uses now.
static SPARE: Mutex<Vec<(Kind, Spare)>> = Mutex::new(Vec::new());

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Pinned,
    Device,
}

#[derive(Clone, Copy, Debug)]
struct Spare {
    /// The context's handle as a number, to compare only.
    context: usize,
    /// The driver's number of the allocation.
    id: u64,
    /// Where the host sees it, as a number; 0 if it does not.
    host: usize,
    device: CUdeviceptr,
}

fn take(context: &Context, kind: Kind) -> Option<Spare> {
    let mut spare = SPARE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let mine = |(of, page): &(Kind, Spare)| *of == kind && page.context == context.raw() as usize;
    while let Some(index) = spare.iter().position(mine) {
        let (_, page) = spare.swap_remove(index);
        if buffer_id(context, page.device) == Some(page.id) {
            return Some(page);
        }
    }
    None
}

fn leave(context: &Context, kind: Kind, host: usize, device: CUdeviceptr) {
    // Without a number nobody could tell later whether the page is still there.
    let Some(id) = buffer_id(context, device) else { return };
    let page = Spare { context: context.raw() as usize, id, host, device };
    SPARE.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push((kind, page));
}

fn buffer_id(context: &Context, address: CUdeviceptr) -> Option<u64> {
    let mut id = 0_u64;
    let attribute = sys::POINTER_ATTRIBUTE_BUFFER_ID;
    let out: *mut c_void = (&raw mut id).cast();
    // SAFETY: the attribute is a 64-bit number, stored in a local.
    let code = unsafe { (context.driver.pointer_get_attribute)(out, attribute, address) };
    (code == sys::CUDA_SUCCESS).then_some(id)
}

/// Words in pinned host memory that streams write and the host reads.
#[derive(Debug)]
pub(super) struct Pinned {
    host: *const AtomicU64,
    device: CUdeviceptr,
}

// SAFETY: the words are atomics in memory that is never freed.
unsafe impl Send for Pinned {}

impl Pinned {
    /// A page of zeros; the context is current.
    pub(super) fn take(context: &Context) -> Result<Self, Error> {
        let page = match take(context, Kind::Pinned) {
            Some(spare) => Self { host: spare.host as *const AtomicU64, device: spare.device },
            None => Self::allocate(context)?,
        };
        page.words().iter().for_each(|word| word.store(0, Ordering::Release));
        Ok(page)
    }

    fn allocate(context: &Context) -> Result<Self, Error> {
        let driver = context.driver;
        // Memory of the process's own: what the driver allocates goes with the context, and a look
        // at it after somebody has destroyed that would be a fault.
        let layout = Layout::new::<Aligned>();
        // SAFETY: the layout is not empty.
        let host = unsafe { std::alloc::alloc_zeroed(layout) };
        if host.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        let host: *mut c_void = host.cast();
        let flags = sys::MEMHOSTREGISTER_PORTABLE | sys::MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: whole pages that are never freed; the context is current.
        let code = unsafe { (driver.mem_host_register)(host, PAGE_BYTES, flags) };
        context.check("cuMemHostRegister", code)?;
        let mut device = 0;
        // SAFETY: as above; the memory was registered to be mapped.
        let code = unsafe { (driver.mem_host_get_device_pointer)(&raw mut device, host, 0) };
        context.check("cuMemHostGetDevicePointer", code)?;
        Ok(Self { host: host.cast_const().cast(), device })
    }

    /// For the next engine; no stream and no graph writes to it any more.
    pub(super) fn leave(self, context: &Context) {
        leave(context, Kind::Pinned, self.host as usize, self.device);
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: so many words were allocated, page-aligned and zero or written since, and they
        // are never freed.
        unsafe { std::slice::from_raw_parts(self.host, PAGE_WORDS) }
    }

    /// What the host sees; acquires what was written before it.
    pub(super) fn load(&self, word: usize) -> u64 {
        self.words()[word].load(Ordering::Acquire)
    }

    pub(super) fn store(&self, word: usize, value: u64) {
        self.words()[word].store(value, Ordering::Release);
    }

    /// Where streams see a word.
    pub(super) fn address(&self, word: usize) -> CUdeviceptr {
        debug_assert!(word < PAGE_WORDS, "the word lies in the page");
        self.device + (word * size_of::<u64>()) as u64
    }
}

/// Words in device memory.
#[derive(Debug)]
pub(super) struct OnDevice {
    device: CUdeviceptr,
}

impl OnDevice {
    /// A page of anything; the context is current.
    pub(super) fn take(context: &Context) -> Result<Self, Error> {
        if let Some(spare) = take(context, Kind::Device) {
            return Ok(Self { device: spare.device });
        }
        let mut device = 0;
        // SAFETY: the context is current; the result is stored in a local.
        let code = unsafe { (context.driver.mem_alloc)(&raw mut device, PAGE_BYTES) };
        context.check("cuMemAlloc", code)?;
        Ok(Self { device })
    }

    /// Makes it a page of zeros, in the order of the stream.
    pub(super) fn clear(&self, context: &Context, stream: &OwnStream) -> Result<(), Error> {
        let clear = context.driver.memset_d8_async;
        // SAFETY: the page is never freed; the context is current.
        let code = unsafe { clear(self.device, 0, PAGE_BYTES, stream.raw()) };
        context.check("cuMemsetD8Async", code)
    }

    /// For the next engine; no stream and no graph uses it any more.
    pub(super) fn leave(self, context: &Context) {
        leave(context, Kind::Device, 0, self.device);
    }

    pub(super) fn address(&self, word: usize) -> CUdeviceptr {
        debug_assert!(word < PAGE_WORDS, "the word lies in the page");
        self.device + (word * size_of::<u64>()) as u64
    }
}
