//! Sums up the memory that a group holds, and releases what no operation uses.

use std::sync::{Arc, Weak};

use peerlane_hal::{Deadline, Fabric as _, Region as _};

use super::Group;
use super::agreement::{Offer, agree, encode};
use super::heap::dropped_lists;
use super::stats::{GroupStats, Held, MemoryKind, summed};
use super::window::Inner;
use crate::error::Error;
use crate::plan::Tier;

/// Returns the memory of the windows that Peerlane has allocated and that still exist.
fn held_by_windows(windows: &[Weak<Inner>]) -> impl Iterator<Item = Held> {
    windows.iter().filter_map(Weak::upgrade).map(|window| {
        let space = window.region().space();
        Held { kind: MemoryKind::Windows, space, bytes: window.bytes() }
    })
}

impl Group {
    /// Returns what the group holds on this rank.
    ///
    /// Memory of operations that were dropped stays in the heap for the next ones, until
    /// [`trim`](Self::trim) gives it back.
    pub fn stats(&self) -> GroupStats {
        let held = self.heap.held().into_iter();
        let held = held.chain(held_by_windows(&self.allocated_windows));
        let held = held.chain(self.buffer_bytes.held());
        let memory = summed(held, self.setup.selection.device);

        let (immediate, paths) = (self.immediate.counts(), self.immediate.paths());
        GroupStats { memory, immediate, paths, moves: self.fabric().moves() }
    }

    /// Releases the memory of the heap that no operation uses any more, and returns the number of
    /// bytes of this rank. Collective.
    ///
    /// The heap consists of segments, each of which is released as a whole, so one operation keeps
    /// its segment. Flags stay.
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Group, host};
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let sum = group.all_reduce::<f32>(1 << 20).prepare()?;
    /// let held = group.stats().memory_bytes();
    /// drop(sum);
    /// let trimmed = group.trim()?;
    /// assert_eq!(group.stats().memory_bytes(), held - trimmed);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// The reason why the group has ended, or the rank that did not come in time.
    pub fn trim(&mut self) -> Result<u64, Error> {
        self.runtime.life.check()?;
        let runtime = Arc::clone(&self.runtime);
        let deadline = Deadline::after(self.timeout());

        let dropped = self.heap.dropped();
        let own_dropped = dropped.len();
        let offer = Offer::default().blob(encode(&dropped));
        let offers = agree(&runtime, "trim", Ok(offer), deadline)?;

        self.heap.free_dropped(&dropped_lists(&offers)?, own_dropped);

        // Each rank ends its imports, and keeps its own memory until all have done so.
        let unused = self.heap.take_unused().into_iter();
        let unused: Vec<_> = unused.map(|segment| segment.without_imports()).collect();
        let ended = agree(&runtime, "trim, imports", Ok(Offer::default()), deadline);
        if let Err(error) = ended {
            // A peer may still access the memory.
            unused.into_iter().for_each(std::mem::forget);
            return Err(error);
        }

        let bytes = unused.iter().filter_map(|segment| segment.of(Tier::Local));
        Ok(bytes.map(|regions| regions.local().bytes()).sum())
    }
}
