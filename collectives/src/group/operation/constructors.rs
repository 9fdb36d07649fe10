//! Methods of a group that describe operations.
//!
//! A start is complete when the whole output is; there are no handles for single blocks.

use std::ops::Range;
use std::sync::Arc;

use peerlane_hal::Rank;

use super::OperationBuilder;
use super::request::{Target, WindowRange};
use super::shards::{self, Destination, Shards};
use crate::collective::Collective;
use crate::element::Element;
use crate::error::Error;
use crate::group::Group;
use crate::group::buffer::Buffer;
use crate::group::window::{self, Window};

impl Group {
    /// Describes an all-gather of `shard_len` elements from each rank. The output is all shards in rank order.
    ///
    /// ```
    /// # use peerlane_collectives::bootstrap::{Bootstrap, in_process};
    /// # use peerlane_collectives::group::Group;
    /// # use peerlane_host as host;
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let rank = group.rank().0;
    /// let mut gather = group.all_gather::<f32>(2).prepare()?;
    /// gather.input_mut()?.fill(rank as f32);
    /// gather.run()?;
    /// assert_eq!(gather.output()?, [0.0, 0.0, 1.0, 1.0]);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    pub fn all_gather<T: Element>(&mut self, shard_len: usize) -> OperationBuilder<'_, T> {
        self.describe("all-gather", Shards::Equal(shard_len), Target::Buffers)
    }

    /// Describes an all-gather of `shard_lens[r]` elements from rank r, which can be 0.
    ///
    /// Every rank must give the same lengths. The output is all shards in rank order, without gaps.
    ///
    /// ```
    /// # use peerlane_collectives::bootstrap::{Bootstrap, in_process};
    /// # use peerlane_collectives::group::Group;
    /// # use peerlane_hal::Rank;
    /// # use peerlane_host as host;
    /// # in_process::run(3, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let rank = group.rank().0;
    /// let mut gather = group.all_gather_v::<i32>(&[1, 0, 3]).prepare()?;
    /// gather.input_mut()?.fill(rank as i32);
    /// gather.run()?;
    /// assert_eq!(gather.output()?, [0, 2, 2, 2]);
    /// assert_eq!(gather.shard(Rank(2))?, [2, 2, 2]);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    pub fn all_gather_v<T: Element>(&mut self, shard_lens: &[usize]) -> OperationBuilder<'_, T> {
        let shards = Shards::Uneven(shard_lens.to_vec());
        self.describe("all-gather-v", shards, Target::Buffers)
    }

    /// Describes an all-gather of `shard_lens[r]` elements from rank r, with a destination for each shard.
    ///
    /// The destinations are in the output buffers of this rank; other ranks can have different ones. Bytes outside of them do not
    /// change. Buffers that the caller does not supply are allocated with the length that their destinations need.
    ///
    /// ```
    /// # use peerlane_collectives::bootstrap::{Bootstrap, in_process};
    /// # use peerlane_collectives::group::{Destination, Group};
    /// # use peerlane_hal::Rank;
    /// # use peerlane_host as host;
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let rank = group.rank().0;
    /// let to = |buffer, offset| Destination { buffer, offset };
    /// let mut gather = group.all_gather_list::<u8>(&[2, 1], &[to(1, 0), to(0, 4)]).prepare()?;
    /// gather.input_mut()?.fill(7 + rank as u8);
    /// gather.run()?;
    /// assert_eq!(gather.shard(Rank(0))?, [7, 7]);
    /// assert_eq!(gather.output_buffer(0)?, [0, 0, 0, 0, 8]);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    pub fn all_gather_list<T: Element>(
        &mut self,
        shard_lens: &[usize],
        destinations: &[Destination],
    ) -> OperationBuilder<'_, T> {
        let shards = Shards::Uneven(shard_lens.to_vec());
        self.describe("all-gather-list", shards, Target::List(destinations.to_vec()))
    }

    /// Describes an all-gather of several tensors in one start, with `tensor_lens[k]` elements from each rank for tensor k.
    ///
    /// In the output, each tensor has its pieces in rank order. Chunks divide the data of a rank for all tensors together.
    ///
    /// ```
    /// # use peerlane_collectives::bootstrap::{Bootstrap, in_process};
    /// # use peerlane_collectives::group::Group;
    /// # use peerlane_host as host;
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let rank = group.rank().0;
    /// let mut gather = group.all_gather_tensors::<f32>(&[1, 2]).prepare()?;
    /// gather.input_piece_mut(0)?.fill(rank as f32);
    /// gather.input_piece_mut(1)?.fill(rank as f32 + 10.0);
    /// gather.run()?;
    /// assert_eq!(gather.tensor(0)?, [0.0, 1.0]);
    /// assert_eq!(gather.tensor(1)?, [10.0, 10.0, 11.0, 11.0]);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    pub fn all_gather_tensors<T: Element>(
        &mut self,
        tensor_lens: &[usize],
    ) -> OperationBuilder<'_, T> {
        let shards = Shards::Tensors(tensor_lens.to_vec());
        self.describe("all-gather-tensors", shards, Target::Buffers)
    }

    /// Describes an all-gather of several tensors with different shards: `tensor_lens[k][r]` elements from rank r for tensor k.
    ///
    /// Every rank must give the same lengths.
    pub fn all_gather_tensors_v<T: Element>(
        &mut self,
        tensor_lens: &[&[usize]],
    ) -> OperationBuilder<'_, T> {
        let lens = tensor_lens.iter().map(|lens| lens.to_vec()).collect();
        self.describe("all-gather-tensors-v", Shards::UnevenTensors(lens), Target::Buffers)
    }

    /// Describes an all-gather into a range of a window, to which each rank contributes an equal share.
    ///
    /// The range must be the same on every rank. The keys of the window are not exchanged again. Many operations can be
    /// prepared over one window, also over ranges that overlap.
    ///
    /// ```
    /// # use peerlane_collectives::bootstrap::{Bootstrap, in_process};
    /// # use peerlane_collectives::group::Group;
    /// # use peerlane_host as host;
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let rank = group.rank().index();
    /// let window = group.window::<f32>(100)?;
    /// let mut first = group.all_gather_into(&window, 0..4).in_place().prepare()?;
    /// let mut second = group.all_gather_into(&window, 50..52).in_place().prepare()?;
    /// window.slice_mut(2 * rank..2 * rank + 2)?.fill(rank as f32);
    /// window.slice_mut(50 + rank..51 + rank)?.fill(5.0);
    /// first.run()?;
    /// second.run()?;
    /// assert_eq!(window.slice(0..4)?[..], [0.0, 0.0, 1.0, 1.0]);
    /// assert_eq!(window.slice(50..52)?[..], [5.0, 5.0]);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    pub fn all_gather_into<T: Element>(
        &mut self,
        window: &Window<T>,
        range: Range<usize>,
    ) -> OperationBuilder<'_, T> {
        let shards = Shards::Shared(range.end.saturating_sub(range.start));
        let target = Target::Window(WindowRange { window: Arc::clone(&window.inner), range });
        self.describe("all-gather-into", shards, target)
    }

    /// Describes an all-gather into a window with `shard_lens[r]` elements from rank r, one after another from element `begin`.
    pub fn all_gather_into_v<T: Element>(
        &mut self,
        window: &Window<T>,
        begin: usize,
        shard_lens: &[usize],
    ) -> OperationBuilder<'_, T> {
        let end = shard_lens.iter().fold(begin, |end, &len| end.saturating_add(len));
        let target =
            Target::Window(WindowRange { window: Arc::clone(&window.inner), range: begin..end });
        self.describe("all-gather-into-v", Shards::Uneven(shard_lens.to_vec()), target)
    }

    fn describe<T: Element>(
        &mut self,
        operation: &'static str,
        shards: Shards,
        target: Target,
    ) -> OperationBuilder<'_, T> {
        OperationBuilder::new(self, operation, Collective::AllGather, shards, target)
    }

    /// Describes a broadcast of `len` elements from rank `root` to all ranks.
    ///
    /// On the root the input has `len` elements; on other ranks it is empty. In place, there is no input, and the root
    /// fills the output before a start.
    ///
    /// ```
    /// # use peerlane_collectives::bootstrap::{Bootstrap, in_process};
    /// # use peerlane_collectives::group::Group;
    /// # use peerlane_hal::Rank;
    /// # use peerlane_host as host;
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
        let collective = Collective::Broadcast { root };
        OperationBuilder::new(
            self,
            "broadcast",
            collective,
            Shards::Root(root, len),
            Target::Buffers,
        )
    }

    /// Describes an all-to-all in which every rank sends `block_len` elements to every rank.
    ///
    /// The input of each rank consists of one block for every rank, in rank order. The output consists of one block
    /// from every rank, in rank order. It cannot run in place.
    ///
    /// ```
    /// # use peerlane_collectives::bootstrap::{Bootstrap, in_process};
    /// # use peerlane_collectives::group::Group;
    /// # use peerlane_host as host;
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let rank = group.rank().0 as i32;
    /// let mut all_to_all = group.all_to_all::<i32>(1).prepare()?;
    /// all_to_all.input_mut()?.copy_from_slice(&[10 * rank, 10 * rank + 1]);
    /// all_to_all.run()?;
    /// assert_eq!(all_to_all.output()?, [rank, 10 + rank]);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    pub fn all_to_all<T: Element>(&mut self, block_len: usize) -> OperationBuilder<'_, T> {
        let shards = Shards::Equal(block_len);
        OperationBuilder::new(self, "all-to-all", Collective::AllToAll, shards, Target::Buffers)
    }

    /// Opens a window: allocates zeroed memory for `len` elements on every rank, and exchanges its keys. Collective.
    ///
    /// Any number of operations can [use it](Self::all_gather_into) without another exchange of keys.
    ///
    /// # Errors
    /// [`Mismatch`](peerlane_hal::ErrorKind::Mismatch), naming the rank and the field that differs;
    /// [`OutOfMemory`](peerlane_hal::ErrorKind::OutOfMemory); the group's end.
    pub fn window<T: Element>(&mut self, len: usize) -> Result<Window<T>, Error> {
        let bytes = shards::bytes(T::DTYPE, "window_len", len);
        window::open(self, T::DTYPE, None, bytes).map(Window::new)
    }

    /// Opens a window over memory of the caller, which has the same length on every rank. Collective.
    ///
    /// # Errors
    /// As [`window`](Self::window).
    pub fn window_over<T: Element>(&mut self, buffer: Buffer<T>) -> Result<Window<T>, Error> {
        let bytes = shards::bytes(T::DTYPE, "window_len", buffer.len());
        window::open(self, T::DTYPE, Some(buffer.into_region()), bytes).map(Window::new)
    }
}
