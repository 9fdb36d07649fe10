//! The all-gather as its callers see it: describe, prepare, start, wait.

mod access;
mod bound;
mod builder;
mod draft;
mod gathered;
mod lease;
mod method;
mod operations;
mod prepare;
mod request;
mod shards;

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{Deadline, Rank};

pub use builder::AllGatherBuilder;
pub use gathered::Gathered;
pub use lease::Lease;
pub use shards::Destination;
pub(in crate::group) use shards::bytes;

use self::bound::Finished;
use super::report::Report;
use super::window::{Entry, Inner};
use crate::element::Element;
use crate::error::Error;
use crate::layout::Layout;
use crate::plan::Source;
use crate::run::prepared::Prepared;
use crate::trace::{Trace, TracedLane};
use crate::window::HostView;

/// A prepared all-gather: the shard of every rank to every rank.
pub struct AllGather<T> {
    prepared: Prepared,
    view: Arc<dyn HostView>,
    report: Report,
    timeout: Duration,
    layout: Layout,
    rank: Rank,
    /// Where the own shard lies before a start.
    from: Source,
    output_buffers: u32,
    /// The windows that are its input and its output.
    windows: [Option<Arc<Inner>>; 2],
    /// Its entry among the users of windows.
    uses: Option<Entry>,
    elements: PhantomData<T>,
}

impl<T: Element> AllGather<T> {
    fn new(finished: Finished, uses: Option<Entry>) -> Self {
        let Finished { prepared, view, report, timeout, layout, rank, from, .. } = finished;
        let (output_buffers, windows) = (finished.output_buffers, finished.windows);
        let elements = PhantomData;
        Self {
            prepared,
            view,
            report,
            timeout,
            layout,
            rank,
            from,
            output_buffers,
            windows,
            uses,
            elements,
        }
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
        // Held until the start is open.
        let begun = self.uses.as_ref().map(|uses| uses.begin(false)).transpose()?;
        let epoch = self.prepared.start(deadline)?;
        drop(begun);
        Ok(Started { gather: self, epoch, deadline })
    }

    /// Puts a start onto the caller's stream, and returns as soon as it is there. Collective.
    ///
    /// *Order.* What the stream holds now comes before the start, and may fill the input and read
    /// the output of earlier starts. What the stream gets next comes after it, and may read the
    /// output and overwrite the input. So come starts of operations over one window, also of those
    /// that overlap, in the order of the streams. The [`Lease`] keeps the next start away until the reader of
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
    /// *Progress.* Lanes whose engines do not move or wait by themselves are driven by a thread of the
    /// group, the same for all its operations, which is started when it is first needed. With
    /// [`strict`](AllGatherBuilder::strict) such a start is refused.
    ///
    /// # Errors
    /// [`Mismatch`](peerlane_hal::ErrorKind::Mismatch) for a stream of another backend or device, and
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if it can take no start; nothing
    /// has started then. Else as [`run`](Self::run).
    pub fn start_on<S: Any>(&mut self, stream: &S) -> Result<Lease<'_, T>, Error> {
        let begun = self.uses.as_ref().map(|uses| uses.begin(true)).transpose()?;
        let start = self.prepared.start_on(stream, self.timeout)?;
        drop(begun);
        Ok(Lease::new(self, start))
    }

    /// What the starts so far did and when, where the operation was prepared with
    /// [`trace`](AllGatherBuilder::trace). Of starts that are open, what has been seen.
    pub fn trace(&self) -> Option<Trace> {
        let (starts, is_cut) = self.prepared.traced()?;
        let lanes = self.report.lanes.iter().map(|lane| TracedLane {
            lane: lane.lane,
            tier: lane.tier,
            backend: lane.backend.to_string(),
        });
        Some(Trace { rank: self.rank.0, lanes: lanes.collect(), starts, is_cut })
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
