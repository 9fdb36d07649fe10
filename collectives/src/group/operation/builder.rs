//! Defines the builder by which a caller sets the options of a collective operation.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::Priority;

use super::Operation;
use super::lens::{BlockLens, Destination};
use super::prepare;
use super::request::{Method, OperationSpec, Target};
use crate::collective::Collective;
use crate::cost::{Form, Links, Transfer};
use crate::element::{DType, Operator};
use crate::error::Error;
use crate::group::Group;
use crate::group::buffer::Buffer;
use crate::group::window::Window;
use crate::layout::Columns;
use crate::plan::Algorithm;
use crate::run::parts::Handles;

/// The sides of an operation that are matrices, of which a block is a range of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Matrix {
    /// The input is a matrix, and the blocks of the output are contiguous.
    Input,
    /// The output is a matrix, and the blocks of the input are contiguous.
    Output,
    /// Both are matrices.
    Both,
}

impl Matrix {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Input, Self::Output, Self::Both];

    /// Returns the name of the sides, such as `input`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Output => "output",
            Self::Both => "both",
        }
    }
}

/// A builder for a collective operation; [`prepare`](Self::prepare) makes the operation ready to
/// start.
pub struct OperationBuilder<'g, T> {
    group: &'g mut Group,
    spec: OperationSpec,
    elements: PhantomData<T>,
}

impl<'g, T> OperationBuilder<'g, T> {
    /// Describes an operation on elements of `dtype`, which is the type `T` or, for
    /// [`Untyped`](crate::element::Untyped), any type.
    pub(super) fn new(
        group: &'g mut Group,
        collective: Collective,
        dtype: DType,
        lens: BlockLens,
    ) -> Self {
        let timeout = group.timeout();
        let strict = group.setup.strict;

        let spec = OperationSpec {
            name: None,
            label: None,
            collective,
            operator: Operator::default(),
            dtype,
            lens,
            target: Target::Buffers,
            method: Method { engine: group.setup.engine.clone(), ..Method::default() },
            in_place: false,
            outputs: None,
            capturable: false,
            any_engine: false,
            priority: Priority::Normal,
            beside_compute: group.setup.beside_compute,
            strict,
            traced: false,
            resizable: false,
            handles: Handles::default(),
            columns: None,
            checks_starts: cfg!(debug_assertions),
            timeout,
            inputs: Vec::new(),
            source: None,
            output_buffers: Vec::new(),
        };

        Self { group, spec, elements: PhantomData }
    }

    /// Sets a label of the operation for errors and abort records, such as
    /// `all-gather 3 "weights of layer 7"`.
    ///
    /// The label must be equal on all ranks, and has at most 256 bytes. By default, the name is the
    /// collective with a number that counts the operations of the group.
    #[must_use]
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.spec.label = Some(label.into());
        self
    }

    /// Sets the name of the operation in errors, for operations that the group makes for itself.
    pub(in crate::group) fn named(mut self, name: &'static str) -> Self {
        self.spec.name = Some(name);
        self
    }

    /// Sets the algorithm of the operation; the default is the one that is
    /// [predicted](crate::cost::choose) to be the fastest. Where engines have no gets, `direct`
    /// stands in for `pull`.
    #[must_use]
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.spec.method.algorithm = Some(algorithm);
        self
    }

    /// Sets the operator of a reduction; the default is the sum. Other collectives ignore it.
    #[must_use]
    pub fn operator(mut self, operator: Operator) -> Self {
        self.spec.operator = operator;
        self
    }

    /// Sets the number of chunks into which a block is cut; the default is the number that is
    /// predicted to be the fastest.
    #[must_use]
    pub fn chunks(mut self, chunks: u32) -> Self {
        self.spec.method.chunks = Some(chunks);
        self
    }

    /// Sets the link rates from which the algorithm and the number of chunks are chosen, such as
    /// those of a [`Calibration`](crate::cost::Calibration).
    ///
    /// They must be equal on all ranks. The default is the links of the [group](Group::links). Call
    /// it once for each [kind of engines](Links::engine) that was measured.
    #[must_use]
    pub fn links(mut self, links: Links) -> Self {
        self.spec.method.links.retain(|known| known.engine != links.engine);
        self.spec.method.links.push(links);
        self
    }

    /// Sets the kind of engines, such as `streams` or `sdma`, among those that all ranks
    /// [offer](Group::engines).
    ///
    /// Every rank sets the same kind. The default is that of the group, or else the kind with the
    /// shortest predicted time, and the next one if a rank cannot create engines of that kind.
    #[must_use]
    pub fn engine(mut self, kind: impl Into<String>) -> Self {
        self.spec.method.engine = Some(kind.into());
        self
    }

    /// Sets the form of an all-reduce; the default is the one with the shortest predicted time.
    ///
    /// Every rank sets the same form. In place, an all-reduce runs in parts.
    #[must_use]
    pub fn form(mut self, form: Form) -> Self {
        self.spec.method.form = Some(form);
        self
    }

    /// Has the starts be fused, and sets how their data moves; the default is what has the shortest
    /// predicted time.
    ///
    /// Every rank sets the same transfer. [`prepare`](Self::prepare) fails if no kind of engines
    /// fuses the starts of the operation so.
    #[must_use]
    pub fn transfer(mut self, transfer: Transfer) -> Self {
        self.spec.method.transfer = Some(transfer);
        self
    }

    /// Makes the operation run in place, with this rank's data in the output buffer as its input.
    ///
    /// The output can be a list, several tensors or a range of a window. In an all-reduce, the
    /// input is the whole output. All-gathers, broadcasts and all-reduces can run in place.
    #[must_use]
    pub fn in_place(mut self) -> Self {
        self.spec.in_place = true;
        self
    }

    /// Sets how many output buffers the starts of an operation alternate between, 1 or 2.
    ///
    /// With two, no put waits until a peer has entered the start, because a start writes where the
    /// start before the last one did; [`Operation::output`] is always the newest. The default is
    /// two for small outputs that are out of place and in one buffer that Peerlane allocates, and
    /// one otherwise. Lists and windows always have one. If only some ranks supply buffers, all
    /// ranks must set this. In a [`capturable`](Self::capturable) operation, only the starts in one
    /// graph alternate, and only if each rank gets data from every other one.
    #[must_use]
    pub fn outputs(mut self, outputs: u32) -> Self {
        self.spec.outputs = Some(outputs);
        self
    }

    /// Allows the operation to be recorded into a graph, such as a CUDA graph.
    ///
    /// With two [outputs](Self::outputs), the starts that one graph records use them in turn, and
    /// only the first one waits until all ranks have entered it, which saves the others about 6 µs
    /// on GPUs. Starts that run at once use the first output. Take the address of an output from
    /// the [`Lease`](super::Lease) of its start.
    ///
    /// [`prepare`](Self::prepare) refuses an algorithm with a lane that no graph can contain and no
    /// thread can drive beside one. Starts that run at once and replays can alternate. If a replay
    /// waits for a peer for longer than the [timeout](Self::timeout), the group ends. The waits of
    /// replays then pass, also of later ones, and their output is undefined; [`Operation::check`]
    /// tells.
    ///
    /// ```compile_fail,E0133
    /// # use peerlane::{Error, Group, Operation};
    /// fn prepare(group: &mut Group) -> Result<Operation<f32>, Error> {
    ///     // Only the caller knows when the last replay is complete.
    ///     group.all_gather(4).capturable().prepare()
    /// }
    /// ```
    ///
    /// # Safety
    /// All ranks record starts of the operation into the same graphs, in the same order, and replay
    /// these graphs in the same order.
    ///
    /// Every graph that has recorded a start of the operation has made its last replay, and that
    /// replay is complete, before the operation is dropped or its group is closed or dropped. No
    /// replay is in progress while the host borrows memory of the operation, by
    /// [`Operation::input_mut`], [`Operation::output`] or a method like them.
    #[must_use]
    pub unsafe fn capturable(mut self) -> Self {
        self.spec.capturable = true;
        self
    }

    /// Allows engines that do not support streams, if they are predicted to be faster for this
    /// operation.
    ///
    /// [`Operation::start_on`] is refused then; [`run`](Operation::run) and
    /// [`start`](Operation::start) drive the engine.
    /// [`LaneReport::kind`](crate::group::LaneReport::kind) names the kind. It has no effect on
    /// backends with one kind of engine, or on [`capturable`](Self::capturable) operations.
    #[must_use]
    pub fn any_engine(mut self) -> Self {
        self.spec.any_engine = true;
        self
    }

    /// Sets whether preparing the operation fails instead of using a slower
    /// [fallback](crate::group::Fallback). The default is the group's setting. The error is then an
    /// error on every rank.
    ///
    /// Then copy engines, NICs or processors make all copies, and compute units make none. A start
    /// on a stream that a thread has to drive is an error of the start, or of the preparation of a
    /// [`capturable`](Self::capturable) operation.
    #[must_use]
    pub fn strict(mut self, strict: bool) -> Self {
        self.spec.strict = strict;
        self
    }

    /// Sets whether the operation records the time of every step, for [`Operation::trace`]; off by
    /// default.
    ///
    /// Each step is then submitted and polled by itself, which makes starts slower. A trace shows
    /// how long steps take relative to each other, and not how fast the operation is. It excludes
    /// [`capturable`](Self::capturable).
    #[must_use]
    pub fn trace(mut self, trace: bool) -> Self {
        self.spec.traced = trace;
        self
    }

    /// Lets each start have lengths and places of its own, which [`Operation::resize`] sets.
    ///
    /// The lengths of the operation are then the largest that a start can have. It has one output,
    /// in one buffer or window, and one tensor. It excludes [`trace`](Self::trace) and
    /// [`destinations`](Self::destinations).
    ///
    /// The lengths of a reduce-scatter are those of the blocks, and the length of an all-reduce is
    /// that of the whole input, of which every start has room for the parts of all ranks. If the
    /// caller names no [form](Self::form), each start has the one that is predicted to be the
    /// fastest for its length.
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Group, host};
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let mut reduce = group.all_reduce::<i32>(100_000).resizable().prepare()?;
    /// for len in [1, 100_000, 7] {
    ///     reduce.resize(len)?.input_mut()?.fill(3);
    ///     reduce.run()?;
    ///     assert_eq!(reduce.output()?, vec![6; len]);
    /// }
    /// # group.close()
    /// # }).unwrap();
    /// ```
    #[must_use]
    pub fn resizable(mut self) -> Self {
        self.spec.resizable = true;
        self
    }

    /// Has starts tell when each block of the output has arrived, so that it can be used before the
    /// others are there.
    ///
    /// [`Operation::start_beside`] makes such starts on a stream, and [`Operation::start`] on the
    /// host. Every rank sets it. Blocks arrive in the order of the plan, which
    /// [`Operation::arrivals`] returns: those of the ranks before this one, from the nearest on.
    /// This rank's own block is copied beside the last of them, because the caller has it in the
    /// input. In place it is there from the beginning.
    ///
    /// The operation runs on copy engines: a start that is one launch of a kernel would tell only
    /// when all is there. A rank puts to the next peer when it has what arrives at the same time,
    /// so a late rank delays the others more than without. It excludes
    /// [`resizable`](Self::resizable).
    #[must_use]
    pub fn arrivals(mut self) -> Self {
        self.spec.handles.arrivals = true;
        self
    }

    /// Has starts wait for each block of the input until the caller says that it is written, so
    /// that the first one moves while the caller computes the next.
    ///
    /// [`Operation::start_beside`] makes such starts on a stream, and [`Operation::start`] on the
    /// host. Every rank sets it. Starts read the blocks in the order of [`Operation::departures`]:
    /// those for the ranks after this one, from the nearest on. This rank's own block is the last
    /// one of a reduction, and the last but one otherwise. It excludes
    /// [`resizable`](Self::resizable), and algorithms in which peers read the input.
    #[must_use]
    pub fn departures(mut self) -> Self {
        self.spec.handles.departures = true;
        self
    }

    /// Lays out the input, the output or both as a matrix of `rows` rows.
    ///
    /// The rows follow each other. The block for or from a rank is then a range of columns, in rank
    /// order, and not a range of elements.
    ///
    /// On the other side a block is contiguous: its rows follow each other. Columns are copied
    /// directly. `prepare` refuses a matrix for reductions, several tensors, and operations that
    /// are in place, resizable or with destinations.
    ///
    /// In this example each of two ranks has all columns of two rows, and gets two columns of all
    /// rows.
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Group, Matrix, host};
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// # let rank = group.rank().0;
    /// let mut exchange = group.all_to_all::<u32>(4).matrix(2, Matrix::Input).prepare()?;
    /// let rows = [[0, 1, 2, 3], [10, 11, 12, 13]].map(|row| row.map(|one: u32| one + 20 * rank));
    /// exchange.input_mut()?.copy_from_slice(rows.as_flattened());
    /// exchange.run()?;
    /// let first = [0, 1, 10, 11, 20, 21, 30, 31];
    /// assert_eq!(exchange.output()?, first.map(|one: u32| one + 2 * rank));
    /// # group.close()
    /// # }).unwrap();
    /// ```
    #[must_use]
    pub fn matrix(mut self, rows: usize, sides: Matrix) -> Self {
        let (input, output) = (sides != Matrix::Output, sides != Matrix::Input);
        self.spec.columns = Some(Columns { rows: rows as u64, input, output });
        self
    }

    /// Sets whether the lengths and places of a [`resizable`](Self::resizable) operation are
    /// compared between ranks even where the host can only read the flags slowly, as on GPUs; the
    /// default is on in debug builds.
    ///
    /// They are compared when a start is seen to be complete. Where the host can read the flags
    /// directly they always are.
    #[must_use]
    pub fn check_starts(mut self, check: bool) -> Self {
        self.spec.checks_starts = check;
        self
    }

    /// Sets the priority of the operation among the work of this rank; the default is
    /// [`Normal`](Priority::Normal).
    ///
    /// While work of a higher priority is open, a poll of the host copies little of an operation of
    /// a lower one. Copy engines of devices copy in the order of the starts. Ranks need not set the
    /// same priority.
    #[must_use]
    pub fn priority(mut self, priority: Priority) -> Self {
        self.spec.priority = priority;
        self
    }

    /// Sets whether the operation runs beside kernels of the caller, such as the matrix products
    /// that its data is gathered for. The default is the group's setting.
    ///
    /// Then it takes as few compute units as the device allows, even if that is slower on an idle
    /// device: on GPUs, the own block of a rank returns over the link, and a reduction runs on at
    /// most 16 blocks of threads unless the options of the fabric name another number. The
    /// [fallbacks](crate::group::Report::fallbacks) of the report say what compute units still do;
    /// only [`strict`](Self::strict) makes that an error. Every rank sets the same value.
    #[must_use]
    pub fn beside_compute(mut self, beside_compute: bool) -> Self {
        self.spec.beside_compute = beside_compute;
        self
    }

    /// Sets how long a start of the operation may take before the group ends; the default is the
    /// timeout of the group. Preparing the operation may take as long as the longer of the two.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.spec.timeout = timeout;
        self
    }

    /// Sets the buffer that holds the input; by default, Peerlane allocates one.
    #[must_use]
    pub fn input(self, input: Buffer<T>) -> Self {
        self.input_buffers(vec![input])
    }

    /// Sets the buffers that hold the input, either one for all tensors or one for each tensor. One
    /// buffer contains the pieces of all tensors one after another.
    ///
    /// The input of a reduce-scatter of one tensor can also be one buffer for each rank, of which
    /// buffer r holds the contribution to the block of rank r.
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Group, Rank, host};
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let inputs = vec![group.allocate::<f32>(3)?, group.allocate::<f32>(1)?];
    /// let mut scatter = group.reduce_scatter::<f32>([3, 1]).input_buffers(inputs).prepare()?;
    /// scatter.input_block_mut(Rank(0))?.fill(1.5);
    /// scatter.input_block_mut(Rank(1))?.fill(2.0);
    /// scatter.run()?;
    /// let rank = group.rank().index();
    /// assert_eq!(scatter.output()?, [&[3.0; 3][..], &[4.0]][rank]);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    #[must_use]
    pub fn input_buffers(mut self, inputs: Vec<Buffer<T>>) -> Self {
        self.spec.inputs = inputs.into_iter().map(Buffer::into_region).collect();
        self
    }

    /// Uses a range of a window, from element `begin`, as the input of the operation.
    #[must_use]
    pub fn input_from(mut self, window: &Window<T>, begin: usize) -> Self {
        self.spec.source = Some((Arc::clone(&window.inner), begin));
        self
    }

    /// Sets the buffer that receives the output; by default, Peerlane allocates one.
    #[must_use]
    pub fn output(self, output: Buffer<T>) -> Self {
        self.output_buffers(vec![output])
    }

    /// Sets the buffers that receive the output, either one for all tensors or one for each tensor.
    /// One buffer contains all tensors one after another.
    ///
    /// For a list, these are the buffers that its destinations count. Bytes outside the
    /// destinations are not touched.
    #[must_use]
    pub fn output_buffers(mut self, outputs: Vec<Buffer<T>>) -> Self {
        self.spec.output_buffers = outputs.into_iter().map(Buffer::into_region).collect();
        self
    }

    /// Sets where the block from each rank is written in the output buffers.
    ///
    /// `destinations[r]` is for the block from rank r. The output of a reduction is one block,
    /// which has one destination.
    ///
    /// The destinations are in the output buffers of this rank; other ranks can have different
    /// ones. Bytes outside of them do not change. Buffers that the caller does not supply are
    /// allocated with the length that their destinations need.
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Destination, Group, OutputPart, Rank, host};
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let rank = group.rank().0;
    /// let to = |buffer, offset| Destination { buffer, offset };
    /// let mut gather =
    ///     group.all_gather::<u8>([2, 1]).destinations(&[to(1, 0), to(0, 4)]).prepare()?;
    /// gather.input_mut()?.fill(7 + rank as u8);
    /// gather.run()?;
    /// assert_eq!(gather.output_of(Rank(0))?, [7, 7]);
    /// assert_eq!(gather.output_of(OutputPart::Buffer(0))?, [0, 0, 0, 0, 8]);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    #[must_use]
    pub fn destinations(mut self, destinations: &[Destination]) -> Self {
        self.spec.target = Target::List(destinations.to_vec());
        self
    }

    /// Uses a range of a window, from element `begin`, as the output of the operation.
    ///
    /// The range must be the same on every rank.
    ///
    /// The keys of the window are not exchanged again. Many operations can be prepared over one
    /// window, also over ranges that overlap.
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Group, host};
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let rank = group.rank().index();
    /// let window = group.window::<f32>(100)?;
    /// let mut first = group.all_gather(2).output_into(&window, 0).in_place().prepare()?;
    /// let mut second = group.all_gather(1).output_into(&window, 50).in_place().prepare()?;
    /// window.slice_mut(2 * rank..2 * rank + 2)?.fill(rank as f32);
    /// window.slice_mut(50 + rank..51 + rank)?.fill(5.0);
    /// first.run()?;
    /// second.run()?;
    /// assert_eq!(window.slice(0..4)?[..], [0.0, 0.0, 1.0, 1.0]);
    /// assert_eq!(window.slice(50..52)?[..], [5.0, 5.0]);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    #[must_use]
    pub fn output_into(mut self, window: &Window<T>, begin: usize) -> Self {
        self.spec.target = Target::Window(Arc::clone(&window.inner), begin);
        self
    }

    /// Plans and verifies the operation, compares its options on all ranks, and takes its memory
    /// from the heap of the group. Collective.
    ///
    /// Remote keys are exchanged only for buffers of the caller, and when the heap grows. Memory
    /// that the caller does not supply is not zeroed. An error on one rank is an error on all.
    ///
    /// # Errors
    /// [`Mismatch`](peerlane_hal::ErrorKind::Mismatch), naming the rank and the field that differs;
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument);
    /// [`OutOfMemory`](peerlane_hal::ErrorKind::OutOfMemory); the reason why the group has ended.
    pub fn prepare(self) -> Result<Operation<T>, Error> {
        let operations = prepare::prepare(self.group, vec![self.spec])?;
        let state = operations.into_iter().next().expect("one operation was prepared");
        Ok(Operation::new(state))
    }

    /// Returns the group and the description of the operation.
    pub(super) fn into_parts(self) -> (&'g mut Group, OperationSpec) {
        (self.group, self.spec)
    }

    /// Returns the description of the operation without its group, for [`Group::prepare_all`].
    #[must_use]
    pub fn describe(self) -> OperationDescription<T> {
        OperationDescription { spec: self.spec, elements: PhantomData }
    }
}

/// The description of an operation that [`Group::prepare_all`] prepares together with others.
pub struct OperationDescription<T> {
    spec: OperationSpec,
    elements: PhantomData<T>,
}

impl Group {
    /// Prepares several operations in one agreement of all ranks, which costs little more than for
    /// one. Collective.
    ///
    /// If one of them cannot be prepared on some rank, none is on any rank.
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Group, Rank, host};
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let layers: Vec<_> = (1..=3).map(|len| group.all_gather::<i64>(len).describe()).collect();
    /// for mut gather in group.prepare_all(layers)? {
    ///     gather.input_mut()?.fill(7);
    ///     gather.run()?;
    ///     assert!(gather.output()?.iter().all(|value| *value == 7));
    /// }
    /// # group.close()
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// As [`OperationBuilder::prepare`].
    pub fn prepare_all<T>(
        &mut self,
        descriptions: Vec<OperationDescription<T>>,
    ) -> Result<Vec<Operation<T>>, Error> {
        let specs = descriptions.into_iter().map(|description| description.spec).collect();
        let operations = prepare::prepare(self, specs)?.into_iter();
        Ok(operations.map(Operation::new).collect())
    }
}

impl<T> fmt::Debug for OperationDescription<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperationDescription")
            .field("collective", &self.spec.collective)
            .field("lens", &self.spec.lens)
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for OperationBuilder<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperationBuilder")
            .field("collective", &self.spec.collective)
            .field("lens", &self.spec.lens)
            .field("method", &self.spec.method)
            .finish_non_exhaustive()
    }
}
