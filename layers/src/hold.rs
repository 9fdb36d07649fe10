//! Implements the flags that delay the ops of a layer until a second engine of the rank signals
//! them.

use std::fmt;
use std::time::Duration;

use peerlane_hal::{Caps, Deadline, ErrorKind, Fabric, Op, PeerMemory, Role};

use crate::{Error, Local, Remote};

/// The size of the flag region in bytes; flags may share a cache line, because only one rank uses
/// them.
const BYTES: u64 = 64;
/// The time limit for importing this rank's own flag region, which involves no other process.
const ALIAS_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns why a layer cannot hold back ops of such an engine, or `None` if it can.
pub(crate) fn cannot_hold(caps: &Caps) -> Option<String> {
    (!caps.queued_wait || caps.slice_ops_max < 2).then(|| {
        format!(
            "the layer holds ops back with waits: expected caps with queued_wait and slice_ops_max \
             of at least 2, found {caps:?}"
        )
    })
}

/// Fails if a layer cannot hold back ops of such an engine.
pub(crate) fn check_hold<E>(caps: &Caps) -> Result<(), Error<E>> {
    let refuse = |text| Err(Error::layer(ErrorKind::InvalidArgument, text));
    cannot_hold(caps).map_or(Ok(()), refuse)
}

/// Returns the error for an op that layers with held ops do not pass on.
pub(crate) fn refused_op<L, R, E>(op: &Op<'_, L, R>) -> Error<E> {
    let text = format!("a {0} was submitted to a layer that passes no {0} on", op.name());
    Error::layer(ErrorKind::InvalidArgument, text)
}

/// A flag region of this rank, which the rank also imports so that its own engines can signal the
/// flags.
pub(crate) struct HoldFlags<F: Fabric> {
    // Boxed, so that they do not move while queued ops name them. The import is dropped first.
    alias: Box<Remote<F>>,
    local: Box<Local<F>>,
}

impl<F: Fabric> HoldFlags<F> {
    pub(crate) fn new(fabric: &F) -> Result<Self, Error<F::Error>> {
        let memory = fabric.memory();
        let local = memory.allocate(BYTES, Role::Flags).map_err(Error::Inner)?;
        let key = memory.export(&local).map_err(Error::Inner)?;
        let alias = memory.import(fabric.rank(), &key, Deadline::after(ALIAS_TIMEOUT));

        Ok(Self { alias: Box::new(alias.map_err(Error::Inner)?), local: Box::new(local) })
    }

    pub(crate) fn alias(&self) -> &Remote<F> {
        &self.alias
    }

    pub(crate) fn local(&self) -> &Local<F> {
        &self.local
    }
}

impl<F: Fabric> fmt::Debug for HoldFlags<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HoldFlags").finish_non_exhaustive()
    }
}
