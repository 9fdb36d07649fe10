//! Copies that go onto a stream together, where the driver takes several in one call.
//!
//! One call for three copies to peers costs the host about as much as one copy, and the device begins
//! them without a gap (docs/perf/cuda-submission.md). Such a call has no order inside, so copies that
//! touch the same bytes do not share one. It cannot be captured.

use std::time::Duration;

use super::page::Pinned;
use super::queue::OwnStream;
use crate::device::Context;
use crate::error::Error;
use crate::sys::{self, CUdeviceptr, CUmemcpyAttributes, CUstream};

/// How long the probe may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// Copies of one stream that are still to be put there.
#[derive(Debug, Default)]
pub(super) struct Copies {
    to: Vec<CUdeviceptr>,
    from: Vec<CUdeviceptr>,
    bytes: Vec<usize>,
}

impl Copies {
    pub(super) fn with_capacity(copies: usize) -> Self {
        Self {
            to: Vec::with_capacity(copies),
            from: Vec::with_capacity(copies),
            bytes: Vec::with_capacity(copies),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.to.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.to.clear();
        self.from.clear();
        self.bytes.clear();
    }

    pub(super) fn push(&mut self, to: CUdeviceptr, from: CUdeviceptr, bytes: usize) {
        self.to.push(to);
        self.from.push(from);
        self.bytes.push(bytes);
    }

    /// Whether a copy must come after one of these: it reads or writes what one writes, or writes what
    /// one reads.
    pub(super) fn touch(&self, to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> bool {
        let meet = |one: CUdeviceptr, length: usize, other: CUdeviceptr| {
            // Spans of mapped regions do not overflow.
            one < other + bytes as u64 && other < one + length as u64
        };
        (0..self.to.len()).any(|index| {
            let length = self.bytes[index];
            let (earlier_to, earlier_from) = (self.to[index], self.from[index]);
            meet(earlier_to, length, to)
                || meet(earlier_to, length, from)
                || meet(earlier_from, length, to)
        })
    }

    /// Puts them onto a stream and forgets them; how many there were.
    ///
    /// # Safety
    /// The spans are valid for as long as copies run.
    pub(super) unsafe fn issue(
        &mut self,
        context: &Context,
        stream: CUstream,
    ) -> Result<usize, Error> {
        let count = self.to.len();
        let issued = match count {
            0 => Ok(()),
            // SAFETY: the caller's.
            1 => unsafe { copy(context, stream, self.to[0], self.from[0], self.bytes[0]) },
            // SAFETY: the caller's.
            _ => unsafe { self.issue_together(context, stream) },
        };
        self.clear();
        issued.map(|()| count)
    }

    /// # Safety
    /// As [`issue`](Self::issue).
    unsafe fn issue_together(&mut self, context: &Context, stream: CUstream) -> Result<(), Error> {
        let driver = context.driver;
        let count = self.to.len();
        let mut attributes = CUmemcpyAttributes {
            src_access_order: sys::MEMCPY_SRC_ACCESS_ORDER_STREAM,
            ..CUmemcpyAttributes::default()
        };
        // The attributes hold from the first copy on.
        let mut first = 0;
        let (to, from) = (self.to.as_mut_ptr(), self.from.as_mut_ptr());
        let bytes = self.bytes.as_mut_ptr();
        let (attributes, first) = (&raw mut attributes, &raw mut first);
        if let Some(call) = driver.memcpy_batch_async_v2 {
            // SAFETY: the arrays hold `count` copies and one attribute, which the driver reads before
            // it returns; the spans are the caller's.
            let code = unsafe { call(to, from, bytes, count, attributes, first, 1, stream) };
            return context.check("cuMemcpyBatchAsync_v2", code);
        }
        let call = context.need("cuMemcpyBatchAsync", driver.memcpy_batch_async)?;
        let mut failed = 0;
        let failed = &raw mut failed;
        // SAFETY: as above; the place of a failure is stored in a local.
        let code = unsafe { call(to, from, bytes, count, attributes, first, 1, failed, stream) };
        context.check("cuMemcpyBatchAsync", code)
    }
}

/// One copy.
///
/// # Safety
/// The spans are valid for as long as it runs.
pub(super) unsafe fn copy(
    context: &Context,
    stream: CUstream,
    to: CUdeviceptr,
    from: CUdeviceptr,
    bytes: usize,
) -> Result<(), Error> {
    // SAFETY: the caller's.
    let code = unsafe { (context.driver.memcpy_async)(to, from, bytes, stream) };
    context.check("cuMemcpyAsync", code)
}

/// Whether this driver does several copies in one call: by doing it. Nobody uses the page yet.
pub(super) fn probe(context: &Context, stream: &OwnStream, page: &Pinned) -> bool {
    let driver = context.driver;
    if driver.memcpy_batch_async_v2.is_none() && driver.memcpy_batch_async.is_none() {
        return false;
    }
    const SENT: [u64; 2] = [0x5eed_0001, 0x5eed_0002];
    let word = size_of::<u64>();
    let mut copies = Copies::default();
    for (index, sent) in SENT.into_iter().enumerate() {
        page.store(index, sent);
        copies.push(page.address(2 + index), page.address(index), word);
    }
    // SAFETY: words of the page, which is never freed.
    let issued = unsafe { copies.issue(context, stream.raw()) };
    let done = issued.and_then(|_| stream.finish(context, PROBE_TIMEOUT, "the probe of batches"));
    let came = done.is_ok() && (0..2).all(|index| page.load(2 + index) == SENT[index]);
    (0..4).for_each(|word| page.store(word, 0));
    came
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_that_touch_the_same_bytes_are_told() {
        let mut copies = Copies::default();
        copies.push(1000, 2000, 100);
        copies.push(3000, 2000, 100);
        assert!(!copies.touch(5000, 2050, 100), "two may read the same");
        assert!(!copies.touch(1100, 6000, 100), "neighbours");
        assert!(!copies.touch(900, 6000, 100), "neighbours");
        for (to, from) in [(1099, 6000), (901, 6000), (5000, 3050), (2099, 6000)] {
            assert!(copies.touch(to, from, 100), "to {to} from {from}");
        }
    }
}
