//! Wraps engines of the host backend and breaks one rule of each.

use std::cell::{OnceCell, RefCell};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::{
    At, Caps, CopyEngine, EngineOffer, EngineRequirements, Error as _, ErrorKind, Fabric, Flag, Op,
    Rank, Reducer, Rows, StreamOrdered, Ticket,
};
use peerlane_host as host;
use peerlane_tests::middleware::{Error, Layer};

type HostOp<'a> = Op<'a, host::Local, host::Remote>;
type Answer<T = ()> = Result<T, Error<host::Error>>;

/// Long enough for another thread to look in between.
const PAUSE: Duration = Duration::from_millis(2);
/// More than a mutant's harness waits for anything.
pub(crate) const TOO_LONG: Duration = Duration::from_millis(2500);

thread_local! {
    /// Whether an engine of the rank that this thread runs waits.
    static BLOCKED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    /// Engines of this thread's rank that were dropped with work in flight.
    static LEFT: RefCell<Vec<host::Engine>> = const { RefCell::new(Vec::new()) };
}

/// The broken rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    OpsBackwards,
    SignalsFirst,
    SignalsInHalves,
    WaitsIgnored,
    WaitsHoldEverything,
    BlockedHoldsOthers,
    ResetsForgotten,
    ReductionsLoseASource,
    ReductionsLast,
    CompleteAtOnce,
    CompletionGoesBack,
    EmptySlicesHaveNoTicket,
    EmptySlicesCompleteAtOnce,
    FullQueueTakesAPart,
    LongSlicesNeverFit,
    ReleaseDoesNothing,
    ReleasedTakesMore,
    ReleaseLeavesWork,
    PutsLoseAByte,
    PutsAreRoundedUp,
    GetsLoseAByte,
    GetsFirst,
    PutsOvertakeGets,
    RowsLoseTheLast,
    PlacesAreKept,
    OneOpMoreIsTaken,
    TheLimitIsRefused,
    OutsideIsTaken,
    ErrorsAreForgotten,
    DropWaits,
    DropLeavesWork,
    MissingOpsAreTaken,
    LateOpsAreLost,
    SignalsSpill,
    PeersMustHelp,
    AlwaysBusy,
    ParkIsDeaf,
    WakerIsDeaf,
    ParkIsLong,
    ComputesBeside,
}

/// Makes broken engines.
#[derive(Clone, Debug)]
pub(crate) struct EngineMutant {
    pub(crate) fault: Fault,
    pub(crate) rank: Rank,
    /// How often any engine of the group was polled, by even and odd rank.
    pub(crate) polls: Arc<[AtomicU64; 2]>,
}

fn without_waits_and_gets(own: Caps) -> Caps {
    Caps { queued_wait: false, gets: false, ..own }
}

// SAFETY: the engines wrap engines of the fabric.
unsafe impl Layer<host::Fabric> for EngineMutant {
    type Engine = Mutant;

    fn engine(
        &self,
        fabric: &host::Fabric,
        _: u64,
        requirements: EngineRequirements,
    ) -> Answer<Mutant> {
        let engine = fabric.engine(requirements).map_err(Error::Inner)?;
        let layer = self.clone();
        let lacks = layer.fault == Fault::MissingOpsAreTaken;
        let own = *engine.caps();
        let caps = if lacks { without_waits_and_gets(own) } else { own };
        Ok(Mutant {
            engine: ManuallyDrop::new(engine),
            caps,
            is_beside: requirements.beside_compute,
            is_early: Rank::all(2).any(|peer| fabric.link(peer).is_none()),
            layer,
            tickets: Vec::new(),
            kept: OnceCell::new(),
            told: 0,
            calls: 0,
            heard: 0,
            broken: 0,
            released: false,
        })
    }

    fn offers(&self, mut own: Vec<EngineOffer>) -> Vec<EngineOffer> {
        if self.fault == Fault::MissingOpsAreTaken {
            own.iter_mut().for_each(|offer| offer.caps = without_waits_and_gets(offer.caps));
        }
        own
    }

    fn break_engine(engine: &mut Mutant) -> Option<ErrorKind> {
        engine.broken = 1;
        Some(ErrorKind::DeviceLost)
    }
}

/// A broken engine.
pub(crate) struct Mutant {
    engine: ManuallyDrop<host::Engine>,
    caps: Caps,
    /// Whether it was created to run beside kernels.
    is_beside: bool,
    /// Whether it was created before one of two ranks was connected.
    is_early: bool,
    layer: EngineMutant,
    /// The offsets of the first put, to the peer and from this rank.
    kept: OnceCell<(u64, u64)>,
    /// The engine's ticket behind each of the mutant's.
    tickets: Vec<Ticket>,
    told: u64,
    calls: u64,
    heard: u64,
    /// How many calls still fail.
    broken: u32,
    released: bool,
}

impl Mutant {
    fn has(&self, fault: Fault) -> bool {
        self.layer.fault == fault
    }

    fn pass(&mut self, ops: &[HostOp<'_>]) -> Answer<Ticket> {
        // SAFETY: the promise of whoever called `submit` on the mutant.
        unsafe { self.engine.submit(ops) }.map_err(Error::Inner)
    }

    fn issue(&mut self, ticket: Ticket) -> Ticket {
        self.tickets.push(ticket);
        Ticket(self.tickets.len() as u64)
    }

    fn fail(&mut self) -> Answer {
        match self.broken.checked_sub(1) {
            None => Ok(()),
            Some(left) => {
                self.broken = left;
                Err(Error::layer(ErrorKind::DeviceLost, "broken once"))
            }
        }
    }

    /// The slices that a broken engine makes of one.
    fn distort<'a>(&self, ops: &[HostOp<'a>]) -> Vec<Vec<HostOp<'a>>> {
        let all = || ops.iter().copied();
        let is_signal = |op: &HostOp<'a>| matches!(op, Op::Signal { .. });
        let is_get = |op: &HostOp<'a>| matches!(op, Op::Get { .. });
        let is_reduction = |op: &HostOp<'a>| matches!(op, Op::Reduce { .. });
        let is_wait = |op: &HostOp<'a>| matches!(op, Op::Wait { .. });
        match self.layer.fault {
            Fault::OpsBackwards => vec![all().rev().collect()],
            Fault::SignalsFirst => {
                vec![all().filter(is_signal).collect(), all().filter(|op| !is_signal(op)).collect()]
            }
            Fault::GetsFirst => {
                vec![all().filter(is_get).collect(), all().filter(|op| !is_get(op)).collect()]
            }
            Fault::PutsOvertakeGets => {
                let mut overtaken: Vec<_> = all().collect();
                for at in (1..overtaken.len()).rev() {
                    if is_get(&overtaken[at - 1]) && matches!(overtaken[at], Op::Put { .. }) {
                        overtaken.swap(at - 1, at);
                    }
                }
                vec![overtaken]
            }
            Fault::ReductionsLast => vec![
                all().filter(|op| !is_reduction(op)).collect(),
                all().filter(is_reduction).collect(),
            ],
            Fault::SignalsInHalves => all().flat_map(halves).collect(),
            Fault::WaitsIgnored => vec![all().filter(|op| !is_wait(op)).collect()],
            Fault::WaitsHoldEverything => vec![all().map(never).collect()],
            Fault::BlockedHoldsOthers if ops.iter().any(is_wait) => {
                BLOCKED.set(true);
                vec![all().collect()]
            }
            Fault::BlockedHoldsOthers if BLOCKED.get() => vec![Vec::new()],
            Fault::LateOpsAreLost if self.is_early => vec![Vec::new()],
            _ => vec![all().flat_map(|op| self.distort_op(op)).collect()],
        }
    }

    fn distort_op<'a>(&self, op: HostOp<'a>) -> Vec<HostOp<'a>> {
        match (self.layer.fault, op) {
            (Fault::ResetsForgotten, Op::Wait { flag, value, .. }) => {
                vec![Op::Wait { flag, value, reset: false }]
            }
            (Fault::PutsLoseAByte, Op::Put { dst, src, bytes }) if bytes > 64 => {
                vec![Op::Put { dst, src, bytes: bytes - 1 }]
            }
            (Fault::GetsLoseAByte, Op::Get { dst, src, bytes }) if bytes > 64 => {
                vec![Op::Get { dst, src, bytes: bytes - 1 }]
            }
            (Fault::PutsAreRoundedUp, Op::Get { dst, src, bytes }) if !bytes.is_multiple_of(8) => {
                vec![Op::Get { dst, src, bytes: bytes.next_multiple_of(8) }]
            }
            (Fault::PutsAreRoundedUp, Op::Put { dst, src, bytes }) if !bytes.is_multiple_of(8) => {
                vec![Op::Put { dst, src, bytes: bytes.next_multiple_of(8) }]
            }
            (Fault::ReductionsLoseASource, Op::Reduce { dst, srcs, bytes, reduction })
                if srcs.len() > 1 =>
            {
                vec![Op::Reduce { dst, srcs: &srcs[1..], bytes, reduction }]
            }
            (Fault::RowsLoseTheLast, Op::PutRows { dst, src, bytes, rows }) => {
                let rows = Rows { count: rows.count.saturating_sub(1), ..rows };
                vec![Op::PutRows { dst, src, bytes, rows }]
            }
            (Fault::PlacesAreKept, Op::Put { dst, src, bytes }) => {
                let (to, from) = *self.kept.get_or_init(|| (dst.offset, src.offset));
                vec![Op::Put {
                    dst: At { offset: to, ..dst },
                    src: At { offset: from, ..src },
                    bytes,
                }]
            }
            (Fault::SignalsSpill, Op::Signal { flag, value }) => {
                let beside = Flag { word: flag.word ^ 1, ..flag };
                vec![op, Op::Signal { flag: beside, value }]
            }
            (_, op) => vec![op],
        }
    }

    fn submit_distorted(&mut self, ops: &[HostOp<'_>]) -> Answer<Ticket> {
        let slices = self.distort(ops);
        let mut last = None;
        for slice in slices {
            if last.is_some() {
                std::thread::sleep(PAUSE / 4);
            }
            last = Some(self.pass(&slice)?);
        }
        last.map_or_else(|| self.pass(&[]), Ok)
    }

    fn submit_beyond(&mut self, ops: &[HostOp<'_>]) -> Option<Answer<Ticket>> {
        let limit = self.engine.caps().slice_ops_max;
        let full = || Err(Error::layer(ErrorKind::QueueFull, "too long for this mutant"));
        match self.layer.fault {
            Fault::EmptySlicesHaveNoTicket if ops.is_empty() => {
                Some(Ok(Ticket(self.tickets.len() as u64)))
            }
            Fault::LongSlicesNeverFit if ops.len() > limit / 2 => Some(full()),
            Fault::ReleasedTakesMore if self.released => {
                Some(Ok(Ticket(self.tickets.len() as u64)))
            }
            Fault::TheLimitIsRefused if ops.len() == limit => {
                Some(Err(Error::layer(ErrorKind::InvalidArgument, "one less, please")))
            }
            Fault::OneOpMoreIsTaken if ops.len() == limit + 1 => {
                Some(self.pass(&ops[..1]).and_then(|_| self.pass(&ops[1..])))
            }
            _ => None,
        }
    }

    fn after_refusal(&mut self, ops: &[HostOp<'_>], kind: ErrorKind) -> Option<Answer<Ticket>> {
        match (self.layer.fault, kind) {
            (Fault::FullQueueTakesAPart, ErrorKind::QueueFull) => {
                for op in ops {
                    if let Err(error) = self.pass(&[*op]) {
                        return Some(Err(error));
                    }
                }
                None
            }
            (Fault::OutsideIsTaken, ErrorKind::InvalidArgument) => Some(self.pass(&[])),
            (Fault::PutsAreRoundedUp, ErrorKind::InvalidArgument) => Some(self.pass(ops)),
            _ => None,
        }
    }
}

fn halves(op: HostOp<'_>) -> Vec<Vec<HostOp<'_>>> {
    let Op::Signal { flag, value } = op else { return vec![vec![op]] };
    vec![vec![Op::Signal { flag, value: value & 0xFFFF_FFFF }], vec![op]]
}

/// A wait that wants the flag to be more than there can be.
fn never(op: HostOp<'_>) -> HostOp<'_> {
    let Op::Wait { flag, reset, .. } = op else { return op };
    Op::Wait { flag, value: u64::MAX, reset }
}

// SAFETY: it breaks the contract only in ways that the checks of this test find, in memory of the test.
unsafe impl CopyEngine for Mutant {
    type Error = Error<host::Error>;
    type Local = host::Local;
    type Remote = host::Remote;

    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn prepare_reduce(&mut self) -> Answer<Option<Reducer>> {
        self.engine.prepare_reduce().map_err(Error::Inner)
    }

    unsafe fn submit(&mut self, ops: &[HostOp<'_>]) -> Answer<Ticket> {
        self.fail()?;
        let answer = match self.submit_beyond(ops) {
            Some(Ok(ticket)) if ticket.0 == self.tickets.len() as u64 => return Ok(ticket),
            Some(answer) => answer,
            None => match self.submit_distorted(ops) {
                Err(error) => self.after_refusal(ops, error.kind()).unwrap_or(Err(error)),
                answer => answer,
            },
        };
        let ticket = answer?;
        if ops.is_empty() && self.has(Fault::EmptySlicesCompleteAtOnce) {
            self.told = self.tickets.len() as u64 + 1;
        }
        Ok(self.issue(ticket))
    }

    fn completed(&mut self) -> Answer<Ticket> {
        self.fail()?;
        self.calls += 1;
        LEFT.with_borrow_mut(|left| left.iter_mut().try_for_each(|it| it.completed().map(drop)))
            .map_err(Error::Inner)?;
        let polls = &self.layer.polls;
        let own = self.layer.rank.index() % 2;
        polls[own].fetch_add(1, Ordering::SeqCst);
        let others = polls[1 - own].load(Ordering::SeqCst);
        if self.has(Fault::PeersMustHelp) && others == self.heard {
            return Ok(Ticket(self.told));
        }
        self.heard = others;
        let done = self.engine.completed().map_err(Error::Inner)?;
        let whole = self.tickets.partition_point(|ticket| *ticket <= done) as u64;
        if self.has(Fault::ReleaseLeavesWork) && self.released {
            return Ok(Ticket(self.tickets.len() as u64));
        }
        if self.has(Fault::CompleteAtOnce) {
            return Ok(Ticket(self.tickets.len() as u64));
        }
        if self.has(Fault::CompletionGoesBack) && self.calls.is_multiple_of(2) {
            return Ok(Ticket(whole.saturating_sub(1)));
        }
        self.told = self.told.max(whole);
        Ok(Ticket(self.told))
    }

    fn park(&mut self, limit: Duration) -> Answer {
        self.fail()?;
        match self.layer.fault {
            Fault::ParkIsDeaf => std::thread::sleep(limit),
            Fault::ParkIsLong => std::thread::sleep(limit + TOO_LONG / 2),
            _ => return self.engine.park(limit).map_err(Error::Inner),
        }
        Ok(())
    }

    fn is_busy(&self) -> bool {
        self.has(Fault::AlwaysBusy) || self.engine.is_busy()
    }

    fn waker(&self) -> Waker {
        if self.has(Fault::WakerIsDeaf) { Waker::noop().clone() } else { self.engine.waker() }
    }

    fn release(&mut self) -> Answer {
        self.fail()?;
        if self.has(Fault::ReleaseDoesNothing) {
            return Ok(());
        }
        self.released = true;
        if self.has(Fault::ReleaseLeavesWork) {
            return Ok(());
        }
        self.engine.release().map_err(Error::Inner)
    }

    fn compute_bytes(&mut self, ops: &[HostOp<'_>], captured: bool) -> u64 {
        let more = u64::from(self.has(Fault::ComputesBeside) && self.is_beside);
        self.engine.compute_bytes(ops, captured) + more
    }

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = Self::Error>> {
        None
    }
}

impl Drop for Mutant {
    fn drop(&mut self) {
        if self.has(Fault::DropWaits) && !self.released && self.told < self.tickets.len() as u64 {
            std::thread::sleep(TOO_LONG);
        }
        // SAFETY: the engine is not used after this.
        let engine = unsafe { ManuallyDrop::take(&mut self.engine) };
        if self.has(Fault::DropLeavesWork) && !self.released {
            LEFT.with_borrow_mut(|left| left.push(engine));
        }
    }
}
