//! The all-gather as its callers see it: describe, prepare, start, wait.

mod builder;
mod draft;
mod lease;
mod prepare;
mod ready;

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::Deadline;

pub use builder::AllGatherBuilder;
pub use lease::Lease;
pub(in crate::group) use prepare::shard_bytes;

use self::ready::Finished;
use super::buffer;
use super::place::Place;
use super::report::Report;
use crate::element::{self, Element};
use crate::error::Error;
use crate::run::prepared::Prepared;
use crate::run::turns::Start;
use crate::window::HostView;

/// A prepared all-gather: the shard of every rank, in rank order, to every rank.
pub struct AllGather<T> {
    prepared: Prepared,
    view: Arc<dyn HostView>,
    report: Report,
    timeout: Duration,
    /// Where the own shard begins in the region that holds it, in bytes; in place there is one output.
    offset: u64,
    elements: PhantomData<T>,
}

impl<T: Element> AllGather<T> {
    fn new(finished: Finished) -> Self {
        let Finished { prepared, view, report, timeout, offset } = finished;
        Self { prepared, view, report, timeout, offset, elements: PhantomData }
    }

    /// The own shard, to fill before a start; waits for a start that is still open.
    ///
    /// # Errors
    /// The group's end, or if only a device can write it.
    pub fn input_mut(&mut self) -> Result<&mut [T], Error> {
        self.settle()?;
        // SAFETY: no start is open, so no engine of this rank reads it, and no peer writes to the
        // own shard at all; `&mut self` keeps the next start away.
        let bytes = unsafe { buffer::bytes_mut(self.view.input()) }?;
        element::cast_mut(&mut bytes[host_span(self.offset, self.report.shard_bytes)])
    }

    /// What the last start gathered: shard after shard in rank order.
    ///
    /// # Errors
    /// The group's end: then the bytes are worthless. Or if only a device can read them.
    pub fn output(&mut self) -> Result<&[T], Error> {
        self.settle()?;
        let span = self.output_span();
        // SAFETY: no start is open, and until the next start peers write at most to the other
        // output: to this one only between this rank's `ready` and their `arrived`, or after it has
        // entered the next start. `&mut self` keeps that away.
        element::cast(&unsafe { buffer::bytes(self.view.output()) }?[span])
    }

    /// The same, to write: as scratch, or to poison it.
    ///
    /// # Errors
    /// As [`output`](Self::output).
    pub fn output_mut(&mut self) -> Result<&mut [T], Error> {
        self.settle()?;
        let span = self.output_span();
        // SAFETY: as for `output`.
        element::cast_mut(&mut unsafe { buffer::bytes_mut(self.view.output()) }?[span])
    }

    /// The bytes of the last start's output in the region of all outputs.
    fn output_span(&self) -> Range<usize> {
        let begin = self.view.output_offset(Start::Eager(self.prepared.started()));
        host_span(begin, self.report.total_bytes)
    }

    /// Starts, and waits until every shard is here. Collective.
    ///
    /// # Errors
    /// [`Timeout`](peerlane_hal::ErrorKind::Timeout) and
    /// [`PeerLost`](peerlane_hal::ErrorKind::PeerLost), naming the rank;
    /// either ends the group.
    pub fn run(&mut self) -> Result<(), Error> {
        self.start()?.wait()
    }

    /// Starts. The returned handle waits for the end; meanwhile peers may read the input and write
    /// to the output. Collective. Where the fabric's engines are driven by their caller, bytes move
    /// while this rank is in [`Started::wait`] or [`Started::poll`].
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn start(&mut self) -> Result<Started<'_, T>, Error> {
        self.settle()?;
        let deadline = Deadline::after(self.timeout);
        let epoch = self.prepared.start(deadline)?;
        Ok(Started { gather: self, epoch, deadline })
    }

    /// Puts a start onto the caller's stream, and returns as soon as it is there. Collective.
    ///
    /// *Order.* What the stream holds now comes before the start, and may fill the input and read
    /// the output of earlier starts. What the stream gets next comes after it, and may read the
    /// output and overwrite the input. The [`Lease`] keeps the next start away until the reader of
    /// this output is on the stream as well. The host is not part of that order: before a
    /// [`start`](Self::start) or an access such as [`input_mut`](Self::input_mut), synchronise the
    /// streams that still use the memory.
    ///
    /// *Deadline.* A start is overdue when its timeout has passed since it was made and since the
    /// start before it was seen to be complete, work that the stream held before it included. That
    /// is noticed also if nobody waits; then the group ends, the stream goes on, and the outputs of
    /// unfinished starts are worthless. So ask before results leave the program: the next call on
    /// this handle, such as [`Lease::wait`], returns the error.
    ///
    /// *Capture.* On a stream that is being captured the start is recorded, if the operation was
    /// prepared as [`capturable`](AllGatherBuilder::capturable).
    ///
    /// With engines that are driven by their caller, a start moves only in [`Lease::poll`] and
    /// [`Lease::wait`].
    ///
    /// # Errors
    /// [`Mismatch`](peerlane_hal::ErrorKind::Mismatch) for a stream of another backend or device, and
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if it can take no start; nothing
    /// has started then. Else as [`run`](Self::run).
    pub fn start_on<S: Any>(&mut self, stream: &S) -> Result<Lease<'_, T>, Error> {
        let start = self.prepared.start_on(stream, self.timeout)?;
        Ok(Lease::new(self, start))
    }

    /// Where the own shard lies: for work that is put onto a stream before a start, or done when no
    /// start is open.
    pub fn input_place(&self) -> Place {
        Place::within(self.view.input(), self.offset, self.report.shard_bytes)
    }

    /// Where the last start gathers; with two outputs in turn, the next one uses the other.
    pub fn output_place(&self) -> Place {
        self.place_of_output(Start::Eager(self.prepared.started()))
    }

    fn place_of_output(&self, start: Start) -> Place {
        let offset = self.view.output_offset(start);
        Place::within(self.view.output(), offset, self.report.total_bytes)
    }

    /// How it runs.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Waits for a start whose handle was dropped.
    fn settle(&mut self) -> Result<(), Error> {
        self.prepared.settle(self.timeout)
    }
}

fn host_span(begin: u64, bytes: u64) -> Range<usize> {
    let index = |at| usize::try_from(at).expect("a host region fits the address space");
    index(begin)..index(begin + bytes)
}

/// A start that is under way.
#[must_use = "a start is finished by `wait`"]
pub struct Started<'a, T> {
    gather: &'a mut AllGather<T>,
    epoch: u64,
    deadline: Deadline,
}

impl<T: Element> Started<'_, T> {
    /// Waits until every shard is here.
    ///
    /// # Errors
    /// As [`AllGather::run`].
    pub fn wait(self) -> Result<(), Error> {
        self.gather.prepared.wait(self.epoch, Some(self.deadline))
    }

    /// Whether every shard is here; never waits.
    ///
    /// # Errors
    /// As [`AllGather::run`], but for the deadline.
    pub fn poll(&mut self) -> Result<bool, Error> {
        self.gather.prepared.poll(self.epoch)
    }

    /// The number of this start, from 1.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}

impl<T> fmt::Debug for AllGather<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllGather").field("report", &self.report).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Started<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Started").field("epoch", &self.epoch).finish_non_exhaustive()
    }
}
