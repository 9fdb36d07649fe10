//! Letting blocked waits pass, from the host.
//!
//! The host, where it reaches the flag, or a stream of its own writes to each awaited flag what its wait
//! wants to see. Nothing of the device is lost, and whatever stands behind the wait runs. One round may
//! not be enough: a reset undoes it, a late signal of a peer too, and the next wait may want another
//! value. So callers repeat it until the engine is drained.

use std::sync::atomic::{AtomicU64, Ordering};

use super::batch::Batch;
use super::page::Pinned;
use super::pending::Awaited;
use super::queue::OwnStream;
use crate::device::WordCalls;

/// The word of the page that counts the rounds that were written.
const ROUND_WORD: usize = 8;
/// Values from here on do not let pass who waits for small ones: the driver compares cyclically.
const UPPER_HALF: u64 = 1 << 63;

/// Writes what waits want to see.
#[derive(Debug)]
pub(super) struct Release<D: WordCalls> {
    stream: OwnStream<D>,
    batch: Batch<D>,
    targets: Vec<Awaited>,
    /// Rounds that were put onto the stream.
    rounds: u64,
    /// Rounds of the host.
    stored: u64,
}

impl<D: WordCalls> Release<D> {
    /// The context is current.
    pub(super) fn new(context: &D, together: bool) -> Result<Self, D::Error> {
        let stream = OwnStream::urgent(context)?;
        let batch = Batch::new(together);
        Ok(Self { stream, batch, targets: Vec::new(), rounds: 0, stored: 0 })
    }

    /// The stream that passes those that wait.
    pub(super) fn stream(&self) -> &OwnStream<D> {
        &self.stream
    }

    /// Whether the last round has been written.
    pub(super) fn is_written(&self, page: &Pinned) -> bool {
        page.load(ROUND_WORD) == self.rounds
    }

    /// One round: for each flag the largest value that somebody waits for. On the stream not before the
    /// last round has been written, so that rounds do not pile up on a device that stands still.
    pub(super) fn round(
        &mut self,
        context: &D,
        page: &Pinned,
        awaited: impl Iterator<Item = Awaited> + Clone,
    ) -> Result<(), D::Error> {
        self.store(awaited.clone());
        if !self.is_written(page) {
            return Ok(());
        }
        self.targets.clear();
        self.targets.extend(awaited.filter(|target| target.host.is_none()));
        pick(&mut self.targets, self.rounds % 2 == 1);
        if self.targets.is_empty() {
            return Ok(());
        }
        let stream = self.stream.raw();
        self.batch.clear();
        for target in &self.targets {
            if self.batch.room() == 1 {
                self.batch.issue(context, stream)?;
            }
            self.batch.write(target.flag, target.value);
        }
        self.batch.write(page.address(ROUND_WORD), self.rounds + 1);
        self.batch.issue(context, stream)?;
        self.rounds += 1;
        Ok(())
    }

    /// The host's part, which no stream can hold up.
    fn store(&mut self, awaited: impl Iterator<Item = Awaited>) {
        self.targets.clear();
        self.targets.extend(awaited.filter(|target| target.host.is_some()));
        pick(&mut self.targets, self.stored % 2 == 1);
        self.stored += 1;
        for target in &self.targets {
            let Some(host) = target.host else { continue };
            // SAFETY: a word of a region of flags, aligned and mapped here (`Place::host_address`); a
            // wait that is not complete names it, so it lives (`submit`). Of graphs only those that run
            // are asked for.
            let word = unsafe { AtomicU64::from_ptr(host as *mut u64) };
            word.store(target.value, Ordering::Release);
        }
    }
}

/// Leaves one value for each flag: the largest that is awaited of the upper half of the range, or of
/// the lower half; of the other one if there is none.
fn pick(targets: &mut Vec<Awaited>, upper: bool) {
    targets.sort_unstable_by_key(|target| {
        let other_half = (target.value >= UPPER_HALF) != upper;
        (target.flag, other_half, std::cmp::Reverse(target.value))
    });
    targets.dedup_by_key(|target| target.flag);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_flag_gets_the_largest_value_of_one_half_by_turns() {
        let all = [(16, 3), (8, 1), (8, u64::MAX), (8, 4), (8, UPPER_HALF), (24, u64::MAX - 1)];
        let picked = |upper| {
            let mut targets: Vec<_> =
                all.iter().map(|&(flag, value)| Awaited { flag, host: None, value }).collect();
            pick(&mut targets, upper);
            targets.iter().map(|target| (target.flag, target.value)).collect::<Vec<_>>()
        };
        assert_eq!(picked(false), [(8, 4), (16, 3), (24, u64::MAX - 1)]);
        assert_eq!(picked(true), [(8, u64::MAX), (16, 3), (24, u64::MAX - 1)]);
    }
}
