//! Connects a fabric between the ranks without a group, for measurements of single ops.

use std::sync::atomic::Ordering;
use std::time::Duration;

use peerlane::bootstrap::Bootstrap;
use peerlane::hal::{
    CopyEngine, DynEngine, DynFabric, DynImport, DynKey, DynRegion, EngineRequirements, Fabric,
    Flag, Op, PeerMemory, Region, RemoteKey, Role, Ticket,
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

    pub(crate) fn backend(&self) -> String {
        self.fabric.backend().to_string()
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

    pub(crate) fn completed(&mut self) -> Result<Ticket> {
        self.engine.completed().map_err(|error| backend_failure("bare copies failed", error))
    }

    pub(crate) fn finish(&mut self, ticket: Ticket) -> Result<()> {
        self.poll_until("its own bare copies", |engine| Ok(engine.completed()? >= ticket))
    }

    /// Waits until a flag of this rank is at least `value`; no other engine may wait for the flag.
    pub(crate) fn wait(&mut self, flag: Flag<'_, DynRegion>, value: u64) -> Result<()> {
        if self.engine.caps().queued_wait {
            // SAFETY: the flag's region is borrowed until the ticket is complete, and by this method's
            // contract this engine is the only reader.
            let ticket = unsafe { self.submit(&[Op::Wait { flag, value, reset: false }]) }?;
            return self.finish(ticket);
        }
        let word = usize::try_from(flag.word).unwrap_or(usize::MAX);
        let Some(word) = flag.region.flags().and_then(|flags| flags.get(word)) else {
            return Err(Failure::failed(
                "the backend cannot measure bare copies: the host cannot read its flags, and its \
                 engines cannot queue waits",
            ));
        };
        self.poll_until("a flag of a peer", |engine| {
            if word.load(Ordering::Acquire) >= value {
                return Ok(true);
            }
            engine.completed()?;
            Ok(word.load(Ordering::Acquire) >= value)
        })
    }

    pub(crate) fn slice_ops_max(&self) -> usize {
        self.engine.caps().slice_ops_max
    }

    /// Parks this thread until the engine may have made progress, at most for `limit`.
    pub(crate) fn park(&mut self, limit: Duration) -> Result<()> {
        self.engine.park(limit).map_err(|error| backend_failure("bare copies failed", error))
    }

    /// Polls the engine until `is_done` returns true, and parks between the polls.
    fn poll_until(
        &mut self,
        what: &str,
        mut is_done: impl FnMut(&mut Self) -> Result<bool>,
    ) -> Result<()> {
        let deadline = self.comm.deadline();
        while !is_done(self)? {
            if deadline.has_passed() {
                let (rank, timeout) = (self.comm.rank(), self.comm.timeout());
                let text = format!("timeout: rank {rank} waited {timeout:?} for {what}");
                return Err(Failure::failed(text).with_advice("raise --timeout"));
            }
            self.park(deadline.remaining())?;
        }
        Ok(())
    }
}

/// Converts a backend error to a failure that says what could not be done.
fn backend_failure(what: impl std::fmt::Display, error: impl peerlane::hal::Error) -> Failure {
    Error::of_backend(what, error).into()
}
