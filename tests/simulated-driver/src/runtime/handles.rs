//! Maps handles to objects. An unknown handle is an error without other effects.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};

use super::Api;
use super::code::{INVALID_HANDLE, Outcome};
use crate::device::counters::Counter;
use crate::device::event::Event;
use crate::device::graph::{Node, Program};
use crate::device::queue::Queue;
use crate::device::sync::{read, write};

/// Things of one kind by their handles, which are never used twice.
#[derive(Debug)]
pub(crate) struct Table<T> {
    entries: RwLock<BTreeMap<usize, Arc<T>>>,
    next: AtomicUsize,
}

pub(crate) static STREAMS: Table<Queue> = Table::new(0x51_0000_0000);
pub(crate) static EVENTS: Table<Event> = Table::new(0x52_0000_0000);
pub(crate) static GRAPHS: Table<Vec<Node>> = Table::new(0x53_0000_0000);
pub(crate) static PROGRAMS: Table<Program> = Table::new(0x54_0000_0000);

impl<T> Table<T> {
    /// Returns an empty table whose handles begin with `first`: they look like pointers that lead
    /// nowhere, and those of two tables never meet.
    pub(super) const fn new(first: usize) -> Self {
        Self { entries: RwLock::new(BTreeMap::new()), next: AtomicUsize::new(first) }
    }

    pub(crate) fn insert(&self, entry: Arc<T>) -> usize {
        let handle = self.next.fetch_add(16, Ordering::Relaxed);
        write(&self.entries).insert(handle, entry);
        handle
    }

    pub(crate) fn find(&self, handle: usize) -> Outcome<Arc<T>> {
        read(&self.entries).get(&handle).cloned().ok_or(INVALID_HANDLE)
    }

    pub(crate) fn remove(&self, handle: usize) -> Outcome<Arc<T>> {
        write(&self.entries).remove(&handle).ok_or(INVALID_HANDLE)
    }
}

/// Null, 1 (legacy) and this stand for default streams.
pub(crate) const STREAM_PER_THREAD: usize = 2;

/// The queue behind a stream's handle, which must still work.
pub(crate) fn stream<A: Api>(handle: usize) -> Outcome<Arc<Queue>> {
    A::ready()?;
    if handle <= STREAM_PER_THREAD {
        let session = A::current()?;
        Counter::DefaultStreamUses.add(session.device(), 1);
        return Ok(session.default_queue());
    }
    let queue = STREAMS.find(handle)?;
    queue.session().fault().map_or(Ok(queue.clone()), |fault| Err(fault.into()))
}
