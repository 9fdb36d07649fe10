//! Tells a caller that waits with a future or a file descriptor when an event of a channel has
//! happened.

use std::fmt;
use std::future::Future;
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use peerlane_hal::{Deadline, ErrorKind};

use super::event::Condition;
use super::{Channel, ChannelEvent, ChannelSide, invalid};
use crate::element::Element;
use crate::error::Error;
use crate::group::eager::{EagerPolls, Look, Next};
use crate::group::event::Event;
use crate::group::runtime::Runtime;

const EVENT: &str = "an event of a channel";

impl<T: Element> Channel<T> {
    /// Returns a handle to an event, by which a caller awaits it as a future, watches a descriptor,
    /// or polls. The handle borrows nothing, so it can be stored and sent to other threads.
    ///
    /// ```
    /// # use peerlane::{Channel, Error};
    /// # async fn serve(mut channel: Channel<u8>) -> Result<(), Error> {
    /// use std::time::Duration;
    /// use peerlane::Rank;
    ///
    /// let request = channel.next_signal(Rank(1), 0);
    /// channel.notify(request, Duration::from_secs(30))?.await?;
    /// let reply = channel.put_signal(Rank(1), 0..4096, 0, 0)?;
    /// channel.notify(reply, Duration::from_secs(30))?.await
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    pub fn notify(
        &self,
        event: impl Into<ChannelEvent>,
        timeout: Duration,
    ) -> Result<Notification, Error> {
        let event = event.into();
        self.check_event(event)?;
        self.runtime.life.check()?;

        if let ChannelEvent::Signal { peer, signal, .. } = event {
            // Flags that the host cannot load are refused here.
            self.flag(peer, signal)?;
        }

        let side = self.sides[self.tier_of(event) as usize].clone();
        let side = side.ok_or_else(|| {
            Error::new(ErrorKind::Other, "no fabric connects the peer of the event")
        })?;

        let index = match event {
            ChannelEvent::Signal { peer, signal, .. } => Some(self.index(peer, signal)),
            ChannelEvent::Message(_) => None,
        };
        let watcher = Watcher {
            event,
            condition: self.condition_of(event),
            deadline: Deadline::after(timeout),
            signal: Event::default(),
        };
        Ok(Notification {
            side,
            runtime: Arc::clone(&self.runtime),
            watcher: Arc::new(watcher),
            eager_polls: EagerPolls::default(),
            is_watched: false,
            awaited: index.map(|index| (Arc::clone(&self.awaited), index)),
        })
    }
}

/// A handle by which a caller learns that an event of a channel has happened.
///
/// It is a future, which any executor can poll, and it has a descriptor for event loops. If it is
/// dropped, the event is no longer watched, and the messages of the channel go on.
///
/// As a future, it first polls by itself and calls its waker, so that the executor polls again.
/// When nothing has moved for 100 µs, the progress thread of the group watches the event, and also
/// if the descriptor was asked for.
#[must_use = "a notification does nothing unless it is awaited, polled or watched"]
pub struct Notification {
    side: Arc<ChannelSide>,
    runtime: Arc<Runtime>,
    watcher: Arc<Watcher>,
    eager_polls: EagerPolls,
    /// Whether the progress thread has watched the event.
    is_watched: bool,
    /// The count of the signal that the event waits for, with its index.
    awaited: Option<(Arc<[AtomicU64]>, usize)>,
}

impl Notification {
    /// Returns whether the event has happened, without blocking.
    ///
    /// # Errors
    /// [`Timeout`](ErrorKind::Timeout) or [`PeerLost`](ErrorKind::PeerLost), naming the peer of a
    /// signal; [`InvalidArgument`](ErrorKind::InvalidArgument) if the channel was dropped; the
    /// reason why the group has ended.
    pub fn poll(&mut self) -> Result<bool, Error> {
        let Self { side, watcher, .. } = self;
        let life = &self.runtime.life;
        life.check()?;
        if side.watchers.has_ended() {
            return Err(invalid(format!(
                "{}: the channel was dropped while {} was awaited",
                side.name, watcher.event
            )));
        }

        // This is read before the poll, which then sees all signals that the peer gave before it
        // left.
        let left = watcher.event.signalling_peer().filter(|_| life.has_any_left());
        let left = left.filter(|peer| life.has_left(*peer));

        // If another thread uses the engine, that thread polls it.
        if let Some(mut queue) = side.free_queue() {
            let polled = side.poll(&mut queue);
            drop(queue);
            polled.map_err(|error| life.fail(&side.name, error))?;
        }

        if side.is_met(watcher.condition) {
            if let (Some((counts, index)), ChannelEvent::Signal { count, .. }) =
                (&self.awaited, watcher.event)
            {
                counts[*index].fetch_max(count, Ordering::Relaxed);
            }
            return Ok(true);
        }

        let (kind, why) = match left {
            Some(peer) => (ErrorKind::PeerLost, format!("rank {peer} has left the group")),
            None if watcher.deadline.has_passed() => {
                (ErrorKind::Timeout, format!("{:?} have passed", watcher.deadline.timeout()))
            }
            None => return Ok(false),
        };
        let text = format!("{}: rank {} awaits {}, but {why}", side.name, side.rank, watcher.event);
        let error = Error::new(kind, text);
        Err(match watcher.event.signalling_peer() {
            Some(peer) => error.with_peer(peer),
            None => error,
        })
    }

    /// Returns a file descriptor for an event loop, which becomes readable when the event has
    /// happened or [`poll`](Self::poll) returns an error; do not read from it.
    ///
    /// # Errors
    /// [`Other`](ErrorKind::Other) if the process has no descriptor or no thread left.
    pub fn descriptor(&mut self) -> Result<BorrowedFd<'_>, Error> {
        self.watcher.signal.descriptor(EVENT)?;
        self.watch()?;

        // What happened before the progress thread watches is found here.
        if !matches!(self.poll(), Ok(false)) {
            self.watcher.signal.signal();
        }
        self.watcher.signal.descriptor(EVENT)
    }

    /// Looks at the event for a future that polls by itself.
    fn look(&mut self) -> Result<Look, Error> {
        let before = self.side.done.load(Ordering::Acquire);
        if self.poll()? {
            return Ok(Look::Complete);
        }
        self.runtime.driver.drive_others(None);
        let has_moved = self.side.done.load(Ordering::Acquire) > before;
        Ok(if has_moved { Look::Progressed } else { Look::Idle })
    }

    /// Has the progress thread watch the event.
    fn watch(&mut self) -> Result<(), Error> {
        self.is_watched = true;
        self.runtime.driver.start_progress()?;
        self.side.watchers.add(&self.watcher);
        self.runtime.driver.wake_progress();
        Ok(())
    }
}

impl Future for Notification {
    type Output = Result<(), Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let own = self.get_mut();
        if !own.is_watched {
            let mut polls = std::mem::take(&mut own.eager_polls);
            let next = polls.poll(context.waker(), || own.look())?;
            own.eager_polls = polls;
            match next {
                Next::Return => return Poll::Ready(Ok(())),
                Next::PolledAgain => return Poll::Pending,
                Next::Watched => {}
            }
        }

        // What happens from here on is told to the waker, and what has happened in between is found
        // by the poll.
        own.watcher.signal.set_waker(context.waker());
        own.watch()?;
        match own.poll()? {
            true => Poll::Ready(Ok(())),
            false => Poll::Pending,
        }
    }
}

impl Drop for Notification {
    fn drop(&mut self) {
        if self.is_watched && !self.runtime.driver.is_of_parent() {
            self.side.watchers.remove(&self.watcher);
        }
    }
}

impl fmt::Debug for Notification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notification").field("event", &self.watcher.event).finish_non_exhaustive()
    }
}

/// An event that the progress thread watches for a caller.
pub(super) struct Watcher {
    event: ChannelEvent,
    condition: Condition,
    deadline: Deadline,
    signal: Event,
}

impl ChannelSide {
    /// Returns whether the caller of a watcher has to look.
    pub(super) fn is_due(&self, watcher: &Watcher) -> bool {
        let has_left = |peer| self.life.has_any_left() && self.life.has_left(peer);
        self.is_met(watcher.condition)
            || watcher.deadline.has_passed()
            || watcher.event.signalling_peer().is_some_and(has_left)
    }
}

/// Lists the events of one side of a channel that the progress thread watches. An event is removed
/// when its caller has been told.
#[derive(Default)]
pub(super) struct Watchers {
    all: Mutex<Vec<Arc<Watcher>>>,
    has_ended: AtomicBool,
}

impl Watchers {
    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Returns whether the channel was dropped.
    fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::SeqCst)
    }

    /// Adds an event, unless it is there.
    fn add(&self, watcher: &Arc<Watcher>) {
        let mut all = self.lock();
        if !all.iter().any(|other| Arc::ptr_eq(other, watcher)) {
            all.push(Arc::clone(watcher));
        }
    }

    fn remove(&self, watcher: &Arc<Watcher>) {
        self.lock().retain(|other| !Arc::ptr_eq(other, watcher));
    }

    /// Tells the callers of the events that are due, and removes these events. No other lock may be
    /// held, because wakers may use the channel.
    pub(super) fn tell_due(&self, is_due: impl Fn(&Watcher) -> bool) {
        while let Some(watcher) = self.take_first(&is_due) {
            watcher.signal.signal();
        }
    }

    fn take_first(&self, is_due: impl Fn(&Watcher) -> bool) -> Option<Arc<Watcher>> {
        let mut all = self.lock();
        let index = all.iter().position(|watcher| is_due(watcher))?;
        Some(all.swap_remove(index))
    }

    /// Ends all waits, because the channel is dropped.
    pub(super) fn end(&self) {
        self.has_ended.store(true, Ordering::SeqCst);
        self.tell_due(|_| true);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Watcher>>> {
        // Every statement leaves the list whole.
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
