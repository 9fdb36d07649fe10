//! Binds the regions that commands name to the types of an engine, and makes the ops of commands.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::command::{
    Command, Commands, Direction, FlagValues, Numbered, RegionFlag, RegionOffset, Regions,
    StartValues,
};
use crate::dynamic::DynImport;
use crate::engine::{At, Flag, Op, Rows};
use crate::error::{Error, ErrorKind};
use crate::memory::{DynRegion, Region};
use crate::rank::Rank;

/// The length of a flag in bytes.
const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// The regions of commands with the types of an engine, as
/// [`DynEngine::bind`](crate::DynEngine::bind) returns them.
pub struct BoundRegions(pub(crate) Box<dyn Any + Send>);

impl fmt::Debug for BoundRegions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoundRegions").finish_non_exhaustive()
    }
}

/// The regions that commands name, with their types.
pub(crate) struct TypedRegions<L, R> {
    locals: Numbered<Arc<L>>,
    remotes: Vec<Numbered<Arc<R>>>,
    /// The owners of the memory, which are dropped last.
    _owners: Vec<DynRegion>,
}

impl<L: Region, R: Send + Sync + 'static> TypedRegions<L, R> {
    /// Returns the regions with their types, or `None` if one belongs to another backend.
    pub(crate) fn new(regions: &Regions) -> Option<Self> {
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
    pub(crate) fn ops<'s, 'a: 's>(
        &'a self,
        commands: Commands<'_>,
        start: &StartValues<'_>,
        sources: &'s mut Vec<At<'a, L>>,
        ops: &mut Vec<Op<'s, L, R>>,
    ) -> Result<(), WrongCommand> {
        let local = |place: RegionOffset| self.local(place.region, start.offset(place));
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
                    Op::Reduce { dst: local(dst)?, srcs, bytes, reduction }
                }
                Command::Signal { flag: RegionFlag { region, word, peer, .. } } => {
                    let [flags, _] = start.flags;
                    let At { region, offset } = self.remote(region, peer, 0)?;
                    let word = flag_word(offset, word, flags);
                    let flag = Flag { region, word };
                    Op::Signal { flag, value: flags.value + start.tag(peer) }
                }
                Command::Wait { flag: RegionFlag { region, word, lag, .. } } => {
                    let flags = start.flags(lag);
                    let At { region, offset } = self.local(region, 0)?;
                    let word = flag_word(offset, word, flags);
                    let flag = Flag { region, word };
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

/// Returns the word of a flag in its region, of which commands see the bytes from `begin` on.
fn flag_word(begin: u64, word: u64, flags: FlagValues) -> u64 {
    // A sum that overflows is out of range of any region, which the engine then refuses.
    (begin / WORD_BYTES).saturating_add(word).saturating_add(flags.word)
}

/// The error of a command that names what is not there.
#[derive(Debug)]
pub(crate) enum WrongCommand {
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
