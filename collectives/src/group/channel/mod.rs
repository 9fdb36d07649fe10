//! Sends one-sided messages between the ranks of a group: puts and gets in a window, and signals.
//!
//! A channel is an engine, and flags of the heap: one for each peer and signal, in which only that
//! peer counts. Messages from the host are submitted at once; [`Channel::on_stream`] enqueues them
//! on a stream, where they can be captured into a graph.

mod close;
mod event;
mod message;
mod notification;
mod open;
mod sources;
mod stream;
mod wait;
mod work;

use std::collections::VecDeque;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use peerlane_hal::{
    self as hal, Command, Deadline, Direction, ErrorKind, Rank, RegionFlag, RegionOffset,
};

pub use self::event::{ChannelEvent, MessageTicket};
use self::message::join_rows;
pub use self::message::{CopyRange, Rows};
pub use self::notification::Notification;
use self::notification::Watchers;
use self::sources::BytesInFlight;
pub use stream::StreamMessages;
pub use wait::SharedWait;
use wait::{BOTH_PARK_MAX, PARK_MAX};

use super::buffer;
use super::driver::OpenCount;
use super::end::GroupEnd;
use super::heap::Allocation;
use super::life::LifeCycle;
use super::report::{Fallback, LaneReport};
use super::runtime::Runtime;
use super::window::{Inner, WindowUse};
use crate::element::Element;
use crate::error::Error;
use crate::layout::FLAG_WORDS;
use crate::plan::Tier;
use crate::run::buffers::{BufferId, FLAGS, OperationBuffers, Start};
use crate::run::queue::Queue;

/// The number in commands of the region of the window.
const WINDOW: u32 = BufferId::OUTPUT.region();

/// Sends one-sided messages between this rank and its peers, in the memory of a window.
///
/// [`Group::channel`](crate::group::Group::channel) opens one. A rank puts bytes into the windows
/// of its peers, gets bytes from there, and signals when they are ready. Puts, gets and signals
/// between this rank and one peer take effect in their order. A window can have several channels,
/// for example one for each thread or stream; messages of different channels are not ordered.
///
/// Peers can write to the window at any time. So no [slice](crate::group::Window::slice) of it can
/// be borrowed while it has a channel: from the time when the channel is opened until all ranks
/// have ended it with [`Group::close_channel`](crate::group::Group::close_channel). If a rank only
/// drops the channel, its peers may go on with theirs, so the window stays closed to slices. Use
/// [`write`](Self::write) and [`read`](Self::read) instead, or
/// [`Window::memory`](crate::group::Window::memory) for work on a stream.
///
/// ```
/// use std::time::Duration;
/// use peerlane::bootstrap::{Bootstrap, in_process};
/// use peerlane::{Group, Rank, host};
///
/// in_process::run(3, |bootstrap| {
///     let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
///     let mut group = Group::open(bootstrap, fabric)?;
///     let (me, ranks) = (group.rank().0, group.ranks() as u32);
///     let (next, last) = (Rank((me + 1) % ranks), Rank((me + ranks - 1) % ranks));
///     let window = group.window::<i32>(8)?;
///     let mut channel = group.channel(&window, 1)?;
///     channel.write(0, &[me as i32; 4])?;
///     channel.put_signal(next, 0..4, 4, 0)?;
///     channel.wait(last, 0, Duration::from_secs(5))?;
///     let mut received = [0; 4];
///     channel.read(4, &mut received)?;
///     assert_eq!(received, [last.0 as i32; 4]);
///     group.close_channel(channel)?;
///     assert_eq!(window.slice(4..8)?[0], last.0 as i32);
///     group.close()
/// })
/// .unwrap();
/// ```
pub struct Channel<T> {
    name: String,
    rank: Rank,
    /// The engines by tier; only the local one if one fabric connects all ranks.
    sides: [Option<Arc<ChannelSide>>; 2],
    tiers: Box<[Tier]>,
    window: Arc<Inner>,
    /// The number of elements of the window.
    len: usize,
    /// The number of signals of the caller. Each rank has one more, which ends the channel.
    signals: u64,
    /// How often this rank has given each signal to each peer.
    given: Box<[u64]>,
    /// How often this rank has waited for each signal of each peer. Notifications share it.
    awaited: Arc<[AtomicU64]>,
    /// The number of waits of the host for each peer.
    host_waits: Arc<[AtomicU32]>,
    /// The bytes of the window that copies of each tier may still read or write.
    in_flight: [BytesInFlight; 2],
    /// Where [`wait_any`](Self::wait_any) begins to look, so that no event starves.
    next_look: usize,
    report: ChannelReport,
    /// Whether messages may be recorded into graphs.
    captures: bool,
    allocation: Option<Allocation>,
    runtime: Arc<Runtime>,
    /// `None` after the channel has ended on all ranks.
    used: Option<WindowUse>,
    elements: PhantomData<T>,
}

/// Returns the number of words of the flags that one rank signals to another.
fn words_of_rank(signals: u64) -> u64 {
    signals.saturating_add(1).saturating_mul(FLAG_WORDS)
}

/// Describes the engines and links of a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChannelReport {
    /// The engines of the channel, inside the node and over the network.
    pub lanes: Vec<LaneReport>,
    /// The links to peers that take a slower path than the devices could have.
    pub fallbacks: Vec<Fallback>,
}

/// The engine and flags of a channel on one fabric, which the watchdog shares.
pub(super) struct ChannelSide {
    name: String,
    /// The number of the channel, which no other channel of the process has.
    channel: u64,
    rank: Rank,
    tier: Tier,
    /// The queue, whose marks count messages.
    queue: Mutex<Queue>,
    /// What the queue had done at its last poll, for threads that do not get its lock.
    done: AtomicU64,
    /// The window and the flags. Those of messages in graphs are 0 or 1.
    memory: Arc<OperationBuffers>,
    /// Whether copies with a constant stride become one copy of rows.
    copies_rows: bool,
    stream_waits: Mutex<StreamWaits>,
    life: Arc<LifeCycle>,
    open: Arc<OpenCount>,
    /// Whether messages on a stream or in a graph may be incomplete.
    is_watched: AtomicBool,
    /// Whether the host has submitted messages that it must move.
    is_open: AtomicBool,
    /// The number of waits of the host for each peer, if this side reports them.
    host_waits: Option<Arc<[AtomicU32]>>,
    watchers: Watchers,
}

/// The waits of streams and graphs.
#[derive(Default)]
struct StreamWaits {
    on_stream: VecDeque<OnStream>,
    /// The waits that graphs have recorded.
    recorded: Vec<StreamWait>,
    is_replay_waiting: bool,
}

/// How messages are ordered.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Host,
    Stream,
    Captured,
}

/// Messages of one call that are on a stream.
struct OnStream {
    /// The number of the mark of the last message.
    number: u64,
    due: Instant,
    waits: Vec<StreamWait>,
}

#[derive(Clone, Copy)]
struct StreamWait {
    signal: usize,
    flag: RegionFlag,
    start: Start,
}

/// A copy in bytes between two windows.
#[derive(Clone, Copy)]
struct BytesCopy {
    from: u64,
    to: u64,
    bytes: u64,
}

impl BytesCopy {
    /// Returns the command of the copy between this rank's window and that of a peer.
    fn command(self, direction: Direction, peer: Rank) -> Command {
        let place = |offset| RegionOffset { region: WINDOW, offset };
        let (remote, local) = match direction {
            Direction::Put => (place(self.to), place(self.from)),
            Direction::Get => (place(self.from), place(self.to)),
        };
        let (bytes, rows) = (self.bytes, hal::Rows::ONE);
        Command::Copy { direction, peer, remote, local, bytes, rows }
    }
}

impl<T: Element> Channel<T> {
    /// Copies elements of this rank's window to the window of a peer, from element `to`.
    ///
    /// When the ticket is complete, the elements may be overwritten here; [`write`](Self::write)
    /// waits for that itself. The peer may read them when it has waited for a later
    /// [signal](Self::signal).
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no such peer, or a range leaves
    /// the window; [`Timeout`](ErrorKind::Timeout) if the engine has no room within the timeout of
    /// the group; the reason why the group has ended.
    pub fn put(
        &mut self,
        peer: Rank,
        from: Range<usize>,
        to: usize,
    ) -> Result<MessageTicket, Error> {
        let copy = self.copy(from.start, to, from.len())?;
        self.submit(peer, &[copy.command(Direction::Put, peer)], Mode::Host)
    }

    /// Copies elements of this rank's window to the window of a peer, and then gives it a signal.
    ///
    /// The peer may read the elements when it has waited for the signal. The ticket tells how often
    /// this signal [has been given](MessageTicket::signal_count) to the peer.
    ///
    /// # Errors
    /// As [`put`](Self::put) and [`signal`](Self::signal).
    pub fn put_signal(
        &mut self,
        peer: Rank,
        from: Range<usize>,
        to: usize,
        signal: usize,
    ) -> Result<MessageTicket, Error> {
        self.check_signal(peer, signal)?;
        let copy = self.copy(from.start, to, from.len())?;
        self.submit_signal(peer, signal, Some(copy), Mode::Host)
    }

    /// Copies elements of a peer's window, from element `from`, to this rank's window. They may be
    /// read here when the ticket is complete.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn get(
        &mut self,
        peer: Rank,
        from: usize,
        to: Range<usize>,
    ) -> Result<MessageTicket, Error> {
        let copy = self.copy(from, to.start, to.len())?;
        self.submit(peer, &[copy.command(Direction::Get, peer)], Mode::Host)
    }

    /// Makes many copies from this rank's window to that of a peer. Copies that touch each other on
    /// both sides become one.
    ///
    /// # Errors
    /// As [`put`](Self::put); [`InvalidArgument`](ErrorKind::InvalidArgument) if two copies write
    /// the same element.
    pub fn puts(&mut self, peer: Rank, copies: &[CopyRange]) -> Result<MessageTicket, Error> {
        self.submit_many(peer, copies, Direction::Put, Mode::Host)
    }

    /// Makes many copies from the window of a peer to this rank's, like [`puts`](Self::puts).
    ///
    /// # Errors
    /// As [`puts`](Self::puts).
    pub fn gets(&mut self, peer: Rank, copies: &[CopyRange]) -> Result<MessageTicket, Error> {
        self.submit_many(peer, copies, Direction::Get, Mode::Host)
    }

    /// Sends a signal to a peer, after all earlier puts to it and gets from it. The ticket tells
    /// how often this signal [has been given](MessageTicket::signal_count) to the peer.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no such peer or signal;
    /// otherwise as [`put`](Self::put).
    pub fn signal(&mut self, peer: Rank, signal: usize) -> Result<MessageTicket, Error> {
        self.check_signal(peer, signal)?;
        self.submit_signal(peer, signal, None, Mode::Host)
    }

    /// Returns how many messages of this rank are not complete, without blocking.
    ///
    /// # Errors
    /// The reason why the group has ended.
    pub fn unfinished(&mut self) -> Result<usize, Error> {
        let mut unfinished = 0;
        for tier in [Tier::Local, Tier::Network] {
            self.poll_engine(tier)?;
            let side = self.sides[tier as usize].as_ref();
            unfinished += side.map_or(0, |side| unfinished_of(&side.queue()));
        }
        Ok(unfinished)
    }

    /// Copies elements to this rank's window, from element `begin`, even while peers access them.
    ///
    /// If puts and gets of this channel still use these elements, it first waits until they are
    /// complete, so that a peer never receives elements that were written after the put.
    ///
    /// The copy consists of stores of aligned words of 8 bytes, and of single bytes at its ends. A
    /// peer that gets the elements meanwhile receives each of these words and bytes as it was
    /// before or after the store. Messages that graphs replay are not waited for.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if they leave the window, or only a device
    /// can write it; [`Timeout`](ErrorKind::Timeout) if messages that use them are not complete
    /// within the timeout of the group; the reason why the group has ended, if there are such
    /// messages.
    pub fn write(&mut self, begin: usize, elements: &[T]) -> Result<(), Error> {
        let bytes =
            self.window.bytes_of(T::DTYPE, &(begin..begin.saturating_add(elements.len())))?;
        let (to, length) = buffer::host_bytes(self.window.region(), bytes.clone())?;
        self.wait_until_unused(&bytes)?;

        let elements: &[u8] = bytemuck::cast_slice(elements);
        debug_assert_eq!(elements.len(), length, "an element has the bytes of its type");

        // SAFETY: the range is in the window, which `self` keeps. Nothing borrows it, because the
        // channel keeps slices away (rules of `Window`).
        unsafe { buffer::store_shared(elements, to) };
        Ok(())
    }

    /// Copies elements of this rank's window, from element `begin`, even while peers access them.
    ///
    /// The copy consists of loads of aligned words of 8 bytes, and of single bytes at its ends. If
    /// a peer writes an element meanwhile, or before this rank has waited for the signal of the
    /// peer, the result can be a mixture of bytes from before and after the write.
    ///
    /// # Errors
    /// As [`write`](Self::write), if only a device can read it.
    pub fn read(&self, begin: usize, elements: &mut [T]) -> Result<(), Error> {
        let bytes =
            self.window.bytes_of(T::DTYPE, &(begin..begin.saturating_add(elements.len())))?;
        let (from, length) = buffer::host_bytes(self.window.region(), bytes)?;

        let elements: &mut [u8] = bytemuck::cast_slice_mut(elements);
        debug_assert_eq!(elements.len(), length, "an element has the bytes of its type");

        // SAFETY: the range is in the window, which `self` keeps. Nothing borrows it for writing,
        // because the channel keeps slices away (rules of `Window`).
        unsafe { buffer::load_shared(from, elements) };
        Ok(())
    }

    /// Returns the number of this rank in the group of the channel.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Returns the number of ranks of the group.
    pub fn ranks(&self) -> usize {
        self.tiers.len()
    }

    /// Returns the number of elements of the window.
    pub fn window_len(&self) -> usize {
        self.len
    }

    /// Returns the number of signals from every rank to every rank.
    pub fn signals(&self) -> usize {
        self.signals as usize
    }

    /// Returns a handle by which the caller waits for the end of the group, as
    /// [`Group::end`](crate::group::Group::end).
    ///
    /// # Errors
    /// If the process has no descriptor left.
    pub fn group_end(&self) -> Result<GroupEnd, Error> {
        GroupEnd::new(&self.runtime.life)
    }

    /// Returns the report that names the engines and links of the channel.
    pub fn report(&self) -> &ChannelReport {
        &self.report
    }

    fn copy(&self, from: usize, to: usize, len: usize) -> Result<BytesCopy, Error> {
        let range = |begin: usize| begin..begin.saturating_add(len);

        // At least one range leaves the window, and the call for it returns the error.
        if range(from.max(to)).end > self.len {
            self.window.bytes_of(T::DTYPE, &range(from))?;
            self.window.bytes_of(T::DTYPE, &range(to))?;
        }

        let bytes = |elements: usize| (elements * T::DTYPE.bytes()) as u64;
        Ok(BytesCopy { from: bytes(from), to: bytes(to), bytes: bytes(len) })
    }

    /// Checks copies, and joins those that touch each other.
    fn joined(&self, copies: &[CopyRange]) -> Result<Vec<BytesCopy>, Error> {
        let mut joined: Vec<BytesCopy> = Vec::with_capacity(copies.len());
        for &CopyRange { from, to, len } in copies {
            let copy = self.copy(from, to, len)?;
            match joined.last_mut() {
                Some(last)
                    if last.from + last.bytes == copy.from && last.to + last.bytes == copy.to =>
                {
                    last.bytes += copy.bytes;
                }
                _ => joined.push(copy),
            }
        }

        // Copies that write in ascending order without overlap need not be sorted.
        let is_ascending = joined.windows(2).all(|pair| pair[0].to + pair[0].bytes <= pair[1].to);
        let written = joined.iter().filter(|copy| !is_ascending && copy.bytes > 0);
        let mut written: Vec<_> = written.map(|copy| (copy.to, copy.to + copy.bytes)).collect();
        written.sort_unstable();

        if let Some(&[one, other]) = written.windows(2).find(|pair| pair[0].1 > pair[1].0) {
            let size = T::DTYPE.bytes() as u64;
            return Err(invalid(format!(
                "two copies write the same elements: one writes elements {} to {}, another one elements {} to {}",
                one.0 / size,
                one.1 / size,
                other.0 / size,
                other.1 / size
            )));
        }

        Ok(joined)
    }

    fn check_signal(&self, peer: Rank, signal: usize) -> Result<(), Error> {
        self.check_peer(peer)?;
        if signal as u64 >= self.signals {
            return Err(invalid(format!(
                "{}: signal {signal} does not exist, expected a number below {}",
                self.name, self.signals
            )));
        }
        Ok(())
    }

    /// Returns the index of a signal in the counts of this rank.
    fn index(&self, peer: Rank, signal: usize) -> usize {
        peer.index() * (self.signals as usize + 1) + signal
    }

    /// Returns the number of the signal by which a rank ends the channel. It follows the signals of
    /// the caller.
    fn end_signal(&self) -> usize {
        self.signals as usize
    }

    fn check_peer(&self, peer: Rank) -> Result<(), Error> {
        if peer.index() < self.tiers.len() {
            return Ok(());
        }
        Err(invalid(format!(
            "{}: rank {peer} does not exist, expected a rank below {}",
            self.name,
            self.tiers.len()
        )))
    }

    /// Returns the word of a signal that `from` gives, in the flags of the rank that waits for it.
    fn word(&self, from: Rank, signal: usize) -> u64 {
        u64::from(from.0) * words_of_rank(self.signals) + signal as u64 * FLAG_WORDS
    }

    /// Returns the word of a signal that a peer gives, with the side that reads it.
    fn flag(&self, peer: Rank, signal: usize) -> Result<(&ChannelSide, &AtomicU64), Error> {
        let side = self.sides[self.tiers[peer.index()] as usize].as_deref();
        let place = self.flag_of(peer, peer, signal);

        let word = side.and_then(|side| Some((side, side.word_of(place)?)));
        word.ok_or_else(|| {
            let text =
                "the signals are in device memory, expected host memory, which the host polls";
            Error::new(ErrorKind::Mismatch, text)
        })
    }

    /// Returns the flag of a signal that `from` gives. `peer` is the other rank of the pair.
    fn flag_of(&self, peer: Rank, from: Rank, signal: usize) -> RegionFlag {
        RegionFlag { region: FLAGS, word: self.word(from, signal), peer, lag: 0 }
    }

    /// Submits a signal to a peer, after a put to it if there is one.
    fn submit_signal(
        &mut self,
        peer: Rank,
        signal: usize,
        put: Option<BytesCopy>,
        mode: Mode,
    ) -> Result<MessageTicket, Error> {
        let index = self.index(peer, signal);
        let count = self.given[index] + 1;
        let signal = Command::Signal { flag: self.flag_of(peer, self.rank, signal) };

        let ticket = match put {
            Some(put) => {
                let put = put.command(Direction::Put, peer);
                self.submit_counted(peer, &[put, signal], mode, count)?
            }
            None => self.submit_counted(peer, &[signal], mode, count)?,
        };

        // Signals in a graph are not counted: each recorded wait takes one recorded signal.
        if mode != Mode::Captured {
            self.given[index] = count;
        }
        Ok(ticket.with_signal_count(count))
    }

    /// Submits many copies, in rows where that is possible.
    fn submit_many(
        &mut self,
        peer: Rank,
        copies: &[CopyRange],
        direction: Direction,
        mode: Mode,
    ) -> Result<MessageTicket, Error> {
        let copies = self.joined(copies)?;
        self.check_peer(peer)?;

        let side = self.sides[self.tiers[peer.index()] as usize].as_ref();
        let in_rows = side.is_some_and(|side| side.copies_rows) && peer != self.rank;
        let commands = match in_rows {
            true => join_rows(&copies, direction, peer),
            false => copies.into_iter().map(|copy| copy.command(direction, peer)).collect(),
        };
        self.submit(peer, &commands, mode)
    }

    /// Submits messages without signals.
    fn submit(
        &mut self,
        peer: Rank,
        commands: &[Command],
        mode: Mode,
    ) -> Result<MessageTicket, Error> {
        self.submit_counted(peer, commands, mode, 1)
    }

    /// Submits messages to a peer. `count` is the value of a signal or wait among them.
    fn submit_counted(
        &mut self,
        peer: Rank,
        commands: &[Command],
        mode: Mode,
        count: u64,
    ) -> Result<MessageTicket, Error> {
        self.runtime.life.check()?;
        self.check_peer(peer)?;
        if peer == self.rank {
            self.check_own(commands)?;
        }

        let tier = self.tiers[peer.index()];
        let Self { sides, runtime, name, in_flight, .. } = self;
        let life = &runtime.life;
        let Some(side) = &sides[tier as usize] else {
            return Err(Error::new(ErrorKind::Other, format!("no fabric connects rank {peer}")));
        };

        if mode != Mode::Host && tier == Tier::Network {
            let text = format!(
                "{name}: rank {peer} is on another node; messages over the network cannot be put on a stream, send them \
                 from the host"
            );
            return Err(Error::new(ErrorKind::Unavailable, text));
        }

        // The clock is read only if the engine has no room.
        let mut deadline = None;
        let wait_for_room = || {
            life.check()?;
            let deadline = *deadline.get_or_insert_with(|| Deadline::after(life.timeout));
            if deadline.has_passed() {
                let text =
                    format!("the engine has had no room for messages for {:?}", life.timeout);
                return Err(Error::new(ErrorKind::Timeout, text));
            }

            Ok(deadline.remaining().min(PARK_MAX))
        };

        let start = if mode == Mode::Captured { Start::Captured(0) } else { Start::Eager(count) };
        let mut queue = side.queue();
        // SAFETY: the ranges were checked against the window, which has one size on all ranks; the
        // window and the flags live as long as the channel, and the channel longer than the graphs
        // that record it, which the caller of `Channel::capturable` guarantees. Only this engine
        // writes these flags of the peer. What messages race with is the callers', who only see
        // bytes.
        let submitted = unsafe { queue.send(commands, start, wait_for_room) };

        // The waits of the group also poll messages that the host must move.
        if mode == Mode::Host && (queue.caps().polled || queue.is_busy()) {
            side.open();
            runtime.driver.wake_progress();
        }

        // Even after an error, the engine may have taken some of the commands.
        let ticket = MessageTicket::new(side.channel, tier, queue.marked());
        if mode != Mode::Captured {
            in_flight[tier as usize].add(commands, ticket.queue_number(), queue.done());
        }
        drop(queue);

        submitted.map_err(|error| life.fail(name, error))?;
        Ok(ticket)
    }

    /// Waits until no copy of this channel uses these bytes of the window.
    fn wait_until_unused(&mut self, bytes: &Range<u64>) -> Result<(), Error> {
        for tier in [Tier::Local, Tier::Network] {
            let Some(side) = &self.sides[tier as usize] else { continue };
            let Some(last) = self.in_flight[tier as usize].last_use(bytes) else { continue };

            let ticket = MessageTicket::new(side.channel, tier, last);
            let timeout = self.runtime.life.timeout;
            self.wait_for(ticket, timeout)?;
        }
        Ok(())
    }

    /// Refuses copies from this rank to itself whose source and destination overlap.
    fn check_own(&self, commands: &[Command]) -> Result<(), Error> {
        let overlap = commands.iter().find_map(|command| match *command {
            Command::Copy { direction, remote, local, bytes, .. }
                if remote.offset.abs_diff(local.offset) < bytes =>
            {
                Some(match direction {
                    Direction::Put => (local.offset, remote.offset, bytes),
                    Direction::Get => (remote.offset, local.offset, bytes),
                })
            }
            Command::Copy { .. }
            | Command::Reduce { .. }
            | Command::Signal { .. }
            | Command::Wait { .. } => None,
        });
        let Some((from, to, bytes)) = overlap else { return Ok(()) };

        let size = T::DTYPE.bytes() as u64;
        Err(invalid(format!(
            "{}: elements {} to {} of rank {} are copied to elements {} to {} of the same window, expected ranges that \
             do not overlap",
            self.name,
            from / size,
            (from + bytes) / size,
            self.rank,
            to / size,
            (to + bytes) / size
        )))
    }

    fn poll_engine(&mut self, tier: Tier) -> Result<(), Error> {
        self.runtime.life.check()?;
        let Some(side) = &self.sides[tier as usize] else { return Ok(()) };
        let polled = side.poll(&mut side.queue());
        polled.map_err(|error| self.runtime.life.fail(&self.name, error))
    }

    fn park(&mut self, tier: Tier, limit: Duration) -> Result<(), Error> {
        // A park covers one engine only, and engines of the other fabric are polled too.
        let limit = if self.sides.iter().flatten().count() > 1 { BOTH_PARK_MAX } else { limit };
        let Some(side) = &self.sides[tier as usize] else { return Ok(()) };
        let parked = side.queue().park(limit);
        parked.map_err(|error| self.runtime.life.fail(&self.name, error))
    }
}

impl ChannelSide {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        // A panic inside is a bug of an engine; the drop of the channel releases it.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the engine what is complete, and notes it.
    #[inline]
    fn poll(&self, queue: &mut Queue) -> Result<(), Error> {
        let polled = queue.poll();
        self.done.store(queue.done(), Ordering::Release);
        polled.map(drop)
    }

    /// Counts the messages as open. The caller must hold the lock of the queue.
    fn open(&self) {
        if !self.is_open.swap(true, Ordering::Relaxed) {
            self.open.add();
        }
    }

    /// Counts the messages as complete. The caller must hold the lock of the queue.
    fn close(&self) {
        if self.is_open.swap(false, Ordering::Relaxed) {
            self.open.remove();
        }
    }
}

impl<T> Drop for Channel<T> {
    fn drop(&mut self) {
        if self.runtime.driver.is_of_parent() {
            return;
        }

        let deadline = Deadline::after(self.runtime.life.timeout);
        let is_well = self.runtime.life.is_well();

        let mut is_complete = is_well;
        for side in self.sides.iter().flatten() {
            let mut queue = side.queue();
            while is_complete && queue.poll().is_ok() && unfinished_of(&queue) > 0 {
                is_complete = !deadline.has_passed() && queue.park(PARK_MAX).is_ok();
            }

            // A drop cannot return the error of an engine that cannot be released.
            let _ = queue.release();
            side.close();
            drop(queue);
            side.watchers.end();

            // After the end of the group, streams and graphs may still wait, and peers may still
            // write, so the group keeps the memory and goes on to release them.
            if is_well {
                self.runtime.work.remove(&**side);
            }
        }

        let Some(mut allocation) = self.allocation.take() else { return };
        // A NIC completes a signal before its peer has stored it, so the flags of a network are not
        // used again.
        if is_complete && self.sides[Tier::Network as usize].is_none() {
            let awaited = self.awaited.iter().map(|count| count.load(Ordering::Relaxed));
            let most = self.given.iter().copied().chain(awaited).max();
            allocation.set_epochs(most.unwrap_or(0));
        } else {
            allocation.leak();
        }
    }
}

/// Returns how many messages of a queue were not complete at its last poll.
fn unfinished_of(queue: &Queue) -> usize {
    (queue.marked() - queue.done()) as usize
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

impl<T> fmt::Debug for Channel<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("name", &self.name).finish_non_exhaustive()
    }
}
