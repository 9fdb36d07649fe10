//! One in-order queue of copies, signals and waits.

use std::task::Waker;
use std::time::Duration;

use crate::error::Error;

/// A byte place inside a region: `offset` bytes from its start.
#[derive(Debug)]
pub struct At<'a, M> {
    /// The region, local or imported.
    pub region: &'a M,
    /// Bytes from the region's start.
    pub offset: u64,
}

/// A flag inside a region: the aligned 64-bit word number `word`.
///
/// Counted in words and not in bytes, so that a flag cannot be misaligned and cannot be passed
/// where bytes are meant.
#[derive(Debug)]
pub struct Flag<'a, M> {
    /// The region, registered as [`Role::Flags`](crate::Role::Flags).
    pub region: &'a M,
    /// 64-bit words from the region's start.
    pub word: u64,
}

// Derives would demand `M: Copy`; a reference is always `Copy`.
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

/// The whole vocabulary of an engine.
///
/// Oneself is a peer too: with a region imported from oneself, `Put` is a local copy and `Signal`
/// a local store.
#[derive(Debug)]
pub enum Op<'a, L, R> {
    /// Copy `bytes` from this rank's `src` to a peer's `dst`; zero bytes are allowed and copy nothing.
    Put {
        /// Where the bytes go.
        dst: At<'a, R>,
        /// Where they come from.
        src: At<'a, L>,
        /// How many.
        bytes: u64,
    },
    /// Copy `bytes` from a peer's `src` to this rank's `dst`; zero bytes are allowed and copy nothing.
    Get {
        /// Where the bytes go.
        dst: At<'a, L>,
        /// Where they come from.
        src: At<'a, R>,
        /// How many.
        bytes: u64,
    },
    /// Store `value` in a peer's flag, after everything put to that peer and got from it before.
    Signal {
        /// The flag, of which this engine is the only writer.
        flag: Flag<'a, R>,
        /// The value that the waiter wants to see.
        value: u64,
    },
    /// Hold what follows in this queue until the flag is at least `value`.
    Wait {
        /// The flag, of which this engine is the only reader.
        flag: Flag<'a, L>,
        /// The smallest value that lets pass.
        value: u64,
        /// Store 0 in the flag before anything that follows; for captured starts, where a constant
        /// is baked in.
        reset: bool,
    },
}

impl<L, R> Clone for Op<'_, L, R> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<L, R> Copy for Op<'_, L, R> {}

/// How far a queue has come: the number of a submitted slice, from 1, monotone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

impl Ticket {
    /// Before the first slice.
    pub const NONE: Self = Self(0);
}

/// What an engine can do natively, and its exact limits.
///
/// An ability that is missing here is supplied in software above the backends; no call answers
/// "unsupported".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Which of its backend's kinds of engine it is, for reports, such as `streams` or `sdma`.
    pub kind: &'static str,
    /// [`Op::Wait`] may be submitted. Otherwise the caller reads the flag itself and submits what
    /// follows once it is there.
    pub queued_wait: bool,
    /// Nothing moves, neither what was submitted nor what peers send, unless somebody calls
    /// [`CopyEngine::completed`].
    pub polled: bool,
    /// Neighbouring signals and waits of one slice cost about as much as one of them. Plans then
    /// keep them together instead of signalling right behind each put.
    pub flags_batched: bool,
    /// Most ops in one slice, inclusive, at least 1.
    pub slice_ops_max: usize,
    /// The largest copy that is done in one piece, in bytes, inclusive; larger ones are split by
    /// the backend.
    pub piece_bytes_max: u64,
    /// Offsets and lengths of puts and gets must be multiples of it; 1 where there is no rule.
    pub put_align_bytes: u64,
}

/// One in-order queue, reaching every connected peer.
///
/// The rules that hold between calls, queues and ranks are in the [contract](crate::contract).
pub trait CopyEngine: Send {
    /// The backend's error.
    type Error: Error;
    /// This rank's registered memory.
    type Local: 'static;
    /// A peer's imported memory.
    type Remote: 'static;
    /// The vendor's queue on which a caller computes; uninhabited where there is none.
    type Stream: 'static;

    /// What this engine can do; constant over its life.
    fn caps(&self) -> &Caps;

    /// Takes a slice of ops into the queue.
    ///
    /// *Ordering.* Ops to one peer take effect in the order submitted; a wait holds everything
    /// behind it. *Completion.* The ticket completes when every op up to and with this slice has;
    /// an empty slice gets a ticket too.
    ///
    /// # Errors
    /// [`QueueFull`](crate::ErrorKind::QueueFull): nothing was taken; try again after
    /// [`completed`](Self::completed). [`InvalidArgument`](crate::ErrorKind::InvalidArgument): an op
    /// breaks a limit of [`caps`](Self::caps) or leaves its region; nothing was taken. Any other
    /// kind poisons the engine.
    ///
    /// # Safety
    /// Until the ticket completes, the regions of all ops live, nobody writes to a source and
    /// nobody else touches a destination. Of a flag this engine is the only writer (or reader).
    unsafe fn submit(
        &mut self,
        ops: &[Op<'_, Self::Local, Self::Remote>],
    ) -> Result<Ticket, Self::Error>;

    /// The last ticket up to which everything is complete: sources may be reused, puts to oneself
    /// and gets are visible here. Monotone; never blocks; drives a polled engine.
    ///
    /// # Errors
    /// The error that poisoned the engine.
    fn completed(&mut self) -> Result<Ticket, Self::Error>;

    /// Gives the processor away until [`completed`](Self::completed) may say more, a flag of this
    /// rank may have changed, the [`waker`](Self::waker) was used, or `limit` has passed. It may
    /// return early; between two looks at the same flag, call it once for every look.
    ///
    /// [`Duration::MAX`] sets no timer, which makes the sleep cheaper: for callers whose deadline is
    /// kept by somebody who uses the waker.
    ///
    /// # Errors
    /// The error that poisoned the engine.
    fn park(&mut self, limit: Duration) -> Result<(), Self::Error>;

    /// Returns whether [`completed`](Self::completed) can do more at once, because it stopped in the
    /// middle of its work to return soon, for example in a long copy.
    ///
    /// A caller that polls several engines calls `completed` again while one of them is busy. It parks
    /// only when none is.
    fn is_busy(&self) -> bool;

    /// A handle with which another thread ends a [`park`](Self::park), the present or the next.
    fn waker(&self) -> Waker;

    /// Lets every queued wait pass, so that the queue drains. What stood behind such a wait is run
    /// or dropped; its results are worthless. From now on [`submit`](Self::submit) answers
    /// [`Aborted`](crate::ErrorKind::Aborted), while [`completed`](Self::completed) goes on to the
    /// last ticket. Call it again until that is reached; waits of graphs that are being replayed
    /// pass too.
    ///
    /// # Errors
    /// The error that poisoned the engine.
    fn release(&mut self) -> Result<(), Self::Error>;

    /// Whether what `stream` gets now is recorded into a graph instead of run.
    ///
    /// # Errors
    /// [`Mismatch`](crate::ErrorKind::Mismatch): the stream is of another device. The vendor's
    /// refusal, or the error that poisoned the engine.
    fn is_capturing(&mut self, stream: &Self::Stream) -> Result<bool, Self::Error>;

    /// What is submitted next comes after what `from` holds now.
    ///
    /// *Ordering.* Until the [`join`](Self::join) the engine may put its work straight onto `from`:
    /// whoever forks gives `from` nothing else in between. A stream that is joined to may be
    /// another one. Forking from one stream and then from another is allowed; the join in between
    /// is not optional. *Capture.* While `from` captures, a submit is recorded with its constants,
    /// runs at each replay, and makes no new ticket: it answers the last one. What it names must
    /// live as long as the graph, and its flags must be of no use to eager slices.
    ///
    /// # Errors
    /// [`Mismatch`](crate::ErrorKind::Mismatch): the stream is of another device.
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument): nothing may be put on such a stream.
    /// The vendor's refusal, or the error that poisoned the engine. The engine is then not forked.
    fn fork(&mut self, from: &Self::Stream) -> Result<(), Self::Error>;

    /// What `into` gets next comes after what was submitted here. What is submitted later has the
    /// engine's own order again.
    ///
    /// # Errors
    /// The vendor's refusal, or the error that poisoned the engine. The fork is then over all the
    /// same.
    fn join(&mut self, into: &Self::Stream) -> Result<(), Self::Error>;
}
