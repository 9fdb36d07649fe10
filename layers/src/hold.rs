//! Provides the flags on which a layer lets ops wait until a second engine of the rank signals them.

use std::fmt;
use std::time::Duration;

use peerlane_hal::{Deadline, Fabric, PeerMemory, Role};

use crate::{Error, Local, Remote};

/// The size of the flag region in bytes. One rank uses it, so its flags may share a cache line.
const BYTES: u64 = 64;
/// The time limit for importing the flag region; its key is of this rank, so no other process is involved.
const ALIAS_TIMEOUT: Duration = Duration::from_secs(5);

/// A flag region for waits, and its import by the same rank for signals.
pub(crate) struct HoldFlags<F: Fabric> {
    // Boxed, so that they do not move while queued ops name them. The import is dropped first.
    alias: Box<Remote<F>>,
    local: Box<Local<F>>,
}

impl<F: Fabric> HoldFlags<F> {
    /// Allocates the flags on a fabric that is connected to its own rank.
    pub(crate) fn new(fabric: &F) -> Result<Self, Error<F::Error>> {
        let memory = fabric.memory();
        let local = memory.allocate(BYTES, Role::Flags).map_err(Error::Inner)?;
        let key = memory.export(&local).map_err(Error::Inner)?;
        let alias = memory.import(fabric.rank(), &key, Deadline::after(ALIAS_TIMEOUT));
        Ok(Self { alias: Box::new(alias.map_err(Error::Inner)?), local: Box::new(local) })
    }

    /// Returns the imported flag region, which signals name.
    pub(crate) fn alias(&self) -> &Remote<F> {
        &self.alias
    }

    /// Returns the local flag region, which waits name.
    pub(crate) fn local(&self) -> &Local<F> {
        &self.local
    }
}

impl<F: Fabric> fmt::Debug for HoldFlags<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HoldFlags").finish_non_exhaustive()
    }
}
