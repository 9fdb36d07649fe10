//! Copies that go onto a stream together, where the driver takes several in one call.
//!
//! One call for three copies to peers costs the host about as much as one copy, and the device begins
//! them without a gap (docs/perf/cuda-submission.md). Such a call has no order inside, so copies that
//! touch the same bytes do not share one. It cannot be captured.

use std::time::Duration;

use super::abilities::StreamDevice;
use super::page::Pinned;
use super::queue::OwnStream;
use crate::device::{self, Between, CopyCalls, DevicePtr, StreamHandle};

/// How long the probe may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// Copies of one stream that are still to be put there.
#[derive(Debug, Default)]
pub(super) struct Copies {
    to: Vec<DevicePtr>,
    from: Vec<DevicePtr>,
    bytes: Vec<usize>,
    /// What a single one is between.
    between: Option<Between>,
}

impl Copies {
    pub(super) fn with_capacity(copies: usize) -> Self {
        Self {
            to: Vec::with_capacity(copies),
            from: Vec::with_capacity(copies),
            bytes: Vec::with_capacity(copies),
            between: None,
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

    pub(super) fn push(&mut self, to: DevicePtr, from: DevicePtr, bytes: usize, between: Between) {
        self.between = Some(between);
        self.to.push(to);
        self.from.push(from);
        self.bytes.push(bytes);
    }

    /// Whether a copy must come after one of these: it reads or writes what one writes, or writes what
    /// one reads.
    pub(super) fn touch(&self, to: DevicePtr, from: DevicePtr, bytes: usize) -> bool {
        let meet = |one: DevicePtr, length: usize, other: DevicePtr| {
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
    pub(super) unsafe fn issue<D: CopyCalls>(
        &mut self,
        context: &D,
        stream: StreamHandle,
    ) -> Result<usize, D::Error> {
        let count = self.to.len();
        let issued = match (count, self.between) {
            (0, _) | (_, None) => Ok(()),
            (1, Some(between)) => {
                let (to, from, bytes) = (self.to[0], self.from[0], self.bytes[0]);
                // SAFETY: the caller's.
                unsafe { context.copy(stream, to, from, bytes, between) }
            }
            _ => {
                let copies = device::Copies {
                    to: &mut self.to,
                    from: &mut self.from,
                    bytes: &mut self.bytes,
                };
                // SAFETY: the caller's; `touch` was asked of each.
                unsafe { context.copy_together(stream, copies) }
            }
        };
        self.clear();
        issued.map(|()| count)
    }
}

/// Whether this driver does several copies in one call: by doing it. Nobody uses the page yet.
pub(super) fn probe<D: StreamDevice>(context: &D, stream: &OwnStream<D>, page: &Pinned) -> bool {
    if !context.may_copy_together() {
        return false;
    }
    const SENT: [u64; 2] = [0x5eed_0001, 0x5eed_0002];
    let word = size_of::<u64>();
    let mut copies = Copies::default();
    for (index, sent) in SENT.into_iter().enumerate() {
        page.store(index, sent);
        copies.push(page.address(2 + index), page.address(index), word, Between::Host);
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
        copies.push(1000, 2000, 100, Between::Peers);
        copies.push(3000, 2000, 100, Between::Peers);
        assert!(!copies.touch(5000, 2050, 100), "two may read the same");
        assert!(!copies.touch(1100, 6000, 100), "neighbours");
        assert!(!copies.touch(900, 6000, 100), "neighbours");
        for (to, from) in [(1099, 6000), (901, 6000), (5000, 3050), (2099, 6000)] {
            assert!(copies.touch(to, from, 100), "to {to} from {from}");
        }
    }
}
