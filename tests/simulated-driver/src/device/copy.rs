//! Runs copies and fills, as a copy engine does.

use std::ptr::write_bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use rustix::mm::{Advice, madvise};

use super::counters::Counter;
use super::engines::Engine;
use super::fault::Fault;
use super::jitter;
use super::memory::{AddressSpace, Range};
use super::sdma;
use super::session::Session;
use super::settings::Setting;

/// Copies of up to this many bytes are made word by word, so that a flag in the copy is neither torn nor stored twice.
const WORDWISE_BYTES_MAX: u64 = 64;

/// One end of a copy.
#[derive(Clone, Debug)]
pub(crate) enum End {
    /// An address that the table must know when the copy runs.
    Memory(u64),
    /// Pageable host memory; the caller keeps it alive.
    Host(u64),
    /// The bytes that pageable host memory held when the copy was submitted.
    Staged(Arc<[u8]>),
}

#[derive(Clone, Debug)]
pub(crate) struct Copy {
    pub(crate) dst: End,
    pub(crate) src: End,
    pub(crate) bytes: u64,
    /// True if the copy runs on a single engine, which never completes copies that are too large.
    pub(crate) by_one_engine: bool,
}

/// Fills memory with a repeated pattern.
#[derive(Clone, Debug)]
pub(crate) struct Fill {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) pattern: [u8; 4],
}

impl End {
    fn address(&self) -> u64 {
        match self {
            Self::Memory(address) | Self::Host(address) => *address,
            Self::Staged(bytes) => bytes.as_ptr() as u64,
        }
    }

    fn pin(
        &self,
        bytes: u64,
        session: &Session,
        memory: &AddressSpace,
    ) -> Result<Vec<Arc<Range>>, Fault> {
        match self {
            Self::Memory(address) => memory.pin(*address, bytes, session),
            Self::Host(_) | Self::Staged(_) => Ok(Vec::new()),
        }
    }

    fn is_host(&self, pinned: &[Arc<Range>]) -> bool {
        pinned.iter().all(|range| range.is_host())
    }
}

impl Copy {
    pub(crate) fn run(&self, session: &Session, memory: &AddressSpace) -> Result<(), Fault> {
        if self.bytes == 0 {
            return Ok(());
        }
        let _engine = Engine::take(session.device());
        if self.by_one_engine {
            sdma::stall(self.bytes, session)?;
        }
        self.take_time();
        self.carry(session, memory)
    }

    /// Moves the bytes, on any engine.
    pub(super) fn carry(&self, session: &Session, memory: &AddressSpace) -> Result<(), Fault> {
        let device = session.device();
        let src = self.src.pin(self.bytes, session, memory)?;
        let dst = self.dst.pin(self.bytes, session, memory)?;
        let (from_host, to_host) = (self.src.is_host(&src), self.dst.is_host(&dst));
        let foreign = src.iter().chain(&dst).any(|range| range.is_foreign_to(session));
        let dropped = match Setting::DropCopies.value() {
            1 => foreign,
            2 => !foreign,
            3 => true,
            _ => false,
        };
        if foreign {
            pause(jitter::next_of_peers());
        }
        if !dropped {
            // The ends stay pinned, or are kept by the caller, until the bytes are copied.
            move_bytes(self.dst.address(), self.src.address(), self.bytes);
        }

        let counter = if from_host || to_host { Counter::HostCopies } else { Counter::Copies };
        counter.add(device, 1);
        if from_host && to_host {
            Counter::HostToHostCopies.add(device, 1);
        }
        Counter::CopyBytes.add(device, self.bytes.cast_signed());
        Ok(())
    }

    pub(super) fn take_time(&self) {
        let nanos = (self.bytes >> 10).saturating_mul(Setting::CopyNanosPerKib.value());
        let least = Duration::from_micros(Setting::CopyDelayMicros.value());
        pause(least + Duration::from_nanos(nanos) + jitter::next());
    }
}

fn pause(delay: Duration) {
    if !delay.is_zero() {
        std::thread::sleep(delay);
    }
}

impl Fill {
    pub(crate) fn run(&self, session: &Session, memory: &AddressSpace) -> Result<(), Fault> {
        let _pinned = memory.pin(self.address, self.bytes, session)?;
        fence(Ordering::SeqCst);
        if self.pattern.iter().all(|byte| *byte == self.pattern[0]) {
            let done = self.zero_pages();
            let (address, bytes) = (self.address + done, self.bytes - done);
            // SAFETY: the span is pinned. As on a device, the caller ensures that it is not used
            // meanwhile.
            unsafe { write_bytes(address as *mut u8, self.pattern[0], bytes as usize) };
        } else {
            for at in (0..self.bytes).step_by(self.pattern.len()) {
                let place = (self.address + at) as *mut [u8; 4];
                // SAFETY: as above; the length is a multiple of the pattern's.
                unsafe { place.write_unaligned(self.pattern) };
            }
        }
        fence(Ordering::SeqCst);
        Counter::Fills.add(session.device(), 1);
        Ok(())
    }

    /// Gives whole pages back to the system if they shall be 0, and returns their number of bytes: pages of shared
    /// memory that nobody uses cost nothing.
    fn zero_pages(&self) -> u64 {
        let page = rustix::param::page_size() as u64;
        let bytes = self.bytes - self.bytes % page;
        if self.pattern != [0; 4] || !self.address.is_multiple_of(page) || bytes == 0 {
            return 0;
        }
        // SAFETY: the pages are inside the pinned span.
        let given = unsafe { madvise(self.address as *mut _, bytes as usize, Advice::LinuxRemove) };
        given.map_or(0, |()| bytes)
    }
}

/// Returns the size in bytes of the words that a short copy stores one by one, or `None` if the copy is long or not aligned.
const fn word_bytes(dst: u64, src: u64, bytes: u64) -> Option<u64> {
    if bytes > WORDWISE_BYTES_MAX {
        return None;
    }
    // A power of two divides all of them if it divides all their bits together.
    match dst | src | bytes {
        all if all.is_multiple_of(8) => Some(8),
        all if all.is_multiple_of(4) => Some(4),
        _ => None,
    }
}

// `memmove` stores four bytes twice, and the second store would repeat a signal that its reader has already reset.
const _: () = {
    assert!(matches!(word_bytes(0x1000, 0x2008, 8), Some(8)));
    assert!(matches!(word_bytes(0x1000, 0x2008, 4), Some(4)));
    assert!(matches!(word_bytes(0x1004, 0x2000, 8), Some(4)));
    assert!(matches!(word_bytes(0x1000, 0x2000, 12), Some(4)));
    assert!(word_bytes(0x1000, 0x2000, 72).is_none());
    assert!(word_bytes(0x1000, 0x2001, 4).is_none());
    assert!(word_bytes(0x1000, 0x2000, 5).is_none());
};

/// Copies between two ends that are mapped and at least this long.
fn move_bytes(dst: u64, src: u64, bytes: u64) {
    macro_rules! copy_words {
        ($word:ty) => {
            for at in (0..bytes).step_by(size_of::<$word>()) {
                // SAFETY: inside the source, aligned; see above.
                let from = unsafe { <$word>::from_ptr((src + at) as *mut _) };
                // SAFETY: inside the destination, aligned; see above.
                let to = unsafe { <$word>::from_ptr((dst + at) as *mut _) };
                to.store(from.load(Ordering::Acquire), Ordering::Release);
            }
        };
    }
    fence(Ordering::SeqCst);
    match word_bytes(dst, src, bytes) {
        Some(8) => copy_words!(AtomicU64),
        Some(_) => copy_words!(AtomicU32),
        // SAFETY: both ends are mapped and this long. As on a device, the caller ensures that the bytes
        // are not used meanwhile.
        None => unsafe { std::ptr::copy(src as *const u8, dst as *mut u8, bytes as usize) },
    }
    fence(Ordering::SeqCst);
}
