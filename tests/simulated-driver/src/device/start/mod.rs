//! Runs the kernels of whole starts: each block by steps in random order, with weak memory.
//!
//! All blocks of a launch run at the same time, on the thread of the queue. A block keeps its stores
//! for a while, and they reach memory in random order, a few at a time. A fence delivers all of
//! them. So a test finds a signal that does not wait for the data before it, and a reader that
//! trusts one half of a word.

mod access;
mod block;
mod faults;
mod program;
mod stores;

use std::cell::Cell;
use std::sync::Arc;

use peerlane_hal::Reduction;

use self::access::Held;
use self::block::{Block, Step};
use self::faults::Hold;
pub(crate) use self::program::Program;
use self::stores::Stores;
use super::counters::Counter;
use super::fault::Fault;
use super::jitter::Draws;
use super::memory::AddressSpace;
use super::session::Session;
use super::settings::Setting;
use super::sync::Backoff;

/// The most stores that are delivered between two steps.
const DELIVERED_MAX: u64 = 512;

/// A launch of the kernel for a program.
#[derive(Clone, Debug)]
pub(crate) struct Start {
    pub(crate) program: Arc<Program>,
    pub(crate) reduction: Option<Reduction>,
    pub(crate) blocks: u32,
    /// The number of threads of a block.
    pub(crate) threads: u32,
}

/// A launch that runs.
struct Launch<'a> {
    program: &'a Program,
    reduction: Option<Reduction>,
    blocks: u32,
    threads: u32,
    session: &'a Session,
    held: Held,
    /// For each op, whether it uses memory that an earlier op of the program writes.
    follows: Vec<bool>,
    /// What is added to the number of a start.
    added_starts: u64,
    /// How many blocks have ended.
    ended: Cell<u32>,
}

impl Start {
    pub(crate) fn run(&self, session: &Session, memory: &AddressSpace) -> Result<(), Fault> {
        let launch = Launch {
            program: &self.program,
            reduction: self.reduction,
            blocks: self.blocks,
            threads: self.threads,
            session,
            held: Held::pin(&self.program, self.blocks, session, memory)?,
            follows: follows(&self.program, self.blocks),
            added_starts: Setting::KernelStarts.value(),
            ended: Cell::new(0),
        };
        launch.run()?;
        Counter::Starts.add(session.device(), 1);
        Ok(())
    }
}

impl Launch<'_> {
    fn run(&self) -> Result<(), Fault> {
        let mut draws = Draws::new(u64::from(self.session.device()));
        let mut blocks: Vec<Block> = (0..self.blocks).map(Block::new).collect();
        // The stores of blocks that have ended.
        let mut left: Vec<Stores> = Vec::new();

        let (mut backoff, mut idle) = (Backoff::default(), 0);
        let mut has_blocked = false;
        while !blocks.is_empty() {
            let index = draws.below(blocks.len() as u64) as usize;
            let step = blocks[index].step(self, &mut draws);
            if step == Step::Ended {
                left.push(blocks.swap_remove(index).stores);
                self.ended.set(self.ended.get() + 1);
            }

            // Stores are delivered while blocks run, and also while all of them wait.
            let all = (blocks.len() + left.len()) as u64;
            let index = draws.below(all) as usize;
            let stores = match left.len().checked_sub(index + 1) {
                Some(_) => &mut left[index],
                None => &mut blocks[index - left.len()].stores,
            };
            let delivered = self.deliver(stores, &mut draws);

            if step != Step::Blocked || delivered {
                (backoff, idle) = (Backoff::default(), 0);
                continue;
            }
            // Others need the processor.
            idle += 1;
            if idle > 2 * blocks.len() {
                if !has_blocked {
                    has_blocked = true;
                    Counter::BlockedWaits.add(self.session.device(), 1);
                }
                self.rest(&mut backoff)?;
            }
        }
        self.end(&mut left, &mut draws)
    }

    /// Delivers some stores, unless a schedule holds them back. Returns whether there were any.
    fn deliver(&self, stores: &mut Stores, draws: &mut Draws) -> bool {
        if stores.is_empty() || Hold::Stores.is_on(self.session) {
            return false;
        }
        if Hold::Halves.is_on(self.session) {
            return stores.deliver_first_halves(&self.held);
        }
        let count = draws.below(DELIVERED_MAX) as usize;
        stores.deliver_some(&self.held, count, draws)
    }

    fn is_held_back(&self) -> bool {
        Hold::Stores.is_on(self.session) || Hold::Halves.is_on(self.session)
    }

    /// Delivers what is left, which a device does before the next command of its queue.
    fn end(&self, left: &mut [Stores], draws: &mut Draws) -> Result<(), Fault> {
        let mut backoff = Backoff::default();
        while self.is_held_back() && left.iter().any(|stores| !stores.is_empty()) {
            for stores in left.iter_mut() {
                self.deliver(stores, draws);
            }
            self.rest(&mut backoff)?;
        }
        left.iter_mut().for_each(|stores| stores.deliver_all(&self.held, draws));
        Ok(())
    }

    fn rest(&self, backoff: &mut Backoff) -> Result<(), Fault> {
        backoff.rest();
        self.session.fault().map_or(Ok(()), Err)
    }
}

/// Returns for each op whether it uses memory that an earlier op writes, in starts of one parity.
fn follows(program: &Program, blocks: u32) -> Vec<bool> {
    let mut written: Vec<([u64; 2], u64)> = Vec::new();
    let mut follows = Vec::with_capacity(program.ops().len());
    for op in program.ops() {
        let spans: Vec<_> = op.spans(blocks).map(|(it, bytes)| (it.addresses(), bytes)).collect();
        let overlaps = |(places, bytes): &([u64; 2], u64)| {
            written.iter().any(|(others, length)| {
                let mut pairs = places.iter().zip(others);
                pairs.any(|(place, other)| place < &(other + length) && *other < place + bytes)
            })
        };
        follows.push(op.has_data() && spans.iter().any(overlaps));
        if op.has_data() {
            written.extend(&spans[op.sources().len()..]);
        }
    }
    follows
}
