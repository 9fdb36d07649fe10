//! Keeps what the threads of a driver look after, while other threads add to it and remove from it.
//!
//! `tests/tests/orderings.rs` compiles this file once more, with the locks of loom.

use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use crate::sleeper::{Announcement, Sleeper};
use crate::sync::{Mutex, MutexGuard, PoisonError};

/// The number of an entry in a list, which no other entry gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EntryNumber(u64);

/// Lists what threads look after.
///
/// A thread that goes through the list holds its lock only from one entry to the next. It meets
/// every entry that is there from its first step to its last, whatever else is removed meanwhile.
pub(super) struct List<T: ?Sized> {
    entries: Mutex<Entries<T>>,
}

struct Entries<T: ?Sized> {
    /// In the order of their numbers, because entries are added at the end.
    all: Vec<(EntryNumber, Arc<T>)>,
    next: u64,
}

impl<T: ?Sized> Default for List<T> {
    fn default() -> Self {
        Self { entries: Mutex::new(Entries { all: Vec::new(), next: 0 }) }
    }
}

impl<T: ?Sized> List<T> {
    /// Adds an entry, which stays until it is removed.
    pub(super) fn add(&self, entry: Arc<T>) {
        let mut entries = self.lock();
        let number = EntryNumber(entries.next);
        entries.next += 1;
        entries.all.push((number, entry));
    }

    /// Removes an entry, if it is still there.
    pub(super) fn remove(&self, entry: &T) {
        let mut entries = self.lock();
        let found =
            entries.all.iter().position(|(_, other)| ptr::addr_eq(&raw const **other, entry));
        let removed = found.map(|index| entries.all.remove(index));

        // The entry may be dropped here, and its drop may use the list.
        drop(entries);
        drop(removed);
    }

    /// Returns the first entry behind another one, or of all, that `is_picked` picks.
    ///
    /// The list is locked while `is_picked` runs, but not when the caller uses the entry.
    pub(super) fn next(
        &self,
        after: Option<EntryNumber>,
        is_picked: impl Fn(&T) -> bool,
    ) -> Option<(EntryNumber, Arc<T>)> {
        let entries = self.lock();
        let first = entries.all.partition_point(|(other, _)| Some(*other) <= after);
        let rest = &entries.all[first..];
        rest.iter().find(|(_, entry)| is_picked(entry)).cloned()
    }

    /// Adds the entries that `is_picked` picks to `picked`.
    pub(super) fn pick(&self, picked: &mut Vec<Arc<T>>, is_picked: impl Fn(&T) -> bool) {
        let entries = self.lock();
        let all = entries.all.iter().map(|(_, entry)| entry);
        picked.extend(all.filter(|entry| is_picked(entry)).cloned());
    }

    /// Returns the first value that `find` finds in an entry. The list is locked meanwhile.
    pub(super) fn find<R>(&self, find: impl FnMut(&T) -> Option<R>) -> Option<R> {
        let entries = self.lock();
        entries.all.iter().map(|(_, entry)| &**entry).find_map(find)
    }

    /// Calls `visit` for each entry. The list is locked meanwhile.
    pub(super) fn each(&self, mut visit: impl FnMut(&T)) {
        let entries = self.lock();
        entries.all.iter().for_each(|(_, entry)| visit(entry));
    }

    /// Returns whether `is_one` is true of an entry. The list is locked meanwhile.
    pub(super) fn any(&self, is_one: impl Fn(&T) -> bool) -> bool {
        self.find(|entry| is_one(entry).then_some(())).is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Entries<T>> {
        // Every statement leaves the list whole.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lets a thread that looks for work sleep while there is none.
#[derive(Default)]
pub(super) struct Rest {
    sleeper: Sleeper,
    sleeps: Announcement,
}

impl Rest {
    /// Announces that the thread sleeps unless it finds work now.
    pub(super) fn announce(&self) {
        self.sleeps.make();
    }

    /// Withdraws the announcement, because the thread has found work.
    pub(super) fn withdraw(&self) {
        self.sleeps.withdraw();
    }

    pub(super) fn sleep(&self, limit: Duration) {
        self.sleeper.sleep(limit);
    }

    /// Wakes the thread if it may sleep. The caller has stored the work before.
    pub(super) fn wake_if_asleep(&self) {
        if self.sleeps.is_made() {
            self.sleeper.wake();
        }
    }

    /// Wakes the thread, or ends its next sleep at once.
    pub(super) fn wake(&self) {
        self.sleeper.wake();
    }
}
