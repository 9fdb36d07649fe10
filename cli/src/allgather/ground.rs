//! A bare fabric between the ranks of a run: what the physical limit is measured on.

use peerlane::bootstrap::Bootstrap;
use peerlane::hal::{CopyEngine, Fabric, Op, PeerMemory, RemoteKey, Role, Ticket};
use peerlane::{Error, Rank};

use super::circle::Circle;
use crate::error::{Failure, Result};

/// This rank's registered memory in a fabric.
pub(crate) type Local<F> = <<F as Fabric>::Memory as PeerMemory>::Local;
/// A peer's imported memory in a fabric.
pub(crate) type Remote<F> = <<F as Fabric>::Memory as PeerMemory>::Remote;
type Key<F> = <<F as Fabric>::Memory as PeerMemory>::Key;

/// A fabric that is connected to every rank, and one engine.
pub(crate) struct Ground<F: Fabric> {
    fabric: F,
    engine: F::Engine,
    circle: Circle,
}

impl<F: Fabric> Ground<F> {
    /// Connects to every rank, oneself included. Collective.
    ///
    /// # Errors
    /// If a rank cannot be reached.
    pub(crate) fn open(mut fabric: F, circle: &Circle) -> Result<Self> {
        let addresses = circle.share("address of the bare fabric", &fabric.address())?;
        for (rank, address) in addresses.iter().enumerate() {
            let peer = Rank::at(rank);
            fabric
                .connect(peer, address, circle.deadline())
                .map_err(|error| refused(format_args!("cannot connect rank {rank}"), error))?;
        }
        let engine = fabric.engine().map_err(|error| refused("cannot make an engine", error))?;
        Ok(Self { fabric, engine, circle: circle.clone() })
    }

    /// Allocates a buffer that every rank can import.
    ///
    /// # Errors
    /// If memory runs out.
    pub(crate) fn allocate(&self, bytes: u64) -> Result<Local<F>> {
        let region = self.fabric.memory().allocate(bytes, Role::Data);
        region.map_err(|error| refused("cannot allocate buffers for bare copies", error))
    }

    /// Exports `mine` and imports what every rank exports, in rank order. Collective.
    ///
    /// # Errors
    /// If a region cannot be exported or imported.
    pub(crate) fn import(&self, mine: &Local<F>) -> Result<Vec<Remote<F>>> {
        let memory = self.fabric.memory();
        let key = memory.export(mine).map_err(|error| refused("cannot export memory", error))?;
        let keys = self.circle.share("key in the bare fabric", &key.encode())?;
        let import = |(rank, key): (usize, &Vec<u8>)| {
            let peer = Rank::at(rank);
            let what = format!("cannot import the memory of rank {rank}");
            let key = Key::<F>::decode(key).map_err(|error| refused(&what, error))?;
            memory.import(peer, &key, self.circle.deadline()).map_err(|error| refused(&what, error))
        };
        keys.iter().enumerate().map(import).collect()
    }

    /// Submits a slice.
    ///
    /// # Errors
    /// That of the engine.
    ///
    /// # Safety
    /// As [`CopyEngine::submit`].
    pub(crate) unsafe fn submit(&mut self, ops: &[Op<'_, Local<F>, Remote<F>>]) -> Result<Ticket> {
        // SAFETY: the caller keeps the promises of `submit`.
        let ticket = unsafe { self.engine.submit(ops) };
        ticket.map_err(|error| refused("cannot submit", error))
    }

    /// Waits until everything up to `ticket` is complete.
    ///
    /// # Errors
    /// If it does not complete in time.
    pub(crate) fn finish(&mut self, ticket: Ticket) -> Result<()> {
        let failed = |error| refused("waiting for bare copies", error);
        let deadline = self.circle.deadline();
        while self.engine.completed().map_err(failed)? < ticket {
            if deadline.has_passed() {
                let (rank, timeout) = (self.circle.rank(), self.circle.timeout());
                let text = format!("rank {rank} waited {timeout:?} for bare copies of its own");
                return Err(Failure::failed(text).with_advice("raise --timeout"));
            }
            self.engine.park(deadline.remaining()).map_err(failed)?;
        }
        Ok(())
    }
}

/// A backend's error as the failure of the run.
fn refused(what: impl std::fmt::Display, error: impl peerlane::hal::Error) -> Failure {
    Error::of_backend(what, error).into()
}
