//! Waits for signals of peers and for copies of this rank, also by several threads by turns.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use peerlane_hal::{Deadline, ErrorKind, Rank};

use super::{Channel, ChannelEvent, ChannelSide, unfinished_of};
use crate::element::Element;
use crate::error::Error;
use crate::plan::Tier;
use crate::run::backoff::Backoff;

/// A wait looks this often for its signal before it does anything else, for about a microsecond.
const SPINS: u32 = 100;
/// A thread that waits looks at the state of the group at least this often.
pub(super) const PARK_MAX: Duration = Duration::from_millis(10);
/// The same as [`PARK_MAX`] if messages of two fabrics are polled, because a park of one engine
/// does not see those of the other.
pub(super) const BOTH_PARK_MAX: Duration = Duration::from_micros(50);

/// Limits how long one thread holds a channel while it waits, so that other threads can use the
/// channel too.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn<'t> {
    shortest: Deadline,
    waiting: &'t AtomicU32,
}

impl<'t> Turn<'t> {
    /// Begins a turn of at least `shortest`, which ends when `waiting` is not 0.
    ///
    /// After that time, it ends at most `shortest` after `waiting` has changed.
    fn begin(shortest: Duration, waiting: &'t AtomicU32) -> Self {
        Self { shortest: Deadline::after(shortest), waiting }
    }

    fn is_over(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0 && self.shortest.has_passed()
    }

    /// Returns the time after which to look again whether it is over.
    fn pause(&self) -> Duration {
        match self.shortest.remaining() {
            Duration::ZERO => self.shortest.timeout(),
            left => left,
        }
    }
}

/// Holds the wait of one of several threads that share a channel; see [`Channel::wait_for_turn`].
///
/// While it exists and has not ended, the rank reports to other ranks that it waits for the peer.
#[derive(Debug)]
pub struct SharedWait<'w> {
    /// The peer and the number of the signal, or `None` for all messages of this rank.
    signal: Option<(Rank, usize)>,
    deadline: Deadline,
    shortest: Duration,
    waiting: &'w AtomicU32,
    progress: Option<Progress<[ChannelEvent; 1]>>,
}

impl<'w> SharedWait<'w> {
    /// Creates a wait until all puts and gets of this rank are complete, as [`Channel::flush`].
    ///
    /// A turn of it lasts as long as `waiting`, the number of other threads that wait for the
    /// channel, is 0, and at least for `shortest`.
    pub fn for_messages(timeout: Duration, shortest: Duration, waiting: &'w AtomicU32) -> Self {
        let deadline = Deadline::after(timeout);
        Self { signal: None, deadline, shortest, waiting, progress: None }
    }

    /// Waits until a peer has given a signal once more than the rank has waited for, instead of for
    /// messages.
    #[must_use]
    pub fn signal(self, peer: Rank, signal: usize) -> Self {
        Self { signal: Some((peer, signal)), ..self }
    }
}

/// Holds what a wait that has begun keeps between its turns. While it exists, the rank counts as
/// waiting for the peers of the signals.
pub(super) struct Progress<E: AsRef<[ChannelEvent]>> {
    events: E,
    host_waits: Arc<[AtomicU32]>,
    /// `None` if the engines can park until an event happens.
    backoff: Option<Backoff>,
}

impl<E: AsRef<[ChannelEvent]>> Progress<E> {
    fn begin<T>(channel: &Channel<T>, events: E) -> Self {
        let host_waits = Arc::clone(&channel.host_waits);
        let mut has_signals = false;
        for peer in events.as_ref().iter().filter_map(ChannelEvent::signalling_peer) {
            host_waits[peer.index()].fetch_add(1, Ordering::Relaxed);
            has_signals = true;
        }

        // A park of an engine of a device does not see the flags that peers signal.
        let is_polled = channel.report.lanes.iter().all(|lane| lane.polled);
        let backoff = (has_signals && !is_polled).then(|| Backoff::new(PARK_MAX));
        Self { events, host_waits, backoff }
    }
}

impl<E: AsRef<[ChannelEvent]>> Drop for Progress<E> {
    fn drop(&mut self) {
        for peer in self.events.as_ref().iter().filter_map(ChannelEvent::signalling_peer) {
            self.host_waits[peer.index()].fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl<E: AsRef<[ChannelEvent]>> fmt::Debug for Progress<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress").field("events", &self.events.as_ref()).finish_non_exhaustive()
    }
}

impl<T: Element> Channel<T> {
    /// Waits until a peer has given a signal once more than this rank has waited for. Returns how
    /// often that is.
    ///
    /// # Errors
    /// As [`wait_for`](Self::wait_for).
    pub fn wait(&mut self, peer: Rank, signal: usize, timeout: Duration) -> Result<u64, Error> {
        self.check_signal(peer, signal)?;
        let count = self.awaited(peer, signal) + 1;
        let event = ChannelEvent::Signal { peer, signal, count };
        self.wait_for_event(event, || Deadline::after(timeout))?;
        Ok(count)
    }

    /// Waits until the end of a turn, and returns whether the wait has ended.
    ///
    /// It is for callers that share a channel between threads. Another thread can use the channel
    /// when a call has returned, before the next call goes on with the wait.
    ///
    /// # Errors
    /// As [`wait`](Self::wait) and [`flush`](Self::flush).
    pub fn wait_for_turn(&mut self, wait: &mut SharedWait<'_>) -> Result<bool, Error> {
        let SharedWait { signal, deadline, shortest, waiting, ref mut progress } = *wait;
        let turn = Some(Turn::begin(shortest, waiting));
        let Some((peer, signal)) = signal else {
            return self.wait_for_unfinished(0, deadline, turn);
        };
        self.check_signal(peer, signal)?;

        let count = self.awaited(peer, signal) + 1;
        let event = ChannelEvent::Signal { peer, signal, count };
        let waited = self.wait_in([event], progress, turn, || deadline);
        // The wait goes on in another turn only if this one has ended.
        if !matches!(waited, Ok(None)) {
            *progress = None;
        }

        Ok(waited?.is_some())
    }

    pub(super) fn wait_for_event(
        &mut self,
        event: ChannelEvent,
        deadline: impl FnOnce() -> Deadline,
    ) -> Result<(), Error> {
        self.wait_in([event], &mut None, None, deadline).map(drop)
    }

    /// Waits for one of several events, whose index it returns, or `None` if the turn has ended
    /// before.
    pub(super) fn wait_in<E: AsRef<[ChannelEvent]> + Copy>(
        &mut self,
        events: E,
        progress: &mut Option<Progress<E>>,
        turn: Option<Turn<'_>>,
        deadline: impl FnOnce() -> Deadline,
    ) -> Result<Option<usize>, Error> {
        let listed = events.as_ref();
        let mut found = self.first_that_happened(listed)?;

        // A signal that comes at once is not reported to other ranks, and the clock is not read.
        if found.is_none() {
            self.poll_engines_of(listed)?;
            if self.spin(listed)? {
                found = self.first_that_happened(listed)?;
            }
        }

        if found.is_none() {
            let progress = progress.get_or_insert_with(|| Progress::begin(self, events));
            found = self.wait_until_one(listed, &mut progress.backoff, turn, deadline)?;
        }

        if let Some(index) = found {
            self.note_awaited(listed[index]);
            self.next_look = index + 1;
        }
        Ok(found)
    }

    /// Returns the index of the first event that has happened, behind the one that the last wait
    /// has returned.
    fn first_that_happened(&self, events: &[ChannelEvent]) -> Result<Option<usize>, Error> {
        let begin = if self.next_look < events.len() { self.next_look } else { 0 };
        for index in (begin..events.len()).chain(0..begin) {
            if self.has_happened(events[index])? {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }

    /// Polls until one of the events has happened, and returns `None` if the turn has ended before.
    fn wait_until_one(
        &mut self,
        events: &[ChannelEvent],
        backoff: &mut Option<Backoff>,
        turn: Option<Turn<'_>>,
        deadline: impl FnOnce() -> Deadline,
    ) -> Result<Option<usize>, Error> {
        let deadline = deadline();
        loop {
            let polled_at = Instant::now();

            // This is read before the poll, which then sees all signals that the peer gave before
            // it left.
            let left = self.peer_that_left(events);
            self.poll_engines_of(events)?;
            if let Some(index) = self.first_that_happened(events)? {
                return Ok(Some(index));
            }

            if let Some((event, peer)) = left {
                let why = format!("rank {peer} has left the group");
                return Err(self.missing(ErrorKind::PeerLost, &[event], &why));
            }
            if deadline.has_passed() {
                let why = format!("{:?} have passed", deadline.timeout());
                return Err(self.missing(ErrorKind::Timeout, events, &why));
            }
            if turn.is_some_and(|turn| turn.is_over()) {
                return Ok(None);
            }

            // Peers may wait for starts of this rank before they give the signal.
            let limit =
                if self.runtime.driver.drive_others(None) { BOTH_PARK_MAX } else { PARK_MAX };
            let limit = turn.map_or(limit, |turn| turn.pause().min(limit));

            match backoff {
                None => self.park(self.tier_of(events[0]), deadline.remaining().min(limit))?,
                Some(backoff) => match backoff.nap(polled_at) {
                    Some(nap) => std::thread::sleep(nap.min(limit)),
                    None => std::thread::yield_now(),
                },
            }
        }
    }

    /// Looks for the events for about a microsecond, and returns whether one has happened.
    fn spin(&self, events: &[ChannelEvent]) -> Result<bool, Error> {
        // A short message is waited for here, so its word is found only once.
        if let &[ChannelEvent::Signal { peer, signal, count }] = events {
            let (side, word) = self.flag(peer, signal)?;
            for _ in 0..SPINS {
                if side.count_in(word) >= count {
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            return Ok(false);
        }

        for _ in 0..SPINS {
            if self.first_that_happened(events)?.is_some() {
                return Ok(true);
            }
            std::hint::spin_loop();
        }
        Ok(false)
    }

    /// Polls the engines that can make one of the events happen.
    fn poll_engines_of(&mut self, events: &[ChannelEvent]) -> Result<(), Error> {
        if let &[event] = events {
            return self.poll_engine(self.tier_of(event));
        }

        for tier in [Tier::Local, Tier::Network] {
            if events.iter().any(|event| self.tier_of(*event) == tier) {
                self.poll_engine(tier)?;
            }
        }
        Ok(())
    }

    /// Returns an event whose peer has left the group, and the peer.
    fn peer_that_left(&self, events: &[ChannelEvent]) -> Option<(ChannelEvent, Rank)> {
        let life = &self.runtime.life;
        if !life.has_any_left() {
            return None;
        }
        let mut peers = events.iter().filter_map(|event| Some((*event, event.signalling_peer()?)));
        peers.find(|(_, peer)| life.has_left(*peer))
    }

    /// Returns the error that none of the events has happened.
    pub(super) fn missing(&self, kind: ErrorKind, events: &[ChannelEvent], why: &str) -> Error {
        let Self { name, rank, .. } = self;
        let text = match events {
            &[ChannelEvent::Signal { peer, signal, .. }] if signal == self.end_signal() => {
                format!("{name}: rank {rank} waits for rank {peer} to end the channel, but {why}")
            }
            &[ChannelEvent::Signal { peer, signal, count }] => {
                let seen = self.given_by(peer, signal).unwrap_or_default();
                format!(
                    "{name}: rank {rank} waits for signal {signal} of rank {peer}, but {why}: it was given {seen} times, \
                     expected {count}"
                )
            }
            [only] => format!("{name}: rank {rank} waits for {only}, but {why}"),
            [first, others @ ..] => {
                let others = others.len();
                format!(
                    "{name}: rank {rank} waits for {first} or one of {others} other events, but {why}"
                )
            }
            [] => format!("{name}: rank {rank} waits for no event, but {why}"),
        };

        // Of several peers, none is to blame more than the others.
        let peer = events.first().and_then(ChannelEvent::signalling_peer);
        let peer = peer.filter(|_| events.iter().all(|event| event.signalling_peer() == peer));
        let error = Error::new(kind, text);
        match peer {
            Some(peer) => error.with_peer(peer),
            None => error,
        }
    }

    /// Returns how often a peer has given a signal since the channel was opened, without waiting.
    ///
    /// # Errors
    /// As [`signal`](Self::signal).
    pub fn signalled(&mut self, peer: Rank, signal: usize) -> Result<u64, Error> {
        self.check_signal(peer, signal)?;
        self.poll_engine(self.tiers[peer.index()])?;
        self.given_by(peer, signal)
    }

    /// Waits until all earlier puts and gets are complete here.
    ///
    /// Then elements that were put may be overwritten, and elements that were got may be read. It
    /// does not tell whether a peer has seen them.
    ///
    /// # Errors
    /// [`Timeout`](ErrorKind::Timeout); the reason why the group has ended.
    pub fn flush(&mut self, timeout: Duration) -> Result<(), Error> {
        self.wait_unfinished(0, timeout)
    }

    /// Waits until at most `at_most` messages of this rank are not complete, so that a caller can
    /// keep a number of messages in flight.
    ///
    /// A put with a signal is two messages, and copies that were joined are one.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub fn wait_unfinished(&mut self, at_most: usize, timeout: Duration) -> Result<(), Error> {
        self.wait_for_unfinished(at_most, Deadline::after(timeout), None).map(drop)
    }

    /// Waits as [`wait_unfinished`](Self::wait_unfinished), and returns false if the turn has ended
    /// before.
    fn wait_for_unfinished(
        &mut self,
        at_most: usize,
        deadline: Deadline,
        turn: Option<Turn<'_>>,
    ) -> Result<bool, Error> {
        while self.unfinished()? > at_most {
            if deadline.has_passed() {
                let text = format!(
                    "{}: copies of rank {} are not complete after {:?}",
                    self.name,
                    self.rank,
                    deadline.timeout()
                );
                return Err(Error::new(ErrorKind::Timeout, text));
            }

            if turn.is_some_and(|turn| turn.is_over()) {
                return Ok(false);
            }

            // The park ends when the engine has completed something.
            let is_open = |side: &&Arc<ChannelSide>| unfinished_of(&side.queue()) > 0;
            let tier = self.sides.iter().flatten().find(is_open).map(|side| side.tier);
            if let Some(tier) = tier {
                let limit = turn.map_or(PARK_MAX, |turn| turn.pause().min(PARK_MAX));
                self.park(tier, deadline.remaining().min(limit))?;
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use peerlane_host as host;

    use super::*;
    use crate::bootstrap::{Bootstrap as _, in_process};
    use crate::group::Group;
    use crate::group::driver::Work as _;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_rank_reports_the_peers_of_waits_that_have_not_ended() {
        let done = in_process::run(3, |bootstrap| {
            let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
            let mut group = Group::open(bootstrap, fabric)?;
            let window = group.window::<u8>(8)?;
            let mut channel = group.channel(&window, 2)?;
            if group.rank() != Rank(0) {
                channel.wait(Rank(0), 0, LONG)?;
                channel.signal(Rank(0), 0)?;
                return group.close_channel(channel).and_then(|()| group.close());
            }

            let side = channel.sides[Tier::Local as usize].clone().unwrap();
            let nobody = AtomicU32::new(0);
            let somebody = AtomicU32::new(1);
            let wait = |peer, signal| {
                let wait = SharedWait::for_messages(LONG, Duration::ZERO, &somebody);
                wait.signal(Rank(peer), signal)
            };
            let (mut one, mut other, mut last) = (wait(1, 0), wait(2, 1), wait(2, 0));
            for wait in [&mut one, &mut other, &mut last] {
                assert!(!channel.wait_for_turn(wait)?);
            }
            assert_eq!(side.waits(), [Rank(1), Rank(2)]);

            // A caller gives up, and another one still waits for the same peer.
            drop(other);
            assert_eq!(side.waits(), [Rank(1), Rank(2)]);

            channel.signal(Rank(1), 0)?;
            channel.signal(Rank(2), 0)?;
            (last.shortest, last.waiting) = (LONG, &nobody);
            assert!(channel.wait_for_turn(&mut last)?);
            assert_eq!(side.waits(), [Rank(1)]);
            channel.wait_for(ChannelEvent::Signal { peer: Rank(1), signal: 0, count: 1 }, LONG)?;
            channel.signal(Rank(0), 0)?;

            // The signal is here at once, in another turn than the one that has noted the wait.
            let mut late = wait(1, 1);
            assert!(!channel.wait_for_turn(&mut late)?);
            late.deadline = Deadline::after(Duration::ZERO);
            channel.wait_for_turn(&mut late).unwrap_err();
            drop(one);
            assert!(side.waits().is_empty(), "{:?}", side.waits());
            group.close_channel(channel).and_then(|()| group.close())
        });
        done.unwrap();
    }

    #[test]
    fn a_turn_ends_only_for_another_thread() {
        let waiting = AtomicU32::new(0);
        let turn = Turn::begin(Duration::ZERO, &waiting);
        assert!(!turn.is_over());
        waiting.store(1, Ordering::Relaxed);
        assert!(turn.is_over());
        assert!(!Turn::begin(LONG, &waiting).is_over());
    }
}
