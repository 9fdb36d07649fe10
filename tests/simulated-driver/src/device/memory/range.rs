//! Describes one range of device addresses, and which sessions may access it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::backing::{Backing, unmap};
use crate::device::counters::Counter;
use crate::device::session::Session;

/// How a range came to be.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    /// Allocated on a device, by a session.
    Plain { session: u64 },
    /// The same, ordered by a queue; it cannot be shared by name.
    Pooled { session: u64 },
    /// Of the host, pinned; every device reaches it.
    Host { session: u64 },
    /// Words that streams may wait for, where the vendor is strict.
    Signal { session: u64 },
    /// Of the host and the caller's own, pinned.
    Registered { session: u64 },
    /// Opened by its name, by a session on this device.
    Imported { session: u64, by: u32 },
    /// A piece of a block, mapped into a reservation.
    Mapped { block: u64 },
}

/// The range; whoever runs a command on it holds it, so that it stays mapped so long.
#[derive(Debug)]
pub(crate) struct Range {
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    pub(crate) backing: Arc<Backing>,
    pub(crate) kind: Kind,
    /// Never used again in this process, other than addresses.
    pub(crate) id: u64,
    /// The devices that were let in one by one, a bit each.
    access: AtomicU64,
    /// A note of the API.
    note: AtomicU32,
}

impl Range {
    pub(super) fn new(base: u64, bytes: u64, backing: Arc<Backing>, kind: Kind) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let range = Self {
            base,
            bytes,
            backing,
            kind,
            id,
            access: AtomicU64::new(0),
            note: AtomicU32::new(0),
        };
        range.live_counter().add(range.device(), 1);
        range
    }

    /// The device whose memory it is.
    pub(crate) fn device(&self) -> u32 {
        self.backing.identity().device
    }

    pub(crate) fn end(&self) -> u64 {
        self.base + self.bytes
    }

    pub(crate) fn is_host(&self) -> bool {
        matches!(self.kind, Kind::Host { .. } | Kind::Signal { .. } | Kind::Registered { .. })
    }

    /// The session that goes with it, if any.
    pub(crate) fn session(&self) -> Option<u64> {
        match self.kind {
            Kind::Plain { session }
            | Kind::Pooled { session }
            | Kind::Host { session }
            | Kind::Signal { session }
            | Kind::Registered { session }
            | Kind::Imported { session, .. } => Some(session),
            Kind::Mapped { .. } => None,
        }
    }

    pub(crate) fn note(&self) -> u32 {
        self.note.load(Ordering::Relaxed)
    }

    pub(crate) fn set_note(&self, note: u32) {
        self.note.store(note, Ordering::Relaxed);
    }

    fn lets_in(&self, device: u32) -> bool {
        self.access.load(Ordering::Acquire) & (1 << device) != 0
    }

    pub(crate) fn allow(&self, device: u32, access: bool) {
        let bit = 1 << device;
        if access {
            self.access.fetch_or(bit, Ordering::AcqRel);
        } else {
            self.access.fetch_and(!bit, Ordering::AcqRel);
        }
    }

    pub(crate) fn is_reached_by(&self, session: &Session) -> bool {
        match self.kind {
            Kind::Host { .. } | Kind::Signal { .. } | Kind::Registered { .. } => true,
            Kind::Plain { .. } | Kind::Pooled { .. } => {
                session.reaches(self.device()) || self.lets_in(session.device())
            }
            Kind::Imported { by, .. } => {
                by == session.device()
                    || session.reaches(self.device())
                    || self.lets_in(session.device())
            }
            Kind::Mapped { .. } => self.lets_in(session.device()),
        }
    }

    /// Whether it belongs to another device or process than the session's.
    pub(crate) fn is_foreign_to(&self, session: &Session) -> bool {
        !self.is_host() && (self.device() != session.device() || self.backing.is_imported())
    }

    fn live_counter(&self) -> Counter {
        match self.kind {
            Kind::Imported { .. } | Kind::Mapped { .. } => Counter::LiveMappings,
            _ => Counter::LiveAllocations,
        }
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        self.live_counter().add(self.device(), -1);
        // A piece lies in a reservation, which takes its addresses back.
        if !matches!(self.kind, Kind::Mapped { .. } | Kind::Registered { .. }) {
            unmap(self.base, self.bytes);
        }
    }
}
