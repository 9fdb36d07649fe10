//! Waits for signals of peers and for copies of this rank, also by several threads by turns.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use peerlane_hal::{Deadline, ErrorKind, Rank};

use super::{Channel, ChannelSide, unfinished_of};
use crate::element::Element;
use crate::error::Error;
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
///
/// It lasts as long as no other thread waits for the channel, and at least for a given time.
#[derive(Clone, Copy, Debug)]
pub struct Turn<'t> {
    shortest: Deadline,
    waiting: &'t AtomicU32,
}

impl<'t> Turn<'t> {
    /// Begins a turn of at least `shortest`, which ends when `waiting` is not 0.
    ///
    /// After that time, it ends at most `shortest` after `waiting` has changed.
    pub fn begin(shortest: Duration, waiting: &'t AtomicU32) -> Self {
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

/// Holds the wait of a thread for a signal, which can take several turns; see
/// [`Channel::wait_for_turn`].
///
/// While it exists and has not ended, the rank reports to other ranks that it waits for the peer.
#[derive(Debug)]
pub struct SignalWait {
    peer: Rank,
    signal: usize,
    deadline: Deadline,
    progress: Option<Progress>,
}

impl SignalWait {
    /// Creates a wait until a peer has given a signal once more than the rank has waited for.
    pub fn new(peer: Rank, signal: usize, deadline: Deadline) -> Self {
        Self { peer, signal, deadline, progress: None }
    }
}

/// Holds what a wait that has begun keeps between its turns. While it exists, the rank counts as
/// waiting for the peer.
struct Progress {
    side: Option<Arc<ChannelSide>>,
    peer: Rank,
    /// `None` if the engines can park until a signal comes.
    backoff: Option<Backoff>,
}

impl Progress {
    fn begin<T>(channel: &Channel<T>, peer: Rank) -> Self {
        let side = channel.sides[channel.tiers[peer.index()] as usize].clone();
        if let Some(side) = &side {
            side.host_waits[peer.index()].fetch_add(1, Ordering::Relaxed);
        }

        // A park of an engine of a device does not see the flags that peers signal.
        let is_polled = channel.report.lanes.iter().all(|lane| lane.polled);
        Self { side, peer, backoff: (!is_polled).then(|| Backoff::new(PARK_MAX)) }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(side) = &self.side {
            side.host_waits[self.peer.index()].fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress").field("peer", &self.peer).finish_non_exhaustive()
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
        let count = self.awaited[self.index(peer, signal)] + 1;
        self.wait_for_count(peer, signal, count, || Deadline::after(timeout))?;
        Ok(count)
    }

    /// Waits as [`wait`](Self::wait), but only until the end of a turn, and returns `None` if it
    /// ends before the wait does.
    ///
    /// It is for callers that share a channel between threads. Another thread can use the channel
    /// when a call has returned, before the next call goes on with the wait.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_for_turn(
        &mut self,
        wait: &mut SignalWait,
        turn: Turn<'_>,
    ) -> Result<Option<u64>, Error> {
        let SignalWait { peer, signal, deadline, ref mut progress } = *wait;
        self.check_signal(peer, signal)?;

        let count = self.awaited[self.index(peer, signal)] + 1;
        let waited = self.wait_in((peer, signal, count), progress, Some(turn), || deadline);
        // The wait goes on in another turn only if this one has ended.
        if !matches!(waited, Ok(false)) {
            *progress = None;
        }

        Ok(waited?.then_some(count))
    }

    /// Waits until a peer has given a signal at least `count` times since the channel was opened.
    ///
    /// # Errors
    /// [`Timeout`](ErrorKind::Timeout), naming the peer, after which the channel can go on;
    /// [`PeerLost`](ErrorKind::PeerLost) if the peer has left the group;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no such peer or signal; the
    /// reason why the group has ended.
    pub fn wait_for(
        &mut self,
        peer: Rank,
        signal: usize,
        count: u64,
        timeout: Duration,
    ) -> Result<(), Error> {
        self.check_signal(peer, signal)?;
        self.wait_for_count(peer, signal, count, || Deadline::after(timeout))
    }

    pub(super) fn wait_for_count(
        &mut self,
        peer: Rank,
        signal: usize,
        count: u64,
        deadline: impl FnOnce() -> Deadline,
    ) -> Result<(), Error> {
        self.wait_in((peer, signal, count), &mut None, None, deadline).map(drop)
    }

    /// Waits for a signal, and returns false if the turn has ended before.
    fn wait_in(
        &mut self,
        (peer, signal, count): (Rank, usize, u64),
        progress: &mut Option<Progress>,
        turn: Option<Turn<'_>>,
        deadline: impl FnOnce() -> Deadline,
    ) -> Result<bool, Error> {
        let is_signalled = |channel: &Self| {
            let value = channel.flag(peer, signal)?.load(Ordering::Acquire);
            Ok::<_, Error>(value.saturating_sub(channel.epoch_base) >= count)
        };

        if !is_signalled(self)? {
            let progress = progress.get_or_insert_with(|| Progress::begin(self, peer));
            let awaited = (peer, signal, count);
            if !self.wait_until(is_signalled, awaited, &mut progress.backoff, turn, deadline)? {
                return Ok(false);
            }
        }

        let index = self.index(peer, signal);
        self.awaited[index] = self.awaited[index].max(count);
        Ok(true)
    }

    /// Polls until `is_signalled`, and returns false if the turn has ended before.
    fn wait_until(
        &mut self,
        is_signalled: impl Fn(&Self) -> Result<bool, Error>,
        (peer, signal, count): (Rank, usize, u64),
        backoff: &mut Option<Backoff>,
        turn: Option<Turn<'_>>,
        deadline: impl FnOnce() -> Deadline,
    ) -> Result<bool, Error> {
        let tier = self.tiers[peer.index()];
        self.poll(tier)?;

        // The clock is not read for a signal that comes at once.
        for _ in 0..SPINS {
            if is_signalled(self)? {
                return Ok(true);
            }
            std::hint::spin_loop();
        }

        let deadline = deadline();
        loop {
            let polled_at = Instant::now();

            // This is read before the poll, which then sees all signals that the peer gave before
            // it left.
            let has_left = self.runtime.life.has_any_left() && self.runtime.life.has_left(peer);
            self.poll(tier)?;
            if is_signalled(self)? {
                return Ok(true);
            }

            let late = has_left || deadline.has_passed();
            if late {
                let name = &self.name;
                let me = self.rank;
                let seen = self.flag(peer, signal)?.load(Ordering::Acquire);
                let seen = seen.saturating_sub(self.epoch_base);

                let kind = if has_left { ErrorKind::PeerLost } else { ErrorKind::Timeout };
                let why = match has_left {
                    true => format!("rank {peer} has left the group"),
                    false => format!("{:?} have passed", deadline.timeout()),
                };
                let text = match signal == self.end_signal() {
                    true => format!(
                        "{name}: rank {me} waits for rank {peer} to end the channel, but {why}"
                    ),
                    false => format!(
                        "{name}: rank {me} waits for signal {signal} of rank {peer}, but {why}: it was given {seen} times, \
                         expected {count}"
                    ),
                };
                return Err(Error::new(kind, text).with_peer(peer));
            }

            if turn.is_some_and(|turn| turn.is_over()) {
                return Ok(false);
            }

            // Peers may wait for starts of this rank before they give the signal.
            let limit =
                if self.runtime.driver.drive_others(None) { BOTH_PARK_MAX } else { PARK_MAX };
            let limit = turn.map_or(limit, |turn| turn.pause().min(limit));

            match backoff {
                None => self.park(tier, deadline.remaining().min(limit))?,
                Some(backoff) => match backoff.nap(polled_at) {
                    Some(nap) => std::thread::sleep(nap.min(limit)),
                    None => std::thread::yield_now(),
                },
            }
        }
    }

    /// Returns how often a peer has given a signal since the channel was opened, without waiting.
    ///
    /// # Errors
    /// As [`signal`](Self::signal).
    pub fn signalled(&mut self, peer: Rank, signal: usize) -> Result<u64, Error> {
        self.check_signal(peer, signal)?;
        self.poll(self.tiers[peer.index()])?;
        Ok(self.flag(peer, signal)?.load(Ordering::Acquire).saturating_sub(self.epoch_base))
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

    /// Waits as [`flush`](Self::flush), but only until the end of a turn, and returns false if it
    /// ends before the wait does; see [`wait_for_turn`](Self::wait_for_turn).
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub fn flush_for_turn(&mut self, deadline: Deadline, turn: Turn<'_>) -> Result<bool, Error> {
        self.wait_for_unfinished(0, deadline, Some(turn))
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
    use crate::plan::Tier;

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
            let short = || Turn::begin(Duration::ZERO, &somebody);
            let wait = |peer, signal| SignalWait::new(Rank(peer), signal, Deadline::after(LONG));
            let (mut one, mut other, mut last) = (wait(1, 0), wait(2, 1), wait(2, 0));
            for wait in [&mut one, &mut other, &mut last] {
                assert_eq!(channel.wait_for_turn(wait, short())?, None);
            }
            assert_eq!(side.waits(), [Rank(1), Rank(2)]);

            // A caller gives up, and another one still waits for the same peer.
            drop(other);
            assert_eq!(side.waits(), [Rank(1), Rank(2)]);

            channel.signal(Rank(1), 0)?;
            channel.signal(Rank(2), 0)?;
            assert_eq!(channel.wait_for_turn(&mut last, Turn::begin(LONG, &nobody))?, Some(1));
            assert_eq!(side.waits(), [Rank(1)]);
            channel.wait_for(Rank(1), 0, 1, LONG)?;
            channel.signal(Rank(0), 0)?;

            // The signal is here at once, in another turn than the one that has noted the wait.
            let mut late = wait(1, 1);
            assert_eq!(channel.wait_for_turn(&mut late, short())?, None);
            late.deadline = Deadline::after(Duration::ZERO);
            channel.wait_for_turn(&mut late, short()).unwrap_err();
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
