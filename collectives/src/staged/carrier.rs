//! The network's engine: what is posted on it, and what it is done with.

use std::collections::VecDeque;
use std::sync::Arc;

use peerlane_hal::{At, Caps, CopyEngine, ErrorKind, Fabric, Flag, Op, Ticket};

use super::error::Error;
use super::queue::Part;
use super::{NetLocal, NetRemote};

/// An op on the network; it keeps the regions that it names.
pub(super) enum Move<N: Fabric> {
    Put { dst: Arc<NetRemote<N>>, to: u64, src: Arc<NetLocal<N>>, from: u64, bytes: u64 },
    Get { dst: Arc<NetLocal<N>>, to: u64, src: Arc<NetRemote<N>>, from: u64, bytes: u64 },
    Signal { flag: Arc<NetRemote<N>>, word: u64, value: u64 },
}

impl<N: Fabric> Move<N> {
    fn op(&self) -> Op<'_, NetLocal<N>, NetRemote<N>> {
        match self {
            Self::Put { dst, to, src, from, bytes } => {
                let (dst, src) = (At { region: &**dst, offset: *to }, at(src, *from));
                Op::Put { dst, src, bytes: *bytes }
            }
            Self::Get { dst, to, src, from, bytes } => {
                let (dst, src) = (at(dst, *to), At { region: &**src, offset: *from });
                Op::Get { dst, src, bytes: *bytes }
            }
            Self::Signal { flag, word, value } => {
                Op::Signal { flag: Flag { region: &**flag, word: *word }, value: *value }
            }
        }
    }
}

fn at<L>(region: &Arc<L>, offset: u64) -> At<'_, L> {
    At { region: &**region, offset }
}

/// The engine that carries the bytes and the records of a rank.
pub(super) struct Carrier<N: Fabric> {
    engine: N::Engine,
    waiting: VecDeque<(Move<N>, Vec<Part>)>,
    /// With the ticket of each.
    posted: VecDeque<(Ticket, Move<N>, Vec<Part>)>,
}

impl<N: Fabric> Carrier<N> {
    pub(super) fn new(engine: N::Engine) -> Self {
        Self { engine, waiting: VecDeque::new(), posted: VecDeque::new() }
    }

    pub(super) fn caps(&self) -> &Caps {
        self.engine.caps()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.posted.is_empty()
    }

    /// Takes a move, behind all others; what it is a part of hears when it is done.
    pub(super) fn push(&mut self, moved: Move<N>, parts: Vec<Part>) {
        self.waiting.push_back((moved, parts));
    }

    /// Posts what there is room for.
    pub(super) fn pump(&mut self) -> Result<(), Error> {
        while !self.waiting.is_empty() {
            let count = self.waiting.len().min(self.engine.caps().slice_ops_max);
            let ops: Vec<_> = self.waiting.iter().take(count).map(|(it, _)| it.op()).collect();
            // SAFETY: the moves keep their regions until the ticket completes. Sources, destinations
            // and flags are those of ops whose contract the caller of the staged engine keeps, or
            // slots, records and counters, each of which has one writer and is not used again before
            // the reader has said that it is done with it.
            let submitted = unsafe { self.engine.submit(&ops) };
            let ticket = match submitted {
                Ok(ticket) => ticket,
                Err(error) if full(&error) => return Ok(()),
                Err(error) => return Err(Error::backend("post on the network")(error)),
            };
            drop(ops);
            let posted = self.waiting.drain(..count).map(|(it, parts)| (ticket, it, parts));
            self.posted.extend(posted);
        }
        Ok(())
    }

    /// Takes what is done.
    pub(super) fn look(&mut self, mut done: impl FnMut(Part)) -> Result<bool, Error> {
        let completed = self.engine.completed().map_err(Error::backend("look at the network"))?;
        let mut moved = false;
        while self.posted.front().is_some_and(|(ticket, ..)| *ticket <= completed) {
            let Some((_, _, parts)) = self.posted.pop_front() else { break };
            parts.into_iter().for_each(&mut done);
            moved = true;
        }
        Ok(moved)
    }

    /// Lets everything that is posted end.
    pub(super) fn release(&mut self) -> Result<(), Error> {
        self.waiting.clear();
        self.engine.release().map_err(Error::backend("release the network"))
    }
}

/// Whether there will be room.
pub(super) fn full(error: &impl peerlane_hal::Error) -> bool {
    error.kind() == ErrorKind::QueueFull
}
