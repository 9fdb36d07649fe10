//! Defines what a caller waits for on a channel: a message of its own, or a signal of a peer.

use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use peerlane_hal::{Deadline, Rank, RegionFlag};

use super::{Channel, ChannelSide, invalid};
use crate::element::Element;
use crate::error::Error;
use crate::plan::Tier;
use crate::run::buffers::Start;

/// Identifies a message that this rank has sent on a channel.
///
/// Each put, get and signal returns one. [`Channel::poll`] tells whether the message is complete:
/// then the elements that were put may be overwritten, and those that were got may be read. A
/// ticket is a number, so it may be kept, copied or dropped, and it stays complete.
///
/// Completion is local. It does not tell whether the peer has seen the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MessageTicket {
    channel: u64,
    tier: Tier,
    number: u64,
    signal_count: Option<NonZeroU64>,
}

impl MessageTicket {
    /// Creates the ticket of a message that is complete when the queue of its tier has done
    /// `number`.
    #[inline]
    pub(super) fn new(channel: u64, tier: Tier, number: u64) -> Self {
        Self { channel, tier, number, signal_count: None }
    }

    #[inline]
    pub(super) fn with_signal_count(self, count: u64) -> Self {
        Self { signal_count: NonZeroU64::new(count), ..self }
    }

    /// Returns what the queue of the tier has done when the message is complete.
    #[inline]
    pub(super) fn queue_number(self) -> u64 {
        self.number
    }

    /// Returns how often the signal of the message had been given to the peer with this message, or
    /// `None` if the message has no signal.
    pub fn signal_count(&self) -> Option<u64> {
        self.signal_count.map(NonZeroU64::get)
    }
}

/// Represents an event that a caller can wait for on a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ChannelEvent {
    /// A message of this rank is complete here.
    Message(MessageTicket),
    /// A peer has given a signal at least `count` times since the channel was opened.
    Signal {
        /// The rank that gives the signal.
        peer: Rank,
        /// The number of the signal.
        signal: usize,
        /// How often it was given.
        count: u64,
    },
}

impl From<MessageTicket> for ChannelEvent {
    fn from(ticket: MessageTicket) -> Self {
        Self::Message(ticket)
    }
}

impl fmt::Display for ChannelEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Message(ticket) => write!(f, "its message {}", ticket.number),
            Self::Signal { peer, signal, .. } => write!(f, "signal {signal} of rank {peer}"),
        }
    }
}

impl ChannelEvent {
    /// Returns the peer that gives the signal.
    #[inline]
    pub(super) fn signalling_peer(&self) -> Option<Rank> {
        match self {
            Self::Message(_) => None,
            Self::Signal { peer, .. } => Some(*peer),
        }
    }
}

/// What makes an event happen, in terms of the side that sees it.
#[derive(Clone, Copy)]
pub(super) enum Condition {
    /// The queue has done this number.
    Done(u64),
    Signalled {
        flag: RegionFlag,
        count: u64,
    },
}

impl ChannelSide {
    /// Returns the word of a flag of the host, or `None` if it is in device memory.
    #[inline]
    pub(super) fn word_of(&self, flag: RegionFlag) -> Option<&AtomicU64> {
        // All starts of the host have the same flags.
        self.memory.flag(flag, Start::Eager(1))
    }

    /// Returns how often a signal has been given since the channel was opened.
    #[inline]
    pub(super) fn count_in(&self, word: &AtomicU64) -> u64 {
        word.load(Ordering::Acquire).saturating_sub(self.memory.epoch_base)
    }

    /// Returns whether a condition is met, as far as the last poll of the engine shows.
    #[inline]
    pub(super) fn is_met(&self, condition: Condition) -> bool {
        match condition {
            Condition::Done(number) => number <= self.done.load(Ordering::Acquire),
            // Without a word, the call that has made the condition was refused.
            Condition::Signalled { flag, count } => {
                self.word_of(flag).is_some_and(|word| self.count_in(word) >= count)
            }
        }
    }
}

impl<T: Element> Channel<T> {
    /// Returns the event that a peer has given a signal once more than this rank has waited for.
    ///
    /// It is checked when it is used. The count goes up when a wait for the event ends, and not
    /// before: two calls without a wait in between return the same event.
    pub fn next_signal(&self, peer: Rank, signal: usize) -> ChannelEvent {
        let awaited = match self.check_signal(peer, signal) {
            Ok(()) => self.awaited(peer, signal),
            Err(_) => 0,
        };
        ChannelEvent::Signal { peer, signal, count: awaited + 1 }
    }

    /// Returns whether an event has happened, without blocking.
    ///
    /// ```
    /// use peerlane::bootstrap::{Bootstrap, in_process};
    /// use peerlane::{Group, Rank, host};
    ///
    /// in_process::run(2, |bootstrap| {
    ///     let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    ///     let mut group = Group::open(bootstrap, fabric)?;
    ///     let window = group.window::<u8>(2 << 20)?;
    ///     let mut channel = group.channel(&window, 1)?;
    ///     let peer = Rank(1 - channel.rank().0);
    ///
    ///     let ticket = channel.put(peer, 0..1 << 20, 1 << 20)?;
    ///     while !channel.poll(ticket)? {
    ///         std::thread::yield_now(); // Other work of this rank.
    ///     }
    ///     group.close_channel(channel)?;
    ///     group.close()
    /// })
    /// .unwrap();
    /// ```
    ///
    /// # Errors
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) for a ticket of another
    /// channel, or a peer or signal that does not exist; the reason why the group has ended.
    pub fn poll(&mut self, event: impl Into<ChannelEvent>) -> Result<bool, Error> {
        let event = event.into();
        self.check_event(event)?;
        self.poll_engine(self.tier_of(event))?;

        let has_happened = self.has_happened(event)?;
        if has_happened {
            self.note_awaited(event);
        }
        Ok(has_happened)
    }

    /// Waits until an event has happened.
    ///
    /// # Errors
    /// [`Timeout`](peerlane_hal::ErrorKind::Timeout), naming the peer of a signal, after which the
    /// channel can go on; [`PeerLost`](peerlane_hal::ErrorKind::PeerLost) if that peer has left the
    /// group; otherwise as [`poll`](Self::poll).
    pub fn wait_for(
        &mut self,
        event: impl Into<ChannelEvent>,
        timeout: Duration,
    ) -> Result<(), Error> {
        let event = event.into();
        self.check_event(event)?;
        self.wait_for_event(event, || Deadline::after(timeout))
    }

    /// Waits until one of several events has happened, and returns its index in `events`.
    ///
    /// If several have happened, the calls return them by turns, so that none starves. It allocates
    /// nothing.
    ///
    /// ```
    /// use std::time::Duration;
    /// use peerlane::bootstrap::{Bootstrap, in_process};
    /// use peerlane::{Group, Rank, host};
    ///
    /// in_process::run(3, |bootstrap| {
    ///     let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    ///     let mut group = Group::open(bootstrap, fabric)?;
    ///     let window = group.window::<u8>(8)?;
    ///     let mut channel = group.channel(&window, 1)?;
    ///     match channel.rank() {
    ///         // A server takes the requests of its clients in the order in which they come.
    ///         Rank(0) => {
    ///             for _ in 0..2 {
    ///                 let requests = [Rank(1), Rank(2)].map(|peer| channel.next_signal(peer, 0));
    ///                 let client = channel.wait_any(&requests, Duration::from_secs(5))?;
    ///                 assert!(client < 2);
    ///             }
    ///         }
    ///         _ => drop(channel.signal(Rank(0), 0)?),
    ///     }
    ///     group.close_channel(channel)?;
    ///     group.close()
    /// })
    /// .unwrap();
    /// ```
    ///
    /// # Errors
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if there are no events;
    /// [`Timeout`](peerlane_hal::ErrorKind::Timeout), naming the peer if all events are signals of
    /// one; [`PeerLost`](peerlane_hal::ErrorKind::PeerLost) if nothing has happened and a peer of
    /// an event has left the group; otherwise as [`poll`](Self::poll).
    pub fn wait_any(&mut self, events: &[ChannelEvent], timeout: Duration) -> Result<usize, Error> {
        if events.is_empty() {
            let text = format!("{}: a wait for no events never ends, expected one", self.name);
            return Err(invalid(text));
        }
        events.iter().try_for_each(|event| self.check_event(*event))?;

        let found = self.wait_in(events, &mut None, None, || Deadline::after(timeout))?;
        Ok(found.expect("a wait without a turn ends with an event or an error"))
    }

    pub(super) fn check_event(&self, event: ChannelEvent) -> Result<(), Error> {
        match event {
            ChannelEvent::Signal { peer, signal, .. } => self.check_signal(peer, signal),
            ChannelEvent::Message(ticket) => {
                let side = self.sides[ticket.tier as usize].as_ref();
                if side.is_some_and(|side| side.channel == ticket.channel) {
                    return Ok(());
                }
                Err(invalid(format!(
                    "message {} was not sent on {}, expected a ticket of this channel",
                    ticket.number, self.name
                )))
            }
        }
    }

    pub(super) fn tier_of(&self, event: ChannelEvent) -> Tier {
        match event {
            ChannelEvent::Message(ticket) => ticket.tier,
            ChannelEvent::Signal { peer, .. } => self.tiers[peer.index()],
        }
    }

    pub(super) fn condition_of(&self, event: ChannelEvent) -> Condition {
        match event {
            ChannelEvent::Message(ticket) => Condition::Done(ticket.number),
            ChannelEvent::Signal { peer, signal, count } => {
                Condition::Signalled { flag: self.flag_of(peer, peer, signal), count }
            }
        }
    }

    /// Returns whether an event has happened, as far as the last poll of the engine shows.
    pub(super) fn has_happened(&self, event: ChannelEvent) -> Result<bool, Error> {
        match event {
            ChannelEvent::Signal { peer, signal, count } => {
                Ok(self.given_by(peer, signal)? >= count)
            }
            ChannelEvent::Message(ticket) => {
                let side = self.sides[ticket.tier as usize].as_ref();
                Ok(side.is_some_and(|side| side.is_met(Condition::Done(ticket.number))))
            }
        }
    }

    /// Returns how often a peer has given a signal since the channel was opened.
    pub(super) fn given_by(&self, peer: Rank, signal: usize) -> Result<u64, Error> {
        let (side, word) = self.flag(peer, signal)?;
        Ok(side.count_in(word))
    }

    /// Returns how often this rank has waited for a signal.
    pub(super) fn awaited(&self, peer: Rank, signal: usize) -> u64 {
        self.awaited[self.index(peer, signal)].load(Ordering::Relaxed)
    }

    /// Notes that a wait for an event has ended.
    pub(super) fn note_awaited(&mut self, event: ChannelEvent) {
        let ChannelEvent::Signal { peer, signal, count } = event else { return };
        let awaited = &self.awaited[self.index(peer, signal)];
        if Arc::strong_count(&self.awaited) > 1 {
            // Another thread may take a signal through a notification meanwhile.
            awaited.fetch_max(count, Ordering::Relaxed);
        } else if awaited.load(Ordering::Relaxed) < count {
            // An atomic maximum would take 3 % of the time of a short message.
            awaited.store(count, Ordering::Relaxed);
        }
    }
}
