//! Enqueues messages on the caller's stream, and finds out when they are overdue.

use std::fmt;
use std::ops::{DerefMut, Range};
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::time::Instant;

use peerlane_hal::{CaptureState, Command, Direction, ErrorKind, Rank, Stream};

use super::{Channel, ChannelSide, CopyRange, Mode, OnStream, StreamWait, StreamWaits};
use crate::element::Element;
use crate::error::Error;
use crate::plan::Tier;
use crate::run::buffers::Start;
use crate::run::queue::{self, HasQueue, Queue};

impl<T: Element> Channel<T> {
    /// Allows messages of the channel to be recorded into a graph, such as a CUDA graph.
    ///
    /// ```compile_fail,E0133
    /// # use peerlane::Channel;
    /// fn record(channel: Channel<u8>) -> Channel<u8> {
    ///     channel.capturable() // Only the caller knows when the last replay is complete.
    /// }
    /// ```
    ///
    /// # Safety
    /// Every graph that has recorded messages of the channel has made its last replay, and that
    /// replay is complete, before the channel is dropped or its group is closed or dropped.
    #[must_use]
    pub unsafe fn capturable(mut self) -> Self {
        self.captures = true;
        self
    }

    /// Enqueues messages on the caller's stream.
    ///
    /// They come after the work that the stream holds now, and before work that is enqueued next.
    /// On a stream that is being captured, they are recorded into the graph, if the channel is
    /// [`capturable`](Self::capturable).
    ///
    /// The host is not part of that order. Messages on a stream reach peers inside the node. If a
    /// wait on a stream takes longer than the timeout of the group, the group ends with an error
    /// that names the peer, even if no thread waits; the next call on the channel returns it, such
    /// as [`check`](Self::check).
    ///
    /// In a graph, a signal does not count: each recorded wait takes one recorded signal. All ranks
    /// must replay alike.
    ///
    /// # Errors
    /// [`Mismatch`](ErrorKind::Mismatch) for a stream of another backend or device;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the stream captures and the channel is
    /// not capturable; the error of `work`; the reason why the group has ended.
    pub fn on_stream<S: Stream, R>(
        &mut self,
        stream: &S,
        work: impl FnOnce(&mut StreamMessages<'_, T>) -> Result<R, Error>,
    ) -> Result<R, Error> {
        self.runtime.life.check()?;
        let side = self.sides[Tier::Local as usize].clone();
        let side = side.expect("the local fabric has an engine, which connects a rank with itself");

        let admit = |channel: &mut Self, capture: CaptureState| {
            if capture.is_capturing() && !channel.captures {
                let text = format!(
                    "{}: the stream captures a graph, but the channel is not capturable; open it with `capturable()`",
                    channel.name
                );
                return Err(Error::new(ErrorKind::InvalidArgument, text));
            }
            Ok(())
        };

        let result = queue::on_stream(self, stream, admit, |channel, capture| {
            let mode = if capture.is_capturing() { Mode::Captured } else { Mode::Stream };
            let due = Instant::now() + channel.runtime.life.timeout;

            let mut messages = StreamMessages { channel, mode, waits: Vec::new() };
            let worked = work(&mut messages);
            let waits = messages.waits;

            // The waits are kept even after an error of `work`, because its earlier messages are on
            // the stream.
            let number = side.queue().marked();
            let mut stream_waits = side.stream_waits();
            match mode {
                Mode::Captured => stream_waits.recorded.extend(waits),
                _ => stream_waits.on_stream.push_back(OnStream { number, due, waits }),
            }
            side.is_watched.store(true, Ordering::Release);
            worked
        });

        self.runtime.note_wait();
        result
    }

    /// Returns the error that has ended the group, if it has ended.
    ///
    /// # Errors
    /// The reason why the group has ended.
    pub fn check(&self) -> Result<(), Error> {
        self.runtime.life.check()
    }
}

/// Enqueues messages of a channel on a stream; see [`Channel::on_stream`].
pub struct StreamMessages<'c, T> {
    channel: &'c mut Channel<T>,
    mode: Mode,
    waits: Vec<StreamWait>,
}

impl<T: Element> StreamMessages<'_, T> {
    /// Copies elements of this rank's window to the window of a peer, like [`Channel::put`].
    ///
    /// # Errors
    /// As [`Channel::put`]; [`Unavailable`](ErrorKind::Unavailable) if the peer is on another node.
    pub fn put(&mut self, peer: Rank, from: Range<usize>, to: usize) -> Result<(), Error> {
        let copy = self.channel.copy(from.start, to, from.len())?;
        self.channel.submit(peer, &[copy.command(Direction::Put, peer)], self.mode).map(drop)
    }

    /// Copies elements of a peer's window to this rank's window, like [`Channel::get`].
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn get(&mut self, peer: Rank, from: usize, to: Range<usize>) -> Result<(), Error> {
        let copy = self.channel.copy(from, to.start, to.len())?;
        self.channel.submit(peer, &[copy.command(Direction::Get, peer)], self.mode).map(drop)
    }

    /// Makes many copies from this rank's window to that of a peer, like [`Channel::puts`].
    ///
    /// # Errors
    /// As [`Channel::puts`] and [`put`](Self::put).
    pub fn puts(&mut self, peer: Rank, copies: &[CopyRange]) -> Result<(), Error> {
        self.channel.submit_many(peer, copies, Direction::Put, self.mode).map(drop)
    }

    /// Makes many copies from the window of a peer to this rank's, like [`Channel::gets`].
    ///
    /// # Errors
    /// As [`puts`](Self::puts).
    pub fn gets(&mut self, peer: Rank, copies: &[CopyRange]) -> Result<(), Error> {
        self.channel.submit_many(peer, copies, Direction::Get, self.mode).map(drop)
    }

    /// Copies elements to the window of a peer and then gives it a signal, like
    /// [`Channel::put_signal`].
    ///
    /// # Errors
    /// As [`Channel::put_signal`] and [`put`](Self::put).
    pub fn put_signal(
        &mut self,
        peer: Rank,
        from: Range<usize>,
        to: usize,
        signal: usize,
    ) -> Result<(), Error> {
        self.channel.check_signal(peer, signal)?;
        let copy = self.channel.copy(from.start, to, from.len())?;
        self.channel.submit_signal(peer, signal, Some(copy), self.mode).map(drop)
    }

    /// Sends a signal to a peer, like [`Channel::signal`].
    ///
    /// # Errors
    /// As [`Channel::signal`] and [`put`](Self::put).
    pub fn signal(&mut self, peer: Rank, signal: usize) -> Result<(), Error> {
        self.channel.check_signal(peer, signal)?;
        self.channel.submit_signal(peer, signal, None, self.mode).map(drop)
    }

    /// Lets the stream wait until a peer has given a signal once more than this rank has waited
    /// for.
    ///
    /// # Errors
    /// [`Unavailable`](ErrorKind::Unavailable) if the engines cannot queue waits;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no such peer or signal; as
    /// [`put`](Self::put).
    pub fn wait(&mut self, peer: Rank, signal: usize) -> Result<(), Error> {
        let Self { channel, mode, waits } = self;
        channel.check_signal(peer, signal)?;

        let local = &channel.report.lanes[0];
        if !local.queued_waits {
            let text = format!(
                "{}: the engines of the backend {} cannot queue waits; wait on the host",
                channel.name, local.backend
            );
            return Err(Error::new(ErrorKind::Unavailable, text));
        }

        let index = channel.index(peer, signal);
        let count = channel.awaited[index].load(Ordering::Relaxed) + 1;
        let flag = channel.flag_of(peer, peer, signal);
        channel.submit_counted(peer, &[Command::Wait { flag }], *mode, count)?;

        let start = if *mode == Mode::Captured { Start::Captured(0) } else { Start::Eager(count) };
        if *mode != Mode::Captured {
            channel.awaited[index].store(count, Ordering::Relaxed);
        }
        waits.push(StreamWait { signal, flag, start });
        Ok(())
    }
}

impl<T: Element> HasQueue for Channel<T> {
    const INSTEAD: &'static str = "send messages from the host";
    type Failure = Error;

    fn queue(&mut self) -> impl DerefMut<Target = Queue> {
        let side = self.sides[Tier::Local as usize].as_ref();
        side.expect("the local fabric has an engine, which connects a rank with itself").queue()
    }

    fn refused(&self, error: Error) -> Error {
        error
    }

    fn broken(&self, error: Error) -> Error {
        self.runtime.life.fail(&self.name, error)
    }
}

impl<T> fmt::Debug for StreamMessages<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamMessages").field("channel", &self.channel).finish_non_exhaustive()
    }
}

impl ChannelSide {
    pub(super) fn stream_waits(&self) -> MutexGuard<'_, StreamWaits> {
        // A panic leaves the state consistent, because each statement changes it as a whole.
        self.stream_waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn missing<'w>(
        &self,
        waits: &'w [StreamWait],
    ) -> impl Iterator<Item = &'w StreamWait> {
        waits.iter().filter(|wait| {
            let value = self.memory.flag_value(wait.flag, wait.start);
            let least = self.memory.flag_value_in(wait.start);
            value.is_none_or(|value| value < least)
        })
    }
}

impl StreamWaits {
    /// Returns the waits that the oldest incomplete messages contain, and whether they are in a
    /// graph.
    pub(super) fn first(&self) -> Option<(&[StreamWait], bool)> {
        let on_stream = self.on_stream.front().map(|front| (&front.waits[..], false));
        on_stream.or_else(|| self.is_replay_waiting.then_some((&self.recorded[..], true)))
    }
}
