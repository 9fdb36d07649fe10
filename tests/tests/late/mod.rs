//! Makes engines that keep the contract and promise no more: a peer sees what was put to it, and the flags that were signalled to
//! it, only some time after the ticket is complete.
//!
//! Ops with this rank run on the inner engine. What goes to a peer is copied to memory of the engine, which frees its source. A
//! thread makes the puts and signals from there, in their order, when the delay has passed. A put is also held until a signal or a
//! get is behind it, because nothing else tells a peer that it has arrived, and is dropped with the engine otherwise. A get from a
//! peer waits until the thread has made all that was submitted before it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use peerlane_hal::{
    At, Caps, CopyEngine, Deadline, EngineOffer, EngineRequirements, Fabric, Flag, Op, PeerMemory,
    Rank, Reducer, Region as _, Role, Rows, StreamOrdered, Ticket,
};
use peerlane_host as host;
use peerlane_tests::middleware::{Error, Layer};
use peerlane_toolkit::EngineState;

type HostOp<'a> = Op<'a, host::Local, host::Remote>;
type Answer<T = ()> = Result<T, Error<host::Error>>;

/// Far longer than a rank needs to tell another that a ticket is complete.
const DELAY: Duration = Duration::from_millis(3);
/// Time limit of connections and imports within this rank.
const SOON: Duration = Duration::from_secs(5);
/// Keeps the places of several puts in one region apart.
const PLACE_BYTES: u64 = 64;

/// Flag with the number of the last delayed op that the thread may make.
const STAGED: u64 = 0;
/// Flag with the number of the last delayed op that the thread has made.
const MADE: u64 = 1;

/// A layer that makes late engines.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LateLayer;

/// Returns the capabilities of a late engine over an engine with the capabilities `own`.
fn caps(own: Caps) -> Caps {
    Caps { slice_ops_max: own.slice_ops_max / 2, ..own }
}

// SAFETY: the engine submits the ops of its caller to an engine of `fabric`.
unsafe impl Layer<host::Fabric> for LateLayer {
    type Engine = Late;

    fn engine(
        &self,
        fabric: &host::Fabric,
        _: u64,
        requirements: EngineRequirements,
    ) -> Answer<Late> {
        Late::new(fabric, requirements).map_err(Error::Inner)
    }

    fn offers(&self, own: Vec<EngineOffer>) -> Vec<EngineOffer> {
        let offer = |offer: EngineOffer| EngineOffer { caps: caps(offer.caps), ..offer };
        own.into_iter().map(offer).collect()
    }
}

/// Memory of this rank, and its import.
struct Aliased {
    remote: host::Remote,
    local: host::Local,
}

impl Aliased {
    fn new(fabric: &host::Fabric, bytes: u64, role: Role) -> Result<Self, host::Error> {
        let memory = fabric.memory();
        let local = memory.allocate(bytes, role)?;
        let key = memory.export(&local)?;
        Ok(Self { remote: memory.import(fabric.rank(), &key, Deadline::after(SOON))?, local })
    }

    fn signal(&self, word: u64, value: u64) -> HostOp<'_> {
        Op::Signal { flag: Flag { region: &self.remote, word }, value }
    }
}

/// A put or a signal to a peer, with the copy of its source.
struct DelayedOp {
    number: u64,
    op: HostOp<'static>,
    _staging: Arc<Aliased>,
}

/// A delayed op and the time at which it takes effect.
type Due = (Instant, DelayedOp);

/// An engine whose puts and signals reach peers late.
pub(crate) struct Late {
    engine: host::Engine,
    state: EngineState<host::Error>,
    rank: Rank,
    /// Allocates the copies of sources.
    own: host::Fabric,
    flags: Arc<Aliased>,
    /// DelayedOps whose sources are not yet copied.
    unready: VecDeque<DelayedOp>,
    delayed_ops: u64,
    /// The number of the last delayed op that a signal or a get behind it has made due.
    announced: u64,
    /// The number of the last delayed op that was given to the thread.
    sent: u64,
    last: Ticket,
    is_released: bool,
    /// `None` once the engine is dropped.
    thread: Option<(Sender<Due>, JoinHandle<()>)>,
}

impl Late {
    fn new(fabric: &host::Fabric, requirements: EngineRequirements) -> Result<Self, host::Error> {
        let rank = fabric.rank();
        let mut own = fabric.reopen(rank, rank.index() + 1)?;
        let address = own.address();
        own.connect(rank, &address, Deadline::after(SOON))?;
        let flags = Arc::new(Aliased::new(fabric, 2 * 8, Role::Flags)?);
        let engine = fabric.engine(requirements)?;
        let caps = caps(*engine.caps());
        let (sender, delayed_ops) = channel();
        let (late_engine, made) = (fabric.engine(requirements)?, Arc::clone(&flags));
        let thread = std::thread::spawn(move || make_all(late_engine, &made, &delayed_ops));
        Ok(Self {
            engine,
            state: EngineState::new(caps),
            rank,
            own,
            flags,
            unready: VecDeque::new(),
            delayed_ops: 0,
            announced: 0,
            sent: 0,
            last: Ticket::NONE,
            is_released: false,
            thread: Some((sender, thread)),
        })
    }

    fn is_far(&self, region: &host::Remote) -> bool {
        region.peer() != self.rank
    }

    /// Returns the room that the source of an op needs if it goes to a peer.
    fn room(&self, op: &HostOp<'_>) -> u64 {
        let bytes = match *op {
            Op::Put { dst, bytes, .. } if self.is_far(dst.region) => bytes,
            Op::PutRows { dst, bytes, rows, .. } if self.is_far(dst.region) => {
                rows.count.saturating_sub(1) * rows.src_pitch + bytes
            }
            Op::Put { .. }
            | Op::Get { .. }
            | Op::PutRows { .. }
            | Op::GetRows { .. }
            | Op::Signal { .. }
            | Op::Wait { .. }
            | Op::Reduce { .. } => 0,
            #[cfg(not(peerlane_workspace))]
            _ => 0,
        };
        bytes.next_multiple_of(PLACE_BYTES)
    }

    /// Waits until the thread has made what has left, and drops the rest: the caller may free the regions of a drained engine.
    fn end_delayed_ops(&mut self) {
        self.unready.clear();
        while self.flags.local.flag_value(MADE).expect("a flag of the host") < self.sent {
            std::thread::yield_now();
        }
    }

    /// Gives the thread the delayed ops that are due and whose sources are copied by now.
    fn send_off(&mut self) {
        let staged = self.flags.local.flag_value(STAGED).expect("a flag of the host");
        let due = Instant::now() + DELAY;
        let last = self.announced.min(staged);
        let ready = self.unready.partition_point(|delayed_op| delayed_op.number <= last);
        let (sender, _) = self.thread.as_ref().expect("the engine is not dropped");
        for delayed_op in self.unready.drain(..ready) {
            self.sent = delayed_op.number;
            sender.send((due, delayed_op)).expect("the thread ends after the sender");
        }
    }
}

/// Makes each delayed op when it is due.
fn make_all(mut engine: host::Engine, flags: &Aliased, delayed_ops: &Receiver<Due>) {
    for (due, delayed_op) in delayed_ops {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let ops = [delayed_op.op, flags.signal(MADE, delayed_op.number)];
        // SAFETY: the promise of whoever called `submit` on the late engine, whose drop waits for this thread. The delayed op
        // keeps the copy of the source, and this engine is the only writer of the flag.
        let ticket = unsafe { engine.submit(&ops) }.expect("the ops were checked");
        while engine.completed().expect("an engine of the host does not fail") < ticket {}
    }
}

// SAFETY: the inner engine makes what concerns this rank, and the thread keeps the order of the rest.
unsafe impl CopyEngine for Late {
    type Error = Error<host::Error>;
    type Local = host::Local;
    type Remote = host::Remote;

    fn caps(&self) -> &Caps {
        self.state.caps()
    }

    fn prepare_reduce(&mut self) -> Answer<Option<Reducer>> {
        let reducer = self.engine.prepare_reduce().map_err(Error::Inner)?;
        self.state.set_reducer(reducer);
        Ok(reducer)
    }

    unsafe fn submit(&mut self, ops: &[HostOp<'_>]) -> Answer<Ticket> {
        self.state.check_slice(ops).map_err(Error::Inner)?;
        let room = ops.iter().map(|op| self.room(op)).sum();
        let staging = Aliased::new(&self.own, room, Role::Data).map_err(Error::Inner)?;
        let (staging, flags) = (Arc::new(staging), Arc::clone(&self.flags));
        let (mut slice, mut delayed_ops): (Vec<HostOp<'_>>, Vec<HostOp<'_>>) = Default::default();
        let (mut offset, mut announced) = (0, self.announced);
        for op in ops {
            let number = self.delayed_ops + delayed_ops.len() as u64;
            let to = At { region: &staging.remote, offset };
            let from = At { region: &staging.local, offset };
            match *op {
                Op::Put { dst, src, bytes } if self.is_far(dst.region) => {
                    let copy = Op::Put { dst: to, src, bytes };
                    slice.extend([copy, flags.signal(STAGED, number + 1)]);
                    delayed_ops.push(Op::Put { dst, src: from, bytes });
                }
                Op::PutRows { dst, src, bytes, rows } if self.is_far(dst.region) => {
                    let same = Rows { dst_pitch: rows.src_pitch, ..rows };
                    let copy = Op::PutRows { dst: to, src, bytes, rows: same };
                    slice.extend([copy, flags.signal(STAGED, number + 1)]);
                    delayed_ops.push(Op::PutRows { dst, src: from, bytes, rows });
                }
                Op::Signal { flag, .. } if self.is_far(flag.region) => {
                    slice.push(flags.signal(STAGED, number + 1));
                    delayed_ops.push(*op);
                    announced = number + 1;
                }
                Op::Get { src, .. } | Op::GetRows { src, .. } if self.is_far(src.region) => {
                    let flag = Flag { region: &flags.local, word: MADE };
                    slice.extend([Op::Wait { flag, value: number, reset: false }, *op]);
                    announced = number;
                }
                Op::Put { .. }
                | Op::Get { .. }
                | Op::PutRows { .. }
                | Op::GetRows { .. }
                | Op::Signal { .. }
                | Op::Wait { .. }
                | Op::Reduce { .. } => slice.push(*op),
                #[cfg(not(peerlane_workspace))]
                _ => slice.push(*op),
            }
            offset += self.room(op);
        }
        // SAFETY: the caller's promise. The delayed ops keep the copies of sources, and the engine keeps its flags; it is their only
        // writer or their only reader.
        let ticket = unsafe { self.engine.submit(&slice) }.map_err(Error::Inner)?;
        for op in delayed_ops {
            self.delayed_ops += 1;
            // SAFETY: the caller keeps the regions until the engine is dropped, which waits for the thread. The delayed op keeps the
            // rest.
            let op = unsafe { std::mem::transmute::<HostOp<'_>, HostOp<'static>>(op) };
            let delayed_op =
                DelayedOp { number: self.delayed_ops, op, _staging: Arc::clone(&staging) };
            self.unready.push_back(delayed_op);
        }
        self.announced = announced;
        self.last = ticket;
        self.send_off();
        Ok(ticket)
    }

    fn completed(&mut self) -> Answer<Ticket> {
        let done = self.engine.completed().map_err(Error::Inner)?;
        self.send_off();
        if self.is_released && done == self.last {
            self.end_delayed_ops();
        }
        Ok(done)
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
        self.state.release();
        self.is_released = true;
        self.engine.release().map_err(Error::Inner)
    }

    fn compute_bytes(&mut self, ops: &[HostOp<'_>], captured: bool) -> u64 {
        self.engine.compute_bytes(ops, captured)
    }

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = Self::Error>> {
        None
    }
}

impl Drop for Late {
    /// Ends what is queued, and waits until the thread has made what has left.
    fn drop(&mut self) {
        let _ = self.engine.release();
        let (sender, thread) = self.thread.take().expect("dropped once");
        drop(sender);
        if thread.join().is_err() {
            eprintln!("the thread of a late engine panicked");
        }
    }
}
