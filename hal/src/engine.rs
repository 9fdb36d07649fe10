//! Defines copy engines, which are in-order queues of puts, gets, signals, waits and reductions.

use std::any::Any;
use std::fmt;
use std::task::Waker;
use std::time::Duration;

use crate::error::Error;
use crate::fused::{Launch, ProgressReader};
use crate::reduction::Reduction;

/// A byte position in a region, as the source or destination of a copy.
#[derive(Debug)]
pub struct At<'a, M> {
    /// The local or imported region that the copy reads or writes.
    pub region: &'a M,
    /// The offset from the start of the region in bytes.
    pub offset: u64,
}

/// A flag, an aligned 64-bit word of a region that one rank signals and another waits for.
///
/// It is addressed by word and not by byte, so it cannot be misaligned and cannot be confused with
/// data.
#[derive(Debug)]
pub struct Flag<'a, M> {
    /// The region that holds the flag, registered as [`Role::Flags`](crate::Role::Flags).
    pub region: &'a M,
    /// The offset of the flag from the start of the region in 64-bit words.
    pub word: u64,
}

// A derive would require `M: Copy`, although a reference is always `Copy`.
impl<M> Clone for At<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<M> Copy for At<'_, M> {}
impl<M> Clone for Flag<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<M> Copy for Flag<'_, M> {}

/// A put, get, signal, wait or reduction that an engine runs.
///
/// A rank is its own peer too: with a region imported from itself, a put is a local copy and a
/// signal a local store.
///
/// Ops are added together with a capability in [`Caps`], which engines have only if they set it. So
/// an engine refuses every op that it does not know, and is then as complete as before.
#[derive(Debug)]
#[cfg_attr(not(peerlane_workspace), non_exhaustive)]
pub enum Op<'a, L, R> {
    /// Copies `bytes` bytes from this rank to a peer. Zero bytes are allowed.
    Put {
        /// The destination, in imported memory of the peer.
        dst: At<'a, R>,
        /// The source, in memory of this rank.
        src: At<'a, L>,
        /// The number of bytes to copy, which may be 0.
        bytes: u64,
    },
    /// Copies `bytes` bytes from a peer to this rank. Zero bytes are allowed.
    Get {
        /// The destination, in memory of this rank.
        dst: At<'a, L>,
        /// The source, in imported memory of the peer.
        src: At<'a, R>,
        /// The number of bytes to copy, which may be 0.
        bytes: u64,
    },
    /// Copies rows of equal length from this rank to a peer, like one [`Put`](Self::Put) for each
    /// row, which may take effect in any order among themselves.
    ///
    /// Only an engine with [`Caps::rows`] runs it.
    PutRows {
        /// The destination of the first row, in imported memory of the peer.
        dst: At<'a, R>,
        /// The source of the first row, in memory of this rank.
        src: At<'a, L>,
        /// The number of bytes of a row, which may be 0.
        bytes: u64,
        /// The number of rows and their pitches.
        rows: Rows,
    },
    /// Copies rows of equal length from a peer to this rank, like one [`Get`](Self::Get) for each
    /// row.
    ///
    /// Only an engine with [`Caps::rows`] and [`Caps::gets`] runs it.
    GetRows {
        /// The destination of the first row, in memory of this rank.
        dst: At<'a, L>,
        /// The source of the first row, in imported memory of the peer.
        src: At<'a, R>,
        /// The number of bytes of a row, which may be 0.
        bytes: u64,
        /// The number of rows and their pitches.
        rows: Rows,
    },
    /// Stores `value` in a flag of a peer, after all earlier puts to that peer and gets from it.
    Signal {
        /// The flag in which the engine stores the value. No other engine may write the flag.
        flag: Flag<'a, R>,
        /// The value to store in the flag.
        value: u64,
    },
    /// Blocks the ops that follow in the queue until a flag of this rank has at least `value`.
    Wait {
        /// The flag that the engine waits for. No other engine may read the flag.
        flag: Flag<'a, L>,
        /// The smallest flag value that ends the wait.
        value: u64,
        /// Whether the engine sets the flag to 0 before it runs the ops that follow the wait.
        /// Captured starts need this, because their values are constants.
        reset: bool,
    },
    /// Combines memory of this rank element by element, and writes the result to memory of this
    /// rank.
    ///
    /// Only an engine that has [prepared](CopyEngine::prepare_reduce) reductions runs it.
    Reduce {
        /// The destination, which may be one of the sources and overlaps no other.
        dst: At<'a, L>,
        /// The sources in the order in which they are combined, at least one.
        srcs: &'a [At<'a, L>],
        /// The number of bytes of the destination and of each source, which may be 0.
        bytes: u64,
        /// The operator and the type of the elements. Offsets, addresses and `bytes` are multiples
        /// of the size of an element.
        reduction: Reduction,
    },
}

impl<L, R> Clone for Op<'_, L, R> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<L, R> Copy for Op<'_, L, R> {}

impl<L, R> Op<'_, L, R> {
    /// Returns the name of the op in texts, such as `put`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Put { .. } => "put",
            Self::Get { .. } => "get",
            Self::PutRows { .. } => "put of rows",
            Self::GetRows { .. } => "get of rows",
            Self::Signal { .. } => "signal",
            Self::Wait { .. } => "wait",
            Self::Reduce { .. } => "reduction",
        }
    }
}

/// The number of rows of a strided copy, and the distances between them.
///
/// If there is more than one row, no distance is less than the length of a row, so that rows do not
/// overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The number of rows, which may be 0.
    pub count: u64,
    /// The number of bytes from the beginning of a row of the destination to that of the next.
    pub dst_pitch: u64,
    /// The number of bytes from the beginning of a row of the source to that of the next.
    pub src_pitch: u64,
}

impl Rows {
    /// One row.
    pub const ONE: Self = Self { count: 1, dst_pitch: 0, src_pitch: 0 };

    /// Returns the offset of each row in the destination and in the source, in bytes.
    pub fn offsets(self) -> impl Iterator<Item = (u64, u64)> {
        (0..self.count).map(move |row| (row * self.dst_pitch, row * self.src_pitch))
    }
}

/// The number of a slice that was submitted to an engine, counted from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

impl Ticket {
    /// The ticket 0, which precedes the ticket of the first slice.
    pub const NONE: Self = Self(0);
}

/// The capabilities and limits of an engine, by which a caller plans its ops.
///
/// A missing capability is emulated by the layers above the backends. An engine may report less
/// than its device can do.
///
/// ```
/// use peerlane::hal::Caps;
///
/// const CAPS: Caps = Caps { gets: true, slice_ops_max: 64, ..Caps::new("ring") };
/// assert!(!CAPS.queued_wait && CAPS.put_align_bytes == 1);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// The name of the engine's kind for reports, such as `streams` or `sdma`.
    pub kind: &'static str,
    /// Whether the engine accepts [`Op::Wait`], so that the caller need not poll flags. Otherwise
    /// the caller polls the flag and submits the later ops once it is set.
    pub queued_wait: bool,
    /// Whether the engine accepts [`Op::Get`]. Otherwise the owner of the bytes puts them.
    pub gets: bool,
    /// Whether the engine accepts [`Op::PutRows`], and [`Op::GetRows`] if it gets. Otherwise the
    /// caller copies each row.
    pub rows: bool,
    /// Whether bytes move only while ranks call [`CopyEngine::completed`], also for puts and gets
    /// of peers.
    pub polled: bool,
    /// Whether several adjacent signals or waits cost the engine about as much as one. Plans then
    /// group them instead of signalling after each put.
    pub flags_batched: bool,
    /// The largest growth of a flag since its last signal whose signal needs no message of
    /// its own, or `u64::MAX` if the growth does not matter.
    pub signal_growth_max: u64,
    /// The largest number of ops in one slice, at least 1.
    pub slice_ops_max: usize,
    /// The size in bytes of the largest copy that the backend does not split.
    pub piece_bytes_max: u64,
    /// The alignment in bytes that offsets and lengths of puts and gets need, or 1 for no
    /// alignment. Collectives refuse blocks and places that are not aligned so.
    pub put_align_bytes: u64,
    /// The hardware queues that all engines of a process share, or `None` if a wait blocks only its
    /// own engine.
    pub shared_queues: Option<SharedQueues>,
}

impl Caps {
    /// Returns the capabilities of an engine that has no optional ones and no limits, except that a
    /// slice has one op.
    ///
    /// A backend names the fields that differ, so that it need not change when fields are added.
    pub const fn new(kind: &'static str) -> Self {
        Self {
            kind,
            queued_wait: false,
            gets: false,
            rows: false,
            polled: false,
            flags_batched: false,
            signal_growth_max: u64::MAX,
            slice_ops_max: 1,
            piece_bytes_max: u64::MAX,
            put_align_bytes: 1,
            shared_queues: None,
        }
    }
}

/// The part of a device that runs the reductions of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reducer {
    /// The largest number of sources of a reduction, at least 2.
    pub sources_max: usize,
    /// The largest number of blocks of threads that run a reduction at once, or 0 if the processor
    /// runs it.
    pub blocks: u32,
    /// The number of threads in a block.
    pub threads: u32,
}

impl fmt::Display for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self { blocks: 0, .. } => f.write_str("the processor"),
            Self { blocks, threads, .. } => write!(f, "{blocks} blocks of {threads} threads"),
        }
    }
}

/// The number of hardware queues that all engines of a process share, and how to change it.
///
/// A queued wait can block other engines whose ops are in the same hardware queue. Ranks that start
/// operations in the same order are not affected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedQueues {
    /// The number of hardware queues that the engines of this process share.
    pub count: u32,
    /// The name of the environment variable that sets the number of hardware queues.
    pub variable: &'static str,
}

/// An in-order queue of puts, gets, signals, waits and reductions that reaches every connected
/// peer.
///
/// The [contract](crate::contract) states the rules that hold between calls, engines and ranks.
///
/// # Progress
///
/// A caller that waits repeats: call [`completed`](Self::completed) and look at the flags; if there
/// is something to do, do it; if an engine [is busy](Self::is_busy), continue at once; otherwise
/// [`park`](Self::park) for at most the time to the deadline. A caller with one engine parks
/// without a limit and lets the waker end it. A caller with several engines parks on one of them
/// with a limit that doubles as long as nothing happens, because one engine may not be woken for
/// events of another.
///
/// ```
/// use std::time::Duration;
/// use peerlane::hal::{CopyEngine, Ticket};
/// use peerlane::Deadline;
///
/// /// Waits until `ticket` is complete, and returns whether it is.
/// fn wait<E>(engine: &mut E, ticket: Ticket, deadline: Deadline) -> Result<bool, E::Error>
/// where
///     E: CopyEngine,
/// {
///     while engine.completed()? < ticket {
///         if deadline.has_passed() {
///             return Ok(false);
///         }
///         if !engine.is_busy() {
///             engine.park(deadline.remaining())?;
///         }
///     }
///     Ok(true)
/// }
/// ```
///
/// # Safety
/// An engine accesses only the bytes that the ops of a slice name, and only until the ticket of the
/// slice is complete. It reports a ticket as complete when every op up to that slice is complete,
/// and not before.
pub unsafe trait CopyEngine: Send + 'static {
    /// The error type of the backend.
    type Error: Error;
    /// The type of a registered region of this rank.
    type Local: 'static;
    /// The type of an imported region of a peer.
    type Remote: 'static;

    /// Returns the capabilities and limits of the engine, which never change.
    fn caps(&self) -> &Caps;

    /// Prepares the engine for [reductions](Op::Reduce), and returns what runs them. Returns `None`
    /// if the engine cannot reduce; the caller then combines the memory.
    ///
    /// # Errors
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the device or its driver refuses the code
    /// for reductions; the error of the vendor's call; the error that poisoned the engine.
    fn prepare_reduce(&mut self) -> Result<Option<Reducer>, Self::Error>;

    /// Submits a slice of ops and returns the slice's ticket.
    ///
    /// *Ordering.* Ops to one peer take effect in the order of submission; a wait blocks everything
    /// behind it. *Completion.* The ticket is complete when all ops up to the end of this slice
    /// are. An empty slice gets a ticket too.
    ///
    /// # Errors
    /// [`QueueFull`](crate::ErrorKind::QueueFull): nothing was submitted; try again after
    /// [`completed`](Self::completed). [`InvalidArgument`](crate::ErrorKind::InvalidArgument): an
    /// op exceeds a limit of [`caps`](Self::caps) or the bounds of its region, or needs a
    /// capability that the engine lacks; nothing was submitted. Any other kind poisons the engine.
    ///
    /// # Safety
    /// Until the ticket completes, the regions of all ops must live, no one may write to a source,
    /// and no one else may access a destination. Only this engine writes a signalled flag, and only
    /// this engine reads a flag that it waits for. A slice that is [recorded into a
    /// graph](StreamOrdered::fork) needs the regions until the last replay is complete, and the
    /// rest while a replay is in progress.
    unsafe fn submit(
        &mut self,
        ops: &[Op<'_, Self::Local, Self::Remote>],
    ) -> Result<Ticket, Self::Error>;

    /// Returns the ticket of the last complete slice. Never blocks, and drives a
    /// [polled](Caps::polled) engine.
    ///
    /// Sources of complete puts can be reused; complete gets and puts to this rank are visible
    /// here. The result never decreases.
    ///
    /// # Errors
    /// The error that poisoned the engine.
    fn completed(&mut self) -> Result<Ticket, Self::Error>;

    /// Sleeps until the engine may have made progress, the [`waker`](Self::waker) was used, or
    /// `limit` has passed. There may be progress if [`completed`](Self::completed) may return more
    /// or a flag of this rank may have changed.
    ///
    /// It may return early. An engine whose device counts arrivals looks at the counter at the end
    /// of a call, and the next call returns at once if it has changed. Call it at most once between
    /// two polls of the same flag. [`Duration::MAX`] sets no timer, which makes the sleep cheaper;
    /// another thread then keeps the deadline and uses the waker.
    ///
    /// # Errors
    /// The error that poisoned the engine.
    fn park(&mut self, limit: Duration) -> Result<(), Self::Error>;

    /// Returns whether [`completed`](Self::completed) can make more progress at once, so that the
    /// caller should not park.
    ///
    /// A caller that polls several engines parks only if none is busy.
    fn is_busy(&self) -> bool;

    /// Returns a waker by which another thread ends the current or next [`park`](Self::park).
    fn waker(&self) -> Waker;

    /// Lets every queued wait pass after an abort, so that the queue drains.
    ///
    /// The ops behind such a wait run or are dropped; their results are undefined. From now on
    /// [`submit`](Self::submit) fails with [`Aborted`](crate::ErrorKind::Aborted), and
    /// [`completed`](Self::completed) proceeds to the last ticket. Call it again until that is
    /// reached. It releases the waits of running graphs too.
    ///
    /// # Errors
    /// The error that poisoned the engine.
    fn release(&mut self) -> Result<(), Self::Error>;

    /// Returns how many bytes of a slice the device's compute units would copy, or 0 if only copy
    /// engines, NICs or processors copy.
    ///
    /// Nothing is submitted. With `captured`, the slice is one of a [captured](StreamOrdered::fork)
    /// start.
    fn compute_bytes(&mut self, ops: &[Op<'_, Self::Local, Self::Remote>], captured: bool) -> u64;

    /// Returns the interface that orders the engine against streams of the caller, or `None` if the
    /// backend has no streams.
    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = Self::Error>>;

    /// Returns the interface that runs a start as one launch, or `None` if the engine has none.
    ///
    /// An engine returns it whose [offer](crate::EngineOffer::fused) has fused starts, and that was
    /// created with a number of [blocks](crate::EngineRequirements::fused_blocks).
    fn fused(&mut self) -> Option<&mut FusedEngine<Self>> {
        None
    }
}

/// The ops of the starts of an operation, from which an engine compiles a program.
///
/// The ops of even and of odd starts are the same ones in the same order. Only their places and
/// flags can differ, so that starts use memory by turns. The values of a [signal](Op::Signal) and
/// of a [wait](Op::Wait) are those of the first two starts: [`base`](Self::base) and one step in
/// the ops of odd starts, and one step more in those of even ones. A step is 2 to the power of
/// [`digest_bits`](Self::digest_bits), by which values grow with each start. A wait for a signal of
/// the start before has one step less in even starts, and 0 in odd ones, as the first start has
/// none before it. A flag is [`blocks`](Self::blocks) adjacent
/// words, from the one that the op names on.
#[derive(Debug)]
pub struct FusedOps<'a, L, R> {
    /// The ops of even starts, and those of odd starts. The first start is odd.
    pub ops: [&'a [Op<'a, L, R>]; 2],
    /// The memory of this rank into which peers put tagged data, and its length in bytes, or `None`
    /// if data is not tagged.
    ///
    /// With it, all puts to peers are to such memory of theirs, and all waits are for flags that
    /// announce such data here, or for signals of the start before. Each place of it has
    /// [twice the bytes](crate::SLOT_FACTOR) of its data, rounded up to words of 16 bytes, and no
    /// other program uses it.
    pub slots: Option<(At<'a, L>, u64)>,
    /// The first of two adjacent words in flags of this rank, in which the device counts the
    /// starts, and which nobody else uses. They live as long as graphs with starts.
    pub counter: Flag<'a, L>,
    /// The number of blocks of threads, equal on all ranks.
    pub blocks: u32,
    /// The largest value that a flag can have before the first start, equal on all ranks.
    pub base: u64,
    /// The number of low bits that hold a digest in the values of signals, at most 24.
    pub digest_bits: u32,
}

/// Runs starts of one operation, each by one launch.
///
/// # Safety
/// A start has the effects of its ops in the order of [`FusedOps`], as
/// [`submit`](crate::CopyEngine::submit) has, and accesses nothing else.
pub unsafe trait FusedStarts {
    /// The error type of the backend.
    type Error: Error;
    /// The type of a registered region of this rank.
    type Local: 'static;
    /// The type of an imported region of a peer.
    type Remote: 'static;

    /// Compiles the ops of starts to a program, and fills the slots with zeros. Returns what a
    /// start launches.
    ///
    /// The programs of an engine have numbers, from 0 on, and their starts are one sequence, with
    /// one [counter](FusedOps::counter). No start is made before the last program is compiled, and
    /// peers must not start before all ranks have returned.
    ///
    /// # Errors
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the engine cannot run such ops by one
    /// launch, or the device refuses the code.
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if an op exceeds the bounds of its
    /// region, or starts were made already.
    fn compile(
        &mut self,
        ops: &FusedOps<'_, Self::Local, Self::Remote>,
    ) -> Result<Launch, Self::Error>;

    /// Compiles ops to a program that the later starts make instead of the one of this number. They
    /// have the counter, the blocks and the values of the ops before, and no tagged data.
    ///
    /// Starts that were recorded into graphs keep their program.
    ///
    /// # Errors
    /// As [`compile`](Self::compile), and if there is no such program; it stays then.
    fn replace(
        &mut self,
        program: usize,
        ops: &FusedOps<'_, Self::Local, Self::Remote>,
    ) -> Result<(), Self::Error>;

    /// Submits the next start, which runs the program with this number, and returns its ticket. The
    /// values of its signals have `digest` in their low bits, which waits ignore.
    ///
    /// While a stream captures, the start is recorded into the graph as by
    /// [`submit`](crate::CopyEngine::submit), and each replay is a start of its own.
    ///
    /// # Errors
    /// As [`submit`](crate::CopyEngine::submit), and
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if there is no such program, or the
    /// digest has more bits.
    ///
    /// # Safety
    /// As [`submit`](crate::CopyEngine::submit), for the compiled ops. All ranks make the same
    /// starts by the same programs. No two starts of the engine run at the same time, also those of
    /// graphs.
    unsafe fn start(&mut self, program: usize, digest: u64) -> Result<Ticket, Self::Error>;

    /// Returns a function that tells how far the starts have come, on any thread. It calls no
    /// driver.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if no ops were compiled.
    fn progress(&mut self) -> Result<ProgressReader, Self::Error>;
}

/// The [fused starts](FusedStarts) of an engine.
pub type FusedEngine<E> = dyn FusedStarts<
        Error = <E as CopyEngine>::Error,
        Local = <E as CopyEngine>::Local,
        Remote = <E as CopyEngine>::Remote,
    >;

/// A reference to a stream of the caller, on which an engine of one backend can enqueue its work.
///
/// Backends implement it for their stream types, such as `peerlane_cuda::Stream`. Which engines
/// take which streams is only known at run time, so [`StreamOrdered`] takes a stream as [`Any`].
pub trait Stream: Any {}

/// Tells whether a stream captures its work into a graph instead of running it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureState {
    /// The stream runs its work.
    None,
    /// The stream captures its work, into the capture of this number. No other capture of the
    /// process has the number.
    Active(u64),
    /// The stream captures its work, or its capture was invalidated, but captures have no numbers.
    Unknown,
}

impl CaptureState {
    /// Returns whether the stream records its work instead of running it.
    pub fn is_capturing(self) -> bool {
        self != Self::None
    }
}

/// Identifies a place in the work of an engine, for streams that go on from there.
///
/// [`StreamOrdered::mark`] returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// The place behind the submission of this ticket, which has run or will run.
    Submitted(Ticket),
    /// A place in a graph that is being captured, with the number of the capture's fork and the
    /// number of the mark since then.
    Captured {
        /// The number of the fork by which the engine became part of the capture.
        fork: u64,
        /// The number of the mark, counted from 0 since that fork.
        index: usize,
    },
}

/// Orders the work of an engine before and after the work on a stream of the caller.
///
/// A stream is a reference to the [stream type](Stream) of the backend.
///
/// # Safety
/// Between [`fork`](Self::fork) and [`join`](Self::join), the engine's work follows the work that
/// the caller enqueued on the stream before, and the caller's later work follows the engine's.
/// After [`fork_beside`](Self::fork_beside), only work of the streams that
/// [`order_after`](Self::order_after) and [`join`](Self::join) name follows the engine's.
pub unsafe trait StreamOrdered {
    /// The error type of the backend.
    type Error: Error;

    /// Returns whether `stream` captures its work into a graph, and into which one.
    ///
    /// # Errors
    /// [`Mismatch`](crate::ErrorKind::Mismatch) if the stream is of another type or device; the
    /// error of the vendor's call; the error that poisoned the engine.
    fn capture_state(&mut self, stream: &dyn Any) -> Result<CaptureState, Self::Error>;

    /// Orders later submissions to the engine after the work that is already on the stream `from`.
    ///
    /// *Ordering.* Until the [`join`](Self::join), the engine may enqueue its work directly on
    /// `from`; the caller enqueues nothing else there in between. The engine may be joined to
    /// another stream. A join is required before the next fork.
    /// *Capture.* While `from` captures, a submission is recorded with its constants, runs at each
    /// replay and returns the last ticket instead of a new one; [`submit`](CopyEngine::submit) says
    /// how long its regions must live. Eager slices must not use its flags.
    ///
    /// # Errors
    /// [`Mismatch`](crate::ErrorKind::Mismatch) if the stream is of another type or device;
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if such a stream takes no work; the
    /// error of the vendor's call; the error that poisoned the engine. The engine is then not
    /// forked.
    fn fork(&mut self, from: &dyn Any) -> Result<(), Self::Error>;

    /// Orders later submissions to the engine after the work that is already on the stream `from`,
    /// and leaves the stream to the caller.
    ///
    /// The engine enqueues its work on streams of its own, so the caller may enqueue work on `from`
    /// that runs at the same time. Until the [`join`](Self::join), it can be called again, for this
    /// stream or another one: submissions follow the work that each of them held at the last call.
    /// While `from` captures, submissions become part of the same graph, as after
    /// [`fork`](Self::fork), and the join must be to a stream of that capture.
    ///
    /// # Errors
    /// As [`fork`](Self::fork). It is [`InvalidArgument`](crate::ErrorKind::InvalidArgument) too if
    /// the engine is part of a capture, and `from` is not part of the same one.
    fn fork_beside(&mut self, from: &dyn Any) -> Result<(), Self::Error>;

    /// Returns the place behind everything that was submitted so far.
    ///
    /// # Errors
    /// The error of the vendor's call, or the error that poisoned the engine.
    fn mark(&mut self) -> Result<Mark, Self::Error>;

    /// Orders later work on the stream `into` after what was submitted before the mark, and not
    /// after what was submitted later.
    ///
    /// If the mark is in a capture, a stream that does not capture becomes part of that capture.
    ///
    /// # Errors
    /// As [`fork`](Self::fork). [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for a mark
    /// of a capture that the engine is not part of any more, and for a stream that is part of
    /// another capture.
    fn order_after(&mut self, mark: Mark, into: &dyn Any) -> Result<(), Self::Error>;

    /// Orders later work on the stream `into` after the engine's submissions since the fork, and
    /// ends the fork.
    ///
    /// # Errors
    /// The error of the vendor's call, or the error that poisoned the engine. The fork has ended
    /// even then.
    fn join(&mut self, into: &dyn Any) -> Result<(), Self::Error>;

    /// Returns how long a graph replay has waited for flags of this engine, or `None` if no replay
    /// waits.
    ///
    /// With several such replays, the longest wait counts. The time counts from the first call that
    /// finds the replay waiting.
    ///
    /// # Errors
    /// The error of the vendor's call.
    fn replay_wait(&mut self) -> Result<Option<Duration>, Self::Error>;
}

/// Casts a type-erased stream to the stream type `S` of a backend.
///
/// # Errors
/// A text for an error of kind [`Mismatch`](crate::ErrorKind::Mismatch).
pub fn stream_of<S: Stream>(stream: &dyn Any) -> Result<&S, String> {
    stream.downcast_ref().ok_or_else(|| {
        let expected = std::any::type_name::<S>();
        format!("the stream has the wrong type, expected {expected}")
    })
}
