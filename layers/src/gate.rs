//! Flags of a layer, which hold an engine back until another engine of the same rank signals them.

use std::fmt;
use std::time::Duration;

use peerlane_hal::{Deadline, Fabric, PeerMemory, Role};

use crate::{Error, Local, Remote};

/// A few flags, each on a cache line with the others: one rank uses them.
const BYTES: u64 = 64;
/// One's own key is at hand, so its import asks nobody.
const ALIAS_TIMEOUT: Duration = Duration::from_secs(5);

/// A region of flags and its alias, for waits and for signals.
pub(crate) struct Gate<F: Fabric> {
    // Boxed, so that a queue that names them never sees them move. The import ends first.
    alias: Box<Remote<F>>,
    local: Box<Local<F>>,
}

impl<F: Fabric> Gate<F> {
    /// Flags of `fabric`, which is connected to itself.
    pub(crate) fn new(fabric: &F) -> Result<Self, Error<F::Error>> {
        let memory = fabric.memory();
        let local = memory.allocate(BYTES, Role::Flags).map_err(Error::Inner)?;
        let key = memory.export(&local).map_err(Error::Inner)?;
        let alias = memory.import(fabric.rank(), &key, Deadline::after(ALIAS_TIMEOUT));
        Ok(Self { alias: Box::new(alias.map_err(Error::Inner)?), local: Box::new(local) })
    }

    /// For signals.
    pub(crate) fn alias(&self) -> &Remote<F> {
        &self.alias
    }

    /// For waits.
    pub(crate) fn local(&self) -> &Local<F> {
        &self.local
    }
}

impl<F: Fabric> fmt::Debug for Gate<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").finish_non_exhaustive()
    }
}
