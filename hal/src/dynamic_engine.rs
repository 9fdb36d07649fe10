//! Defines type-erased engines, which run ops and commands on regions of any backend.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use crate::command::{
    Command, Commands, Direction, FlagValues, FusedCommands, Numbered, RegionFlag, RegionOffset,
    Regions, StartValues,
};
use crate::dynamic_error::{DynError, WrongType, wrong_type};
use crate::engine::{
    At, Caps, CaptureState, CopyEngine, Flag, FusedEngine, FusedOps, FusedStarts, Mark, Op,
    Reducer, Rows, StreamOrdered, Ticket,
};
use crate::error::{Error, ErrorKind};
use crate::fused::{Launch, ProgressReader};
use crate::key::BackendId;
use crate::memory::{DynImport, DynRegion, Region};
use crate::rank::Rank;

/// The length of a flag in bytes.
const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// A type-erased engine of any backend.
pub struct DynEngine(Box<dyn ErasedEngine>);

impl DynEngine {
    /// Erases the type of an engine of a backend.
    pub(crate) fn new<E: CopyEngine>(engine: E, backend: BackendId) -> Self
    where
        E::Local: Region,
        E::Remote: Send + Sync,
    {
        let (ops, sources) = (Vec::new(), Vec::new());
        Self(Box::new(TypedEngine { engine, backend, ops, sources }))
    }

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

    /// Compiles the commands of fused starts, as [`compile`](crate::FusedStarts::compile).
    ///
    /// # Errors
    /// As [`compile`](crate::FusedStarts::compile); [`Unavailable`](ErrorKind::Unavailable) if the
    /// engine has no fused starts; [`InvalidArgument`](ErrorKind::InvalidArgument) if a command
    /// names a region that is not bound.
    pub fn compile_commands(
        &mut self,
        regions: &BoundRegions,
        fused: &FusedCommands<'_>,
    ) -> Result<Launch, DynError> {
        self.0.compile_commands(regions, fused)
    }

    /// Compiles commands to a program that later starts make instead of the one of this number, as
    /// [`replace`](crate::FusedStarts::replace).
    ///
    /// # Errors
    /// As [`replace`](crate::FusedStarts::replace), and as
    /// [`compile_commands`](Self::compile_commands).
    pub fn replace_commands(
        &mut self,
        program: usize,
        regions: &BoundRegions,
        fused: &FusedCommands<'_>,
    ) -> Result<(), DynError> {
        self.0.replace_commands(program, regions, fused)
    }
}

impl fmt::Debug for DynEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DynEngine").field("caps", self.caps()).finish_non_exhaustive()
    }
}

/// The regions of commands with the types of an engine, as
/// [`DynEngine::bind`] returns them.
pub struct BoundRegions(Box<dyn Any + Send>);

impl fmt::Debug for BoundRegions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoundRegions").finish_non_exhaustive()
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

    fn fused(&mut self) -> Option<&mut FusedEngine<Self>> {
        self.0.fused()
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
    fn compile_commands(
        &mut self,
        regions: &BoundRegions,
        fused: &FusedCommands<'_>,
    ) -> Result<Launch, DynError>;
    fn replace_commands(
        &mut self,
        program: usize,
        regions: &BoundRegions,
        fused: &FusedCommands<'_>,
    ) -> Result<(), DynError>;
    fn fused(&mut self) -> Option<&mut FusedEngine<DynEngine>>;
}

/// The regions that commands name, with their types.
struct TypedRegions<L, R> {
    locals: Numbered<Arc<L>>,
    remotes: Vec<Numbered<Arc<R>>>,
    /// The owners of the memory, which are dropped last.
    _owners: Vec<DynRegion>,
}

impl<L: Region, R: Send + Sync + 'static> TypedRegions<L, R> {
    /// Returns the regions with their types, or `None` if one belongs to another backend.
    fn new(regions: &Regions) -> Option<Self> {
        let local = |entry: &Option<(DynRegion, u64)>| match entry {
            Some((region, offset)) => Some(Some((region.downcast()?, *offset))),
            None => Some(None),
        };
        let remote = |entry: &Option<(DynImport, u64)>| match entry {
            Some((import, offset)) => Some(Some((Arc::clone(&import.0).downcast().ok()?, *offset))),
            None => Some(None),
        };

        let remotes = regions.remotes.iter();
        Some(Self {
            locals: regions.locals.iter().map(local).collect::<Option<_>>()?,
            remotes: remotes
                .map(|ranks| ranks.iter().map(remote).collect())
                .collect::<Option<_>>()?,
            _owners: regions.locals.iter().flatten().map(|(region, _)| region.clone()).collect(),
        })
    }

    fn local(&self, number: u32, offset: u64) -> Result<At<'_, L>, WrongCommand> {
        match self.locals.get(number as usize) {
            Some(Some((region, begin))) => Ok(At { region, offset: begin.saturating_add(offset) }),
            _ => Err(WrongCommand::Region { number, peer: None }),
        }
    }

    fn remote(&self, number: u32, peer: Rank, offset: u64) -> Result<At<'_, R>, WrongCommand> {
        let of_rank = self.remotes.get(number as usize).and_then(|ranks| ranks.get(peer.index()));
        match of_rank {
            Some(Some((region, begin))) => Ok(At { region, offset: begin.saturating_add(offset) }),
            _ => Err(WrongCommand::Region { number, peer: Some(peer) }),
        }
    }

    /// Appends the ops of commands in a start to `ops`, and the sources of their reductions to
    /// `sources`.
    #[inline]
    fn ops<'s, 'a: 's>(
        &'a self,
        commands: Commands<'_>,
        start: &StartValues<'_>,
        sources: &'s mut Vec<At<'a, L>>,
        ops: &mut Vec<Op<'s, L, R>>,
    ) -> Result<(), WrongCommand> {
        let local = |place: RegionOffset| self.local(place.region, start.offset(place));

        // All sources are collected before an op borrows them, as in `typed_ops`.
        for command in commands.commands {
            if let Command::Reduce { first, count, .. } = *command {
                let given = commands.sources.get(first as usize..).unwrap_or_default();
                let given = given.get(..count as usize);
                for source in given.ok_or(WrongCommand::Sources { first, count })? {
                    sources.push(local(*source)?);
                }
            }
        }

        let mut sources: &[At<'_, L>] = sources;
        for command in commands.commands {
            ops.push(match *command {
                Command::Copy { bytes: 0, .. } => continue,
                Command::Copy { direction, peer, remote, local: own, bytes, rows } => {
                    let remote = self.remote(remote.region, peer, start.offset(remote))?;
                    copy_op(direction, remote, local(own)?, bytes, rows)
                }
                Command::Reduce { dst, count, bytes, reduction, .. } => {
                    let (srcs, rest) = sources.split_at(count as usize);
                    sources = rest;
                    if bytes == 0 {
                        continue;
                    }
                    Op::Reduce { dst: local(dst)?, srcs, bytes, reduction }
                }
                Command::Signal { flag: RegionFlag { region, word, peer, .. } } => {
                    let [flags, _] = start.flags;
                    let At { region, offset } = self.remote(region, peer, 0)?;
                    let flag = Flag { region, word: flag_word(offset, word, flags) };
                    Op::Signal { flag, value: flags.value + start.tag(peer) }
                }
                Command::Wait { flag: RegionFlag { region, word, lag, .. } } => {
                    let flags = start.flags(lag);
                    let At { region, offset } = self.local(region, 0)?;
                    let flag = Flag { region, word: flag_word(offset, word, flags) };
                    Op::Wait { flag, value: flags.value, reset: start.reset }
                }
            });
        }
        Ok(())
    }
}

/// Returns the op of a copy, which is one of rows only if there are several.
fn copy_op<'a, L, R>(
    direction: Direction,
    remote: At<'a, R>,
    local: At<'a, L>,
    bytes: u64,
    rows: Rows,
) -> Op<'a, L, R> {
    match (direction, rows) {
        (Direction::Put, Rows::ONE) => Op::Put { dst: remote, src: local, bytes },
        (Direction::Get, Rows::ONE) => Op::Get { dst: local, src: remote, bytes },
        (Direction::Put, rows) => Op::PutRows { dst: remote, src: local, bytes, rows },
        (Direction::Get, rows) => Op::GetRows { dst: local, src: remote, bytes, rows },
    }
}

/// Returns the word of a flag in a region. Commands count it from byte `begin` of the region.
fn flag_word(begin: u64, word: u64, flags: FlagValues) -> u64 {
    // A sum that overflows is out of range of any region, which the engine then refuses.
    (begin / WORD_BYTES).saturating_add(word).saturating_add(flags.word)
}

/// The error of a command that names what is not there.
#[derive(Debug)]
enum WrongCommand {
    /// It names a region that is not bound. `peer` is `None` for a region of this rank.
    Region { number: u32, peer: Option<Rank> },
    /// It names sources that its slice does not have.
    Sources { first: u32, count: u32 },
}

impl fmt::Display for WrongCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Region { number, peer: Some(peer) } => {
                write!(f, "a command names region {number} of rank {peer}, which is not bound")
            }
            Self::Region { number, peer: None } => {
                write!(f, "a command names region {number} of this rank, which is not bound")
            }
            Self::Sources { first, count } => write!(
                f,
                "a reduction names {count} sources from number {first} on, which are not there"
            ),
        }
    }
}

impl std::error::Error for WrongCommand {}

impl Error for WrongCommand {
    fn kind(&self) -> ErrorKind {
        ErrorKind::InvalidArgument
    }
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

    /// Submits the ops that `append` adds, with the sources of their reductions, to two empty
    /// vectors.
    ///
    /// # Safety
    /// As [`CopyEngine::submit`] with these ops.
    unsafe fn submit_typed<'a>(
        &mut self,
        append: impl for<'s> FnOnce(
            &'s mut Vec<At<'a, E::Local>>,
            &mut Ops<'s, E>,
        ) -> Result<(), DynError>,
    ) -> Result<Ticket, DynError> {
        let mut sources = recycle(std::mem::take(&mut self.sources));
        let mut typed = recycle(std::mem::take(&mut self.ops));

        let appended = append(&mut sources, &mut typed);
        // SAFETY: the caller upholds the same contract.
        let submitted = appended.map(|()| unsafe { self.engine.submit(&typed) });

        // The allocations return even after an error.
        self.ops = recycle(typed);
        self.sources = recycle(sources);
        submitted?.map_err(DynError::new)
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
        let backend = self.backend;
        // SAFETY: the caller upholds the same contract.
        unsafe {
            self.submit_typed(|sources, typed| match typed_ops(ops, sources, typed) {
                Some(()) => Ok(()),
                None => wrong_type(ErrorKind::InvalidArgument, "region of an op", backend),
            })
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

        // SAFETY: the caller upholds the same contract.
        unsafe {
            self.submit_typed(|sources, typed| {
                regions.ops(commands, start, sources, typed).map_err(DynError::new)
            })
        }
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

    fn compile_commands(
        &mut self,
        regions: &BoundRegions,
        fused: &FusedCommands<'_>,
    ) -> Result<Launch, DynError> {
        self.with_ops(regions, fused, |engine, ops| engine.compile(ops))
    }

    fn replace_commands(
        &mut self,
        program: usize,
        regions: &BoundRegions,
        fused: &FusedCommands<'_>,
    ) -> Result<(), DynError> {
        self.with_ops(regions, fused, |engine, ops| engine.replace(program, ops))
    }

    fn fused(&mut self) -> Option<&mut FusedEngine<DynEngine>> {
        // As for streams.
        if self.engine.fused().is_none() { None } else { Some(self) }
    }
}

impl<E: CopyEngine> TypedEngine<E> {
    /// Calls a function with the ops of commands.
    fn with_ops<R>(
        &mut self,
        regions: &BoundRegions,
        fused: &FusedCommands<'_>,
        call: impl FnOnce(
            &mut FusedEngine<E>,
            &FusedOps<'_, E::Local, E::Remote>,
        ) -> Result<R, E::Error>,
    ) -> Result<R, DynError>
    where
        E::Local: Region,
        E::Remote: Send + Sync,
    {
        let &FusedCommands { commands, ref starts, slots, counter, blocks, base, digest_bits } =
            fused;
        let regions = self.typed_regions(regions)?;

        let (mut even_sources, mut odd_sources) = (Vec::new(), Vec::new());
        let (mut even, mut odd) = (Vec::new(), Vec::new());
        let slots =
            slots.map(|(place, bytes)| Ok((regions.local(place.region, place.offset)?, bytes)));
        let bound = regions
            .ops(commands, &starts[0], &mut even_sources, &mut even)
            .and_then(|()| regions.ops(commands, &starts[1], &mut odd_sources, &mut odd))
            .and_then(|()| slots.transpose())
            .and_then(|slots| Ok((slots, regions.local(counter.0, 0)?)));

        let (slots, At { region, offset }) = bound.map_err(DynError::new)?;
        let word = (offset / WORD_BYTES).saturating_add(counter.1);
        let counter = Flag { region, word };
        let ops = FusedOps { ops: [&even, &odd], slots, counter, blocks, base, digest_bits };
        call(self.fused_starts()?, &ops).map_err(DynError::new)
    }

    /// Calls a function with ops whose regions have their types.
    fn with_typed_ops<R>(
        &mut self,
        ops: &FusedOps<'_, DynRegion, DynImport>,
        call: impl FnOnce(
            &mut FusedEngine<E>,
            &FusedOps<'_, E::Local, E::Remote>,
        ) -> Result<R, E::Error>,
    ) -> Result<R, DynError>
    where
        E::Local: Region,
        E::Remote: Send + Sync,
    {
        let (mut even_sources, mut odd_sources) = (Vec::new(), Vec::new());
        let (mut even, mut odd) = (Vec::new(), Vec::new());
        let typed = typed_ops(ops.ops[0], &mut even_sources, &mut even)
            .and_then(|()| typed_ops(ops.ops[1], &mut odd_sources, &mut odd))
            .and_then(|()| match ops.slots {
                Some((place, bytes)) => Some(Some((typed_at(place)?, bytes))),
                None => Some(None),
            })
            .and_then(|slots| Some((slots, ops.counter.region.typed()?)));
        let Some((slots, region)) = typed else {
            return wrong_type(ErrorKind::InvalidArgument, "region of an op", self.backend);
        };

        let &FusedOps { counter: Flag { word, .. }, blocks, base, digest_bits, .. } = ops;
        let counter = Flag { region, word };
        let ops = FusedOps { ops: [&even, &odd], slots, counter, blocks, base, digest_bits };
        call(self.fused_starts()?, &ops).map_err(DynError::new)
    }

    fn fused_starts(&mut self) -> Result<&mut FusedEngine<E>, DynError> {
        let kind = self.engine.caps().kind;
        self.engine.fused().ok_or_else(|| {
            let text = format!("the engine, of kind {kind}, makes no fused starts");
            DynError::new(WrongType { kind: ErrorKind::Unavailable, text })
        })
    }
}

// SAFETY: all calls are passed on to an implementation that upholds the contract.
unsafe impl<E: CopyEngine> FusedStarts for TypedEngine<E>
where
    E::Local: Region,
    E::Remote: Send + Sync,
{
    type Error = DynError;
    type Local = DynRegion;
    type Remote = DynImport;

    fn compile(&mut self, ops: &FusedOps<'_, DynRegion, DynImport>) -> Result<Launch, DynError> {
        self.with_typed_ops(ops, |engine, ops| engine.compile(ops))
    }

    fn replace(
        &mut self,
        program: usize,
        ops: &FusedOps<'_, DynRegion, DynImport>,
    ) -> Result<(), DynError> {
        self.with_typed_ops(ops, |engine, ops| engine.replace(program, ops))
    }

    unsafe fn start(&mut self, program: usize, digest: u64) -> Result<Ticket, DynError> {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.fused_starts()?.start(program, digest) }.map_err(DynError::new)
    }

    fn progress(&mut self) -> Result<ProgressReader, DynError> {
        self.fused_starts()?.progress().map_err(DynError::new)
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

    fn capture_state(&mut self, stream: &dyn Any) -> Result<CaptureState, DynError> {
        self.stream_order()?.capture_state(stream).map_err(DynError::new)
    }

    fn fork(&mut self, from: &dyn Any) -> Result<(), DynError> {
        self.stream_order()?.fork(from).map_err(DynError::new)
    }

    fn fork_beside(&mut self, from: &dyn Any) -> Result<(), DynError> {
        self.stream_order()?.fork_beside(from).map_err(DynError::new)
    }

    fn mark(&mut self) -> Result<Mark, DynError> {
        self.stream_order()?.mark().map_err(DynError::new)
    }

    fn order_after(&mut self, mark: Mark, into: &dyn Any) -> Result<(), DynError> {
        self.stream_order()?.order_after(mark, into).map_err(DynError::new)
    }

    fn join(&mut self, into: &dyn Any) -> Result<(), DynError> {
        self.stream_order()?.join(into).map_err(DynError::new)
    }

    fn replay_wait(&mut self) -> Result<Option<Duration>, DynError> {
        self.stream_order()?.replay_wait().map_err(DynError::new)
    }
}
