//! The live registrations of this process, by generation.
//!
//! A key names a generation and nothing else, so that a key of freed memory finds nothing here, even
//! when new memory has the old address.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::mapping::Mapping;
use crate::host::key::{ProcessToken, role_number, role_of};
use crate::key::{Generation, KeyError};
use crate::memory::Role;
use crate::rank::Rank;
use crate::wire::{Reader, Writer};

/// Memory behind a registration.
#[derive(Debug)]
pub(super) enum Backing {
    /// Allocated here, or imported from another process.
    Mapped(Mapping),
    /// The caller's own.
    Borrowed(NonNull<u8>),
}

/// One registration; importers in this process share it.
#[derive(Debug)]
pub(in crate::host) struct Registration {
    pub(super) backing: Backing,
    pub(super) bytes: u64,
    pub(super) owner: Rank,
    pub(super) role: Role,
}

/// What a key names. The generation alone would do; owner and role are checked too, so that a key
/// that was tampered with opens nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) generation: Generation,
    pub(super) owner: Rank,
    pub(super) role: Role,
}

impl Wanted {
    pub(super) fn write(&self, writer: Writer) -> Writer {
        writer.u64(self.generation.0).u32(self.owner.0).u32(role_number(self.role))
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, KeyError> {
        let generation = Generation(reader.u64("generation")?);
        let owner = Rank(reader.u32("rank")?);
        Ok(Self { generation, owner, role: role_of(reader.u32("role")?)? })
    }
}

// SAFETY: a registration only names memory; who may touch which byte when is the contract of the
// ops and of `register`.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    pub(in crate::host) fn base(&self) -> NonNull<u8> {
        match &self.backing {
            Backing::Mapped(mapping) => mapping.base(),
            Backing::Borrowed(base) => *base,
        }
    }
}

type Live = HashMap<Generation, Arc<Registration>>;

fn live() -> MutexGuard<'static, Live> {
    static LIVE: OnceLock<Mutex<Live>> = OnceLock::new();
    // The map is whole after every statement, so a panic elsewhere does not harm it.
    LIVE.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Enters a registration under a generation that this process has never used.
pub(super) fn enter(registration: Arc<Registration>) -> Generation {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let generation = Generation(NEXT.fetch_add(1, Ordering::Relaxed));
    live().insert(generation, registration);
    generation
}

pub(super) fn find(wanted: &Wanted) -> Option<Arc<Registration>> {
    let found = live().get(&wanted.generation).cloned()?;
    (found.owner == wanted.owner && found.role == wanted.role).then_some(found)
}

pub(super) fn remove(generation: Generation) {
    // Taken out first: unmapping under the lock would stall other ranks of the process.
    let registration = live().remove(&generation);
    drop(registration);
}

/// This process's token.
pub(in crate::host) fn process_token() -> ProcessToken {
    static TOKEN: OnceLock<ProcessToken> = OnceLock::new();
    *TOKEN.get_or_init(|| {
        let mut token = [0; 16];
        let filled = rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty());
        assert_eq!(filled, Ok(token.len()), "the kernel has random numbers once it has booted");
        ProcessToken(token)
    })
}
