//! An engine of streams: the queue of copies, signals and waits that drivers of accelerators have in
//! common. A backend implements [`StreamDevice`] for its context and puts its own type around
//! [`Engine`].
//!
//! | the contract | here |
//! | --- | --- |
//! | put, get | on the main stream or on one beside it; neighbours on one stream in one call, where the driver takes several |
//! | neighbouring signals, waits, resets | one batch of memory operations on the main stream |
//! | ticket | an event on the main stream at the end of a slice |
//! | `completed` | looks at these events, in a mode in which captures of others do not mind |
//! | `fork` | the caller's stream becomes the main stream, until the `join` |
//! | a slice while that stream captures | the same calls, with streams and events of their own, and no ticket |
//! | `release` | a stream of its own, or the host, writes the awaited values |
//!
//! What this costs the host is the number of calls: an out-of-place start of a direct all-gather on
//! four devices is one or two batches, four copies, four events recorded and four waited for. In the
//! steady state nothing is allocated and no lock is taken.

mod abilities;
mod back;
mod batch;
mod bounce;
mod capture;
mod capture_probe;
mod close;
mod copies;
mod copy_probe;
mod emit;
mod fork;
mod page;
mod pending;
mod queue;
mod release;
mod route;
mod signal;
mod slice;
mod step;
mod stream;
mod tickets;
mod word_probe;

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

pub use self::abilities::{Abilities, Found, StreamDevice};
pub use self::back::OwnCopy;
use self::back::Part;
use self::batch::Batch;
use self::bounce::Bounce;
use self::capture::Captures;
use self::copies::Copies;
use self::emit::Side;
use self::fork::Forked;
use self::page::Pinned;
use self::pending::{COMMANDS_MAX, Pending};
use self::queue::{Event, OwnStream};
use self::release::Release;
use self::route::Routes;
use self::signal::Words;
pub use self::signal::{SignalBy, probe_signal};
use self::step::{Reach, Step};
pub use self::stream::Stream;
use self::tickets::Tickets;
pub use self::word_probe::probe_waits;
use crate::device::{Fault, StreamHandle};
use crate::places::{PeerPlace, Place, check_slice};
use crate::{Parker, Poison};
use peerlane_hal::{Caps, Error as _, ErrorKind, Op, Rank, Ticket};

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
const UNSEEN_MAX: usize = 16;

/// What an engine is made for.
#[derive(Clone, Debug)]
pub struct EngineSetup {
    /// This rank.
    pub rank: Rank,
    /// The peers that are connected.
    pub peers: Vec<Rank>,
    /// How signals get to them.
    pub signal: SignalBy,
    /// How own copies are made.
    pub own_copy: OwnCopy,
    /// A peer is reached through host memory.
    pub staged: bool,
}

/// One in-order queue over the streams of a device. Its methods are those of
/// [`CopyEngine`](peerlane_hal::CopyEngine), with the same promises.
#[derive(Debug)]
pub struct Engine<D: StreamDevice> {
    context: Arc<D>,
    abilities: Abilities,
    caps: Caps,
    reach: Reach,
    routes: Routes,
    /// What the driver made for this engine; dropped only where that cannot block.
    hardware: ManuallyDrop<Hardware<D>>,
    /// The steps of the slice at hand, and its open batch.
    steps: Vec<Step>,
    parts: Vec<Part>,
    batch: Batch<D>,
    copies: Vec<Copies>,
    /// Whether the driver takes several copies in one call.
    copies_together: bool,
    own_copy: OwnCopy,
    pending: Pending,
    forked: Option<Forked>,
    /// The stream that the last eager slice went onto.
    last_main: StreamHandle,
    /// Why captures cannot be trusted here, if they cannot.
    capture_ability: Result<(), D::Error>,
    parker: Parker,
    /// A slice was submitted since somebody last asked how far things are.
    fresh: bool,
    /// Slices since the driver was last asked.
    unseen: usize,
    poison: Poison<D::Error>,
    released: bool,
}

#[derive(Debug)]
struct Hardware<D: StreamDevice> {
    main: OwnStream<D>,
    sides: Vec<Side<D>>,
    /// Where the streams beside the main one start.
    started: Event<D>,
    tickets: Tickets<D>,
    captures: Captures<D>,
    release: Release<D>,
    words: Option<Words>,
    /// For eager slices and for captured ones, which may run at once.
    bounces: Option<[Bounce; 2]>,
    page: Pinned,
    /// Orders streams of the caller.
    joined: Event<D>,
}

impl<D: StreamDevice> Engine<D> {
    /// An engine that reaches `setup.peers`.
    ///
    /// # Errors
    /// Of kind `Unavailable` if the driver or the device lacks what signals and waits need; the
    /// driver's refusal.
    pub fn open(context: Arc<D>, setup: EngineSetup) -> Result<Self, D::Error> {
        let EngineSetup { rank, peers, signal, own_copy, staged } = setup;
        let relaxed = context.enter_relaxed()?;
        context.check_words()?;
        let abilities = context.abilities()?;
        let reach = Reach::new(rank, &peers, &abilities);
        let routes = Routes::new(reach.ranks(), &abilities);
        let tracks = routes.tracks();
        let words_together = word_probe::check(&*context)?;
        copy_probe::check(&*context)?;
        let sides = (0..routes.sides()).map(|_| Side::create(&*context));
        let main = OwnStream::create(&*context)?;
        let hardware = Hardware {
            captures: Captures::new(&*context, &main)?,
            main,
            sides: sides.collect::<Result<_, _>>()?,
            started: Event::create(&*context)?,
            tickets: Tickets::new(),
            release: Release::new(&*context, words_together)?,
            words: match signal {
                SignalBy::StreamWrite => None,
                SignalBy::Copy => Some(Words::new(&*context)?),
            },
            bounces: match staged {
                true => Some([Bounce::new(&*context, tracks)?, Bounce::new(&*context, tracks)?]),
                false => None,
            },
            page: Pinned::take(&*context)?,
            joined: Event::create(&*context)?,
        };
        let capture_ability = capture_probe::check(&*context, words_together);
        let copies_together = copies::probe(&*context, &hardware.main, &hardware.page);
        drop(relaxed);
        let caps = Caps {
            kind: "streams",
            queued_wait: true,
            polled: false,
            flags_batched: words_together,
            slice_ops_max: SLICE_OPS_MAX,
            piece_bytes_max: u64::MAX,
            put_align_bytes: 1,
        };
        Ok(Self {
            caps,
            abilities,
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
            batch: Batch::new(words_together),
            copies: (0..tracks).map(|_| Copies::with_capacity(SLICE_OPS_MAX)).collect(),
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
    fn settle(&mut self) -> Result<(), D::Error> {
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
    fn release_round(&mut self) -> Result<(), D::Error> {
        let _relaxed = self.context.enter_relaxed()?;
        let Hardware { captures, release, page, .. } = &mut *self.hardware;
        let looked = captures.look(&self.context, release.stream(), page);
        let awaited = self.pending.awaited().chain(captures.awaited(page));
        release.round(&self.context, page, awaited).and(looked)
    }
}

impl<D: StreamDevice> Engine<D> {
    /// What it can do.
    pub fn caps(&self) -> &Caps {
        &self.caps
    }

    /// # Errors
    /// # Safety
    /// As [`CopyEngine::submit`](peerlane_hal::CopyEngine::submit).
    pub unsafe fn submit<L: Place, R: PeerPlace>(
        &mut self,
        ops: &[Op<'_, L, R>],
    ) -> Result<Ticket, D::Error> {
        self.poison.check()?;
        if self.released {
            return Err(Fault::Released.into());
        }
        check_slice(ops.len(), SLICE_OPS_MAX)?;
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

    /// # Errors
    /// As [`CopyEngine::completed`](peerlane_hal::CopyEngine::completed).
    pub fn completed(&mut self) -> Result<Ticket, D::Error> {
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

    /// # Errors
    /// As [`CopyEngine::park`](peerlane_hal::CopyEngine::park).
    pub fn park(&mut self, limit: Duration) -> Result<(), D::Error> {
        self.poison.check()?;
        let (tickets, context) = (&self.hardware.tickets, &self.context);
        self.parker.park(limit, || tickets.has_news(context));
        Ok(())
    }

    /// As [`CopyEngine::waker`](peerlane_hal::CopyEngine::waker).
    pub fn waker(&self) -> Waker {
        self.parker.waker()
    }

    /// # Errors
    /// As [`CopyEngine::release`](peerlane_hal::CopyEngine::release).
    pub fn release(&mut self) -> Result<(), D::Error> {
        self.released = true;
        let settled = self.settle();
        // Also of a poisoned engine, whose streams may hold waits.
        let round = self.release_round();
        self.poison.check()?;
        self.poison.keep(settled.and(round))
    }
}
