//! Words that the engine and the host share, and words on the device that signals are copied from.
//!
//! They are never freed, because freeing may wait for every stream of the context, also for one that
//! waits for a peer. An engine that goes leaves them to the next one of its context. A context that
//! was destroyed meanwhile took its memory with it; the number that the driver gives each allocation
//! tells whether it is still the same.

use std::alloc::Layout;
use std::any::TypeId;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::queue::OwnStream;
use crate::device::{CopyCalls, DevicePtr, MemoryCalls};

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
    /// Of which backend the context is, and its number there.
    context: (TypeId, usize),
    /// The driver's number of the allocation.
    id: u64,
    /// Where the host sees it, as a number; 0 if it does not.
    host: usize,
    device: DevicePtr,
}

fn take<D: MemoryCalls>(context: &D, kind: Kind) -> Option<Spare> {
    let mut spare = SPARE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let mine = |(of, page): &(Kind, Spare)| *of == kind && page.context == name(context);
    while let Some(index) = spare.iter().position(mine) {
        let (_, page) = spare.swap_remove(index);
        if context.allocation_number(page.device) == Some(page.id) {
            return Some(page);
        }
    }
    None
}

fn name<D: MemoryCalls>(context: &D) -> (TypeId, usize) {
    (TypeId::of::<D>(), context.id())
}

fn leave<D: MemoryCalls>(context: &D, kind: Kind, host: usize, device: DevicePtr) {
    // Without a number nobody could tell later whether the page is still there.
    let Some(id) = context.allocation_number(device) else { return };
    let page = Spare { context: name(context), id, host, device };
    SPARE.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push((kind, page));
}

/// Words in pinned host memory that streams write and the host reads.
#[derive(Debug)]
pub(super) struct Pinned {
    host: *const AtomicU64,
    device: DevicePtr,
}

// SAFETY: the words are atomics in memory that is never freed.
unsafe impl Send for Pinned {}

impl Pinned {
    /// A page of zeros; the context is current.
    pub(super) fn take<D: MemoryCalls>(context: &D) -> Result<Self, D::Error> {
        let page = match take(context, Kind::Pinned) {
            Some(spare) => Self { host: spare.host as *const AtomicU64, device: spare.device },
            None => Self::allocate(context)?,
        };
        page.words().iter().for_each(|word| word.store(0, Ordering::Release));
        Ok(page)
    }

    fn allocate<D: MemoryCalls>(context: &D) -> Result<Self, D::Error> {
        // Memory of the process's own: what the driver allocates goes with the context, and a look
        // at it after somebody has destroyed that would be a fault.
        let layout = Layout::new::<Aligned>();
        // SAFETY: the layout is not empty.
        let host = unsafe { std::alloc::alloc_zeroed(layout) };
        let Some(host) = NonNull::new(host) else { std::alloc::handle_alloc_error(layout) };
        // SAFETY: whole pages that are never freed; the context is current.
        unsafe { context.register_host(host.cast(), PAGE_BYTES) }?;
        // SAFETY: it was just registered.
        let device = unsafe { context.host_pointer(host.cast()) }?;
        Ok(Self { host: host.as_ptr().cast_const().cast(), device })
    }

    /// For the next engine; no stream and no graph writes to it any more.
    pub(super) fn leave<D: MemoryCalls>(self, context: &D) {
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
    pub(super) fn address(&self, word: usize) -> DevicePtr {
        debug_assert!(word < PAGE_WORDS, "the word lies in the page");
        self.device + (word * size_of::<u64>()) as u64
    }
}

/// Words in device memory, of the kind that streams wait for.
#[derive(Debug)]
pub(super) struct OnDevice {
    device: DevicePtr,
}

impl OnDevice {
    /// A page of anything; the context is current.
    pub(super) fn take<D: MemoryCalls>(context: &D) -> Result<Self, D::Error> {
        if let Some(spare) = take(context, Kind::Device) {
            return Ok(Self { device: spare.device });
        }
        Ok(Self { device: context.allocate_flags(PAGE_BYTES)? })
    }

    /// Makes it a page of zeros, in the order of the stream.
    pub(super) fn clear<D: CopyCalls>(
        &self,
        context: &D,
        stream: &OwnStream<D>,
    ) -> Result<(), D::Error> {
        // SAFETY: the page is never freed; the context is current.
        unsafe { context.clear(stream.raw(), self.device, PAGE_BYTES) }
    }

    /// For the next engine; no stream and no graph uses it any more.
    pub(super) fn leave<D: MemoryCalls>(self, context: &D) {
        leave(context, Kind::Device, 0, self.device);
    }

    pub(super) fn address(&self, word: usize) -> DevicePtr {
        debug_assert!(word < PAGE_WORDS, "the word lies in the page");
        self.device + (word * size_of::<u64>()) as u64
    }
}
