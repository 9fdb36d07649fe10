//! Owns the streams, events, pages and bounce buffers of an engine, and wraps the caller's stream.
//!
//! All streams are non-blocking, so that none synchronizes with the legacy default stream. Events record no
//! time, which makes them cheap.
//!
//! # Pages
//! Pages hold words that the engine and the host share, and words on the device that signals are copied
//! from. They are never freed, because freeing may wait for every stream of the context, including one that
//! waits for a peer. A dropped engine leaves its pages to the next engine of the context. If the context was
//! destroyed meanwhile, its memory is gone; the driver's number of each allocation shows this.
//!
//! # Bounce buffers
//! Where two devices do not reach each other, regions are pinned host memory. A copy from host memory to
//! host memory blocks the caller until it is done, with every call ("API synchronization behavior" in
//! NVIDIA's reference of the runtime); behind a queued wait that may be never. So such a put is two
//! asynchronous copies: to a buffer on the device and from there.

use std::alloc::Layout;
use std::any::{Any, TypeId};
use std::cell::Cell;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::Fault;
use crate::deferred_free;
use crate::device::{
    CaptureState, CopyCalls, DevicePtr, EventHandle, MemoryCalls, StreamCalls, StreamHandle,
};

/// A stream of the caller, before or after which an engine's work can be ordered. Each backend wraps it in its own
/// type, so that a stream of one vendor cannot be used with another.
#[derive(Clone)]
pub struct Stream {
    raw: StreamHandle,
    _keep: Option<Arc<dyn Any + Send + Sync>>,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Stream").field(&self.raw.0).finish()
    }
}

impl Stream {
    /// Wraps a stream handle, together with the owner that keeps the stream alive if it is known.
    ///
    /// # Safety
    /// The handle is the number of a default stream, or the stream stays alive until every engine that was
    /// forked from it has been forked from another stream or dropped.
    pub unsafe fn new(raw: StreamHandle, keep: Option<Arc<dyn Any + Send + Sync>>) -> Self {
        Self { raw, _keep: keep }
    }

    pub(super) fn raw(&self) -> StreamHandle {
        self.raw
    }

    pub(super) fn check<D: StreamCalls>(&self, context: &D) -> Result<(), D::Error> {
        // SAFETY: the stream is alive or a default stream (`new`).
        unsafe { context.check_stream(self.raw) }
    }

    pub(super) fn is_capturing<D: StreamCalls>(&self, context: &D) -> Result<bool, D::Error> {
        // SAFETY: the stream is alive (`new`), and `check` rejected default streams.
        unsafe { context.is_capturing(self.raw) }
    }

    pub(super) fn capture<D: StreamCalls>(&self, context: &D) -> Result<CaptureState, D::Error> {
        // SAFETY: as for `is_capturing`.
        unsafe { context.capture_state(self.raw) }
    }
}

const QUERY_INTERVAL: Duration = Duration::from_micros(50);

/// A stream that an engine created; the thread that drops the stream has made the context current.
#[derive(Debug)]
pub(super) struct OwnStream<D: StreamCalls> {
    library: D::Library,
    raw: StreamHandle,
    /// Whether the stream may hold blocked work, because the last `finish` did not succeed.
    may_be_blocked: Cell<bool>,
}

impl<D: StreamCalls> OwnStream<D> {
    pub(super) fn create(context: &D) -> Result<Self, D::Error> {
        Self::with_priority(context, false)
    }

    /// Creates a stream of the highest priority, which has a hardware queue of its own. Streams of one priority may
    /// share a hardware queue, where work behind a blocked wait of another stream waits too.
    pub(super) fn urgent(context: &D) -> Result<Self, D::Error> {
        Self::with_priority(context, true)
    }

    fn with_priority(context: &D, urgent: bool) -> Result<Self, D::Error> {
        let (library, raw) = (context.library(), context.create_stream(urgent)?);
        Ok(Self { library, raw, may_be_blocked: Cell::new(false) })
    }

    pub(super) fn raw(&self) -> StreamHandle {
        self.raw
    }

    /// Returns whether all work of the stream is complete; an error is usually that of earlier work.
    ///
    /// Not for a stream that captures. Under `enter_relaxed` the query is not part of captures of other
    /// threads.
    pub(super) fn is_idle(&self, context: &D) -> Result<bool, D::Error> {
        // SAFETY: the stream lives as long as `self`.
        unsafe { context.is_idle(self.raw) }
    }

    /// Blocks until all work of the stream is complete; a stream that is not complete in time is left to the driver.
    ///
    /// # Errors
    /// Returns [`Fault::Timeout`], or the driver's error.
    pub(super) fn finish(
        &self,
        context: &D,
        timeout: Duration,
        what: &str,
    ) -> Result<(), D::Error> {
        let start = Instant::now();
        self.may_be_blocked.set(true);
        while !self.is_idle(context)? {
            if start.elapsed() >= timeout {
                let what = format!("{what} on {} did not complete", context.label());
                return Err(Fault::Timeout { what, timeout }.into());
            }
            std::thread::sleep(QUERY_INTERVAL);
        }
        self.may_be_blocked.set(false);
        Ok(())
    }

    pub(super) fn capture(&self, context: &D) -> Result<CaptureState, D::Error> {
        // SAFETY: the stream lives as long as `self`.
        unsafe { context.capture_state(self.raw) }
    }
}

impl<D: StreamCalls> Drop for OwnStream<D> {
    fn drop(&mut self) {
        // Some drivers wait for the work of a stream before they destroy it.
        if !self.may_be_blocked.get() {
            // SAFETY: created by `with_priority` and owned.
            unsafe { D::destroy_stream(self.library, self.raw) };
        }
    }
}

/// A driver event; the thread that drops the event has made the context current.
#[derive(Debug)]
pub(super) struct Event<D: StreamCalls> {
    library: D::Library,
    raw: EventHandle,
}

impl<D: StreamCalls> Event<D> {
    pub(super) fn create(context: &D) -> Result<Self, D::Error> {
        Ok(Self { library: context.library(), raw: context.create_event(false)? })
    }

    pub(super) fn record(&self, context: &D, stream: StreamHandle) -> Result<(), D::Error> {
        // SAFETY: the event is owned. The stream is alive: it is the engine's, or the caller's
        // (`Stream::new`).
        unsafe { context.record_event(self.raw, stream) }
    }

    pub(super) fn block(&self, context: &D, stream: StreamHandle) -> Result<(), D::Error> {
        // SAFETY: as for `record`.
        unsafe { context.wait_for_event(stream, self.raw) }
    }

    pub(super) fn order(
        &self,
        context: &D,
        ahead: StreamHandle,
        behind: StreamHandle,
    ) -> Result<(), D::Error> {
        self.record(context, ahead)?;
        self.block(context, behind)
    }

    /// Returns whether all work before the recorded event is complete. Call it under `enter_relaxed`, so that
    /// captures of other threads are not affected.
    pub(super) fn has_passed(&self, context: &D) -> Result<bool, D::Error> {
        // SAFETY: the event is owned.
        unsafe { context.has_passed(self.raw) }
    }
}

impl<D: StreamCalls> Drop for Event<D> {
    fn drop(&mut self) {
        // SAFETY: created by `create` and owned.
        unsafe { D::destroy_event(self.library, self.raw) };
    }
}

pub(super) const PAGE_WORDS: usize = 1 << 11;
const PAGE_BYTES: usize = PAGE_WORDS * size_of::<u64>();

/// A page of 64-bit words, aligned to a system page because the driver pins whole pages.
#[repr(C, align(4096))]
struct PageBytes([u8; PAGE_BYTES]);

/// Memory pages that no engine uses at present, kept for reuse, because freeing them may block.
static SPARE: Mutex<Vec<(PageKind, SparePage)>> = Mutex::new(Vec::new());

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PageKind {
    Pinned,
    Device,
}

#[derive(Clone, Copy, Debug)]
struct SparePage {
    context: (TypeId, usize),
    /// The driver's number of the allocation, which shows whether its context was destroyed.
    id: u64,
    /// The page's address in this process, or 0 if the host cannot access the page.
    host: usize,
    device: DevicePtr,
}

fn take_spare<D: MemoryCalls>(context: &D, kind: PageKind) -> Option<SparePage> {
    let mut spare = SPARE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let mine =
        |(of, page): &(PageKind, SparePage)| *of == kind && page.context == context_key(context);
    while let Some(index) = spare.iter().position(mine) {
        let (_, page) = spare.swap_remove(index);
        if context.allocation_number(page.device) == Some(page.id) {
            return Some(page);
        }
    }
    None
}

fn context_key<D: MemoryCalls>(context: &D) -> (TypeId, usize) {
    (TypeId::of::<D>(), context.id())
}

fn leave_spare<D: MemoryCalls>(context: &D, kind: PageKind, host: usize, device: DevicePtr) {
    // Without a number, a later check whether the page still exists is impossible.
    let Some(id) = context.allocation_number(device) else { return };
    let page = SparePage { context: context_key(context), id, host, device };
    SPARE.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push((kind, page));
}

/// A page of words in pinned host memory, which streams write and the host reads.
#[derive(Debug)]
pub(super) struct PinnedPage {
    host: *const AtomicU64,
    device: DevicePtr,
}

// SAFETY: the words are atomics in memory that is never freed.
unsafe impl Send for PinnedPage {}

impl PinnedPage {
    /// Takes or allocates a page in pinned host memory and fills it with zeros. The context is current.
    pub(super) fn take<D: MemoryCalls>(context: &D) -> Result<Self, D::Error> {
        let page = match take_spare(context, PageKind::Pinned) {
            Some(spare) => Self { host: spare.host as *const AtomicU64, device: spare.device },
            None => Self::allocate(context)?,
        };
        page.words().iter().for_each(|word| word.store(0, Ordering::Release));
        Ok(page)
    }

    fn allocate<D: MemoryCalls>(context: &D) -> Result<Self, D::Error> {
        // Memory of the process: memory of the driver would be freed with the context, and a later read of it
        // would fault.
        let layout = Layout::new::<PageBytes>();
        // SAFETY: the layout is not empty.
        let host = unsafe { std::alloc::alloc_zeroed(layout) };
        let Some(host) = NonNull::new(host) else { std::alloc::handle_alloc_error(layout) };
        // SAFETY: whole pages that are never freed. The context is current.
        unsafe { context.register_host(host.cast(), PAGE_BYTES) }?;
        // SAFETY: it was just registered.
        let device = unsafe { context.host_pointer(host.cast()) }?;
        Ok(Self { host: host.as_ptr().cast_const().cast(), device })
    }

    /// Makes the memory page available to the next engine; no stream and no graph may write to the page any more.
    pub(super) fn leave<D: MemoryCalls>(self, context: &D) {
        leave_spare(context, PageKind::Pinned, self.host as usize, self.device);
    }

    /// Returns some of the words, which stay valid when another engine uses the page.
    pub(super) fn part(&self, words: Range<usize>) -> PinnedWords {
        PinnedWords { device: self.address(words.start), words: &self.words()[words] }
    }

    fn words(&self) -> &'static [AtomicU64] {
        // SAFETY: `PAGE_WORDS` words were allocated, page-aligned and initialized with zeros, and they are
        // never freed.
        unsafe { std::slice::from_raw_parts(self.host, PAGE_WORDS) }
    }

    pub(super) fn load(&self, word: usize) -> u64 {
        self.words()[word].load(Ordering::Acquire)
    }

    pub(super) fn exchange(&self, word: usize, current: u64, new: u64) -> u64 {
        let word = &self.words()[word];
        let found = word.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire);
        found.unwrap_or_else(|found| found)
    }

    pub(super) fn store(&self, word: usize, value: u64) {
        self.words()[word].store(value, Ordering::Release);
    }

    pub(super) fn address(&self, word: usize) -> DevicePtr {
        debug_assert!(word < PAGE_WORDS, "the word lies in the page");
        self.device + (word * size_of::<u64>()) as u64
    }
}

/// Adjacent words of a [`PinnedPage`].
#[derive(Clone, Copy, Debug)]
pub(super) struct PinnedWords {
    words: &'static [AtomicU64],
    device: DevicePtr,
}

impl PinnedWords {
    pub(super) fn load(self, word: usize) -> u64 {
        self.words[word].load(Ordering::Acquire)
    }

    pub(super) fn store(self, word: usize, value: u64) {
        self.words[word].store(value, Ordering::Release);
    }

    pub(super) fn address(self, word: usize) -> DevicePtr {
        debug_assert!(word < self.words.len(), "the word is one of these");
        self.device + (word * size_of::<u64>()) as u64
    }
}

/// A page of words in device memory of the kind that streams can wait for.
#[derive(Debug)]
pub(super) struct DevicePage {
    device: DevicePtr,
}

impl DevicePage {
    /// Takes or allocates a page in device memory with unspecified content. The context is current.
    pub(super) fn take<D: MemoryCalls>(context: &D) -> Result<Self, D::Error> {
        if let Some(spare) = take_spare(context, PageKind::Device) {
            return Ok(Self { device: spare.device });
        }
        Ok(Self { device: context.allocate_flags(PAGE_BYTES)? })
    }

    pub(super) fn clear<D: CopyCalls>(
        &self,
        context: &D,
        stream: &OwnStream<D>,
    ) -> Result<(), D::Error> {
        // SAFETY: the page is never freed. The context is current.
        unsafe { context.set(stream.raw(), self.device, 0, PAGE_BYTES) }
    }

    /// Makes the memory page available to the next engine; no stream and no graph may use the page any more.
    pub(super) fn leave<D: MemoryCalls>(self, context: &D) {
        leave_spare(context, PageKind::Device, 0, self.device);
    }

    pub(super) fn address(&self, word: usize) -> DevicePtr {
        debug_assert!(word < PAGE_WORDS, "the word lies in the page");
        self.device + (word * size_of::<u64>()) as u64
    }
}

/// The size in bytes of each stream's bounce buffer. The order of the stream keeps the pieces apart.
pub(super) const BOUNCE_BYTES: u64 = 8 << 20;

/// Device buffers for copies from host memory to host memory, one for each stream.
#[derive(Debug)]
pub(super) struct BounceBuffers {
    base: DevicePtr,
    streams: usize,
}

impl BounceBuffers {
    pub(super) fn new<D: MemoryCalls>(context: &D, streams: usize) -> Result<Self, D::Error> {
        Ok(Self { base: context.allocate(streams * BOUNCE_BYTES as usize)?, streams })
    }

    pub(super) fn buffer(&self, stream_index: usize) -> DevicePtr {
        debug_assert!(stream_index < self.streams, "every stream has a buffer");
        self.base + stream_index as u64 * BOUNCE_BYTES
    }

    /// Frees the bounce buffers, which no copy may use any more.
    pub(super) fn free<D: MemoryCalls>(self, context: &Arc<D>) {
        let base = self.base;
        // SAFETY: allocated by `new`, freed once, and idle (the caller's promise).
        deferred_free::free(context, move |context| unsafe { context.free(base) });
    }
}
