//! Flags with which a layer holds ops back until another engine of the same rank signals them.

use std::fmt;
use std::time::Duration;

use peerlane_hal::{Deadline, Fabric, PeerMemory, Role};

use crate::{Error, Local, Remote};

/// Length of the region. One rank uses it, so its flags may share a cache line.
const BYTES: u64 = 64;
/// Time limit of the import; the key is of this rank, so no other process is involved.
const ALIAS_TIMEOUT: Duration = Duration::from_secs(5);

/// A region of flags and its import by the same rank, for waits and for signals.
pub(crate) struct HoldFlags<F: Fabric> {
    // Boxed, so that they do not move while queued ops name them. The import is dropped first.
    alias: Box<Remote<F>>,
    local: Box<Local<F>>,
}

impl<F: Fabric> HoldFlags<F> {
    /// Allocates flags on `fabric`. The fabric is connected to its own rank.
    pub(crate) fn new(fabric: &F) -> Result<Self, Error<F::Error>> {
        let memory = fabric.memory();
        let local = memory.allocate(BYTES, Role::Flags).map_err(Error::Inner)?;
        let key = memory.export(&local).map_err(Error::Inner)?;
        let alias = memory.import(fabric.rank(), &key, Deadline::after(ALIAS_TIMEOUT));
        Ok(Self { alias: Box::new(alias.map_err(Error::Inner)?), local: Box::new(local) })
    }

    /// Returns the imported region, for signals.
    pub(crate) fn alias(&self) -> &Remote<F> {
        &self.alias
    }

    /// Returns the local region, for waits.
    pub(crate) fn local(&self) -> &Local<F> {
        &self.local
    }
}

impl<F: Fabric> fmt::Debug for HoldFlags<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HoldFlags").finish_non_exhaustive()
    }
}
