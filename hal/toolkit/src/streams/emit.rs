//! A slice's way onto the streams.
//!
//! The main stream carries flags, waits and about half of the puts. A stream beside it is told by an
//! event to start behind the main one, when it gets its first put behind a wait; the main stream is
//! told by an event of its end, when something needs that: a signal to a peer whose puts are there,
//! a signal to oneself, the end of the slice.

use crate::pieces;

use super::abilities::StreamDevice;
use super::batch::Batch;
use super::bounce::{BUFFER_BYTES, Bounce};
use super::copies::Copies;
use super::queue::{Event, OwnStream};
use super::route::Whom;
use super::signal::Words;
use crate::device::{Between, DevicePtr, StreamHandle};

/// Memory operations that one op becomes at most, together with what brackets it.
const OPS_MAX: usize = 5;

/// A stream beside the main one, and the events between the two.
#[derive(Debug)]
pub(super) struct Side<D: StreamDevice> {
    stream: OwnStream<D>,
    ended: Event<D>,
    /// The main stream holds something that the next put here must come after.
    behind: bool,
    /// It holds puts that the main stream was not told of.
    open: bool,
}

impl<D: StreamDevice> Side<D> {
    pub(super) fn create(context: &D) -> Result<Self, D::Error> {
        Ok(Self {
            stream: OwnStream::create(context)?,
            ended: Event::create(context)?,
            behind: true,
            open: false,
        })
    }

    pub(super) fn stream(&self) -> &OwnStream<D> {
        &self.stream
    }
}

/// A flag that a captured slice sets while it waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Busy {
    pub(super) word: DevicePtr,
    /// Waits that are still to come.
    pub(super) waits: usize,
    pub(super) begun: bool,
}

/// Puts one slice onto its streams.
#[derive(Debug)]
pub(super) struct Emitter<'a, D: StreamDevice> {
    pub(super) context: &'a D,
    pub(super) main: StreamHandle,
    pub(super) sides: &'a mut [Side<D>],
    /// Where streams beside the main one start.
    pub(super) started: &'a Event<D>,
    /// It is recorded behind the last wait.
    pub(super) marked: bool,
    pub(super) batch: &'a mut Batch<D>,
    /// Copies that wait to go onto the stream of each track; while there are any, no batch is open.
    pub(super) copies: &'a mut [Copies],
    /// Whether copies go together; else at once.
    pub(super) together: bool,
    /// Where signals are copied from, if they are.
    pub(super) words: Option<&'a mut Words>,
    /// Where puts from host memory to host memory go through.
    pub(super) bounce: Option<&'a Bounce>,
    /// The largest copy in one piece.
    pub(super) piece_bytes_max: u64,
    pub(super) captured: bool,
    pub(super) busy: Option<Busy>,
    /// Commands on the main stream, and on those beside it together.
    pub(super) commands: [usize; 2],
}

impl<D: StreamDevice> Emitter<'_, D> {
    /// Begins behind what the main stream holds.
    pub(super) fn begin(&mut self) {
        // What a slice that failed has left.
        self.batch.clear();
        self.copies.iter_mut().for_each(Copies::clear);
        if let Some(words) = &mut self.words {
            words.forget_owed();
        }
        self.all_behind();
        self.sides.iter_mut().for_each(|side| side.open = false);
    }

    pub(super) fn put(
        &mut self,
        (dst, src): (DevicePtr, DevicePtr),
        (bytes, between, both_on_host): (u64, Between, bool),
        track: usize,
    ) -> Result<(), D::Error> {
        self.flush()?;
        let stream = match track.checked_sub(1) {
            None => self.main,
            Some(index) => {
                let side = &mut self.sides[index];
                let stream = side.stream.raw();
                if side.behind {
                    // One event serves all streams that start behind the same wait.
                    if !self.marked {
                        self.started.record(self.context, self.main)?;
                        self.marked = true;
                        self.commands[0] += 1;
                    }
                    self.started.hold(self.context, stream)?;
                    self.commands[1] += 1;
                    side.behind = false;
                }
                side.open = true;
                stream
            }
        };
        match self.bounce.filter(|_| both_on_host) {
            None => pieces(bytes, self.piece_bytes_max).try_for_each(|piece| {
                let places = (dst + piece.offset, src + piece.offset);
                self.copy(places, (piece.bytes, between), stream, track)
            }),
            Some(bounce) => pieces(bytes, BUFFER_BYTES).try_for_each(|piece| {
                let buffer = bounce.buffer(track);
                let piece_bytes = (piece.bytes, Between::Host);
                self.copy((buffer, src + piece.offset), piece_bytes, stream, track)?;
                self.copy((dst + piece.offset, buffer), piece_bytes, stream, track)
            }),
        }
    }

    fn copy(
        &mut self,
        (dst, src): (DevicePtr, DevicePtr),
        (bytes, between): (u64, Between),
        stream: StreamHandle,
        track: usize,
    ) -> Result<(), D::Error> {
        // The spans were checked against their regions, so they fit the address space.
        let length = bytes as usize;
        if self.copies[track].touch(dst, src, length) {
            self.issue(track, stream)?;
        }
        self.copies[track].push(dst, src, length, between);
        if self.together { Ok(()) } else { self.issue(track, stream) }
    }

    fn issue(&mut self, track: usize, stream: StreamHandle) -> Result<(), D::Error> {
        // SAFETY: the spans lie in regions that live (`submit`), or in the buffer of the track, which
        // is as long as a piece.
        let issued = unsafe { self.copies[track].issue(self.context, stream) }?;
        self.commands[track.min(1)] += issued;
        Ok(())
    }

    /// Puts all copies onto their streams, before a flag.
    fn issue_all(&mut self) -> Result<(), D::Error> {
        for track in 0..self.copies.len() {
            if !self.copies[track].is_empty() {
                let stream = match track.checked_sub(1) {
                    None => self.main,
                    Some(side) => self.sides[side].stream.raw(),
                };
                self.issue(track, stream)?;
            }
        }
        Ok(())
    }

    /// `track` is that of the puts to the same peer.
    pub(super) fn signal(
        &mut self,
        whom: Whom,
        track: Option<usize>,
        (flag, value): (DevicePtr, u64),
    ) -> Result<(), D::Error> {
        self.issue_all()?;
        self.make_room()?;
        match whom {
            Whom::Oneself => {
                self.join_all()?;
                self.pay()?;
            }
            // The event goes in front of the open batch; nothing in the batch is older than the puts
            // that it waits for, because a put closes the batch before it.
            Whom::Peer(_) => {
                if let Some(side) = track.and_then(|track| track.checked_sub(1)) {
                    self.join(side)?;
                    // A later put to this peer comes after the signal.
                    self.sides[side].behind = true;
                    self.marked = false;
                }
                if let Some(words) = &mut self.words {
                    return Ok(words.signal(self.batch, flag, value, self.captured)?);
                }
            }
        }
        if whom == Whom::Oneself {
            self.all_behind();
        }
        self.batch.write(flag, value);
        Ok(())
    }

    pub(super) fn wait(
        &mut self,
        flag: DevicePtr,
        value: u64,
        reset: bool,
    ) -> Result<(), D::Error> {
        self.issue_all()?;
        // Signals before a wait must be out: the peer may answer them.
        self.pay()?;
        self.make_room()?;
        self.all_behind();
        if let Some(busy) = &mut self.busy
            && !busy.begun
        {
            busy.begun = true;
            self.batch.write(busy.word, 1);
        }
        self.batch.wait(flag, value);
        if reset {
            self.batch.write(flag, 0);
        }
        if let Some(busy) = &mut self.busy {
            busy.waits -= 1;
            if busy.waits == 0 {
                self.batch.write(busy.word, 0);
            }
        }
        Ok(())
    }

    /// Ends the slice: everything joined, and everything on its stream.
    pub(super) fn end(&mut self) -> Result<(), D::Error> {
        self.issue_all()?;
        self.join_all()?;
        self.pay()?;
        self.flush()
    }

    /// How much of the fullest stream's queue the slice takes.
    pub(super) fn commands(&self) -> usize {
        self.commands.into_iter().max().unwrap_or(0)
    }

    fn all_behind(&mut self) {
        self.marked = false;
        self.sides.iter_mut().for_each(|side| side.behind = true);
    }

    fn join_all(&mut self) -> Result<(), D::Error> {
        (0..self.sides.len()).try_for_each(|side| self.join(side))
    }

    /// What the main stream gets next comes after the puts of this one.
    fn join(&mut self, side: usize) -> Result<(), D::Error> {
        let side = &mut self.sides[side];
        if side.open {
            side.open = false;
            side.ended.order(self.context, side.stream.raw(), self.main)?;
            self.commands = [self.commands[0] + 1, self.commands[1] + 1];
        }
        Ok(())
    }

    fn make_room(&mut self) -> Result<(), D::Error> {
        if self.batch.room() < OPS_MAX { self.flush() } else { Ok(()) }
    }

    /// Puts copied signals out before what must come after them.
    fn pay(&mut self) -> Result<(), D::Error> {
        match &self.words {
            Some(words) if words.owes() => self.flush(),
            _ => Ok(()),
        }
    }

    fn flush(&mut self) -> Result<(), D::Error> {
        if !self.batch.is_empty() {
            self.commands[0] += self.batch.commands();
            self.batch.issue(self.context, self.main)?;
        }
        if let Some(words) = &mut self.words {
            self.commands[0] += words.copy(self.context, self.main)?;
        }
        Ok(())
    }
}
