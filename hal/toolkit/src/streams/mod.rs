//! Implements an engine on the streams of a GPU, with copies, word writes and word waits as drivers
//! offer them.
//!
//! A backend implements [`StreamDevice`] for its context. Its engine is then [`Engine`].
//!
//! | contract | here |
//! | --- | --- |
//! | put, get | on the main stream or a side stream; adjacent copies of one stream in one call, where the driver takes several |
//! | adjacent signals, waits, resets | one batch of memory operations on the main stream |
//! | reduction | a kernel on the main stream |
//! | ticket | an event on the main stream at the end of a slice |
//! | `completed` | queries these events, in a mode that captures of other threads tolerate |
//! | `fork` | the caller's stream becomes the main stream until `join` |
//! | `fork_beside` | the own main stream waits for an event of the caller's stream |
//! | `mark`, `order_after` | the event of a ticket; in a capture an event of its own |
//! | a slice while that stream captures | the same calls with separate streams and events, and no ticket |
//! | `release` | a dedicated stream, or the host, writes the awaited values |
//!
//! The cost for the host is the number of calls: an out-of-place start of a direct all-gather on
//! four devices is one or two batches, four copies, four recorded events and four event waits. The
//! steady state allocates nothing and takes no lock.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `mod` | the engine: submission, completion, fork and join |
//! | `steps` | checks of ops, the choice of streams, and self copies |
//! | `emit` | puts the steps of a slice onto the streams |
//! | `batches` | batches of memory operations and copies, and words that signals are copied from |
//! | `pending` | slices in flight: tickets, back-pressure, awaited flags |
//! | `resources` | streams, events, pages of words, and bounce buffers |
//! | `capture` | resources of recorded slices |
//! | `fused` | launches of whole starts |
//! | `release` | lets blocked waits pass, and drops an engine without blocking |
//! | `probes` | tests of what a driver really does, once for each device |

mod batches;
mod capture;
mod emit;
mod fused;
mod pending;
mod probes;
mod release;
mod resources;
mod steps;

use std::any::Any;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use self::batches::{ABORTED, PendingCopies, SignalWords, WordBatch};
use self::capture::Captures;
use self::emit::{Busy, Emitter, SideStream};
use self::fused::Fused;
use self::pending::{Awaited, COMMANDS_MAX, Pending, TicketEvents};
pub use self::probes::{ProbeCache, probe_signal, probe_waits};
use self::release::Releaser;
pub use self::resources::Stream;
use self::resources::{BounceBuffers, Event, OwnStream, PinnedPage};
pub use self::steps::SelfCopy;
use self::steps::{LinkCopy, OpResolver, SliceTotals, Step, StreamPlan, mark_link_copies};
use crate::Fault;
use crate::device::{CaptureState, DevicePtr, EngineRequest, StreamHandle};
pub use crate::device::{StreamDevice, StreamLimits};
use crate::regions::{Local, Remote};
use crate::{EngineState, TimedParker};
use peerlane_hal::{
    Caps, CopyEngine, EngineOffer, Error as _, ErrorKind, FusedEngine, FusedLimits, LinkKind, Mark,
    Op, Rank, Reducer, StreamOrdered, Ticket,
};

/// How an engine writes signals to the flags of peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SignalBy {
    /// The stream writes the peer's flag with a memory operation.
    StreamWrite,
    /// The stream copies a device word of its own to the peer's flag.
    Copy,
}

/// The name of the kind of engines that make fused starts.
pub const KERNELS: &str = "kernels";

/// The largest number of ops in one submission, because more than [`COMMANDS_MAX`] commands on one
/// stream could block the caller, and a slice must fit an empty queue.
const SLICE_OPS_MAX: usize = 256;
/// The smallest number of copies with a constant stride that go onto their stream as rows of one
/// copy. Any two copies have one, and together with others they cost less in one batch.
const ROWS_MIN: u64 = 4;
/// Returns an upper bound on the commands that `ops` ops enqueue on one stream. These are two for
/// each op, more if every op is several memory operations, and the events around them.
const fn commands_max(ops: usize) -> usize {
    ops * 19 / 8 + 8
}
const _: () = assert!(commands_max(SLICE_OPS_MAX) <= COMMANDS_MAX);

/// The most blocks of threads of a reduction beside kernels of the caller, unless the backend is
/// told another number: an eighth of the multiprocessors of an H100. They add faster than a link
/// brings contributions (docs/perf/cuda-additions.md).
const REDUCE_BLOCKS_BESIDE_COMPUTE: u32 = 16;

const SPIN: Duration = Duration::from_micros(20);
/// A parked thread may sleep this long between two checks, because the streams wait for flags
/// themselves.
const SLEEP_MAX: Duration = Duration::from_micros(200);
/// After this many submissions, `completed` queries the driver even right after a submit.
const SUBMITS_MAX: usize = 16;

/// Returns the offer of stream engines on a device.
///
/// # Errors
/// Returns an error of kind `Unavailable` if the driver or the device lacks a feature that signals
/// and waits need, and the driver's error.
pub fn offer<D: StreamDevice>(context: &D) -> Result<EngineOffer, D::Error> {
    let _relaxed = context.enter_relaxed()?;
    context.check_words()?;
    let limits = context.stream_limits()?;
    let words_together = probes::check_batches(context)?;

    let caps = caps(context, &limits, words_together);
    let captured_seconds = context.captured_seconds();
    Ok(EngineOffer { streams: true, captured_seconds, ..EngineOffer::new(caps) })
}

/// Returns the offer of engines that make fused starts, or `None` if the device has no kernel for
/// them. `streams` is the offer of stream engines, and `blocks_max` a limit for the blocks.
pub fn fused_offer<D: StreamDevice>(
    context: &D,
    streams: &EngineOffer,
    blocks_max: Option<u32>,
) -> Option<EngineOffer> {
    let limits = context.fused_limits()?;
    let blocks_max = limits.blocks_max.min(blocks_max.unwrap_or(u32::MAX)).max(1);
    Some(EngineOffer {
        caps: Caps { kind: KERNELS, ..streams.caps },
        copy_blocks: blocks_max,
        resident_blocks_max: context.resident_blocks_max(),
        fused: Some(FusedLimits { blocks_max, ..limits }),
        captured_seconds: 0.0,
        ..*streams
    })
}

fn caps<D: StreamDevice>(context: &D, limits: &StreamLimits, words_together: bool) -> Caps {
    Caps {
        queued_wait: true,
        gets: true,
        // Otherwise each row is a command, of which a stream takes few.
        rows: context.row_pitch_max() > 0,
        flags_batched: words_together,
        slice_ops_max: SLICE_OPS_MAX,
        shared_queues: Some(limits.shared_queues),
        ..Caps::new("streams")
    }
}

/// The parameters of a stream engine.
#[derive(Clone, Debug)]
pub struct EngineSetup {
    /// The rank that the engine serves.
    pub rank: Rank,
    /// The connected peers that the engine reaches.
    pub peers: Vec<Rank>,
    /// The method by which the engine writes signals to its peers.
    pub signal: SignalBy,
    /// The method by which the engine copies this rank's block to its own output.
    pub self_copy: SelfCopy,
    /// Whether some peer is reached through host memory.
    pub staged: bool,
    /// The peers that use the same device as this rank.
    pub on_device: Vec<Rank>,
    /// The largest number of blocks of threads that run a reduction, or `None` for the number that
    /// the device suggests.
    pub reduce_blocks: Option<u32>,
    /// The name of the engine's kind.
    pub kind: &'static str,
    /// The number of blocks of threads of fused starts, or `None` for an engine that makes none.
    pub fused_blocks: Option<u32>,
}

impl EngineSetup {
    /// Creates the parameters of an engine from the request of a fabric.
    ///
    /// `self_copy` and `reduce_blocks` are those of the options of the fabric. An engine beside
    /// compute returns the own block over the link, unless the options name another method.
    pub fn new(request: &EngineRequest, self_copy: SelfCopy, reduce_blocks: Option<u32>) -> Self {
        let is_beside = request.requirements.beside_compute;
        let self_copy = match self_copy {
            SelfCopy::Auto if is_beside => SelfCopy::Link,
            given => given,
        };
        let reduce_blocks =
            reduce_blocks.or_else(|| is_beside.then_some(REDUCE_BLOCKS_BESIDE_COMPUTE));

        Self {
            rank: request.rank,
            peers: request.peers.iter().map(|peer| peer.peer).collect(),
            signal: request.signal,
            self_copy,
            staged: request.is_staged(),
            on_device: request
                .peers
                .iter()
                .filter(|peer| peer.kind == LinkKind::Local)
                .map(|peer| peer.peer)
                .collect(),
            reduce_blocks,
            kind: request.kind,
            fused_blocks: Some(request.requirements.fused_blocks)
                .filter(|blocks| request.kind == KERNELS && *blocks > 0),
        }
    }
}

/// An in-order queue of ops that runs on the streams of a GPU.
#[derive(Debug)]
pub struct Engine<D: StreamDevice> {
    context: Arc<D>,
    limits: StreamLimits,
    state: EngineState<D::Error>,
    resolver: OpResolver,
    stream_plan: StreamPlan,
    /// The driver's streams, events and memory pages, which are dropped only if that cannot block.
    hardware: ManuallyDrop<Hardware<D>>,
    steps: Vec<Step>,
    /// The addresses of the sources of the reductions of a slice.
    sources: Vec<DevicePtr>,
    marks: Vec<LinkCopy>,
    batch: WordBatch<D>,
    copies: Vec<PendingCopies>,
    copies_together: bool,
    self_copy: SelfCopy,
    reduce_blocks: Option<u32>,
    pending: Pending,
    forked: Option<Forked>,
    /// Whether the main stream follows streams of the caller since the last submission, which a
    /// join must cover.
    follows: bool,
    last_main: StreamHandle,
    capture_ability: Result<(), D::Error>,
    parker: TimedParker,
    just_submitted: bool,
    submits: usize,
}

#[derive(Debug)]
struct Hardware<D: StreamDevice> {
    main: OwnStream<D>,
    sides: Vec<SideStream<D>>,
    started: Event<D>,
    tickets: TicketEvents<D>,
    captures: Captures<D>,
    release: Releaser<D>,
    words: Option<SignalWords>,
    /// Device buffers for copies between two host regions, one set for eager and one for captured
    /// work, because both may run at the same time.
    bounces: Option<[BounceBuffers; 2]>,
    page: PinnedPage,
    joined: Event<D>,
    fused: Option<Fused>,
}

impl<D: StreamDevice> Engine<D> {
    /// Creates an engine that reaches the peers `setup.peers`.
    ///
    /// # Errors
    /// Returns an error of kind `Unavailable` if the driver or the device lacks a feature that
    /// signals and waits need, and the driver's error.
    pub fn open(context: Arc<D>, setup: EngineSetup) -> Result<Self, D::Error> {
        let EngineSetup {
            rank, peers, signal, self_copy, staged, on_device, reduce_blocks, ..
        } = setup;
        let relaxed = context.enter_relaxed()?;
        context.check_words()?;
        let limits = context.stream_limits()?;
        let resolver = OpResolver::new(rank, &peers, on_device, &limits, context.row_pitch_max());
        let stream_plan = StreamPlan::new(resolver.ranks(), &limits);
        let streams = stream_plan.streams();
        let words_together = probes::check_batches(&*context)?;
        probes::check_local_copies(&*context)?;
        let sides = (0..stream_plan.sides()).map(|_| SideStream::create(&*context));
        let main = OwnStream::create(&*context)?;
        let hardware = Hardware {
            captures: Captures::new(&*context)?,
            main,
            sides: sides.collect::<Result<_, _>>()?,
            started: Event::create(&*context)?,
            tickets: TicketEvents::new(),
            release: Releaser::new(&*context, words_together)?,
            words: match signal {
                SignalBy::StreamWrite => None,
                SignalBy::Copy => Some(SignalWords::new(&*context)?),
            },
            bounces: match staged {
                true => Some([
                    BounceBuffers::new(&*context, streams)?,
                    BounceBuffers::new(&*context, streams)?,
                ]),
                false => None,
            },
            page: PinnedPage::take(&*context)?,
            joined: Event::create(&*context)?,
            fused: None,
        };
        let words = hardware.captures.fused_words();
        let hardware =
            Hardware { fused: Fused::reserve(&*context, setup.fused_blocks, words)?, ..hardware };
        let capture_ability = probes::check_captures(&*context, words_together);
        let copies_together = probes::probe_copy_batch(&*context, &hardware.main, &hardware.page);
        drop(relaxed);
        let caps = Caps { kind: setup.kind, ..caps(&*context, &limits, words_together) };
        Ok(Self {
            state: EngineState::new(caps),
            limits,
            resolver,
            stream_plan,
            last_main: hardware.main.raw(),
            hardware: ManuallyDrop::new(hardware),
            steps: Vec::with_capacity(SLICE_OPS_MAX),
            sources: Vec::new(),
            marks: Vec::with_capacity(SLICE_OPS_MAX),
            self_copy: match self_copy {
                // A peer's memory may be on the far side of the host.
                SelfCopy::Auto if staged => SelfCopy::Local,
                other => other,
            },
            batch: WordBatch::new(words_together),
            copies: (0..streams).map(|_| PendingCopies::with_capacity(SLICE_OPS_MAX)).collect(),
            copies_together,
            reduce_blocks,
            pending: Pending::new(),
            forked: None,
            follows: false,
            capture_ability,
            parker: TimedParker::new(SPIN, SLEEP_MAX),
            just_submitted: false,
            submits: 0,
            context,
        })
    }

    /// Asks the driver which submissions are complete, except while a graph must be released. Then
    /// the launch of a further graph may hold a lock of the driver until the release is complete.
    ///
    /// A lost device reports its error at the next query of any event.
    fn settle(&mut self) -> Result<(), D::Error> {
        let releases = self.state.is_released() && self.hardware.captures.is_waiting();
        if self.pending.is_empty() || releases {
            return Ok(());
        }
        let _relaxed = self.context.enter_relaxed()?;
        let done = self.hardware.tickets.completed(&self.context)?;
        if self.pending.settle(done) {
            self.parker.busy();
        }
        Ok(())
    }

    fn release_round(&mut self) -> Result<(), D::Error> {
        let Hardware { captures, release, page, fused, .. } = &mut *self.hardware;
        if let Some(fused) = fused {
            fused.abort();
        }
        if !release.write_from_host(captures, &self.pending) {
            return Ok(());
        }
        release.write_from_stream(&self.context, page, captures, &self.pending)
    }
}

// SAFETY: ops are checked against their regions, and tickets complete after their ops.
unsafe impl<D: StreamDevice> CopyEngine for Engine<D> {
    type Error = D::Error;
    type Local = Local<D>;
    type Remote = Remote<D>;

    fn caps(&self) -> &Caps {
        self.state.caps()
    }

    fn prepare_reduce(&mut self) -> Result<Option<Reducer>, D::Error> {
        self.state.check()?;
        let _relaxed = self.context.enter_relaxed()?;
        let reducer = self.context.prepare_reduce()?.map(|reducer| {
            let blocks_max = self.reduce_blocks.map_or(u32::MAX, |blocks| blocks.max(1));
            Reducer { blocks: reducer.blocks.min(blocks_max), ..reducer }
        });
        self.state.set_reducer(reducer);
        Ok(reducer)
    }

    unsafe fn submit(&mut self, ops: &[Op<'_, Local<D>, Remote<D>>]) -> Result<Ticket, D::Error> {
        self.state.check_slice(ops)?;
        let totals = steps::resolve(ops, &self.resolver, &mut self.steps, &mut self.sources)?;
        if let Some(Forked { stream, captured: Some(Captured { sides, .. }) }) = &self.forked {
            let (main, sides) = (stream.raw(), *sides);
            return match self.record(&totals, main, sides) {
                Ok(()) => Ok(Ticket(self.pending.last())),
                // An error in a capture usually concerns the capture only, and the eager work of
                // the engine goes on.
                Err(error) if error.kind() != ErrorKind::DeviceLost => Err(error),
                Err(error) => self.state.keep(Err(error)),
            };
        }
        let commands = commands_max(ops.len()).saturating_add(totals.more_copies);
        if self.pending.admit(commands).is_err() {
            let settled = self.settle();
            self.state.keep(settled)?;
            self.pending.admit(commands)?;
        }
        (self.just_submitted, self.submits) = (true, self.submits + 1);
        self.parker.busy();
        let emitted = self.emit(&totals);
        self.state.keep(emitted)
    }

    fn completed(&mut self) -> Result<Ticket, D::Error> {
        self.state.check()?;
        // Right after a submit hardly anything has changed, and a query of the driver costs as much
        // as a copy.
        let hurried = std::mem::take(&mut self.just_submitted) && self.submits < SUBMITS_MAX;
        if !hurried {
            self.submits = 0;
            let settled = self.settle();
            self.state.keep(settled)?;
        }
        Ok(Ticket(self.pending.done()))
    }

    fn park(&mut self, limit: Duration) -> Result<(), D::Error> {
        self.state.check()?;
        let (tickets, context) = (&self.hardware.tickets, &self.context);
        self.parker.park(limit, || tickets.has_news(context));
        Ok(())
    }

    /// Returns false, because the device makes progress without polling.
    fn is_busy(&self) -> bool {
        false
    }

    fn waker(&self) -> Waker {
        self.parker.waker()
    }

    fn release(&mut self) -> Result<(), D::Error> {
        self.state.release();
        let settled = self.settle();
        // A poisoned engine is released too, since its streams may hold waits.
        let round = self.release_round();
        self.state.check()?;
        self.state.keep(settled.and(round))
    }

    fn compute_bytes(&mut self, ops: &[Op<'_, Local<D>, Remote<D>>], captured: bool) -> u64 {
        // `submit` refuses a slice that names an unknown peer.
        let Ok(totals) = steps::resolve(ops, &self.resolver, &mut self.steps, &mut self.sources)
        else {
            return 0;
        };
        let (sides, together) = match captured {
            true => (self.captured_sides(), false),
            false => (self.hardware.sides.len(), self.copies_together),
        };
        self.stream_plan.begin(&totals, sides, together);
        let peer_streams = self.stream_plan.peer_streams();
        let back = self.self_copy.back(&self.limits, &totals, peer_streams, captured);
        mark_link_copies(back, &self.steps, &mut self.marks);
        let copied = |(step, mark): (&Step, &LinkCopy)| match (step, mark) {
            (Step::Copy { bytes, rows, copy_kind, .. }, mark)
                if self.context.uses_compute_units(*copy_kind) =>
            {
                match mark {
                    LinkCopy::None => *bytes * rows.count,
                    LinkCopy::Replaced => 0,
                    LinkCopy::Back(_) => 2 * bytes,
                }
            }
            _ => 0,
        };
        self.steps.iter().zip(&self.marks).map(copied).sum()
    }

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = D::Error>> {
        Some(self)
    }

    fn fused(&mut self) -> Option<&mut FusedEngine<Self>> {
        if self.hardware.fused.is_some() { Some(self) } else { None }
    }
}

#[derive(Debug)]
pub(super) struct Forked {
    /// The main stream of the slices.
    pub(super) stream: Stream,
    /// What a capture may use, or `None` if the stream is not capturing.
    pub(super) captured: Option<Captured>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Captured {
    /// The number of side streams.
    sides: usize,
    /// The capture that the slices are recorded into.
    capture: CaptureState,
}

// SAFETY: events order the engine and the stream of the caller.
unsafe impl<D: StreamDevice> StreamOrdered for Engine<D> {
    type Error = D::Error;

    fn capture_state(&mut self, stream: &dyn Any) -> Result<CaptureState, D::Error> {
        let stream = stream_of::<D>(stream)?;
        self.state.check()?;
        let _entered = self.context.enter()?;
        stream.check(&*self.context)?;
        // Most starts are not captured, and the number of a capture costs more to find.
        match stream.is_capturing(&*self.context)? {
            true => stream.capture(&*self.context),
            false => Ok(CaptureState::None),
        }
    }

    fn fork(&mut self, from: &dyn Any) -> Result<(), D::Error> {
        let from = stream_of::<D>(from)?;
        self.state.check()?;
        let context = Arc::clone(&self.context);
        let _entered = context.enter()?;
        self.forked = None;
        from.check(&*context)?;
        let captured = if from.is_capturing(&*context)? {
            self.capture_ability.clone()?;
            Some(self.begin_capture(from)?)
        } else {
            None
        };
        self.forked = Some(Forked { stream: from.clone(), captured });
        Ok(())
    }

    fn fork_beside(&mut self, from: &dyn Any) -> Result<(), D::Error> {
        let from = stream_of::<D>(from)?;
        self.state.check()?;
        let context = Arc::clone(&self.context);
        let _entered = context.enter()?;
        from.check(&*context)?;
        let capture = match from.is_capturing(&*context)? {
            true => from.capture(&*context)?,
            false => CaptureState::None,
        };

        // A caller that has ended its capture without a join is not part of it any more.
        let mut part_of = self.forked.as_ref().and_then(|forked| forked.captured);
        if part_of.is_some_and(|captured| captured.capture != capture)
            && !self.hardware.captures.is_home_capturing(&context)?
        {
            part_of = None;
        }
        let main = match part_of {
            // The slices since the first fork are in this capture, and so are the next ones.
            Some(captured) if captured.capture == capture => self.main(),
            Some(_) => {
                let text = format!(
                    "the engine is part of a capture that {from:?} is not part of; fork it from a stream of that \
                     capture, or join it first"
                );
                return Err(Fault::Argument(text).into());
            }
            None if capture == CaptureState::None => {
                self.forked = None;
                self.follows = true;
                self.hardware.main.raw()
            }
            None => {
                self.capture_ability.clone()?;
                let captured = self.begin_capture(from)?;
                let home = self.hardware.captures.home(&context, capture)?;
                // SAFETY: the captures of this engine own the stream.
                let stream = unsafe { Stream::new(home, None) };
                self.forked = Some(Forked { stream, captured: Some(captured) });
                home
            }
        };

        // A stream need not wait for itself.
        if main == from.raw() {
            return Ok(());
        }
        self.hardware.joined.order(&context, from.raw(), main)
    }

    fn mark(&mut self) -> Result<Mark, D::Error> {
        self.state.check()?;
        let Some(Forked { captured: Some(_), .. }) = &self.forked else {
            return Ok(Mark::Submitted(Ticket(self.pending.last())));
        };

        let main = self.main();
        let _entered = self.context.enter()?;
        self.hardware.captures.mark(&self.context, main)
    }

    fn order_after(&mut self, mark: Mark, into: &dyn Any) -> Result<(), D::Error> {
        let into = stream_of::<D>(into)?;
        self.state.check()?;
        let context = Arc::clone(&self.context);
        let _entered = context.enter()?;
        into.check(&*context)?;
        let is_capturing = into.is_capturing(&*context)?;

        match mark {
            Mark::Submitted(ticket) if is_capturing => {
                self.settle()?;
                if self.pending.done() >= ticket.0 { Ok(()) } else { Err(outside_of_capture(into)) }
            }
            Mark::Submitted(ticket) => {
                self.hardware.tickets.order_after(&context, ticket.0, into.raw())
            }
            Mark::Captured { fork, index } => {
                let captured = self.forked.as_ref().and_then(|forked| forked.captured);
                let event = self.hardware.captures.event(fork, index);
                let (Some(Captured { capture, .. }), Some(event)) = (captured, event) else {
                    let text = "the mark is of a capture that the engine is not part of any more";
                    return Err(Fault::Argument(text.to_owned()).into());
                };
                // A stream that does not capture becomes part of the capture by this wait.
                if is_capturing && into.capture(&*context)? != capture {
                    let text = format!("{into:?} is part of another capture than the mark");
                    return Err(Fault::Argument(text).into());
                }
                event.block(&context, into.raw())
            }
        }
    }

    fn join(&mut self, into: &dyn Any) -> Result<(), D::Error> {
        let into = stream_of::<D>(into)?;
        let forked = self.forked.take();
        self.state.check()?;
        let context = Arc::clone(&self.context);
        let _entered = context.enter()?;
        match forked {
            // All work is on that stream already.
            Some(Forked { stream, .. }) if stream.raw() == into.raw() => Ok(()),
            Some(Forked { stream, captured: Some(_) }) => {
                into.check(&*context)?;
                self.hardware.joined.order(&context, stream.raw(), into.raw())
            }
            _ => {
                into.check(&*context)?;
                self.join_eager(into)
            }
        }
    }

    fn replay_wait(&mut self) -> Result<Option<Duration>, D::Error> {
        let running = self.hardware.fused.as_mut().and_then(Fused::running_time);
        Ok(self.hardware.captures.longest_wait().max(running))
    }
}

impl<D: StreamDevice> Engine<D> {
    fn captured_sides(&self) -> usize {
        self.stream_plan.sides().min(self.limits.captured_sides_max)
    }

    /// Returns the main stream of the next slice.
    fn main(&self) -> StreamHandle {
        self.forked.as_ref().map_or(self.hardware.main.raw(), |forked| forked.stream.raw())
    }

    /// Prepares slices that become part of the capture of `from`.
    fn begin_capture(&mut self, from: &Stream) -> Result<Captured, D::Error> {
        let sides = self.captured_sides();
        let sides = self.hardware.captures.begin(&self.context, from, sides)?;
        Ok(Captured { sides, capture: from.capture(&*self.context)? })
    }

    fn join_eager(&mut self, into: &Stream) -> Result<(), D::Error> {
        self.settle()?;
        let follows = std::mem::take(&mut self.follows);
        if self.pending.is_empty() && !follows {
            return Ok(());
        }
        if into.is_capturing(&*self.context)? {
            return Err(outside_of_capture(into));
        }

        match follows {
            // The event of the last ticket is older than what the main stream follows.
            true => {
                let main = self.hardware.main.raw();
                self.hardware.joined.order(&self.context, main, into.raw())
            }
            false => self.hardware.tickets.order(&self.context, into.raw()),
        }
    }

    fn emit(&mut self, totals: &SliceTotals) -> Result<Ticket, D::Error> {
        let _entered = self.context.enter()?;
        let main = self.main();
        self.follows = false;
        let hardware = &mut *self.hardware;
        let last = self.pending.last();
        let stream_changed = self.last_main != main && self.pending.done() < last;
        let together = self.copies_together;
        self.stream_plan.begin(totals, hardware.sides.len(), together);
        if stream_changed {
            // Ordered by the event, since the previous stream may be destroyed.
            hardware.tickets.order(&self.context, main)?;
        }
        let mut emitter = Emitter {
            context: &*self.context,
            main,
            sides: &mut hardware.sides,
            started: &hardware.started,
            started_recorded: false,
            batch: &mut self.batch,
            copies: &mut self.copies,
            together,
            words: hardware.words.as_mut(),
            bounce: hardware.bounces.as_ref().map(|[eager, _]| eager),
            piece_bytes_max: self.limits.piece_bytes_max,
            blocks: self.state.reducer().map_or(0, |reducer| reducer.blocks),
            captured: false,
            busy: None,
            commands: [0; 2],
        };
        for awaited in awaited(&self.steps) {
            self.pending.await_flag(awaited);
        }
        emitter.begin();
        let back =
            self.self_copy.back(&self.limits, totals, self.stream_plan.peer_streams(), false);
        mark_link_copies(back, &self.steps, &mut self.marks);
        emit_steps(&mut emitter, (&self.steps, &self.marks, &self.sources), &mut self.stream_plan)?;
        emitter.end()?;
        // Plus the event of the ticket.
        let commands = emitter.commands() + 1;
        hardware.tickets.record(&self.context, last + 1, main)?;
        self.last_main = main;
        Ok(Ticket(self.pending.issue(commands)))
    }

    fn record(
        &mut self,
        totals: &SliceTotals,
        main: StreamHandle,
        sides: usize,
    ) -> Result<(), D::Error> {
        let hardware = &mut *self.hardware;
        let busy = match totals.waits {
            0 => None,
            waits => {
                let aborted =
                    |awaited: Awaited| Awaited { value: awaited.value | ABORTED, ..awaited };
                let word = hardware.captures.busy_word(awaited(&self.steps).map(aborted))?;
                Some(Busy { word, waits, begun: false })
            }
        };

        let _entered = self.context.enter()?;
        hardware.captures.note_use();
        self.stream_plan.begin(totals, sides, false);
        let (sides, started) = hardware.captures.sides(sides);
        let mut emitter = Emitter {
            context: &*self.context,
            main,
            sides,
            started,
            started_recorded: false,
            batch: &mut self.batch,
            copies: &mut self.copies,
            together: false,
            words: hardware.words.as_mut(),
            bounce: hardware.bounces.as_ref().map(|[_, captured]| captured),
            piece_bytes_max: self.limits.piece_bytes_max,
            blocks: self.state.reducer().map_or(0, |reducer| reducer.blocks),
            captured: true,
            busy,
            commands: [0; 2],
        };

        emitter.begin();
        let back = self.self_copy.back(&self.limits, totals, self.stream_plan.peer_streams(), true);
        mark_link_copies(back, &self.steps, &mut self.marks);
        emit_steps(&mut emitter, (&self.steps, &self.marks, &self.sources), &mut self.stream_plan)?;

        emitter.end()
    }
}

fn outside_of_capture<E: From<Fault>>(into: &Stream) -> E {
    let text = format!(
        "cannot order {into:?}, which captures a graph, after ops that were submitted before the capture and still \
         run; fork the engine from the capturing stream first, or wait until those ops complete"
    );
    Fault::Mismatch(text).into()
}

fn stream_of<D: StreamDevice>(stream: &dyn Any) -> Result<&Stream, D::Error> {
    let stream = peerlane_hal::stream_of::<D::Stream>(stream).map_err(Fault::Mismatch)?;
    Ok(stream.as_ref())
}

fn awaited(steps: &[Step]) -> impl Iterator<Item = Awaited> + Clone {
    steps.iter().filter_map(|step| match *step {
        Step::Wait { flag, host, value, .. } => Some(Awaited { flag, host, value }),
        _ => None,
    })
}

fn emit_steps<D: StreamDevice>(
    emitter: &mut Emitter<'_, D>,
    (steps, marks, sources): (&[Step], &[LinkCopy], &[DevicePtr]),
    stream_plan: &mut StreamPlan,
) -> Result<(), D::Error> {
    steps.iter().zip(marks).try_for_each(|(step, mark)| match (*step, *mark) {
        (_, LinkCopy::Replaced) => Ok(()),
        (Step::Copy { target, dst, src, bytes, rows, copy_kind, both_on_host, .. }, mark) => {
            let stream_index = stream_plan.stream_index(target);
            if rows.count >= ROWS_MIN {
                return emitter.put_rows((dst, src), (bytes, copy_kind), rows, stream_index);
            }
            for (to_offset, from_offset) in rows.offsets() {
                let ends = (dst + to_offset, src + from_offset);
                emitter.put(ends, (bytes, copy_kind, both_on_host), stream_index)?;
            }
            match mark {
                // In the same stream, so that it follows the put.
                LinkCopy::Back(own) => {
                    emitter.put((own, dst), (bytes, copy_kind, both_on_host), stream_index)
                }
                _ => Ok(()),
            }
        }
        (Step::Signal { target, flag, value }, _) => {
            emitter.signal(target, stream_plan.put_stream_index(target), (flag, value))
        }
        (Step::Wait { flag, value, reset, .. }, _) => emitter.wait(flag, value, reset),
        (Step::Reduce { dst, srcs: (first, count), bytes, reduction }, _) => {
            let srcs = &sources[first..first + count];
            emitter.reduce((dst, srcs), bytes, reduction, stream_plan.own_stream_index())
        }
    })
}
