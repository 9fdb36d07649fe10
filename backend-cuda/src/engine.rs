//! The queue of copies, signals and waits, on streams of the driver.
//!
//! | the contract | here |
//! | --- | --- |
//! | put, get | on the main stream or on one beside it; neighbours on one stream in one `cuMemcpyBatchAsync`, or each a `cuMemcpyAsync` |
//! | neighbouring signals, waits, resets | one `cuStreamBatchMemOp` on the main stream |
//! | ticket | an event on the main stream at the end of a slice |
//! | `completed` | looks at these events, in a mode in which captures of others do not mind |
//! | `fork` | the caller's stream becomes the main stream, until the `join` |
//! | a slice while that stream captures | the same calls, with streams and events of their own, and no ticket |
//! | `release` | a stream of its own writes the awaited values |
//!
//! What this costs the host is the number of calls: an out-of-place start of a direct all-gather on
//! four devices is one or two batches, four copies, four events recorded and four waited for. In the
//! steady state nothing is allocated and no lock is taken.

mod back;
mod batch;
mod bounce;
mod capture;
mod capture_probe;
mod close;
mod copies;
mod emit;
mod page;
mod park;
mod pending;
mod queue;
mod release;
mod route;
mod signal;
mod slice;
mod step;
mod stream;
mod tickets;

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::mechanics::Poison;
use peerlane_hal::{Caps, CopyEngine, Error as _, ErrorKind, Op, Rank, Ticket};

pub use self::back::OwnCopy;
use self::back::Part;
use self::batch::Batch;
use self::bounce::Bounce;
use self::capture::Captures;
use self::copies::Copies;
use self::emit::Side;
use self::page::Pinned;
use self::park::Parker;
use self::pending::{COMMANDS_MAX, Pending};
use self::queue::{Event, OwnStream};
use self::release::Release;
use self::route::Routes;
pub use self::signal::SignalBy;
use self::signal::Words;
pub(crate) use self::signal::probe_signal;
use self::step::{Reach, Step};
pub use self::stream::Stream;
use self::tickets::Tickets;
use crate::device::Context;
use crate::error::Error;
use crate::memory::{Local, Remote};
use crate::sys::CUstream;

/// The longest slice. More commands than [`COMMANDS_MAX`] on one stream could block the caller, and
/// a slice must fit an empty queue.
const SLICE_OPS_MAX: usize = 256;
/// Commands that a slice is on one stream at most: two for each op, more if every op is several
/// memory operations, and what stands around them.
const fn commands_max(ops: usize) -> usize {
    ops * 19 / 8 + 8
}
const _: () = assert!(commands_max(SLICE_OPS_MAX) <= COMMANDS_MAX);

/// Slices after which a look right behind a submit is worth its price.
const UNSEEN_MAX: usize = 8;

/// What an engine is made for.
#[derive(Clone, Debug)]
pub(crate) struct EngineSetup {
    /// This rank.
    pub(crate) rank: Rank,
    /// The peers that are connected.
    pub(crate) peers: Vec<Rank>,
    /// How signals get to them.
    pub(crate) signal: SignalBy,
    /// How own copies are made.
    pub(crate) own_copy: OwnCopy,
    /// A peer is reached through host memory.
    pub(crate) staged: bool,
}

/// One in-order queue over CUDA.
#[derive(Debug)]
pub struct Engine {
    context: Arc<Context>,
    caps: Caps,
    reach: Reach,
    routes: Routes,
    /// What the driver made for this engine; dropped only where that cannot block.
    hardware: ManuallyDrop<Hardware>,
    /// The steps of the slice at hand, and its open batch.
    steps: Vec<Step>,
    parts: Vec<Part>,
    batch: Batch,
    copies: Vec<Copies>,
    /// Whether the driver takes several copies in one call.
    copies_together: bool,
    own_copy: OwnCopy,
    pending: Pending,
    forked: Option<Forked>,
    /// The stream that the last eager slice went onto.
    last_main: CUstream,
    /// Why captures cannot be trusted here, if they cannot.
    capture_ability: Result<(), Error>,
    parker: Parker,
    /// A slice was submitted since somebody last asked how far things are.
    fresh: bool,
    /// Slices since the driver was last asked.
    unseen: usize,
    poison: Poison<Error>,
    released: bool,
}

// SAFETY: `last_main` is a handle that is compared only; everything else is `Send`.
unsafe impl Send for Engine {}

#[derive(Debug)]
struct Hardware {
    main: OwnStream,
    sides: Vec<Side>,
    /// Where the streams beside the main one start.
    started: Event,
    tickets: Tickets,
    captures: Captures,
    release: Release,
    words: Option<Words>,
    /// For eager slices and for captured ones, which may run at once.
    bounces: Option<[Bounce; 2]>,
    page: Pinned,
    /// Orders streams of the caller.
    joined: Event,
}

/// The caller's stream that is the main stream now.
#[derive(Debug)]
struct Forked {
    stream: Stream,
    /// Streams beside it, if it captures.
    captured: Option<usize>,
}

impl Engine {
    /// An engine that reaches `setup.peers`.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the driver or the device lacks what signals and waits need.
    pub(crate) fn open(context: Arc<Context>, setup: EngineSetup) -> Result<Self, Error> {
        let EngineSetup { rank, peers, signal, own_copy, staged } = setup;
        let reach = Reach::new(rank, &peers);
        let routes = Routes::new(reach.ranks(), context.copy_engines);
        let relaxed = context.enter_relaxed()?;
        batch::check_ability(&context)?;
        let sides = (0..routes.sides()).map(|_| Side::create(&context));
        let main = OwnStream::create(&context)?;
        let hardware = Hardware {
            captures: Captures::new(&context, &main)?,
            main,
            sides: sides.collect::<Result<_, _>>()?,
            started: Event::create(&context)?,
            tickets: Tickets::new(),
            release: Release::new(&context)?,
            words: match signal {
                SignalBy::StreamWrite => None,
                SignalBy::Copy => Some(Words::new(&context)?),
            },
            bounces: match staged {
                true => Some([Bounce::new(&context)?, Bounce::new(&context)?]),
                false => None,
            },
            page: Pinned::take(&context)?,
            joined: Event::create(&context)?,
        };
        let capture_ability = capture_probe::check(&context);
        let copies_together = copies::probe(&context, &hardware.main, &hardware.page);
        drop(relaxed);
        let caps = Caps {
            queued_wait: true,
            polled: false,
            flags_batched: true,
            slice_ops_max: SLICE_OPS_MAX,
            piece_bytes_max: u64::MAX,
            put_align_bytes: 1,
        };
        Ok(Self {
            caps,
            reach,
            routes,
            last_main: hardware.main.raw(),
            hardware: ManuallyDrop::new(hardware),
            steps: Vec::with_capacity(SLICE_OPS_MAX),
            parts: Vec::with_capacity(SLICE_OPS_MAX),
            own_copy: match own_copy {
                // A peer's memory may lie beyond the host.
                OwnCopy::Auto if staged => OwnCopy::Local,
                other => other,
            },
            batch: Batch::new(),
            copies: (0..route::TRACKS_MAX).map(|_| Copies::with_capacity(SLICE_OPS_MAX)).collect(),
            copies_together,
            pending: Pending::new(),
            forked: None,
            capture_ability,
            parker: Parker::default(),
            fresh: false,
            unseen: 0,
            poison: Poison::new(),
            released: false,
            context,
        })
    }

    /// Takes notice of what is complete. A device that no longer works says so at the next look, about
    /// whatever event.
    fn settle(&mut self) -> Result<(), Error> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let _relaxed = self.context.enter_relaxed()?;
        let done = self.hardware.tickets.completed(&self.context)?;
        if self.pending.settle(done) {
            self.parker.busy();
        }
        Ok(())
    }

    /// One round of a release.
    fn release_round(&mut self) -> Result<(), Error> {
        let _relaxed = self.context.enter_relaxed()?;
        let Hardware { captures, release, page, .. } = &mut *self.hardware;
        let looked = captures.look(&self.context, release.stream(), page);
        let awaited = self.pending.awaited().chain(captures.awaited(page));
        release.round(&self.context, page, awaited).and(looked)
    }

    /// What `into` gets next comes after the last ticket.
    fn join_eager(&mut self, into: &Stream) -> Result<(), Error> {
        self.settle()?;
        if self.pending.is_empty() {
            return Ok(());
        }
        if into.is_capturing(&self.context)? {
            return Err(Error::Mismatch(format!(
                "{into:?} captures, and work that was submitted before is still running: it cannot \
                 become part of the graph; fork from the stream that captures"
            )));
        }
        self.hardware.tickets.order(&self.context, into.raw())
    }
}

impl CopyEngine for Engine {
    type Error = Error;
    type Local = Local;
    type Remote = Remote;
    type Stream = Stream;

    fn caps(&self) -> &Caps {
        &self.caps
    }

    unsafe fn submit(&mut self, ops: &[Op<'_, Local, Remote>]) -> Result<Ticket, Error> {
        self.poison.check()?;
        if self.released {
            return Err(Error::Released);
        }
        if ops.len() > SLICE_OPS_MAX {
            return Err(Error::Argument(format!(
                "a slice has {} ops, wanted at most slice_ops_max = {SLICE_OPS_MAX}",
                ops.len()
            )));
        }
        let shape = step::resolve(ops, &self.reach, &mut self.steps)?;
        if let Some(Forked { stream, captured: Some(sides) }) = &self.forked {
            let (main, sides) = (stream.raw(), *sides);
            return match self.record(&shape, main, sides) {
                Ok(()) => Ok(Ticket(self.pending.last())),
                // What fails a capture is usually the capture's; the engine's own work goes on.
                Err(error) if error.kind() != ErrorKind::DeviceLost => Err(error),
                Err(error) => self.poison.keep(Err(error)),
            };
        }
        let commands = commands_max(ops.len()).saturating_add(shape.more_copies);
        if self.pending.admit(commands).is_err() {
            let settled = self.settle();
            self.poison.keep(settled)?;
            self.pending.admit(commands)?;
        }
        (self.fresh, self.unseen) = (true, self.unseen + 1);
        self.parker.busy();
        let emitted = self.emit(&shape);
        self.poison.keep(emitted)
    }

    fn completed(&mut self) -> Result<Ticket, Error> {
        self.poison.check()?;
        // Right behind a submit there is hardly news, and to ask the driver costs as much as a copy.
        let hurried = std::mem::take(&mut self.fresh) && self.unseen < UNSEEN_MAX;
        if !hurried {
            self.unseen = 0;
            let settled = self.settle();
            self.poison.keep(settled)?;
        }
        Ok(Ticket(self.pending.done()))
    }

    fn park(&mut self, limit: Duration) -> Result<(), Error> {
        self.poison.check()?;
        let (tickets, context) = (&self.hardware.tickets, &self.context);
        self.parker.park(limit, || tickets.has_news(context));
        Ok(())
    }

    fn waker(&self) -> Waker {
        self.parker.waker()
    }

    fn release(&mut self) -> Result<(), Error> {
        self.released = true;
        let settled = self.settle();
        // Also of a poisoned engine, whose streams may hold waits.
        let round = self.release_round();
        self.poison.check()?;
        self.poison.keep(settled.and(round))
    }

    fn is_capturing(&mut self, stream: &Stream) -> Result<bool, Error> {
        self.poison.check()?;
        let _entered = self.context.enter()?;
        stream.check(&self.context)?;
        stream.is_capturing(&self.context)
    }

    fn fork(&mut self, from: &Stream) -> Result<(), Error> {
        self.poison.check()?;
        let _entered = self.context.enter()?;
        self.forked = None;
        from.check(&self.context)?;
        let captured = if from.is_capturing(&self.context)? {
            self.capture_ability.clone()?;
            // A graph with the own copy on a third branch ran its branches one after the other.
            let sides = self.routes.sides().min(1);
            Some(self.hardware.captures.begin(&self.context, from, sides)?)
        } else {
            None
        };
        self.forked = Some(Forked { stream: from.clone(), captured });
        Ok(())
    }

    fn join(&mut self, into: &Stream) -> Result<(), Error> {
        let forked = self.forked.take();
        self.poison.check()?;
        let context = Arc::clone(&self.context);
        let _entered = context.enter()?;
        match forked {
            // Everything is on that stream already.
            Some(Forked { stream, .. }) if stream.raw() == into.raw() => Ok(()),
            Some(Forked { stream, captured: Some(_) }) => {
                into.check(&context)?;
                self.hardware.joined.order(&context, stream.raw(), into.raw())
            }
            _ => {
                into.check(&context)?;
                self.join_eager(into)
            }
        }
    }
}
