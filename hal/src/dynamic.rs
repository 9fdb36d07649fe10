//! Defines type-erased fabrics, regions and engines, for programs that choose a backend at run
//! time.
//!
//! A program that selects a backend at run time uses these. Each type implements the trait of the
//! typed one, so code that is generic over [`Fabric`] takes a [`DynFabric`] as well. A call costs
//! one virtual call more, and an op one comparison of types per region.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use crate::bound::{BoundRegions, TypedRegions};
use crate::command::{Commands, Regions, StartValues};
use crate::deadline::Deadline;
use crate::engine::{At, Caps, CopyEngine, Flag, Op, Reducer, StreamOrdered, Ticket};
use crate::error::{Error, ErrorKind};
use crate::fabric::{EngineRequirements, Fabric, Link};
use crate::key::{BackendId, Envelope, Generation, KeyError, RemoteKey};
use crate::memory::{DynRegion, PeerMemory, Region, Role};
use crate::rank::Rank;
use crate::wire::{Reader, Writer};

/// A type-erased error of any backend.
///
/// The text and the [source](std::error::Error::source) are those of the backend's error.
#[derive(Debug)]
pub struct DynError(Box<dyn Error>);

impl DynError {
    /// Wraps the error of a backend.
    pub fn new(error: impl Error) -> Self {
        Self(Box::new(error))
    }

    /// Returns the wrapped error of the backend.
    pub fn into_inner(self) -> Box<dyn Error> {
        self.0
    }
}

impl fmt::Display for DynError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for DynError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

impl Error for DynError {
    fn kind(&self) -> ErrorKind {
        self.0.kind()
    }

    fn peer(&self) -> Option<Rank> {
        self.0.peer()
    }
}

/// The error of an operation on a region, key or stream that belongs to another backend.
#[derive(Debug)]
struct WrongType {
    kind: ErrorKind,
    text: String,
}

impl fmt::Display for WrongType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for WrongType {}

impl Error for WrongType {
    fn kind(&self) -> ErrorKind {
        self.kind
    }
}

fn wrong_type<T>(kind: ErrorKind, what: &str, expected: BackendId) -> Result<T, DynError> {
    let text =
        format!("the {what} belongs to another backend, expected one of the backend {expected}");
    Err(DynError::new(WrongType { kind, text }))
}

/// A type-erased imported region of any backend. Clones share the import, which ends with the last
/// of them.
#[derive(Clone)]
pub struct DynImport(pub(crate) Arc<dyn Any + Send + Sync>);

impl fmt::Debug for DynImport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DynImport").finish_non_exhaustive()
    }
}

/// A remote key of any backend, together with the length of its region.
///
/// It is encoded as the backend's key, followed by the length of the region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DynKey {
    region_bytes: u64,
    generation: Generation,
    key: Vec<u8>,
}

impl DynKey {
    fn from_key<K: RemoteKey>(key: &K) -> Self {
        // `K` can be this type, and a key is wrapped only once.
        if let Some(key) = (key as &dyn Any).downcast_ref::<Self>() {
            return key.clone();
        }

        let (region_bytes, generation) = (key.region_bytes(), key.generation());
        Self { region_bytes, generation, key: key.encode() }
    }

    fn typed<K: RemoteKey>(&self) -> Result<K, KeyError> {
        // `K` can be this type.
        let mut same = Some(self.clone());
        if let Some(key) = (&mut same as &mut dyn Any).downcast_mut::<Option<K>>() {
            return Ok(key.take().expect("set above"));
        }

        let key = K::decode(&self.key)?;
        if key.region_bytes() != self.region_bytes {
            let (field, found) = ("region bytes after the key", self.region_bytes);
            return Err(KeyError::Field { field, found, expected: "the value inside the key" });
        }
        Ok(key)
    }
}

impl RemoteKey for DynKey {
    fn encode(&self) -> Vec<u8> {
        Writer::new().bytes(&self.key).u64(self.region_bytes).finish()
    }

    /// Checks only the header of a remote key. The fabric checks the backend and the payload when
    /// it imports the region.
    fn decode(bytes: &[u8]) -> Result<Self, KeyError> {
        let mut reader = Reader::new(bytes);
        let key = reader.bytes("key", bytes.len().saturating_sub(size_of::<u64>()))?.to_vec();
        let region_bytes = reader.u64("region bytes after the key")?;
        let generation = Envelope::parse(&key)?.generation;
        Ok(Self { region_bytes, generation, key })
    }

    fn region_bytes(&self) -> u64 {
        self.region_bytes
    }

    fn generation(&self) -> Generation {
        self.generation
    }
}

/// A type-erased fabric of any backend, chosen at run time.
///
/// ```
/// use peerlane_hal::{BackendId, DynFabric, Fabric, PeerMemory, Rank, Region, Role};
/// use peerlane_host as host;
///
/// let fabric = DynFabric::new(host::Fabric::open(Rank(0), 1)?);
/// assert_eq!(fabric.backend(), BackendId::HOST);
/// assert_eq!(fabric.memory().allocate(64, Role::Data)?.bytes(), 64);
/// assert!(fabric.downcast_ref::<host::Fabric>().is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct DynFabric(Box<dyn ErasedFabric>);

impl DynFabric {
    /// Wraps a fabric of any backend and erases its type. A `DynFabric` is returned as it is.
    pub fn new<F: Fabric>(fabric: F) -> Self {
        let mut fabric = Some(fabric);
        match (&mut fabric as &mut dyn Any).downcast_mut::<Option<Self>>() {
            Some(erased) => erased.take().expect("set above"),
            None => Self(Box::new(TypedFabric(fabric.expect("set above")))),
        }
    }

    /// Returns the fabric as the backend's type `F`, or `None` if it belongs to another backend.
    pub fn downcast_ref<F: Fabric>(&self) -> Option<&F> {
        self.0.as_any().downcast_ref()
    }
}

impl fmt::Debug for DynFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DynFabric")
            .field("backend", &self.backend())
            .field("rank", &self.rank())
            .finish_non_exhaustive()
    }
}

// SAFETY: all calls are passed on to an implementation that upholds the contract.
unsafe impl Fabric for DynFabric {
    type Error = DynError;
    type Memory = Self;
    type Engine = DynEngine;

    fn backend(&self) -> BackendId {
        self.0.backend()
    }

    fn rank(&self) -> Rank {
        self.0.rank()
    }

    fn memory(&self) -> &Self {
        self
    }

    fn address(&self) -> Vec<u8> {
        self.0.address()
    }

    fn connect(
        &mut self,
        peer: Rank,
        address: &[u8],
        deadline: Deadline,
    ) -> Result<(), Self::Error> {
        self.0.connect(peer, address, deadline)
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        self.0.link(peer)
    }

    fn reopen(&self, rank: Rank, ranks: usize) -> Result<Self, DynError> {
        self.0.reopen(rank, ranks)
    }

    fn engine(&self, requirements: EngineRequirements) -> Result<DynEngine, DynError> {
        self.0.engine(requirements).map(DynEngine)
    }
}

// SAFETY: all calls are passed on to an implementation that upholds the contract.
unsafe impl PeerMemory for DynFabric {
    type Error = DynError;
    type Key = DynKey;
    type Local = DynRegion;
    type Remote = DynImport;

    fn allocate(&self, bytes: u64, role: Role) -> Result<DynRegion, DynError> {
        self.0.allocate(bytes, role)
    }

    fn allocate_on_demand(&self, bytes: u64, role: Role) -> Result<DynRegion, DynError> {
        self.0.allocate_on_demand(bytes, role)
    }

    fn allocate_polled_flags(&self, bytes: u64) -> Result<DynRegion, DynError> {
        self.0.allocate_polled_flags(bytes)
    }

    unsafe fn register(
        &self,
        base: NonNull<u8>,
        bytes: u64,
        role: Role,
    ) -> Result<DynRegion, DynError> {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.0.register(base, bytes, role) }
    }

    unsafe fn adopt(&self, region: &DynRegion, role: Role) -> Result<DynRegion, DynError> {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.0.adopt(region, role) }
    }

    fn export(&self, local: &DynRegion) -> Result<DynKey, DynError> {
        self.0.export(local)
    }

    fn import(&self, peer: Rank, key: &DynKey, deadline: Deadline) -> Result<DynImport, DynError> {
        self.0.import(peer, key, deadline)
    }
}

trait ErasedFabric: Send + Sync {
    fn as_any(&self) -> &dyn Any;
    fn backend(&self) -> BackendId;
    fn rank(&self) -> Rank;
    fn address(&self) -> Vec<u8>;
    fn connect(&mut self, peer: Rank, address: &[u8], deadline: Deadline) -> Result<(), DynError>;
    fn link(&self, peer: Rank) -> Option<Link>;
    fn reopen(&self, rank: Rank, ranks: usize) -> Result<DynFabric, DynError>;
    fn engine(&self, requirements: EngineRequirements) -> Result<Box<dyn ErasedEngine>, DynError>;
    fn allocate(&self, bytes: u64, role: Role) -> Result<DynRegion, DynError>;
    fn allocate_on_demand(&self, bytes: u64, role: Role) -> Result<DynRegion, DynError>;
    fn allocate_polled_flags(&self, bytes: u64) -> Result<DynRegion, DynError>;
    unsafe fn register(
        &self,
        base: NonNull<u8>,
        bytes: u64,
        role: Role,
    ) -> Result<DynRegion, DynError>;
    unsafe fn adopt(&self, region: &DynRegion, role: Role) -> Result<DynRegion, DynError>;
    fn export(&self, local: &DynRegion) -> Result<DynKey, DynError>;
    fn import(&self, peer: Rank, key: &DynKey, deadline: Deadline) -> Result<DynImport, DynError>;
}

struct TypedFabric<F>(F);

impl<F: Fabric> ErasedFabric for TypedFabric<F> {
    fn as_any(&self) -> &dyn Any {
        &self.0
    }

    fn backend(&self) -> BackendId {
        self.0.backend()
    }

    fn rank(&self) -> Rank {
        self.0.rank()
    }

    fn address(&self) -> Vec<u8> {
        self.0.address()
    }

    fn connect(&mut self, peer: Rank, address: &[u8], deadline: Deadline) -> Result<(), DynError> {
        self.0.connect(peer, address, deadline).map_err(DynError::new)
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        self.0.link(peer)
    }

    fn reopen(&self, rank: Rank, ranks: usize) -> Result<DynFabric, DynError> {
        self.0.reopen(rank, ranks).map(DynFabric::new).map_err(DynError::new)
    }

    fn engine(&self, requirements: EngineRequirements) -> Result<Box<dyn ErasedEngine>, DynError> {
        let backend = self.0.backend();
        let engine = self.0.engine(requirements).map_err(DynError::new)?;
        Ok(Box::new(TypedEngine { engine, backend, ops: Vec::new(), sources: Vec::new() }))
    }

    fn allocate(&self, bytes: u64, role: Role) -> Result<DynRegion, DynError> {
        region(self.0.memory().allocate(bytes, role))
    }

    fn allocate_on_demand(&self, bytes: u64, role: Role) -> Result<DynRegion, DynError> {
        region(self.0.memory().allocate_on_demand(bytes, role))
    }

    fn allocate_polled_flags(&self, bytes: u64) -> Result<DynRegion, DynError> {
        region(self.0.memory().allocate_polled_flags(bytes))
    }

    unsafe fn register(
        &self,
        base: NonNull<u8>,
        bytes: u64,
        role: Role,
    ) -> Result<DynRegion, DynError> {
        // SAFETY: the caller upholds the same contract.
        region(unsafe { self.0.memory().register(base, bytes, role) })
    }

    unsafe fn adopt(&self, held: &DynRegion, role: Role) -> Result<DynRegion, DynError> {
        // SAFETY: the caller upholds the same contract.
        region(unsafe { self.0.memory().adopt(held, role) })
    }

    fn export(&self, local: &DynRegion) -> Result<DynKey, DynError> {
        let Some(local) = local.typed() else {
            return wrong_type(ErrorKind::Mismatch, "region", self.0.backend());
        };
        self.0.memory().export(local).map(|key| DynKey::from_key(&key)).map_err(DynError::new)
    }

    fn import(&self, peer: Rank, key: &DynKey, deadline: Deadline) -> Result<DynImport, DynError> {
        let key = key.typed().map_err(DynError::new)?;
        let imported = self.0.memory().import(peer, &key, deadline).map_err(DynError::new)?;
        Ok(DynImport(Arc::new(imported)))
    }
}

fn region<R: Region, E: Error>(region: Result<R, E>) -> Result<DynRegion, DynError> {
    region.map(|region| DynRegion::new(Arc::new(region))).map_err(DynError::new)
}

/// A type-erased engine of any backend.
pub struct DynEngine(Box<dyn ErasedEngine>);

impl DynEngine {
    /// Returns the engine as the backend's type `E`, or `None` if it belongs to another backend.
    pub fn downcast_mut<E: CopyEngine>(&mut self) -> Option<&mut E> {
        // `E` can be this type.
        if (self as &dyn Any).is::<E>() {
            return (self as &mut dyn Any).downcast_mut();
        }
        self.0.as_any_mut().downcast_mut()
    }

    /// Binds the regions that commands name, so that [`submit_commands`](Self::submit_commands)
    /// need not find out their types.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if a region belongs to another backend.
    pub fn bind(&self, regions: &Regions) -> Result<BoundRegions, DynError> {
        self.0.bind(regions)
    }

    /// Submits commands as [`submit`](CopyEngine::submit) does with the ops that they describe in a
    /// start.
    ///
    /// # Errors
    /// As [`submit`](CopyEngine::submit); [`InvalidArgument`](ErrorKind::InvalidArgument) if a
    /// command names a region that is not bound, or `regions` were bound to an engine of another
    /// backend. Nothing of the slice is taken then.
    ///
    /// # Safety
    /// As [`submit`](CopyEngine::submit). The regions live until they are no longer used, even if
    /// `regions` are dropped before.
    pub unsafe fn submit_commands(
        &mut self,
        regions: &BoundRegions,
        commands: Commands<'_>,
        start: &StartValues<'_>,
    ) -> Result<Ticket, DynError> {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.0.submit_commands(regions, commands, start) }
    }

    /// Returns how many bytes of commands the device's compute units would copy, as
    /// [`compute_bytes`](CopyEngine::compute_bytes), or 0 if they cannot be submitted.
    pub fn compute_bytes_of(
        &mut self,
        regions: &BoundRegions,
        commands: Commands<'_>,
        start: &StartValues<'_>,
        captured: bool,
    ) -> u64 {
        self.0.compute_bytes_of(regions, commands, start, captured)
    }
}

impl fmt::Debug for DynEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DynEngine").field("caps", self.caps()).finish_non_exhaustive()
    }
}

// SAFETY: all calls are passed on to an implementation that upholds the contract.
unsafe impl CopyEngine for DynEngine {
    type Error = DynError;
    type Local = DynRegion;
    type Remote = DynImport;

    fn caps(&self) -> &Caps {
        self.0.caps()
    }

    fn prepare_reduce(&mut self) -> Result<Option<Reducer>, DynError> {
        self.0.prepare_reduce()
    }

    unsafe fn submit(&mut self, ops: &[Op<'_, DynRegion, DynImport>]) -> Result<Ticket, DynError> {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.0.submit(ops) }
    }

    fn completed(&mut self) -> Result<Ticket, DynError> {
        self.0.completed()
    }

    fn park(&mut self, limit: Duration) -> Result<(), DynError> {
        self.0.park(limit)
    }

    fn is_busy(&self) -> bool {
        self.0.is_busy()
    }

    fn waker(&self) -> Waker {
        self.0.waker()
    }

    fn release(&mut self) -> Result<(), DynError> {
        self.0.release()
    }

    fn compute_bytes(&mut self, ops: &[Op<'_, DynRegion, DynImport>], captured: bool) -> u64 {
        self.0.compute_bytes(ops, captured)
    }

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = DynError>> {
        self.0.streams()
    }
}

trait ErasedEngine: Send {
    fn as_any_mut(&mut self) -> &mut dyn Any;
    fn caps(&self) -> &Caps;
    fn prepare_reduce(&mut self) -> Result<Option<Reducer>, DynError>;
    unsafe fn submit(&mut self, ops: &[Op<'_, DynRegion, DynImport>]) -> Result<Ticket, DynError>;
    fn completed(&mut self) -> Result<Ticket, DynError>;
    fn park(&mut self, limit: Duration) -> Result<(), DynError>;
    fn is_busy(&self) -> bool;
    fn waker(&self) -> Waker;
    fn release(&mut self) -> Result<(), DynError>;
    fn compute_bytes(&mut self, ops: &[Op<'_, DynRegion, DynImport>], captured: bool) -> u64;
    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = DynError>>;
    fn bind(&self, regions: &Regions) -> Result<BoundRegions, DynError>;
    unsafe fn submit_commands(
        &mut self,
        regions: &BoundRegions,
        commands: Commands<'_>,
        start: &StartValues<'_>,
    ) -> Result<Ticket, DynError>;
    fn compute_bytes_of(
        &mut self,
        regions: &BoundRegions,
        commands: Commands<'_>,
        start: &StartValues<'_>,
        captured: bool,
    ) -> u64;
}

type Ops<'a, E> = Vec<Op<'a, <E as CopyEngine>::Local, <E as CopyEngine>::Remote>>;

struct TypedEngine<E: CopyEngine> {
    engine: E,
    backend: BackendId,
    /// Both vectors are empty between calls, so that only their allocations are reused.
    ops: Ops<'static, E>,
    sources: Vec<At<'static, E::Local>>,
}

impl<E: CopyEngine> TypedEngine<E>
where
    E::Local: Region,
    E::Remote: Send + Sync,
{
    fn typed_regions<'r>(
        &self,
        regions: &'r BoundRegions,
    ) -> Result<&'r TypedRegions<E::Local, E::Remote>, DynError> {
        let typed = regions.0.downcast_ref();
        typed.map_or_else(
            || wrong_type(ErrorKind::InvalidArgument, "bound region", self.backend),
            Ok,
        )
    }
}

impl<E: CopyEngine> ErasedEngine for TypedEngine<E>
where
    E::Local: Region,
    E::Remote: Send + Sync,
{
    fn as_any_mut(&mut self) -> &mut dyn Any {
        &mut self.engine
    }

    fn caps(&self) -> &Caps {
        self.engine.caps()
    }

    fn prepare_reduce(&mut self) -> Result<Option<Reducer>, DynError> {
        self.engine.prepare_reduce().map_err(DynError::new)
    }

    unsafe fn submit(&mut self, ops: &[Op<'_, DynRegion, DynImport>]) -> Result<Ticket, DynError> {
        let mut sources = recycle(std::mem::take(&mut self.sources));
        let mut typed: Ops<'_, E> = recycle(std::mem::take(&mut self.ops));

        // SAFETY: the caller upholds the same contract.
        let submitted = typed_ops(ops, &mut sources, &mut typed)
            .map(|()| unsafe { self.engine.submit(&typed) });

        self.ops = recycle(typed);
        self.sources = recycle(sources);
        match submitted {
            Some(submitted) => submitted.map_err(DynError::new),
            None => wrong_type(ErrorKind::InvalidArgument, "region of an op", self.backend),
        }
    }

    fn completed(&mut self) -> Result<Ticket, DynError> {
        self.engine.completed().map_err(DynError::new)
    }

    fn park(&mut self, limit: Duration) -> Result<(), DynError> {
        self.engine.park(limit).map_err(DynError::new)
    }

    fn is_busy(&self) -> bool {
        self.engine.is_busy()
    }

    fn waker(&self) -> Waker {
        self.engine.waker()
    }

    fn release(&mut self) -> Result<(), DynError> {
        self.engine.release().map_err(DynError::new)
    }

    fn compute_bytes(&mut self, ops: &[Op<'_, DynRegion, DynImport>], captured: bool) -> u64 {
        // `submit` refuses a slice with a region of another type.
        let (mut sources, mut typed) = (Vec::new(), Vec::new());
        let typed = typed_ops(ops, &mut sources, &mut typed).map(|()| typed);
        typed.map_or(0, |ops| self.engine.compute_bytes(&ops, captured))
    }

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = DynError>> {
        // The borrow of a typed result would last as long as `self`.
        if self.engine.streams().is_none() { None } else { Some(self) }
    }

    fn bind(&self, regions: &Regions) -> Result<BoundRegions, DynError> {
        match TypedRegions::<E::Local, E::Remote>::new(regions) {
            Some(typed) => Ok(BoundRegions(Box::new(typed))),
            None => wrong_type(ErrorKind::InvalidArgument, "region of a command", self.backend),
        }
    }

    unsafe fn submit_commands(
        &mut self,
        regions: &BoundRegions,
        commands: Commands<'_>,
        start: &StartValues<'_>,
    ) -> Result<Ticket, DynError> {
        let regions = self.typed_regions(regions)?;
        let mut sources = recycle(std::mem::take(&mut self.sources));
        let mut typed: Ops<'_, E> = recycle(std::mem::take(&mut self.ops));

        let ops = regions.ops(commands, start, &mut sources, &mut typed);
        // SAFETY: the caller upholds the same contract.
        let submitted = ops.map(|()| unsafe { self.engine.submit(&typed) });

        self.ops = recycle(typed);
        self.sources = recycle(sources);
        submitted.map_err(DynError::new)?.map_err(DynError::new)
    }

    fn compute_bytes_of(
        &mut self,
        regions: &BoundRegions,
        commands: Commands<'_>,
        start: &StartValues<'_>,
        captured: bool,
    ) -> u64 {
        // `submit_commands` refuses what cannot be submitted.
        let (mut sources, mut typed) = (Vec::new(), Vec::new());
        let Ok(regions) = self.typed_regions(regions) else { return 0 };

        let ops = regions.ops(commands, start, &mut sources, &mut typed).map(|()| typed);
        ops.map_or(0, |ops| self.engine.compute_bytes(&ops, captured))
    }
}

/// Returns a region of an op with its type, or `None` if it belongs to another backend.
fn typed_at<'a, L: Region>(at: At<'a, DynRegion>) -> Option<At<'a, L>> {
    Some(At { region: at.region.typed()?, offset: at.offset })
}

/// Appends ops with typed regions to `typed`, and the sources of their reductions to `sources`.
/// Returns `None` if a region belongs to another backend.
fn typed_ops<'s, 'a: 's, L: Region, R: 'static>(
    ops: &[Op<'a, DynRegion, DynImport>],
    sources: &'s mut Vec<At<'a, L>>,
    typed: &mut Vec<Op<'s, L, R>>,
) -> Option<()> {
    // All sources are collected before an op borrows them, because a vector that grows moves them.
    for op in ops {
        if let Op::Reduce { srcs, .. } = op {
            for source in *srcs {
                sources.push(typed_at(*source)?);
            }
        }
    }

    let mut sources: &[At<'_, L>] = sources;
    for op in ops {
        typed.push(typed_op(op, &mut sources)?);
    }
    Some(())
}

/// Returns an op with typed regions, and takes the sources of a reduction from the front of
/// `sources`.
fn typed_op<'a, L: Region, R: 'static>(
    op: &Op<'a, DynRegion, DynImport>,
    sources: &mut &'a [At<'a, L>],
) -> Option<Op<'a, L, R>> {
    let remote =
        |at: At<'a, DynImport>| Some(At { region: at.region.0.downcast_ref()?, offset: at.offset });

    Some(match *op {
        Op::Put { dst, src, bytes } => Op::Put { dst: remote(dst)?, src: typed_at(src)?, bytes },
        Op::Get { dst, src, bytes } => Op::Get { dst: typed_at(dst)?, src: remote(src)?, bytes },
        Op::PutRows { dst, src, bytes, rows } => {
            Op::PutRows { dst: remote(dst)?, src: typed_at(src)?, bytes, rows }
        }
        Op::GetRows { dst, src, bytes, rows } => {
            Op::GetRows { dst: typed_at(dst)?, src: remote(src)?, bytes, rows }
        }
        Op::Signal { flag, value } => {
            let flag = Flag { region: flag.region.0.downcast_ref()?, word: flag.word };
            Op::Signal { flag, value }
        }
        Op::Wait { flag, value, reset } => {
            let flag = Flag { region: flag.region.typed()?, word: flag.word };
            Op::Wait { flag, value, reset }
        }
        Op::Reduce { dst, srcs, bytes, reduction } => {
            let (taken, rest) = sources.split_at(srcs.len());
            *sources = rest;
            Op::Reduce { dst: typed_at(dst)?, srcs: taken, bytes, reduction }
        }
    })
}

/// Reuses the allocation of a vector for values of another lifetime.
///
/// Collecting an emptied vector in place keeps its buffer, so a start allocates nothing.
fn recycle<T, U>(mut values: Vec<T>) -> Vec<U> {
    const { assert!(size_of::<T>() == size_of::<U>()) };
    values.clear();
    values.into_iter().map(|_| unreachable!("cleared above")).collect()
}

impl<E: CopyEngine> TypedEngine<E> {
    fn stream_order(&mut self) -> Result<&mut dyn StreamOrdered<Error = E::Error>, DynError> {
        let backend = self.backend;
        self.engine.streams().ok_or_else(|| {
            let text = format!("engines of the backend {backend} do not support streams");
            DynError::new(WrongType { kind: ErrorKind::Mismatch, text })
        })
    }
}

// SAFETY: all calls are passed on to an implementation that upholds the contract.
unsafe impl<E: CopyEngine> StreamOrdered for TypedEngine<E> {
    type Error = DynError;

    fn is_capturing(&mut self, stream: &dyn Any) -> Result<bool, DynError> {
        self.stream_order()?.is_capturing(stream).map_err(DynError::new)
    }

    fn fork(&mut self, from: &dyn Any) -> Result<(), DynError> {
        self.stream_order()?.fork(from).map_err(DynError::new)
    }

    fn join(&mut self, into: &dyn Any) -> Result<(), DynError> {
        self.stream_order()?.join(into).map_err(DynError::new)
    }

    fn replay_wait(&mut self) -> Result<Option<Duration>, DynError> {
        self.stream_order()?.replay_wait().map_err(DynError::new)
    }
}
