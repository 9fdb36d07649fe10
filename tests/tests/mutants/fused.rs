//! Gives engines of the host backend fused starts, which submit their ops, and breaks one rule of
//! the contract of these.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::{
    Caps, CopyEngine, EngineOffer, EngineRequirements, Error as _, ErrorKind, Fabric, Flag,
    FusedEngine, FusedLimits, FusedOps, FusedProgress, FusedStarts, Launch, Op, ProgressReader,
    Reducer, Region as _, StreamOrdered, Ticket,
};
use peerlane_host as host;
use peerlane_tests::middleware::{Error, Layer};

type HostOp<'a> = Op<'a, host::Local, host::Remote>;
type Answer<T = ()> = Result<T, Error<host::Error>>;

const LIMITS: FusedLimits =
    FusedLimits { blocks_max: 8, threads: 1, ranks_max: 8, shares_device: false };
const RESIDENT_BLOCKS_MAX: u32 = 20;

/// What is wrong with the starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StartFault {
    /// Nothing.
    None,
    /// All starts use the places of even ones.
    TurnsForgotten,
    /// Ops take effect behind the next start.
    OpsComeLater,
    /// What is in slots is copied before anything else.
    SlotsReadFirst,
    ReleaseDoesNothing,
    AnyOpsAreTaken,
    AnyBlocksFit,
    ReplacedProgramsStay,
    NoDigests,
}

/// Makes engines with such starts.
#[derive(Clone, Debug)]
pub(crate) struct FusedLayer {
    fault: StartFault,
    reserved: Arc<AtomicU32>,
}

impl FusedLayer {
    pub(crate) fn new(fault: StartFault) -> Self {
        Self { fault, reserved: Arc::default() }
    }
}

// SAFETY: the engines wrap engines of the fabric.
unsafe impl Layer<host::Fabric> for FusedLayer {
    type Engine = FusedHost;

    fn engine(
        &self,
        fabric: &host::Fabric,
        _: u64,
        requirements: EngineRequirements,
    ) -> Answer<FusedHost> {
        let blocks = requirements.fused_blocks;
        if blocks > LIMITS.blocks_max {
            return Err(Error::layer(ErrorKind::InvalidArgument, "too many blocks"));
        }
        let before = self.reserved.fetch_add(blocks, Ordering::Relaxed);
        if before + blocks > RESIDENT_BLOCKS_MAX && self.fault != StartFault::AnyBlocksFit {
            self.reserved.fetch_sub(blocks, Ordering::Relaxed);
            return Err(Error::layer(ErrorKind::Unavailable, "no room for the blocks"));
        }

        let engine = fabric.engine(EngineRequirements { fused_blocks: 0, ..requirements });
        let engine = engine.map_err(Error::Inner)?;
        Ok(FusedHost {
            engine,
            layer: self.clone(),
            blocks,
            program: None,
            left: VecDeque::new(),
            held: Vec::new(),
            tickets: Vec::new(),
            last: 0,
            starts: Vec::new(),
            released: false,
            progress: Arc::default(),
        })
    }

    fn offers(&self, mut own: Vec<EngineOffer>) -> Vec<EngineOffer> {
        for offer in &mut own {
            offer.fused = Some(LIMITS);
            offer.resident_blocks_max = RESIDENT_BLOCKS_MAX;
        }
        own
    }
}

/// The ops of even and of odd starts, with the value of flags before the first start.
struct Stored {
    ops: [Vec<HostOp<'static>>; 2],
    base: u64,
    digest_bits: u32,
}

impl Stored {
    /// Returns the least value of flags in a start.
    fn value(&self, start: u64) -> u64 {
        if start == 0 { 0 } else { self.base + (start << self.digest_bits) }
    }
}

/// An engine whose starts submit their ops to an engine of the host.
pub(crate) struct FusedHost {
    engine: host::Engine,
    layer: FusedLayer,
    blocks: u32,
    program: Option<Stored>,
    /// The ops of tickets that are not submitted, with the number of the ticket.
    left: VecDeque<(u64, HostOp<'static>)>,
    /// Ops that come later than they should.
    held: Vec<(u64, HostOp<'static>)>,
    /// The engine's ticket behind each ticket of this engine that is submitted whole.
    tickets: Vec<Ticket>,
    /// The last ticket, and those of the starts.
    last: u64,
    starts: Vec<u64>,
    released: bool,
    /// The starts that have begun, and those that have ended.
    progress: Arc<[AtomicU64; 2]>,
}

impl FusedHost {
    fn has(&self, fault: StartFault) -> bool {
        self.layer.fault == fault
    }

    /// Submits ops until the queue of the engine is full.
    fn pump(&mut self) -> Answer {
        while let Some((number, op)) = self.left.front().copied() {
            // SAFETY: the promise of whoever made the start.
            let ticket = match unsafe { self.engine.submit(&[op]) } {
                Ok(ticket) => ticket,
                Err(error) if error.kind() == ErrorKind::QueueFull => return Ok(()),
                Err(error) => return Err(Error::Inner(error)),
            };

            self.left.pop_front();
            // A ticket without ops is that before it.
            let before = self.tickets.last().copied().unwrap_or(Ticket::NONE);
            let known = self.tickets.len().max(number as usize);
            self.tickets.resize(known, before);
            self.tickets[number as usize - 1] = ticket;
        }
        Ok(())
    }

    /// Returns why the ops cannot run, if they cannot.
    fn refusal(&self, ops: &FusedOps<'_, host::Local, host::Remote>) -> Option<&'static str> {
        let [even, odd] = ops.ops;
        if ops.blocks != self.blocks {
            return Some("another number of blocks");
        }
        if ops.slots.is_some_and(|(at, bytes)| at.offset.saturating_add(bytes) > at.region.bytes())
        {
            return Some("slots outside of their region");
        }
        // In these tests, the flags of all ranks have the same length.
        let words = ops.counter.region.bytes() / 8;
        let is_inside = |word: u64| word + u64::from(ops.blocks) <= words;
        let step = 1 << ops.digest_bits;
        let [first, second] = [1, 2].map(|start| ops.base + start * step);
        let is_alike = |(even, odd): (&HostOp<'_>, &HostOp<'_>)| match (*even, *odd) {
            (Op::Put { bytes, .. }, Op::Put { bytes: other, .. }) => bytes == other,
            (Op::Signal { flag, value }, Op::Signal { flag: other, value: odd }) => {
                is_inside(flag.word.max(other.word)) && (odd, value) == (first, second)
            }
            (Op::Wait { value, .. }, Op::Wait { value: odd, .. }) => {
                let values = (odd, value);
                values == (first, second) || values == (0, first)
            }
            _ => false,
        };
        let is_right = even.len() == odd.len() && even.iter().zip(odd).all(is_alike);
        (!is_right).then_some("ops that are no ops of starts")
    }
}

impl Drop for FusedHost {
    fn drop(&mut self) {
        self.layer.reserved.fetch_sub(self.blocks, Ordering::Relaxed);
    }
}

/// Returns an op with the places of a longer life.
///
/// # Safety
/// The regions outlive every use of the op.
unsafe fn extended(op: HostOp<'_>) -> HostOp<'static> {
    // SAFETY: only the lifetime changes, for which the caller vouches.
    unsafe { std::mem::transmute(op) }
}

// SAFETY: it breaks the contract only in ways that the checks of this test find, in memory of the
// test.
unsafe impl FusedStarts for FusedHost {
    type Error = Error<host::Error>;
    type Local = host::Local;
    type Remote = host::Remote;

    fn compile(&mut self, ops: &FusedOps<'_, host::Local, host::Remote>) -> Answer<Launch> {
        if let Some(why) = self.refusal(ops)
            && !self.has(StartFault::AnyOpsAreTaken)
        {
            return Err(Error::layer(ErrorKind::InvalidArgument, why));
        }

        let is_first = |op: &HostOp<'_>| match (op, ops.slots) {
            (Op::Put { src, .. }, Some((slots, _))) if self.has(StartFault::SlotsReadFirst) => {
                std::ptr::eq(src.region, slots.region)
            }
            _ => false,
        };
        let stored = ops.ops.map(|of_start| {
            let (first, rest): (Vec<_>, Vec<_>) = of_start.iter().partition(|op| is_first(op));
            // SAFETY: the regions outlive the engine, as the checks say.
            first.into_iter().chain(rest).map(|op: &HostOp<'_>| unsafe { extended(*op) }).collect()
        });
        let (base, digest_bits) = (ops.base, ops.digest_bits);
        self.program = Some(Stored { ops: stored, base, digest_bits });
        Ok(Launch { blocks: ops.blocks, threads: LIMITS.threads })
    }

    fn replace(&mut self, program: usize, ops: &FusedOps<'_, host::Local, host::Remote>) -> Answer {
        if program > 0 {
            return Err(Error::layer(ErrorKind::InvalidArgument, "there is no such program"));
        }
        let before = self.program.take();
        let compiled = self.compile(ops);
        if compiled.is_err() || self.has(StartFault::ReplacedProgramsStay) {
            self.program = before;
        }
        compiled.map(drop)
    }

    unsafe fn start(&mut self, _: usize, digest: u64) -> Answer<Ticket> {
        if self.released {
            return Err(Error::layer(ErrorKind::Aborted, "released"));
        }
        let Some(stored) = &self.program else {
            return Err(Error::layer(ErrorKind::InvalidArgument, "nothing was compiled"));
        };
        if digest >> stored.digest_bits != 0 {
            return Err(Error::layer(ErrorKind::InvalidArgument, "the digest is too long"));
        }

        let start = self.progress[0].fetch_add(1, Ordering::Relaxed) + 1;
        let turn = if self.has(StartFault::TurnsForgotten) { 0 } else { start & 1 };
        let digest = if self.has(StartFault::NoDigests) { 0 } else { digest };
        let [before, own] = [start - 1, start].map(|start| stored.value(start));
        let last = if turn == 1 { 0 } else { stored.value(1) };
        self.last += 1;
        self.starts.push(self.last);
        let number = self.last;
        for op in &stored.ops[turn as usize] {
            match *op {
                Op::Signal { flag, .. } => {
                    let value = own + digest;
                    let signals = words_of(flag, self.blocks);
                    self.left.extend(signals.map(|flag| (number, Op::Signal { flag, value })));
                }
                // The first word tells of the start before.
                Op::Wait { flag, value, reset } => {
                    let is_last = value == last;
                    let (blocks, value) = if is_last { (1, before) } else { (self.blocks, own) };
                    let waits = words_of(flag, blocks);
                    let waits = waits.map(|flag| (number, Op::Wait { flag, value, reset }));
                    self.left.extend(waits);
                }
                op => self.left.push_back((number, op)),
            }
        }
        self.left.extend(self.held.drain(..).map(|(_, op)| (number, op)));
        self.pump()?;
        Ok(Ticket(number))
    }

    fn progress(&mut self) -> Answer<ProgressReader> {
        let progress = Arc::clone(&self.progress);
        Ok(Arc::new(move || {
            let [begun, done] = [0, 1].map(|word: usize| progress[word].load(Ordering::Relaxed));
            FusedProgress { begun, done }
        }))
    }
}

/// Returns the flags of all blocks.
fn words_of<R>(flag: Flag<'static, R>, blocks: u32) -> impl Iterator<Item = Flag<'static, R>> {
    (0..u64::from(blocks)).map(move |block| Flag { region: flag.region, word: flag.word + block })
}

// SAFETY: as above.
unsafe impl CopyEngine for FusedHost {
    type Error = Error<host::Error>;
    type Local = host::Local;
    type Remote = host::Remote;

    fn caps(&self) -> &Caps {
        self.engine.caps()
    }

    fn prepare_reduce(&mut self) -> Answer<Option<Reducer>> {
        self.engine.prepare_reduce().map_err(Error::Inner)
    }

    unsafe fn submit(&mut self, ops: &[HostOp<'_>]) -> Answer<Ticket> {
        self.last += 1;
        let number = self.last;
        // SAFETY: the promise of the caller.
        let ops = ops.iter().map(|op| (number, unsafe { extended(*op) }));
        let comes_later = self.layer.fault == StartFault::OpsComeLater;
        if comes_later {
            self.held.extend(ops)
        } else {
            self.left.extend(ops)
        }
        self.pump()?;
        Ok(Ticket(number))
    }

    fn completed(&mut self) -> Answer<Ticket> {
        self.pump()?;
        let done = self.engine.completed().map_err(Error::Inner)?;
        let mut ended = self.tickets.partition_point(|ticket| *ticket <= done) as u64;
        if let Some((unfinished, _)) = self.left.front() {
            ended = ended.min(unfinished - 1);
        } else if ended == self.tickets.len() as u64 {
            // What is behind has no ops, or was released.
            ended = self.last;
        }
        let starts = self.starts.partition_point(|ticket| *ticket <= ended) as u64;
        self.progress[1].store(starts, Ordering::Relaxed);
        Ok(Ticket(ended))
    }

    fn park(&mut self, limit: Duration) -> Answer {
        self.engine.park(limit).map_err(Error::Inner)
    }

    fn is_busy(&self) -> bool {
        self.engine.is_busy()
    }

    fn waker(&self) -> Waker {
        self.engine.waker()
    }

    fn release(&mut self) -> Answer {
        if self.has(StartFault::ReleaseDoesNothing) {
            return Ok(());
        }
        self.released = true;
        self.left.clear();
        self.engine.release().map_err(Error::Inner)
    }

    fn compute_bytes(&mut self, ops: &[HostOp<'_>], captured: bool) -> u64 {
        self.engine.compute_bytes(ops, captured)
    }

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = Self::Error>> {
        None
    }

    fn fused(&mut self) -> Option<&mut FusedEngine<Self>> {
        Some(self)
    }
}
