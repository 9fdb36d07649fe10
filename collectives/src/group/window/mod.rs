//! Windows, which are memory of every rank whose remote keys are exchanged once for any number of
//! operations.
//!
//! An operation over a window exchanges only its description and its flags when it is prepared. So
//! a caller can keep the memory of a whole model in one window, and prepare an operation for each
//! of its parts, even if parts overlap.

mod open;
mod slice;
mod unreleased;
mod uses;

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use peerlane_hal::{At, DynImport, DynRegion, ErrorKind, Rank, Region, Space};

pub(in crate::group) use open::{offer, offer_for, open, release};
pub use slice::{WindowSlice, WindowSliceMut};
pub use unreleased::Unreleased;
pub(super) use uses::{BegunStart, Extent, WindowUse, WindowUses};

use crate::element::{DType, Element, Untyped};
use crate::error::Error;
use crate::group::buffer::MemoryRange;
use crate::group::runtime::Runtime;
use crate::group::segment::Segment;
use crate::plan::Tier;

/// Registered memory on every rank that several operations share, like a window in MPI.
///
/// [`Group::window`](crate::group::Group::window) opens one.
///
/// Operations keep the memory allocated. Operations that overlap can be prepared at the same time,
/// but not run at the same time: a start is refused while another one uses the same elements, or
/// while the host has [borrowed](Self::slice) them.
///
/// # Who may access a window, and when
///
/// The host of this rank, starts of operations, and messages of channels access the same memory,
/// the last two also from peers. These rules keep them apart. A table of the group checks them
/// under one lock, so they hold on all threads of this rank.
///
/// 1. *A start* gives peers access to its ranges of this rank's window from its begin to its end,
///    and never outside of it. A peer writes there only after this rank has signalled `ready`,
///    which is a step of the start, and the start ends after the last signal of each such peer; the
///    proof of a plan shows both. So a range is free for the host if no start of this rank that
///    uses it is open, whatever the peers do.
/// 2. *A channel* gives peers access to the whole window, from the time when the ranks agree to
///    open it until all have [closed](crate::group::Group::close_channel) it, or the window is
///    [released](crate::group::Group::release). If this rank drops its channel, the channels of the
///    peers go on, so a drop changes nothing.
/// 3. *A slice* excludes both. It is refused while an open start or a channel uses its elements,
///    and while it exists, even if it was leaked, no such start can begin and no channel can be
///    opened. Of two slices that overlap none is mutable. After the end of the group, when peers
///    may be anywhere in a start, every slice is refused. A start of a resizable operation counts
///    as one of the whole window here, because a peer that resizes it differently uses other
///    elements until the ranks notice it.
/// 4. *Copies* by [`Channel::read`](crate::group::Channel::read) and
///    [`Channel::write`](crate::group::Channel::write) may happen beside messages of peers. They
///    access the memory by atomic loads and stores and borrow nothing.
/// 5. *Starts and messages* on the same elements are ordered by the caller. Wrong orders give wrong
///    elements, and nothing worse, because engines access memory by address.
///
/// A graph replays starts that this table does not see; this is why recording them takes `unsafe`.
/// So does [registering](crate::group::Group::register) memory of the caller, who promises to
/// access it by these rules.
pub struct Window<T> {
    pub(in crate::group) inner: Arc<Inner>,
    elements: PhantomData<T>,
}

pub(in crate::group) struct Inner {
    pub(in crate::group) number: u64,
    pub(in crate::group) runtime: Arc<Runtime>,
    users: Arc<WindowUses>,
    pub(in crate::group) segment: Segment,
}

/// A window equals only itself.
impl PartialEq for Inner {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Inner {
    pub(in crate::group) fn region(&self) -> &DynRegion {
        self.segment.of(Tier::Local).expect("the local fabric has registered the window").local()
    }

    pub(in crate::group) fn bytes(&self) -> u64 {
        self.region().bytes()
    }

    /// Returns whether only a device can access the window.
    pub(in crate::group) fn is_on_device(&self) -> bool {
        self.region().space() != Space::Host
    }

    /// Returns the address of a byte of the window on this rank.
    pub(in crate::group) fn address(&self, begin: u64) -> NonNull<u8> {
        MemoryRange::within(self.region(), begin, 0).base
    }

    /// Returns a byte of the window as memory that an engine of `rank`, which is this rank, imports
    /// from itself.
    pub(in crate::group) fn own_import(&self, rank: Rank, begin: u64) -> At<'_, DynImport> {
        let regions = self.segment.of(Tier::Local);
        let import = regions.and_then(|regions| regions.peer_at(rank, begin));
        import.expect("a window imports its memory from this rank, too")
    }

    pub(in crate::group) fn bytes_of(
        &self,
        dtype: DType,
        range: &Range<usize>,
    ) -> Result<Range<u64>, Error> {
        let Range { start, end } = *range;
        let size = dtype.bytes();
        let len = usize::try_from(self.region().bytes()).unwrap_or(usize::MAX) / size;
        if start > end || end > len {
            let text = format!(
                "the range is {start}..{end}, expected a range within 0..{len}, the elements of \
                 the window"
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        Ok((start * size) as u64..(end * size) as u64)
    }
}

impl<T> Window<T> {
    /// Returns a view of the window, which is one of elements of `T` already.
    pub(in crate::group) fn over(inner: Arc<Inner>) -> Self {
        Self { inner, elements: PhantomData }
    }
}

impl<T: Element> Window<T> {
    pub(in crate::group) fn new(inner: Arc<Inner>) -> Self {
        Self { inner, elements: PhantomData }
    }

    /// Returns the number of elements of the window, which is the same on every rank.
    pub fn len(&self) -> usize {
        usize::try_from(self.inner.region().bytes()).unwrap_or(usize::MAX) / T::DTYPE.bytes()
    }

    /// Returns whether the window has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns a view of the same window with elements of another type, for operations on parts of
    /// an arena of bytes.
    ///
    /// The view keeps the window in use: drop it before the window is
    /// [released](crate::group::Group::release).
    pub fn cast<U: Element>(&self) -> Window<U> {
        Window { inner: Arc::clone(&self.inner), elements: PhantomData }
    }

    /// Returns a view of the same window for operations whose element type is chosen at run time.
    ///
    /// The view keeps the window in use, as one of [`cast`](Self::cast).
    pub fn untyped(&self) -> Window<Untyped> {
        Window { inner: Arc::clone(&self.inner), elements: PhantomData }
    }

    /// Returns the address range of some elements of the window, for work on a stream or by a host
    /// thread.
    ///
    /// No operation on the elements may be open while a host thread uses them.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if they are not all in the window.
    pub fn memory(&self, range: Range<usize>) -> Result<MemoryRange, Error> {
        let bytes = self.inner.bytes_of(T::DTYPE, &range)?;
        Ok(MemoryRange::within(self.inner.region(), bytes.start, bytes.end - bytes.start))
    }

    /// Borrows elements of the window for reading. As long as the slice lives, no operation that
    /// writes them can start.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if they are not all in the window, if an
    /// operation that writes them has an open start, or if only a device can read them; the reason
    /// why the group has ended, after which the content is undefined.
    pub fn slice(&self, range: Range<usize>) -> Result<WindowSlice<'_, T>, Error> {
        let bytes = self.inner.bytes_of(T::DTYPE, &range)?;
        WindowSlice::borrow(&self.inner, bytes)
    }

    /// Borrows elements of the window for writing. As long as the slice lives, no operation that
    /// uses them can start.
    ///
    /// # Errors
    /// As [`slice`](Self::slice), for any operation that uses them.
    pub fn slice_mut(&self, range: Range<usize>) -> Result<WindowSliceMut<'_, T>, Error> {
        let bytes = self.inner.bytes_of(T::DTYPE, &range)?;
        WindowSliceMut::borrow(&self.inner, bytes)
    }
}

impl<T> fmt::Debug for Window<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window").field("number", &self.inner.number).finish_non_exhaustive()
    }
}
