//! Implements signals: 64-bit values that engines and callers change and wait for, in this process
//! or shared with others.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Instant;

use super::counters::{Counter, NO_DEVICE};
use super::memory::{AddressSpace, Backing, NoMemory, share};
use super::settings::Setting;
use super::sync::{Backoff, read, write};

/// Bytes of a signal in shared memory.
const SHARED_BYTES: u64 = 4096;

/// A signal in the vendor's layout; users access only the value.
#[repr(C, align(64))]
#[derive(Debug, Default)]
struct SignalLayout {
    kind: AtomicI64,
    value: AtomicI64,
    rest: [AtomicU64; 2],
    start: AtomicU64,
    end: AtomicU64,
    more: [AtomicU64; 2],
}

const _: () = {
    assert!(size_of::<SignalLayout>() == 64);
    assert!(std::mem::offset_of!(SignalLayout, value) == 8);
    assert!(std::mem::offset_of!(SignalLayout, start) == 32);
};

#[derive(Debug)]
enum Held {
    Own(Box<SignalLayout>),
    /// Mapped from shared memory.
    Shared(u64, Backing),
}

#[derive(Debug)]
pub(crate) struct Signal(Held);

/// Signals of this process by address, which is the handle.
static SIGNALS: RwLock<BTreeMap<u64, Arc<Signal>>> = RwLock::new(BTreeMap::new());

/// Compares a signal's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    Equal,
    Other,
    Less,
    AtLeast,
}

impl Condition {
    const fn holds(self, value: i64, with: i64) -> bool {
        match self {
            Self::Equal => value == with,
            Self::Other => value != with,
            Self::Less => value < with,
            Self::AtLeast => value >= with,
        }
    }
}

const _: () = {
    assert!(Condition::Less.holds(-1, 0) && !Condition::Less.holds(0, 0));
    assert!(Condition::AtLeast.holds(0, 0) && !Condition::AtLeast.holds(-1, 0));
    assert!(Condition::Equal.holds(3, 3) && Condition::Other.holds(3, 4));
};

impl Signal {
    /// Creates a signal and returns its handle.
    pub(crate) fn create(value: i64, shared: bool) -> Result<u64, NoMemory> {
        if read(&SIGNALS).len() as u64 >= Setting::Signals.value() {
            return Err(NoMemory::Exhausted);
        }
        let held = if shared {
            Self::map(Backing::create(NO_DEVICE, SHARED_BYTES, 0).ok_or(NoMemory::Exhausted)?)?
        } else {
            Held::Own(Box::default())
        };
        let signal = Self(held);
        signal.place().kind.store(1, Ordering::Relaxed);
        signal.store(value);
        Ok(signal.keep())
    }

    /// Opens a shared signal and returns its handle.
    pub(crate) fn open(backing: Backing) -> Result<u64, NoMemory> {
        if backing.bytes() != SHARED_BYTES {
            return Err(NoMemory::BadRange);
        }
        Ok(Self(Self::map(backing)?).keep())
    }

    fn map(backing: Backing) -> Result<Held, NoMemory> {
        let address = backing.map(0, SHARED_BYTES, None).ok_or(NoMemory::Exhausted)?;
        Ok(Held::Shared(address, backing))
    }

    fn keep(self) -> u64 {
        Counter::LiveSignals.add(NO_DEVICE, 1);
        let signal = Arc::new(self);
        let handle = std::ptr::from_ref(signal.place()) as u64;
        write(&SIGNALS).insert(handle, signal);
        handle
    }

    pub(crate) fn find(handle: u64) -> Option<Arc<Self>> {
        read(&SIGNALS).get(&handle).cloned()
    }

    /// Removes the handle; waiting threads keep the signal.
    pub(crate) fn destroy(handle: u64) -> bool {
        let removed = write(&SIGNALS).remove(&handle);
        if removed.is_some() {
            Counter::LiveSignals.add(NO_DEVICE, -1);
        }
        removed.is_some()
    }

    /// Returns the name of a shared signal.
    pub(crate) fn name(&self) -> Option<[u8; share::NAME_BYTES]> {
        match &self.0 {
            Held::Own(_) => None,
            Held::Shared(_, backing) => Some(share::name(backing)),
        }
    }

    fn place(&self) -> &SignalLayout {
        match &self.0 {
            Held::Own(place) => place,
            Held::Shared(address, _) => {
                // SAFETY: the page was mapped when the signal was created, and is unmapped when it is
                // dropped. All fields are atomic, because other processes change them.
                unsafe { &*(*address as *const SignalLayout) }
            }
        }
    }

    /// Returns the address of the value.
    pub(crate) fn value_address(&self) -> u64 {
        std::ptr::from_ref(&self.place().value) as u64
    }

    pub(crate) fn load(&self) -> i64 {
        self.place().value.load(Ordering::Acquire)
    }

    pub(crate) fn store(&self, value: i64) {
        self.place().value.store(value, Ordering::SeqCst);
    }

    pub(crate) fn add(&self, value: i64) {
        self.place().value.fetch_add(value, Ordering::SeqCst);
    }

    /// Waits until the condition holds, the timeout has passed or `give_up` returns true. Returns
    /// the last value.
    pub(crate) fn wait(
        &self,
        condition: Condition,
        with: i64,
        deadline: Option<Instant>,
        mut give_up: impl FnMut() -> bool,
    ) -> i64 {
        let mut backoff = Backoff::default();
        loop {
            let value = self.load();
            let late = || deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if condition.holds(value, with) || late() || give_up() {
                return value;
            }
            backoff.rest();
        }
    }

    /// Stores when the signal's copy began and ended.
    pub(crate) fn set_times(&self, start: u64, end: u64) {
        self.place().start.store(start, Ordering::Relaxed);
        self.place().end.store(end, Ordering::Relaxed);
    }

    pub(crate) fn times(&self) -> (u64, u64) {
        let place = self.place();
        (place.start.load(Ordering::Relaxed), place.end.load(Ordering::Relaxed))
    }
}

impl Drop for Signal {
    fn drop(&mut self) {
        if let Held::Shared(address, _) = self.0 {
            AddressSpace::unmap_foreign(address, SHARED_BYTES);
        }
    }
}
