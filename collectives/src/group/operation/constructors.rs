//! Defines the methods of `Group` that return builders for collective operations such as
//! all-gather, and that open windows.
//!
//! A start is complete when the whole output is; there are no handles for single blocks.

use peerlane_hal::{Fabric as _, PeerMemory as _, Rank, Role};

use super::OperationBuilder;
use super::lens::{self, BlockLens};
use crate::buffer_plan::{BufferPlan, CallSite, plan_buffers};
use crate::collective::Collective;
use crate::element::{DType, Element, Untyped};
use crate::error::Error;
use crate::group::Group;
use crate::group::buffer::Buffer;
use crate::group::window::{self, Unreleased, Window};

impl Group {
    /// Returns a builder for an operation of any [`Collective`].
    ///
    /// Methods such as [`all_gather`](Self::all_gather) do the same for one collective.
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Group, host};
    /// use peerlane::collective::Collective;
    /// use peerlane::Rank;
    ///
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// for collective in [Collective::AllGather, Collective::Gather { root: Rank(1) }] {
    ///     let mut operation = group.operation::<i64>(collective, 1).prepare()?;
    ///     operation.input_mut()?[0] = i64::from(group.rank().0) + 5;
    ///     operation.run()?;
    ///     if collective.is_receiver(group.rank()) {
    ///         assert_eq!(operation.output()?, [5, 6]);
    ///     }
    /// }
    /// # group.close()
    /// # }).unwrap();
    /// ```
    pub fn operation<T: Element>(
        &mut self,
        collective: Collective,
        lens: impl Into<BlockLens>,
    ) -> OperationBuilder<'_, T> {
        OperationBuilder::new(self, collective, T::DTYPE, lens.into())
    }

    /// Returns a builder for an operation whose element type is chosen at run time.
    ///
    /// It has the options of every other operation. Lengths and places are in elements of `dtype`.
    /// Windows and buffers of the caller are given [untyped](Window::untyped).
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{DType, Group, host};
    /// use peerlane::collective::Collective;
    ///
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// for dtype in [DType::U8, DType::F64, DType::Complex64] {
    ///     let mut gather = group.untyped_operation(Collective::AllGather, dtype, 3).prepare()?;
    ///     gather.input_bytes_mut()?.fill(group.rank().0 as u8);
    ///     gather.run()?;
    ///     let (zeros, ones) = gather.output_bytes()?.split_at(3 * dtype.bytes());
    ///     assert!(zeros.iter().all(|byte| *byte == 0) && ones.iter().all(|byte| *byte == 1));
    /// }
    /// # group.close()
    /// # }).unwrap();
    /// ```
    pub fn untyped_operation(
        &mut self,
        collective: Collective,
        dtype: DType,
        lens: impl Into<BlockLens>,
    ) -> OperationBuilder<'_, Untyped> {
        OperationBuilder::new(self, collective, dtype, lens.into())
    }

    /// Returns a builder for a reduce-scatter, in which every rank gets one block of the sum of all
    /// inputs.
    ///
    /// The input of each rank has a block for every rank, in rank order. The blocks have
    /// [equal or different lengths](BlockLens); the length of a rank is that of its output. With
    /// several tensors, each has its blocks in rank order in the input. The contributions are added
    /// in rank order by the rank that gets the block, on its processor or by a kernel of its GPU.
    /// [`operator`](OperationBuilder::operator) sets another operator.
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Group, host};
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let rank = group.rank().0 as f32;
    /// let mut operation = group.reduce_scatter::<f32>(1).prepare()?;
    /// operation.input_mut()?.copy_from_slice(&[rank + 1.0, 10.0]);
    /// operation.run()?;
    /// assert_eq!(operation.output()?, [if rank == 0.0 { 3.0 } else { 20.0 }]);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    pub fn reduce_scatter<T: Element>(
        &mut self,
        lens: impl Into<BlockLens>,
    ) -> OperationBuilder<'_, T> {
        self.operation(Collective::ReduceScatter, lens)
    }

    /// Returns a builder for an all-reduce, in which every rank gets the sum of all inputs.
    ///
    /// `lens` is the length of the input, or of several [tensors](BlockLens::tensors) of it.
    /// Each rank adds the contributions to a part of the elements and passes the result on, so all
    /// ranks get equal bits. It adds in rank order, or, [in place](OperationBuilder::in_place), its
    /// own contribution first. [`operator`](OperationBuilder::operator) sets another operator.
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Group, Operator, host};
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let mut operation = group.all_reduce::<i32>(3).operator(Operator::Max).prepare()?;
    /// let rank = group.rank().0 as i32;
    /// operation.input_mut()?.copy_from_slice(&[rank, -rank, 7]);
    /// operation.run()?;
    /// assert_eq!(operation.output()?, [1, 0, 7]);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    pub fn all_reduce<T: Element>(
        &mut self,
        lens: impl Into<BlockLens>,
    ) -> OperationBuilder<'_, T> {
        self.operation(Collective::AllReduce, lens)
    }

    /// Returns a builder for a reduce, in which one rank, the root, gets the sum of all inputs.
    ///
    /// `lens` is as in an [all-reduce](Self::all_reduce).
    pub fn reduce<T: Element>(
        &mut self,
        root: Rank,
        lens: impl Into<BlockLens>,
    ) -> OperationBuilder<'_, T> {
        self.operation(Collective::Reduce { root }, lens)
    }

    /// Returns a builder for an inclusive scan, in which every rank gets the sum of the inputs of
    /// the ranks up to its own.
    ///
    /// `lens` is as in an [all-reduce](Self::all_reduce).
    /// Rank 0 gets its own input, and the last rank the sum of all. Each rank adds the
    /// contributions in rank order. [`operator`](OperationBuilder::operator) sets another operator;
    /// an average divides by the number of contributions, which is one more than the number of the
    /// rank.
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Group, host};
    /// # in_process::run(3, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let mut operation = group.scan::<u32>(1).prepare()?;
    /// operation.input_mut()?[0] = 10;
    /// operation.run()?;
    /// assert_eq!(operation.output()?, [10 * (group.rank().0 + 1)]);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    pub fn scan<T: Element>(&mut self, lens: impl Into<BlockLens>) -> OperationBuilder<'_, T> {
        self.operation(Collective::Scan, lens)
    }

    /// Returns a builder for an exclusive scan, in which every rank except rank 0 gets the sum of
    /// the inputs of the ranks below its own.
    ///
    /// Rank 0 gets nothing: its output is empty. It is otherwise like [`scan`](Self::scan).
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Group, host};
    /// # in_process::run(3, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// // The position at which each rank writes its share of a common list.
    /// let mut operation = group.exscan::<u32>(1).prepare()?;
    /// operation.input_mut()?[0] = 5;
    /// operation.run()?;
    /// let begin = operation.output()?.first().copied().unwrap_or(0);
    /// assert_eq!(begin, 5 * group.rank().0);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    pub fn exscan<T: Element>(&mut self, lens: impl Into<BlockLens>) -> OperationBuilder<'_, T> {
        self.operation(Collective::Exscan, lens)
    }

    /// Returns a builder for an all-gather, in which every rank gets the block of every rank, in
    /// rank order.
    ///
    /// The blocks have [equal or different lengths](BlockLens), and can consist of the pieces of
    /// several tensors. In the output, each tensor has its pieces in rank order, without gaps.
    /// Chunks divide the data of a rank for all tensors together.
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{BlockLens, Group, OutputPart, Rank, host};
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let rank = group.rank().0;
    /// let mut equal = group.all_gather::<f32>(2).prepare()?;
    /// equal.input_mut()?.fill(rank as f32);
    /// equal.run()?;
    /// assert_eq!(equal.output()?, [0.0, 0.0, 1.0, 1.0]);
    ///
    /// let mut different = group.all_gather::<u8>([1, 3]).prepare()?;
    /// different.input_mut()?.fill(rank as u8);
    /// different.run()?;
    /// assert_eq!(different.output_of(Rank(1))?, [1, 1, 1]);
    ///
    /// let mut tensors = group.all_gather::<u8>(BlockLens::tensors([1, 2])).prepare()?;
    /// tensors.input_piece_mut(0)?.fill(rank as u8);
    /// tensors.input_piece_mut(1)?.fill(rank as u8 + 10);
    /// tensors.run()?;
    /// assert_eq!(tensors.output_of(OutputPart::Tensor(0))?, [0, 1]);
    /// assert_eq!(tensors.output_of(OutputPart::Tensor(1))?, [10, 10, 11, 11]);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    pub fn all_gather<T: Element>(
        &mut self,
        lens: impl Into<BlockLens>,
    ) -> OperationBuilder<'_, T> {
        self.operation(Collective::AllGather, lens)
    }

    /// Returns a builder for a broadcast of `len` elements from rank `root` to all ranks.
    ///
    /// On the root the input has `len` elements; on other ranks it is empty. In place, there is no
    /// input, and the root fills the output before a start.
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Group, Rank, host};
    /// # in_process::run(3, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let mut broadcast = group.broadcast::<i32>(Rank(1), 2).prepare()?;
    /// if group.rank() == Rank(1) {
    ///     broadcast.input_mut()?.copy_from_slice(&[7, 8]);
    /// }
    /// broadcast.run()?;
    /// assert_eq!(broadcast.output()?, [7, 8]);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    pub fn broadcast<T: Element>(&mut self, root: Rank, len: usize) -> OperationBuilder<'_, T> {
        self.operation(Collective::Broadcast { root }, len)
    }

    /// Returns a builder for an all-to-all, in which every rank gets a different block from every
    /// rank.
    ///
    /// The input of each rank consists of one block for every rank, in rank order. The output
    /// consists of one block from every rank, in rank order. It cannot run in place. Blocks of
    /// different lengths are described by [`BlockLens::send_receive`].
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{BlockLens, Group, Rank, host};
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let rank = group.rank().0 as i32;
    /// let mut equal = group.all_to_all::<i32>(1).prepare()?;
    /// equal.input_mut()?.copy_from_slice(&[10 * rank, 10 * rank + 1]);
    /// equal.run()?;
    /// assert_eq!(equal.output()?, [rank, 10 + rank]);
    ///
    /// // Rank 0 keeps 1 element and sends 2 to rank 1, which sends and keeps nothing.
    /// let (send, receive) = if rank == 0 { ([1, 2], [1, 0]) } else { ([0, 0], [2, 0]) };
    /// let lens = BlockLens::send_receive(&send, &receive);
    /// let mut different = group.all_to_all::<i32>(lens).prepare()?;
    /// different.input_mut()?.copy_from_slice(&[7, 8, 9][..send.iter().sum()]);
    /// different.run()?;
    /// assert_eq!(different.output_of(Rank(0))?, if rank == 0 { &[7][..] } else { &[8, 9] });
    /// # group.close()
    /// # }).unwrap();
    /// ```
    pub fn all_to_all<T: Element>(
        &mut self,
        lens: impl Into<BlockLens>,
    ) -> OperationBuilder<'_, T> {
        self.operation(Collective::AllToAll, lens)
    }

    /// Returns a builder for a gather, in which rank `root` gets the block of every rank, in rank
    /// order.
    ///
    /// Other ranks have no output. It cannot run in place.
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Group, Rank, host};
    /// # in_process::run(3, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let rank = group.rank().0;
    /// let mut gather = group.gather::<i32>(Rank(1), [1, 0, 2]).prepare()?;
    /// gather.input_mut()?.fill(rank as i32);
    /// gather.run()?;
    /// assert_eq!(gather.output()?, if rank == 1 { &[0, 2, 2][..] } else { &[] });
    /// # group.close()
    /// # }).unwrap();
    /// ```
    pub fn gather<T: Element>(
        &mut self,
        root: Rank,
        lens: impl Into<BlockLens>,
    ) -> OperationBuilder<'_, T> {
        self.operation(Collective::Gather { root }, lens)
    }

    /// Returns a builder for a scatter, in which every rank gets a different block from rank
    /// `root`.
    ///
    /// The input of the root consists of one block for every rank, in rank order. Other ranks have
    /// no input. It cannot run in place.
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Group, Rank, host};
    /// # in_process::run(3, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let rank = group.rank().0;
    /// let mut scatter = group.scatter::<i32>(Rank(1), [1, 0, 2]).prepare()?;
    /// if rank == 1 {
    ///     scatter.input_mut()?.copy_from_slice(&[7, 8, 9]);
    /// }
    /// scatter.run()?;
    /// assert_eq!(scatter.output()?, [&[7][..], &[], &[8, 9]][rank as usize]);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    pub fn scatter<T: Element>(
        &mut self,
        root: Rank,
        lens: impl Into<BlockLens>,
    ) -> OperationBuilder<'_, T> {
        self.operation(Collective::Scatter { root }, lens)
    }

    /// Opens a window with zeroed memory for `len` elements on every rank, and exchanges the remote
    /// keys. Collective.
    ///
    /// Any number of operations can [use it](OperationBuilder::output_into) without another
    /// exchange of keys.
    ///
    /// # Errors
    /// [`Mismatch`](peerlane_hal::ErrorKind::Mismatch), naming the rank and the field that differs;
    /// [`OutOfMemory`](peerlane_hal::ErrorKind::OutOfMemory); the group's end.
    pub fn window<T: Element>(&mut self, len: usize) -> Result<Window<T>, Error> {
        let bytes = lens::bytes(T::DTYPE, "window_len", len);
        let wanted = bytes.map(|bytes| (window::offer(T::DTYPE), bytes));
        window::open(self, None, wanted).map(Window::new)
    }

    /// Opens a window as [`window`](Self::window), whose pages of host memory are taken from the
    /// system at their first use. Collective.
    ///
    /// It is for memory that may be used in part only. The first use of a page takes longer than
    /// the next ones. If the system has no memory left then, it ends a process, instead of an error
    /// here. Memory of a device, and memory that is registered with a NIC, is taken at once.
    ///
    /// # Errors
    /// As [`window`](Self::window).
    pub fn window_on_demand<T: Element>(&mut self, len: usize) -> Result<Window<T>, Error> {
        let allocated = lens::bytes(T::DTYPE, "window_len", len).and_then(|bytes| {
            let region = self.setup.fabric.memory().allocate_on_demand(bytes, Role::Data);
            let failed = |error| Error::of_fabric("allocate the window", error);
            Ok((bytes, region.map_err(failed)?))
        });
        let (region, wanted) = match allocated {
            Ok((bytes, region)) => (Some(region), Ok((window::offer(T::DTYPE), bytes))),
            Err(error) => (None, Err(error)),
        };
        window::open(self, region, wanted).map(Window::new)
    }

    /// Plans the buffers of call sites, and opens one window for all of them, in which buffers that
    /// are not live at the same step share memory. Collective.
    ///
    /// Each operation is then prepared over the range of its call site. The call sites must be
    /// equal on every rank. Peers write to the output of an operation only while a start of it is
    /// open on this rank. So the memory of a buffer that is no longer live can be used by the next
    /// operation without a barrier. Messages of a [channel](Self::channel) need one.
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Group, host};
    /// use peerlane::buffer_plan::CallSite;
    ///
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let rank = group.rank().0 as f32;
    /// let call_site = |name: &str, first_use, last_use| CallSite {
    ///     name: name.to_owned(),
    ///     bytes: 2 * 100 * 4, // 100 elements from each of two ranks
    ///     first_use,
    ///     last_use,
    /// };
    /// let call_sites = [call_site("layer 0", 0, 1), call_site("layer 1", 2, 3)];
    /// let (window, plan) = group.window_for::<f32>(&call_sites)?;
    /// let [first, second] = [0, 1].map(|index| plan.buffers[index].begin::<f32>());
    /// assert_eq!(first, second); // The two gathers share memory.
    ///
    /// let mut layer_0 = group.all_gather(100).output_into(&window, first).prepare()?;
    /// let mut layer_1 = group.all_gather(100).output_into(&window, second).prepare()?;
    /// for (gather, value) in [(&mut layer_0, 0.0), (&mut layer_1, 10.0)] {
    ///     gather.input_mut()?.fill(value + rank);
    ///     gather.run()?;
    ///     let output = window.slice(first..first + 200)?;
    ///     assert_eq!((output[0], output[100]), (value, value + 1.0));
    /// }
    /// # group.close()
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// As [`window`](Self::window) and [`plan_buffers`]. The field that differs can be one of a
    /// call site. With more than 64 call sites, it is the digest of a range of them.
    pub fn window_for<T: Element>(
        &mut self,
        call_sites: &[CallSite],
    ) -> Result<(Window<T>, BufferPlan), Error> {
        let planned = plan_buffers(call_sites);
        let wanted = planned.as_ref().map_err(Error::clone).and_then(|plan| {
            let len = usize::try_from(plan.peak_bytes).unwrap_or(usize::MAX) / T::DTYPE.bytes();
            let bytes = lens::bytes(T::DTYPE, "window_len", len)?;
            Ok((window::offer_for(T::DTYPE, call_sites), bytes))
        });
        let inner = window::open(self, None, wanted)?;
        Ok((Window::new(inner), planned?))
    }

    /// Opens a window over memory that the caller has registered, with the same length on every
    /// rank. Collective.
    ///
    /// # Errors
    /// As [`window`](Self::window).
    pub fn window_over<T: Element>(&mut self, buffer: Buffer<T>) -> Result<Window<T>, Error> {
        let bytes = lens::bytes(T::DTYPE, "window_len", buffer.len());
        let wanted = bytes.map(|bytes| (window::offer(T::DTYPE), bytes));
        window::open(self, Some(buffer.into_region()), wanted).map(Window::new)
    }

    /// Returns the memory of a window to its owner, on every rank. Collective.
    ///
    /// When this has succeeded, no rank can access the memory any more: memory that the caller has
    /// registered can be freed or used for anything else. All operations and channels over the
    /// window must have been dropped on every rank.
    ///
    /// # Errors
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if a rank still has operations
    /// or channels over the window, and [`Aborted`](peerlane_hal::ErrorKind::Aborted) on the other
    /// ranks. The error returns the window on every rank, and the release can be tried again. Until
    /// it has succeeded, the memory stays in use, even if the window is dropped.
    ///
    /// The reason why the group has ended. Then the memory stays in use until every rank has
    /// dropped its group.
    pub fn release<T: Element>(&mut self, window: Window<T>) -> Result<(), Unreleased<T>> {
        window::release(self, window.inner)
            .map_err(|(inner, error)| Unreleased { window: Window::new(inner), error })
    }
}
