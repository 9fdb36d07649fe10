//! The live registrations of this process, by generation.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::{Claim, Handover};
use peerlane_hal::Rank;
use peerlane_hal::Role;
use peerlane_hal::{BackendId, Generation};

struct Registered {
    backend: BackendId,
    owner: Rank,
    role: Role,
    memory: Arc<dyn Handover>,
}

type Live = HashMap<Generation, Registered>;

fn live() -> MutexGuard<'static, Live> {
    static LIVE: OnceLock<Mutex<Live>> = OnceLock::new();
    // The map is whole after every statement, so a panic elsewhere does not harm it.
    LIVE.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// A registration that is in; dropping it takes it out.
#[derive(Debug)]
pub struct Entry(Generation);

impl Entry {
    /// Its generation, which this process has never used before.
    pub const fn generation(&self) -> Generation {
        self.0
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // Taken out first: unmapping under the lock would stall other ranks of the process.
        let registered = live().remove(&self.0);
        drop(registered);
    }
}

/// Enters a registration.
pub fn enter(backend: BackendId, owner: Rank, role: Role, memory: Arc<dyn Handover>) -> Entry {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let generation = Generation(NEXT.fetch_add(1, Ordering::Relaxed));
    live().insert(generation, Registered { backend, owner, role, memory });
    Entry(generation)
}

/// The registration of this process that a key names, if it lives and is of the type `M`.
pub fn find<M: Handover>(claim: &Claim) -> Option<Arc<M>> {
    let memory: Arc<dyn Any + Send + Sync> = find_any(claim)?;
    memory.downcast().ok()
}

/// The same, of any type.
pub(super) fn find_any(claim: &Claim) -> Option<Arc<dyn Handover>> {
    let live = live();
    let found = live.get(&claim.generation)?;
    let seen = (found.backend, found.owner, found.role);
    (seen == (claim.backend, claim.owner, claim.role)).then(|| Arc::clone(&found.memory))
}
