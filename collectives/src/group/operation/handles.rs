//! Tells when single blocks of a start have arrived, and lets single blocks depart.
//!
//! A lane notes its place when it has brought a block, and stops before it reads one that has not
//! departed. So a handle is a place in a lane, and nothing but the order of the flags is different
//! from other starts.

use std::collections::BTreeSet;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use peerlane_hal::{Deadline, ErrorKind, Rank};

use super::prepared::{FuturePolls, Prepared};
use super::{OpenStart, Operation, State};
use crate::error::Error;
use crate::plan::{Cell, Plan};
use crate::run::parts::Handles;

/// Names one chunk of a block.
///
/// In an arrival, the block is that of the rank that provides it. In a departure, it is that for
/// the rank that gets it, or this rank's block if all ranks get the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockChunk {
    /// The rank that the block comes from or goes to.
    pub block: Rank,
    /// The number of the chunk in its block, counted from 0.
    pub chunk: u32,
}

/// Selects a block, or one chunk of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BlockPart {
    /// All chunks of the block of a rank.
    Block(Rank),
    /// One chunk.
    Chunk(BlockChunk),
}

impl From<Rank> for BlockPart {
    fn from(rank: Rank) -> Self {
        Self::Block(rank)
    }
}

impl From<BlockChunk> for BlockPart {
    fn from(chunk: BlockChunk) -> Self {
        Self::Chunk(chunk)
    }
}

impl fmt::Display for BlockPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Block(rank) => write!(f, "block {rank}"),
            Self::Chunk(BlockChunk { block, chunk }) => write!(f, "chunk {chunk} of block {block}"),
        }
    }
}

/// The chunks whose arrivals and departures the starts of an operation tell, in order.
pub(super) struct Chunks {
    handles: Handles,
    arrivals: Box<[BlockChunk]>,
    departures: Box<[BlockChunk]>,
    /// This rank, if its block of the output is there from the beginning.
    own: Option<Rank>,
}

impl Chunks {
    pub(super) fn new(handles: Handles, plan: &Plan, prepared: &Prepared) -> Self {
        let (mut arriving, departing) = prepared.chunk_orders();
        let collective = plan.collective;
        let own = Some(plan.rank).filter(|_| handles.arrivals && plan.in_place);

        if handles.arrivals {
            // Lanes can tell each other of this rank's own block.
            arriving.retain(|cell| Some(cell.block) != own);
            // What no step announces is there at the beginning, or is complete with the start.
            let providers = Rank::all(plan.ranks as usize);
            let providers = providers.filter(|&rank| collective.requires(rank, plan.rank));
            let all = providers
                .flat_map(|block| (0..plan.chunks).map(move |chunk| Cell { block, chunk }));
            let known: BTreeSet<_> = arriving.iter().copied().collect();
            let missing: Vec<_> = all.filter(|cell| !known.contains(cell)).collect();
            let (first, last): (Vec<_>, Vec<_>) =
                missing.into_iter().partition(|cell| Some(cell.block) == own);
            arriving.splice(0..0, first);
            arriving.extend(last);
        }

        let named = |cells: Vec<Cell>| {
            cells.into_iter().map(|Cell { block, chunk }| BlockChunk { block, chunk }).collect()
        };
        Self { handles, arrivals: named(arriving), departures: named(departing), own }
    }

    /// Returns whether starts have handles.
    pub(super) fn any(&self) -> bool {
        self.handles.any()
    }

    /// Returns the chunks of the output that a part of it selects and that are not there from the
    /// beginning.
    fn arriving(&self, part: BlockPart) -> Result<Vec<Cell>, Error> {
        if !self.handles.arrivals {
            return invalid(
                "the operation does not tell arrivals; prepare it with `arrivals()`".to_owned(),
            );
        }
        let mut cells = selected(&self.arrivals, part, "arrives")?;
        cells.retain(|cell| Some(cell.block) != self.own);
        Ok(cells)
    }

    /// Returns the chunks of the input that a part of it selects.
    fn departing(&self, part: BlockPart) -> Result<Vec<Cell>, Error> {
        if !self.handles.departures {
            return invalid(
                "the operation does not wait for departures; prepare it with `departures()`"
                    .to_owned(),
            );
        }
        selected(&self.departures, part, "departs")
    }
}

/// Returns the chunks of a list that a part selects.
fn selected(chunks: &[BlockChunk], part: BlockPart, verb: &str) -> Result<Vec<Cell>, Error> {
    let is_selected = |known: &&BlockChunk| match part {
        BlockPart::Block(rank) => known.block == rank,
        BlockPart::Chunk(chunk) => **known == chunk,
    };
    let cells = chunks.iter().filter(is_selected);
    let cells: Vec<_> = cells.map(|&BlockChunk { block, chunk }| Cell { block, chunk }).collect();
    if !cells.is_empty() {
        return Ok(cells);
    }

    let mut blocks: Vec<String> = Vec::new();
    for BlockChunk { block, .. } in chunks {
        let name = block.to_string();
        if !blocks.contains(&name) {
            blocks.push(name);
        }
    }
    let expected = match blocks.is_empty() {
        true => "none does in this operation".to_owned(),
        false => format!("expected a chunk of block {}", blocks.join(" or ")),
    };
    invalid(format!("no {part} {verb} on this rank; {expected}"))
}

fn invalid<R>(text: String) -> Result<R, Error> {
    Err(Error::new(ErrorKind::InvalidArgument, text))
}

impl State {
    pub(super) fn has_arrived(&self, epoch: u64, part: BlockPart) -> Result<bool, Error> {
        let cells = self.chunks.arriving(part)?;
        Ok(self.prepared.has_arrived(epoch, &cells)? || cells.is_empty())
    }

    /// Waits until a part of the output of a start has arrived, and returns whether it has before
    /// `limit`.
    pub(super) fn wait_arrival(
        &self,
        OpenStart { epoch, deadline }: OpenStart,
        part: BlockPart,
        limit: Option<Deadline>,
    ) -> Result<bool, Error> {
        let cells = self.chunks.arriving(part)?;
        if cells.is_empty() {
            return self.prepared.check().map(|()| true);
        }
        self.prepared.wait_arrival((epoch, &cells), Some(deadline), limit)
    }

    /// Checks that a part of the input can depart, and returns its chunks.
    pub(super) fn check_departing(&self, part: BlockPart) -> Result<Vec<Cell>, Error> {
        let cells = self.chunks.departing(part)?;
        if self.prepared.misses_all(&cells) {
            return Ok(cells);
        }
        invalid(format!("{part} has departed already in this start"))
    }

    /// Lets a start read a part of the input, behind the work that a stream holds if there is one.
    pub(super) fn depart(
        &self,
        part: BlockPart,
        stream: Option<&dyn std::any::Any>,
    ) -> Result<(), Error> {
        let cells = self.check_departing(part)?;
        self.prepared.depart(&cells, stream, self.timeout)
    }

    /// Has later work on a stream follow the arrival of a part of the output.
    pub(super) fn order_after_arrival(
        &self,
        part: BlockPart,
        stream: &dyn std::any::Any,
    ) -> Result<(), Error> {
        let cells = self.chunks.arriving(part)?;
        self.prepared.order_after_arrival(&cells, stream)
    }
}

impl<T> Operation<T> {
    /// Returns the chunks of the output in the order in which they arrive, if the operation was
    /// prepared with [`arrivals`](super::OperationBuilder::arrivals).
    ///
    /// A chunk is complete when all chunks before it that move in the same lane are.
    pub fn arrivals(&self) -> &[BlockChunk] {
        &self.state.chunks.arrivals
    }

    /// Returns the chunks of the input in the order in which starts read them, if the operation was
    /// prepared with [`departures`](super::OperationBuilder::departures).
    ///
    /// Chunks can depart in any order, but a start reads one only after those before it.
    pub fn departures(&self) -> &[BlockChunk] {
        &self.state.chunks.departures
    }
}

/// A future that is ready when a block of a start has arrived.
///
/// [`Started::arrival`](super::Started::arrival) returns it. If it is dropped, the start goes on.
#[must_use = "a future does nothing unless it is polled"]
pub struct Arrival<'a> {
    state: &'a State,
    start: OpenStart,
    cells: Vec<Cell>,
    polls: FuturePolls,
}

impl<'a> Arrival<'a> {
    pub(super) fn new(state: &'a State, start: OpenStart, part: BlockPart) -> Result<Self, Error> {
        let cells = state.chunks.arriving(part)?;
        Ok(Self { state, start, cells, polls: FuturePolls::default() })
    }
}

impl Future for Arrival<'_> {
    type Output = Result<(), Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { state, start, cells, polls } = self.get_mut();
        if cells.is_empty() {
            return Poll::Ready(state.prepared.check());
        }

        let goal = (start.epoch, &cells[..]);
        state.prepared.poll_future(goal, start.deadline, polls, context.waker())
    }
}

impl fmt::Debug for Arrival<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arrival").field("epoch", &self.start.epoch).finish_non_exhaustive()
    }
}
