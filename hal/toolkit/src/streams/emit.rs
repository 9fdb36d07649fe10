//! Enqueues the copies, signals and waits of one slice on the streams of an engine.
//!
//! The main stream carries flags, waits and about half of the puts. A side stream starts behind an event of
//! the main stream when it gets its first put after a wait. The main stream waits for an event at the end of
//! a side stream when one of these needs it: a signal to a peer with puts on that stream, a signal to this
//! rank, or the end of the slice.

use peerlane_hal::{Reduction, Rows};

use crate::device::{CopyKind, DevicePtr, StreamHandle};
use crate::pieces;

use super::StreamDevice;
use super::batches::{PendingCopies, SignalWords, WordBatch};
use super::resources::{BOUNCE_BYTES, BounceBuffers, Event, OwnStream};
use super::steps::Target;

const OPS_MAX: usize = 5;

/// A side stream for puts, with the event that joins it to the main stream.
#[derive(Debug)]
pub(super) struct SideStream<D: StreamDevice> {
    stream: OwnStream<D>,
    ended: Event<D>,
    must_follow: bool,
    /// Whether the stream holds copies for which the main stream has not waited yet.
    unjoined: bool,
}

impl<D: StreamDevice> SideStream<D> {
    pub(super) fn create(context: &D) -> Result<Self, D::Error> {
        Ok(Self {
            stream: OwnStream::create(context)?,
            ended: Event::create(context)?,
            must_follow: true,
            unjoined: false,
        })
    }

    pub(super) fn stream(&self) -> &OwnStream<D> {
        &self.stream
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Busy {
    pub(super) word: DevicePtr,
    pub(super) waits: usize,
    pub(super) begun: bool,
}

#[derive(Debug)]
pub(super) struct Emitter<'a, D: StreamDevice> {
    pub(super) context: &'a D,
    pub(super) main: StreamHandle,
    pub(super) sides: &'a mut [SideStream<D>],
    pub(super) started: &'a Event<D>,
    pub(super) started_recorded: bool,
    pub(super) batch: &'a mut WordBatch<D>,
    /// The copies that are not enqueued yet, by stream index; while there are any, no batch of flag operations
    /// is open.
    pub(super) copies: &'a mut [PendingCopies],
    /// Whether one driver call enqueues all pending copies of a stream; otherwise a copy is enqueued at once.
    pub(super) together: bool,
    /// Device words from which signals are copied to flags, or `None` if streams write flags directly.
    pub(super) words: Option<&'a mut SignalWords>,
    pub(super) bounce: Option<&'a BounceBuffers>,
    pub(super) piece_bytes_max: u64,
    /// The largest number of blocks of threads that run a reduction.
    pub(super) blocks: u32,
    pub(super) captured: bool,
    pub(super) busy: Option<Busy>,
    pub(super) commands: [usize; 2],
}

impl<D: StreamDevice> Emitter<'_, D> {
    pub(super) fn begin(&mut self) {
        // A slice that failed may have left operations.
        self.batch.clear();
        self.copies.iter_mut().for_each(PendingCopies::clear);
        if let Some(words) = &mut self.words {
            words.clear_pending();
        }
        self.all_must_follow();
        self.sides.iter_mut().for_each(|side| side.unjoined = false);
    }

    pub(super) fn put(
        &mut self,
        (dst, src): (DevicePtr, DevicePtr),
        (bytes, copy_kind, both_on_host): (u64, CopyKind, bool),
        stream_index: usize,
    ) -> Result<(), D::Error> {
        let stream = self.stream_for_put(stream_index)?;
        match self.bounce.filter(|_| both_on_host) {
            None => pieces(bytes, self.piece_bytes_max).try_for_each(|piece| {
                let ends = (dst + piece.offset, src + piece.offset);
                self.copy(ends, (piece.bytes, copy_kind), stream, stream_index)
            }),
            Some(bounce) => pieces(bytes, BOUNCE_BYTES).try_for_each(|piece| {
                let buffer = bounce.buffer(stream_index);
                let piece_bytes = (piece.bytes, CopyKind::Host);
                self.copy((buffer, src + piece.offset), piece_bytes, stream, stream_index)?;
                self.copy((dst + piece.offset, buffer), piece_bytes, stream, stream_index)
            }),
        }
    }

    pub(super) fn put_rows(
        &mut self,
        (dst, src): (DevicePtr, DevicePtr),
        (row_bytes, copy_kind): (u64, CopyKind),
        rows: Rows,
        stream_index: usize,
    ) -> Result<(), D::Error> {
        let stream = self.stream_for_put(stream_index)?;
        self.issue(stream_index, stream)?;
        self.commands[stream_index.min(1)] += 1;
        // SAFETY: the rows are in one region of each side, which is alive (`submit`). `Step::extend` or the check of the slice keeps
        // the rows of one side apart, and the contract of `submit` excludes a destination that is a source.
        unsafe { self.context.copy_rows(stream, dst, src, row_bytes as usize, rows, copy_kind) }
    }

    /// Enqueues a reduction behind the copies of this rank to itself, which are on the stream `own`.
    pub(super) fn reduce(
        &mut self,
        (dst, srcs): (DevicePtr, &[DevicePtr]),
        bytes: u64,
        reduction: Reduction,
        own: usize,
    ) -> Result<(), D::Error> {
        self.issue_all()?;
        if let Some(side) = own.checked_sub(1) {
            self.join(side)?;
        }
        self.flush()?;
        self.all_must_follow();
        self.commands[0] += 1;
        // SAFETY: the spans are in regions that are alive (`submit`), and aligned (`resolve`). The slice was accepted because
        // the device has a reducer (`check_slice`).
        unsafe { self.context.reduce(self.main, dst, srcs, bytes, reduction, self.blocks) }
    }

    fn stream_for_put(&mut self, stream_index: usize) -> Result<StreamHandle, D::Error> {
        self.flush()?;
        Ok(match stream_index.checked_sub(1) {
            None => self.main,
            Some(index) => {
                let side = &mut self.sides[index];
                let stream = side.stream.raw();
                if side.must_follow {
                    // One event serves all side streams that start behind the same wait.
                    if !self.started_recorded {
                        self.started.record(self.context, self.main)?;
                        self.started_recorded = true;
                        self.commands[0] += 1;
                    }
                    self.started.block(self.context, stream)?;
                    self.commands[1] += 1;
                    side.must_follow = false;
                }
                side.unjoined = true;
                stream
            }
        })
    }

    fn copy(
        &mut self,
        (dst, src): (DevicePtr, DevicePtr),
        (bytes, copy_kind): (u64, CopyKind),
        stream: StreamHandle,
        stream_index: usize,
    ) -> Result<(), D::Error> {
        // The spans were checked against their regions, so they fit the address space.
        let length = bytes as usize;
        if self.copies[stream_index].conflicts(dst, src, length) {
            self.issue(stream_index, stream)?;
        }
        self.copies[stream_index].push(dst, src, length, copy_kind);
        if self.together { Ok(()) } else { self.issue(stream_index, stream) }
    }

    fn issue(&mut self, stream_index: usize, stream: StreamHandle) -> Result<(), D::Error> {
        // SAFETY: the spans are in regions that are alive (`submit`), or in the buffer of the stream, which
        // is as long as a piece.
        let issued = unsafe { self.copies[stream_index].issue(self.context, stream) }?;
        self.commands[stream_index.min(1)] += issued;
        Ok(())
    }

    fn issue_all(&mut self) -> Result<(), D::Error> {
        for stream_index in 0..self.copies.len() {
            if !self.copies[stream_index].is_empty() {
                let stream = match stream_index.checked_sub(1) {
                    None => self.main,
                    Some(side) => self.sides[side].stream.raw(),
                };
                self.issue(stream_index, stream)?;
            }
        }
        Ok(())
    }

    pub(super) fn signal(
        &mut self,
        target: Target,
        stream_index: Option<usize>,
        (flag, value): (DevicePtr, u64),
    ) -> Result<(), D::Error> {
        self.issue_all()?;
        self.make_room()?;
        match target {
            Target::Own => {
                self.join_all()?;
                self.flush_signals()?;
            }
            // The event goes in front of the open batch. All operations of the batch are newer than the puts
            // that the event waits for, because a put closes the batch.
            Target::Peer(_) => {
                if let Some(side) =
                    stream_index.and_then(|stream_index| stream_index.checked_sub(1))
                {
                    self.join(side)?;
                    // A later put to this peer is ordered after the signal.
                    self.sides[side].must_follow = true;
                    self.started_recorded = false;
                }
                if let Some(words) = &mut self.words {
                    return Ok(words.signal(self.batch, flag, value, self.captured)?);
                }
            }
        }
        if target == Target::Own {
            self.all_must_follow();
        }
        self.write(flag, value);
        Ok(())
    }

    pub(super) fn wait(
        &mut self,
        flag: DevicePtr,
        value: u64,
        reset: bool,
    ) -> Result<(), D::Error> {
        self.issue_all()?;
        // Signals before a wait must be sent, since the peer may answer them.
        self.flush_signals()?;
        self.make_room()?;
        self.all_must_follow();
        if let Some(busy) = &mut self.busy
            && !busy.begun
        {
            busy.begun = true;
            self.batch.write(busy.word, 1);
        }
        match self.captured {
            true => self.batch.wait_captured(flag, value),
            false => self.batch.wait(flag, value),
        }
        if reset {
            self.write(flag, 0);
        }
        if let Some(busy) = &mut self.busy {
            busy.waits -= 1;
            if busy.waits == 0 {
                self.batch.write(busy.word, 0);
            }
        }
        Ok(())
    }

    fn write(&mut self, flag: DevicePtr, value: u64) {
        match self.captured {
            true => self.batch.write_captured(flag, value),
            false => self.batch.write(flag, value),
        }
    }

    pub(super) fn end(&mut self) -> Result<(), D::Error> {
        self.issue_all()?;
        self.join_all()?;
        self.flush_signals()?;
        self.flush()
    }

    pub(super) fn commands(&self) -> usize {
        self.commands.into_iter().max().unwrap_or(0)
    }

    fn all_must_follow(&mut self) {
        self.started_recorded = false;
        self.sides.iter_mut().for_each(|side| side.must_follow = true);
    }

    fn join_all(&mut self) -> Result<(), D::Error> {
        (0..self.sides.len()).try_for_each(|side| self.join(side))
    }

    fn join(&mut self, side: usize) -> Result<(), D::Error> {
        let side = &mut self.sides[side];
        if side.unjoined {
            side.unjoined = false;
            side.ended.order(self.context, side.stream.raw(), self.main)?;
            self.commands = [self.commands[0] + 1, self.commands[1] + 1];
        }
        Ok(())
    }

    fn make_room(&mut self) -> Result<(), D::Error> {
        if self.batch.room() < OPS_MAX { self.flush() } else { Ok(()) }
    }

    fn flush_signals(&mut self) -> Result<(), D::Error> {
        match &self.words {
            Some(words) if words.has_pending() => self.flush(),
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
