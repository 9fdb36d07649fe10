//! Describes collective operations by a builder, prepares them once, and starts them any number of
//! times.
//!
//! | file | holds |
//! | --- | --- |
//! | `constructors.rs` | the methods of [`Group`](super::Group) that describe operations |
//! | `builder.rs` | the options of an operation |
//! | `lens.rs` | the lengths of blocks and the destinations of a list, as the caller gives them |
//! | `request.rs` | the description of an operation and the placement of its data in buffers and windows |
//! | `choice.rs` | the choice of engines, form, algorithm and chunks |
//! | `plan.rs` | the plan of this rank and its proof |
//! | `memory.rs` | the caller's buffers, windows and blocks of the heap |
//! | `prepare.rs`, `report.rs` | the agreement between ranks, the executor and the report |
//! | `prepared.rs`, `first_polls.rs` | the handle of a prepared plan: start, poll, wait |
//! | `started.rs` | the handles of starts that are not complete |
//! | `lease.rs` | the handle of a start on a stream |
//! | `handles.rs` | arrivals and departures of single blocks |
//! | `beside.rs` | the handle of a start beside a stream |
//! | `resize.rs` | lengths and places of single starts |
//! | `all_to_all_v.rs` | all-to-alls whose starts exchange their counts |
//! | `counts.rs` | the counts of such a start, and their checks |
//! | `access.rs` | input and output between starts, by address, as bytes and as elements |
//!
//! Only the access to elements depends on their type. Everything else is in `State`, or in methods
//! that operations of all types have, also [those](UntypedOperation) whose type is chosen at run
//! time.

mod access;
mod all_to_all_v;
mod beside;
mod builder;
mod choice;
mod constructors;
mod counts;
mod execution;
mod first_polls;
mod fused;
mod handles;
mod lease;
mod lens;
mod memory;
mod plan;
mod prepare;
mod prepared;
mod report;
mod request;
mod resize;
mod started;

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{Deadline, DynRegion, ErrorKind, Rank, Stream};

pub use access::OutputPart;
pub(in crate::group) use all_to_all_v::Intent;
pub use all_to_all_v::{AllToAllV, AllToAllVBuilder};
pub use beside::{BesideStart, OwnedBesideStart};
pub use builder::{Matrix, OperationBuilder, OperationDescription};
pub use counts::SendCounts;
pub(in crate::group) use counts::StartElements;
pub use handles::{Arrival, BlockChunk, BlockPart};
pub use lease::Lease;
pub(in crate::group) use lens::bytes;
pub use lens::{BlockLens, Destination};
pub(in crate::group) use plan::Proofs;
pub use resize::Part;
pub use started::{OwnedStart, Started};

use self::handles::Chunks;
use self::prepared::Prepared;
use self::resize::Resizing;
use super::report::Report;
use super::stats::CountedBuffers;
use super::window::{BegunStart, Inner, WindowUse};
use crate::element::{DType, Element, Untyped};
use crate::error::Error;
use crate::layout::Layout;
use crate::plan::Source;
use crate::run::buffers::{BufferId, OperationBuffers, Start};
use crate::trace::{Trace, TracedLane};

/// A prepared collective operation with its input and output memory, which can start any number of
/// times.
///
/// [`Group`](super::Group) describes operations with methods such as
/// [`all_gather`](super::Group::all_gather), and [`prepare`](OperationBuilder::prepare) makes one.
/// An operation can start any number of times. The caller fills the input between starts, calls
/// [`run`](Self::run), and reads the output.
///
/// ```
/// use peerlane::bootstrap::{Bootstrap, in_process};
/// use peerlane::{Group, host};
///
/// in_process::run(2, |bootstrap| {
///     let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
///     let mut group = Group::open(bootstrap, fabric)?;
///     let mut gather = group.all_gather::<i32>(1).prepare()?;
///     for step in 0..3 {
///         gather.input_mut()?[0] = 10 * step + group.rank().0 as i32;
///         gather.run()?;
///         assert_eq!(gather.output()?, [10 * step, 10 * step + 1]);
///     }
///     group.close()
/// })
/// .unwrap();
/// ```
pub struct Operation<T> {
    state: State,
    elements: PhantomData<T>,
}

/// An operation whose element type is a value, which is chosen at run time.
///
/// [`Group::untyped_operation`](super::Group::untyped_operation) describes one. It has the methods
/// of an [`Operation`] that do not name elements: starts, addresses such as
/// [`input_memory`](Operation::input_memory), and the bytes of its memory, by
/// [`input_bytes_mut`](Operation::input_bytes_mut) and [`output_bytes`](Operation::output_bytes).
/// Operations of different types can so be in one collection; see also
/// [`Operation::into_untyped`].
pub type UntypedOperation = Operation<Untyped>;

/// What operations of all element types are made of.
struct State {
    /// Declared before `prepared`, whose drop tells that the operation uses no memory any more.
    view: Arc<OperationBuffers>,
    prepared: Prepared,
    /// The last start that this rank has made on the host, enqueued or recorded.
    last: Start,
    report: Report,
    timeout: Duration,
    dtype: DType,
    layout: Layout,
    rank: Rank,
    from: Source,
    output_buffers: u32,
    windows: [Option<Arc<Inner>>; 2],
    /// Declared before `uses`, because the starts of its other plans end when it is dropped.
    resizing: Option<Box<Resizing>>,
    uses: Option<WindowUse>,
    /// The chunks whose arrival and departure starts can tell.
    chunks: Chunks,
    _buffers: CountedBuffers,
}

/// A start of the host, and the time at which the group ends if it is not complete.
#[derive(Clone, Copy, Debug)]
pub(in crate::group) struct OpenStart {
    epoch: u64,
    deadline: Deadline,
}

impl State {
    /// Starts the operation after its earlier starts are complete.
    fn start(&mut self) -> Result<OpenStart, Error> {
        self.start_after(|| Ok(()))
    }

    /// Starts the operation after its earlier starts are complete and `before` has written to its
    /// memory.
    fn start_after(
        &mut self,
        before: impl FnOnce() -> Result<(), Error>,
    ) -> Result<OpenStart, Error> {
        self.settle()?;

        let deadline = Deadline::after(self.timeout);
        // Held until the start is open.
        let begun = begin_use(&self.uses, &self.prepared, false)?;
        before()?;
        let epoch = self.prepared.start(deadline, self.chunks.any())?;
        drop(begun);
        self.last = Start::Eager(epoch);
        Ok(OpenStart { epoch, deadline })
    }

    /// Makes a start after the earlier ones are complete, and waits for it.
    fn run(&mut self) -> Result<(), Error> {
        self.settle()?;

        // Held until the start is open.
        let begun = begin_use(&self.uses, &self.prepared, false)?;
        let (epoch, deadline) = self.prepared.run(self.timeout)?;
        drop(begun);

        self.last = Start::Eager(epoch);
        match deadline {
            Some(deadline) => self.prepared.wait(epoch, Some(deadline)),
            None => Ok(()),
        }
    }

    fn wait(&self, start: OpenStart) -> Result<(), Error> {
        self.prepared.wait(start.epoch, Some(start.deadline))
    }

    fn start_on<S: Stream>(&mut self, stream: &S) -> Result<Start, Error> {
        self.start_on_after(stream, || Ok(()))
    }

    /// Starts the operation on a stream, on which `before` has enqueued what writes to its memory.
    fn start_on_after<S: Stream>(
        &mut self,
        stream: &S,
        before: impl FnOnce() -> Result<(), Error>,
    ) -> Result<Start, Error> {
        // Held until the start is open.
        let begun = begin_use(&self.uses, &self.prepared, true)?;
        before()?;
        let start = self.prepared.start_on(stream, self.timeout)?;
        drop(begun);
        self.last = start;
        Ok(start)
    }

    /// Waits for open starts, of all plans of the operation.
    fn settle(&self) -> Result<(), Error> {
        if let Some(resizing) = &self.resizing {
            resizing.settle_others(self.timeout)?;
        }
        self.prepared.settle(self.timeout)
    }

    /// Returns the region of a buffer, and the place of `bytes` of the buffer in it.
    fn memory(&self, buffer: BufferId, bytes: Range<u64>) -> (&DynRegion, Range<u64>) {
        let (region, all) = self.view.memory(buffer);
        (region, all.start + bytes.start..all.start + bytes.end)
    }

    fn buffer_bytes(&self, buffer: BufferId) -> u64 {
        let (_, all) = self.view.memory(buffer);
        all.end - all.start
    }

    fn trace(&self) -> Option<Trace> {
        let (starts, is_cut) = self.prepared.traced()?;

        let lanes = self.report.lanes.iter().map(|lane| TracedLane {
            lane: lane.lane,
            tier: lane.tier,
            backend: lane.backend.to_string(),
        });
        Some(Trace { rank: self.rank.0, lanes: lanes.collect(), starts, is_cut })
    }
}

/// Begins the use of the windows by a start. If it is refused, the ranks that wait for the start
/// learn why when they ask.
fn begin_use<'u>(
    uses: &'u Option<WindowUse>,
    prepared: &Prepared,
    on_stream: bool,
) -> Result<Option<BegunStart<'u>>, Error> {
    let begun = uses.as_ref().map(|uses| uses.begin(on_stream)).transpose();
    begun.inspect_err(|error| prepared.note_refusal(error))
}

impl<T> Operation<T> {
    fn new(state: State) -> Self {
        Self { state, elements: PhantomData }
    }

    /// Forgets the element type, which [`dtype`](Self::dtype) returns afterwards.
    pub fn into_untyped(self) -> UntypedOperation {
        Operation::new(self.state)
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.state.dtype
    }

    /// Starts the operation and waits until its output is complete. Collective.
    ///
    /// If the group ends meanwhile, the run succeeds on the ranks that saw it complete before they
    /// learned of the end. On the others the output is undefined, because peers may already write
    /// the next one.
    ///
    /// # Errors
    /// [`Timeout`](peerlane_hal::ErrorKind::Timeout) and
    /// [`PeerLost`](peerlane_hal::ErrorKind::PeerLost), which name the rank; either ends the group.
    pub fn run(&mut self) -> Result<(), Error> {
        self.state.run()
    }

    /// Enqueues the operation on the caller's stream and returns at once. Collective.
    ///
    /// *Order.* The start comes after the work that the stream holds now, which may fill the input
    /// and read the output of earlier starts. Work that is enqueued next comes after the start, and
    /// may read the output and overwrite the input. Starts of operations over one window are
    /// ordered in the same way. The [`Lease`] prevents the next start until the work that reads
    /// this output is on the stream. The host is not part of that order: synchronise the streams
    /// that use the memory before a [`start`](Self::start) or an access such as
    /// [`input_mut`](Self::input_mut).
    ///
    /// *Deadline.* The timeout of a start begins when it is enqueued, or when the start before it
    /// was seen to be complete, whichever is later. It includes the work that the stream held
    /// before. If the timeout passes, the group ends even if no thread waits: the stream continues,
    /// and the outputs of unfinished starts are undefined. Check for an error before results leave
    /// the program: the next call on this handle, such as [`Lease::wait`], returns it.
    ///
    /// *Capture.* On a stream that is being captured the start is recorded into the graph, if the
    /// operation was prepared as [`capturable`](OperationBuilder::capturable). If a replayed start
    /// waits for a peer for longer than the timeout, the group ends, and the waits of this and
    /// later replays pass. Call [`check`](Self::check) between replays.
    ///
    /// *Progress.* A thread of the group drives the lanes whose engines do not move or wait by
    /// themselves. It serves all operations and is started when it is first needed. With
    /// [`strict`](OperationBuilder::strict) such a start is refused.
    ///
    /// # Errors
    /// [`Mismatch`](peerlane_hal::ErrorKind::Mismatch) for a stream of another backend or device,
    /// and [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if the stream can take no
    /// start; nothing has started then. Otherwise as [`run`](Self::run).
    pub fn start_on<S: Stream>(&mut self, stream: &S) -> Result<Lease<'_, T>, Error> {
        let start = self.state.start_on(stream)?;
        Ok(Lease::new(self, start))
    }

    /// Returns the error that has ended the group, if one has. Costs one atomic load.
    ///
    /// A caller that replays a graph calls no other function that would return it. The outputs of a
    /// replay are defined only if this succeeds after the replay is complete.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn check(&self) -> Result<(), Error> {
        self.state.prepared.check()
    }

    /// Returns the recorded times of the operation's steps, if it was prepared with
    /// [`trace`](OperationBuilder::trace).
    ///
    /// Of starts that are not complete, it contains the steps seen so far.
    pub fn trace(&self) -> Option<Trace> {
        self.state.trace()
    }

    /// Returns the report that says how the operation runs, with its algorithm, lanes, links and
    /// fallbacks.
    pub fn report(&self) -> &Report {
        &self.state.report
    }

    /// Notes that the caller has refused to start the operation, as
    /// [`Group::note_refusal`](crate::group::Group::note_refusal).
    pub fn note_refusal(&self, error: &Error) {
        self.state.prepared.note_refusal(error);
    }

    /// Starts the operation after `before` has written to its memory.
    pub(in crate::group) fn start_after(
        &mut self,
        before: impl FnOnce() -> Result<(), Error>,
    ) -> Result<OpenStart, Error> {
        self.state.start_after(before)
    }

    /// Starts the operation on a stream, on which `before` has enqueued what writes to its memory.
    pub(in crate::group) fn start_on_after<S: Stream>(
        &mut self,
        stream: &S,
        before: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.state.start_on_after(stream, before).map(drop)
    }

    /// Waits for a start, and returns whether it is complete.
    pub(in crate::group) fn wait_for_start(
        &self,
        start: OpenStart,
        patience: Patience,
    ) -> Result<bool, Error> {
        let OpenStart { epoch, deadline } = start;
        let prepared = &self.state.prepared;
        match patience {
            Patience::None => prepared.poll(epoch),
            Patience::Part(part) => {
                prepared.wait_part(epoch, Some(deadline), Deadline::after(part))
            }
            Patience::Limit(limit) => {
                prepared.wait_until(epoch, Some(deadline), Some(Deadline::after(limit)))
            }
            Patience::Whole => prepared.wait(epoch, Some(deadline)).map(|()| true),
        }
    }

    /// Waits for open starts.
    pub(in crate::group) fn settle(&self) -> Result<(), Error> {
        self.state.settle()
    }

    /// Returns the index of the plan that the next start uses: 0 for the longest starts, then those
    /// of [`Report::shorter`] in their order.
    pub(in crate::group) fn current_plan(&self) -> usize {
        self.state.resizing.as_ref().map_or(0, |resizing| resizing.current_plan())
    }

    /// Returns whether the host compares the lengths and places of a start before bytes move.
    pub(in crate::group) fn compares_before_copies(&self) -> bool {
        self.state.prepared.is_polled()
    }

    /// Sets how long the next starts may take.
    pub(in crate::group) fn set_timeout(&mut self, timeout: Duration) {
        let state = &mut self.state;
        if state.timeout == timeout {
            return;
        }

        state.timeout = timeout;
        state.prepared.tracker().set_timeout(timeout);
        if let Some(resizing) = &state.resizing {
            resizing.set_timeout_of_others(timeout);
        }
    }
}

/// How long a caller waits for a start.
#[derive(Clone, Copy, Debug)]
pub(in crate::group) enum Patience {
    /// It looks once.
    None,
    /// This long, as one of several waits.
    Part(Duration),
    /// This long.
    Limit(Duration),
    /// Until the start is complete or late.
    Whole,
}

impl<T: Element> Operation<T> {
    /// Runs the operation on any memory of the host: copies `input` to the input of the operation,
    /// and its output to `output`. Collective.
    ///
    /// Memory that is not registered is staged like this. To save the copies, fill
    /// [`input_mut`](Self::input_mut) and read [`output`](Self::output), or use a window over
    /// registered memory.
    ///
    /// # Errors
    /// As [`run`](Self::run); [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if a
    /// slice has another length than the input or output;
    /// [`Unavailable`](peerlane_hal::ErrorKind::Unavailable) with
    /// [`strict`](OperationBuilder::strict); as [`input_mut`](Self::input_mut) and
    /// [`output`](Self::output).
    pub fn run_with(&mut self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        if self.state.prepared.is_strict() {
            let text = "strict is set, but `run_with` copies input and output through the memory of the operation; fill \
                        `input_mut`, use a window over registered memory, or turn strict off";
            return Err(Error::new(ErrorKind::Unavailable, text));
        }

        let check = |what, found: usize, expected: usize| {
            let text = format!("the {what} has {found} elements, expected {expected}");
            let error = || Error::new(ErrorKind::InvalidArgument, text);
            if found == expected { Ok(()) } else { Err(error()) }
        };
        check("output", output.len(), self.output()?.len())?;
        let staged = self.input_mut()?;
        check("input", input.len(), staged.len())?;

        staged.copy_from_slice(input);
        self.run()?;
        output.copy_from_slice(self.output()?);
        Ok(())
    }
}

impl<T> fmt::Debug for Operation<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation").field("report", &self.state.report).finish_non_exhaustive()
    }
}
