//! Connects a fabric between the ranks without a group, for measurements of single ops.

use peerlane::bootstrap::Bootstrap;
use peerlane::hal::{
    CopyEngine, DynEngine, DynFabric, DynImport, DynKey, DynRegion, EngineRequirements, Fabric, Op,
    PeerMemory, RemoteKey, Role, Ticket,
};
use peerlane::{Error, Rank};

use super::comm::Comm;
use crate::error::{Failure, Result};

/// A fabric that is connected to every rank and belongs to no group.
pub(crate) struct BareFabric {
    fabric: DynFabric,
    comm: Comm,
}

/// A copy engine of a fabric without a group, whose waits have a deadline.
pub(crate) struct BareEngine {
    engine: DynEngine,
    comm: Comm,
}

impl BareFabric {
    /// Connects the fabric to every rank, including this one. Collective.
    pub(crate) fn open(mut fabric: DynFabric, comm: &Comm) -> Result<Self> {
        let addresses = comm.share("address of the bare fabric", &fabric.address())?;
        for (rank, address) in addresses.iter().enumerate() {
            let peer = Rank::at(rank);
            fabric.connect(peer, address, comm.deadline()).map_err(|error| {
                backend_failure(format_args!("cannot connect rank {rank}"), error)
            })?;
        }
        Ok(Self { fabric, comm: comm.clone() })
    }

    pub(crate) fn engine(&mut self) -> Result<BareEngine> {
        let engine = self.fabric.engine(EngineRequirements::default());
        let engine = engine.map_err(|error| backend_failure("cannot create an engine", error))?;
        Ok(BareEngine { engine, comm: self.comm.clone() })
    }

    pub(crate) fn allocate(&self, bytes: u64, role: Role) -> Result<DynRegion> {
        let region = self.fabric.memory().allocate(bytes, role);
        region.map_err(|error| backend_failure("cannot allocate buffers for bare copies", error))
    }

    /// Exports `mine` and imports the exported regions of all ranks, in rank order. Collective.
    pub(crate) fn import(&self, mine: &DynRegion) -> Result<Vec<DynImport>> {
        let memory = self.fabric.memory();
        let key =
            memory.export(mine).map_err(|error| backend_failure("cannot export memory", error))?;
        let keys = self.comm.share("key in the bare fabric", &key.encode())?;
        let import = |(rank, key): (usize, &Vec<u8>)| {
            let peer = Rank::at(rank);
            let what = format!("cannot import the memory of rank {rank}");
            let key = DynKey::decode(key).map_err(|error| backend_failure(&what, error))?;
            memory
                .import(peer, &key, self.comm.deadline())
                .map_err(|error| backend_failure(&what, error))
        };
        keys.iter().enumerate().map(import).collect()
    }
}

impl BareEngine {
    /// Submits a slice of ops to the engine.
    ///
    /// # Safety
    /// The rules of [`CopyEngine::submit`] apply.
    pub(crate) unsafe fn submit(&mut self, ops: &[Op<'_, DynRegion, DynImport>]) -> Result<Ticket> {
        // SAFETY: the caller fulfils the rules of `CopyEngine::submit`.
        let ticket = unsafe { self.engine.submit(ops) };
        ticket.map_err(|error| backend_failure("cannot submit bare copies", error))
    }

    /// Waits until a submitted slice is complete.
    pub(crate) fn finish(&mut self, ticket: Ticket) -> Result<()> {
        let failed = |error| backend_failure("bare copies failed", error);
        let deadline = self.comm.deadline();
        while self.engine.completed().map_err(failed)? < ticket {
            if deadline.has_passed() {
                let (rank, timeout) = (self.comm.rank(), self.comm.timeout());
                let text =
                    format!("timeout: rank {rank} waited {timeout:?} for its own bare copies");
                return Err(Failure::failed(text).with_advice("raise --timeout"));
            }
            self.engine.park(deadline.remaining()).map_err(failed)?;
        }
        Ok(())
    }
}

/// Converts a backend error to a failure that says what could not be done.
fn backend_failure(what: impl std::fmt::Display, error: impl peerlane::hal::Error) -> Failure {
    Error::of_backend(what, error).into()
}
