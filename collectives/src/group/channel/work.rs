//! Moves the messages of a channel on, and finds out when those of streams and graphs are overdue.

use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use peerlane_hal::Rank;

use super::{ChannelSide, StreamWait, unfinished_of};
use crate::bootstrap::AbortRecord;
use crate::group::driver::{Driven, Overdue, Work};
use crate::run::queue::Queue;

impl ChannelSide {
    /// Returns the queue, or `None` while another thread uses it.
    pub(super) fn free_queue(&self) -> Option<MutexGuard<'_, Queue>> {
        match self.queue.try_lock() {
            Ok(queue) => Some(queue),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Finds out what is complete, and returns the record of a timeout if messages on a stream or
    /// in a graph are overdue.
    ///
    /// Returns `None` while another thread uses the engine.
    fn overdue(&self, timeout: Duration) -> Option<AbortRecord> {
        let mut queue = self.free_queue()?;
        let mut stream_waits = self.stream_waits();

        // The error of an engine is returned by the next call on the channel.
        let done = if queue.poll().is_ok() { queue.done() } else { 0 };
        while stream_waits.on_stream.front().is_some_and(|front| front.number <= done) {
            stream_waits.on_stream.pop_front();
        }

        let replay_wait = match stream_waits.recorded.is_empty() {
            true => None,
            false => queue.replay_wait().ok().flatten(),
        };
        drop(queue);

        stream_waits.is_replay_waiting = replay_wait.is_some();
        let is_watched = !stream_waits.on_stream.is_empty() || !stream_waits.recorded.is_empty();
        self.is_watched.store(is_watched, Ordering::Release);

        let is_late = match stream_waits.on_stream.front() {
            Some(front) => front.due <= Instant::now(),
            None => replay_wait.is_some_and(|waited| waited >= timeout),
        };

        let (waits, is_captured) = stream_waits.first().filter(|_| is_late)?;
        let (name, rank) = (&self.name, self.rank);
        let what = if is_captured { "a replayed graph" } else { "a stream" };

        // Without a missing signal, the stream still copies or does earlier work.
        let first = self.missing(waits).next();
        let text = match first {
            Some(StreamWait { signal, flag, .. }) => format!(
                "{name} did not finish within {timeout:?}: {what} of rank {rank} waited for signal {signal} of rank {}",
                flag.peer
            ),
            None => format!(
                "{name} did not finish within {timeout:?}: rank {rank} did not complete its copies or earlier work on its stream"
            ),
        };

        Some(AbortRecord {
            by: Some(rank),
            operation: name.clone(),
            phase: "signal".to_owned(),
            ..AbortRecord::timeout(Some(first.map_or(rank, |wait| wait.flag.peer)), text)
        })
    }
}

impl Work for ChannelSide {
    fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    fn is_for_thread(&self, all: bool) -> bool {
        self.is_observed() || all && self.is_open()
    }

    fn is_observed(&self) -> bool {
        !self.watchers.is_empty()
    }

    /// Moves messages of the host. The error of an engine is returned by the next call on the
    /// channel.
    fn drive(&self) -> Result<Driven, AbortRecord> {
        // If another thread uses the engine, that thread moves them. It can wait for long, so the
        // callers of notifications are told here what it has found.
        let Some(mut queue) = self.free_queue() else {
            self.watchers.tell_due(|watcher| self.is_due(watcher));
            return Ok(Driven { has_progressed: false, is_open: self.is_open() });
        };

        let before = queue.done();
        let is_polled = self.poll(&mut queue).is_ok();
        let done = queue.done();
        let is_open = is_polled && unfinished_of(&queue) > 0;
        if !is_open {
            self.close();
        }
        drop(queue);

        // After the error of an engine, the callers find it out themselves.
        self.watchers.tell_due(|watcher| !is_polled || self.is_due(watcher));
        Ok(Driven { has_progressed: done > before, is_open })
    }

    fn waits(&self) -> Vec<Rank> {
        let host_waits = self.host_waits.as_deref().unwrap_or_default();
        let host = Rank::all(host_waits.len()).zip(host_waits);
        let host = host.filter(|(_, waits)| waits.load(Ordering::Relaxed) > 0);

        let stream_waits = self.stream_waits();
        let missing = stream_waits.first().map_or_else(Vec::new, |(waits, _)| {
            self.missing(waits).map(|wait| wait.flag.peer).collect()
        });

        let host = host.map(|(peer, _)| peer);
        host.chain(missing).filter(|peer| *peer != self.rank).collect()
    }

    fn stream_timeout(&self) -> Option<Duration> {
        self.is_watched.load(Ordering::Acquire).then_some(self.life.timeout)
    }

    fn check_streams(&self) -> Option<Overdue> {
        let timeout = self.life.timeout;
        let record = self.overdue(timeout)?;
        Some(Overdue::Late { timeout, waits: self.waits(), record })
    }

    /// Returns true, because a graph may hold messages of the channel.
    fn is_captured(&self) -> bool {
        true
    }

    fn tell(&self) {
        self.watchers.tell_due(|_| true);
    }

    fn release(&self) -> bool {
        self.free_queue().is_some_and(|mut queue| queue.release().unwrap_or(false))
    }
}
