//! Runs all-to-alls in which each start has counts of its own, which travel with the data.
//!
//! An all-to-all-v consists of two operations: an all-gather of the counts of all ranks, and a
//! resizable all-to-all. A start exchanges the counts, checks those of all ranks, and lays out the
//! blocks by them. Every rank knows all counts then, so it also knows where its blocks begin in
//! the outputs of its peers, which have no room for more than what comes.
//!
//! If the host cannot read the memory of the group on some rank, the counts go through the hub
//! instead (docs/adr/0030).

use std::fmt;
use std::mem;
use std::time::Duration;

use peerlane_hal::{Deadline, ErrorKind, Rank, Region as _, Space, Stream};

use super::builder::OperationBuilder;
use super::counts::{CountTable, Fault, SendCounts, StartElements};
use super::lens::BlockLens;
use super::request::OperationSpec;
use super::resize::Part;
use super::{Lease, Operation, Started, prepare};
use crate::collective::Collective;
use crate::element::{DType, Element, Untyped};
use crate::error::Error;
use crate::group::Group;
use crate::group::agreement::{Offer, agree, blob, decode, encode};
use crate::group::buffer::{Buffer, MemoryRange};
use crate::group::report::Report;
use crate::group::window::Window;
use crate::plan::Algorithm;
use crate::run::buffers::BufferId;

/// The name of the operation that exchanges the counts, in errors.
const COUNTS: &str = "counts of an all-to-all-v";

/// What this rank does after the counts are exchanged.
pub(in crate::group) enum Intent {
    StartOnHost,
    StartOnStream,
    /// The rank refuses the start for this reason.
    Refuse(Error),
}

/// A builder for an [`AllToAllV`]; [`prepare`](Self::prepare) makes it ready to start.
#[derive(Debug)]
pub struct AllToAllVBuilder<'g, T> {
    builder: OperationBuilder<'g, T>,
    send_max: usize,
    receive_max: usize,
    /// Whether the caller sets `beside_compute` for each start.
    beside_compute_by_start: bool,
}

impl<'g, T> AllToAllVBuilder<'g, T> {
    pub(super) fn new(
        group: &'g mut Group,
        dtype: DType,
        (send_max, receive_max): (usize, usize),
    ) -> Self {
        let lens = BlockLens::by_start(send_max, receive_max);
        let builder = OperationBuilder::new(group, Collective::AllToAll, dtype, lens);
        Self { builder: builder.resizable(), send_max, receive_max, beside_compute_by_start: false }
    }

    /// Sets a label for errors, as [`OperationBuilder::label`].
    #[must_use]
    pub fn label(self, label: impl Into<String>) -> Self {
        Self { builder: self.builder.label(label), ..self }
    }

    /// Sets the algorithm that moves the data, as [`OperationBuilder::algorithm`].
    #[must_use]
    pub fn algorithm(self, algorithm: Algorithm) -> Self {
        Self { builder: self.builder.algorithm(algorithm), ..self }
    }

    /// Sets how many outputs the starts alternate between, 1 or 2, as
    /// [`OperationBuilder::outputs`].
    ///
    /// The default is 1. With 2, whose memory is twice as long, starts on a stream need not wait
    /// until the outputs of all ranks are free. Starts that all ranks make on the host never do.
    #[must_use]
    pub fn outputs(self, outputs: u32) -> Self {
        Self { builder: self.builder.outputs(outputs), ..self }
    }

    /// Sets the timeout of the exchange of the counts, and that of the start after it. If either
    /// passes, the group ends. The default is the timeout of the group. Preparing the operation may
    /// take as long as the longer of the two.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { builder: self.builder.timeout(timeout), ..self }
    }

    /// Sets the buffer that holds the input, with `send_max` elements; by default, Peerlane
    /// allocates one.
    #[must_use]
    pub fn input(self, input: Buffer<T>) -> Self {
        Self { builder: self.builder.input(input), ..self }
    }

    /// Sets the buffer that receives the output, with `receive_max` elements; by default, Peerlane
    /// allocates one.
    #[must_use]
    pub fn output(self, output: Buffer<T>) -> Self {
        Self { builder: self.builder.output(output), ..self }
    }

    /// Uses `send_max` elements of a window, from element `begin` on, as the input.
    #[must_use]
    pub fn input_from(self, window: &Window<T>, begin: usize) -> Self {
        Self { builder: self.builder.input_from(window, begin), ..self }
    }

    /// Uses `receive_max` elements of a window, from element `begin` on, as the output. The place
    /// is the same on every rank.
    #[must_use]
    pub fn output_into(self, window: &Window<T>, begin: usize) -> Self {
        Self { builder: self.builder.output_into(window, begin), ..self }
    }

    /// Sets whether the operation runs beside kernels of the caller, as
    /// [`OperationBuilder::beside_compute`].
    #[must_use]
    pub fn beside_compute(self, beside_compute: bool) -> Self {
        Self { builder: self.builder.beside_compute(beside_compute), ..self }
    }

    /// Lets each start say whether it runs beside compute, by
    /// [`AllToAllV::set_beside_compute`].
    pub(in crate::group) fn beside_compute_by_start(self) -> Self {
        Self { beside_compute_by_start: true, ..self }
    }

    /// Prepares the operation, as [`OperationBuilder::prepare`]. Collective.
    ///
    /// # Errors
    /// As [`OperationBuilder::prepare`].
    pub fn prepare(self) -> Result<AllToAllV<T>, Error> {
        let Self { builder, send_max, receive_max, beside_compute_by_start } = self;
        let (group, data) = builder.into_parts();
        let (rank, ranks) = (group.rank(), group.ranks());

        let words = CountTable::row_words(ranks);
        let counts = OperationBuilder::<u64>::new(
            group,
            Collective::AllGather,
            DType::U64,
            BlockLens::from(words),
        );
        // It is as short as a barrier, so no other algorithm or number of chunks is faster.
        let counts = counts.named(COUNTS).algorithm(Algorithm::Direct).chunks(1);
        let counts = counts.timeout(data.timeout);
        let counts = match &data.label {
            Some(label) => counts.label(label.clone()),
            None => counts,
        };
        let (group, counts) = counts.into_parts();

        let label = data.label.as_ref().map_or(String::new(), |label| format!(" \"{label}\""));
        let timeout = data.timeout;
        let is_beside_compute = data.beside_compute;
        let mut specs = vec![counts, data];
        if beside_compute_by_start {
            let other = OperationSpec { beside_compute: !is_beside_compute, ..specs[1].clone() };
            specs.push(other);
        }

        let mut prepared = prepare::prepare(group, specs)?.into_iter();
        let (Some(counts), Some(data)) = (prepared.next(), prepared.next()) else {
            unreachable!("at least two operations were prepared");
        };
        let other = prepared.next().map(Operation::new);
        let name = format!("all-to-all-v {}{label}", group.prepared);

        // Ranks of one group can have different fabrics, and all take the same path.
        let on_host = [BufferId::INPUT, BufferId::OUTPUT]
            .map(|buffer| counts.memory(buffer, 0..0).0.space() == Space::Host);
        let offer = Offer::default().blob(vec![u8::from(on_host == [true; 2])]);
        // As for the operations, a short timeout of the starts leaves the preparation its time.
        let deadline = Deadline::after(timeout.max(group.timeout()));
        let offers = agree(&group.runtime, &format!("{name}, memory"), Ok(offer), deadline)?;
        let mut through_hub = false;
        for (rank, offer) in Rank::all(ranks).zip(&offers) {
            through_hub |= blob(offer, rank, 0)? != [1];
        }

        let mut prepared = AllToAllV {
            name,
            counts: Operation::new(counts),
            data: Operation::new(data),
            other,
            is_beside_compute,
            table: CountTable::new(rank, ranks, send_max, receive_max),
            through_hub,
            timeout,
            starts: 0,
            is_last_on_stream: false,
            received: vec![0; ranks],
            displacements: vec![0; ranks],
        };
        // Until the first start, the output is empty.
        prepared.place()?;
        Ok(prepared)
    }
}

/// A prepared all-to-all in which every start has counts and displacements of its own, like
/// `MPI_Alltoallv` with an exchange of the counts before.
///
/// [`Group::all_to_all_v`] describes one. A rank gives only what it sends, and learns from the
/// start how much comes from each rank. The input has room for what a rank sends in all, and the
/// output for what it receives in all, however that is spread over the ranks. In the output, the
/// blocks follow each other in rank order without gaps.
///
/// In this example, each rank sends tokens to the ranks of the experts that they need.
///
/// ```
/// use peerlane::bootstrap::{Bootstrap, in_process};
/// use peerlane::{Group, Rank, SendCounts, host};
///
/// in_process::run(2, |bootstrap| {
///     let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
///     let mut group = Group::open(bootstrap, fabric)?;
///     let rank = group.rank().0 as i32;
///
///     // Each rank sends at most 4 elements in all, and all may go to one rank.
///     let mut dispatch = group.all_to_all_v::<i32>(4, 8).prepare()?;
///     dispatch.input_mut()?.copy_from_slice(&[10 * rank, 10 * rank + 1, 10 * rank + 2, 0]);
///     let received = dispatch.run(if rank == 0 { &[1, 2] } else { &[3, 0] })?;
///     assert_eq!(received, if rank == 0 { [1, 3] } else { [2, 0] });
///     let expected: &[i32] = if rank == 0 { &[0, 10, 11, 12] } else { &[1, 2] };
///     assert_eq!(dispatch.output()?, expected);
///
///     // The block for each rank can be anywhere in the input.
///     dispatch.input_mut()?.copy_from_slice(&[1, 2, 3, 4]);
///     dispatch.run(SendCounts::new(&[1, 1]).displacements(&[3, 1]))?;
///     assert_eq!(dispatch.output_of(Rank(0))?, if rank == 0 { [4] } else { [2] });
///
///     // If counts are refused on one rank, all ranks return an error, and nothing has moved.
///     let counts = if rank == 0 { [5, 0] } else { [1, 0] };
///     let error = dispatch.run(&counts).unwrap_err();
///     assert!(error.to_string().contains("5 elements are sent to rank 0"));
///     assert_eq!(dispatch.run(&[1, 0])?, if rank == 0 { [1, 1] } else { [0, 0] });
///     group.close()
/// })
/// .unwrap();
/// ```
///
/// # Cost
/// Every rank tells all others 3 n + 1 words of 8 bytes in each start, where n is the number of
/// ranks. The host waits for them, in a start on a stream too, because it enqueues the copies. If
/// the host can read the memory of the group on all ranks, that is a short all-gather. Otherwise,
/// as on GPUs, it is a message through the hub, such as [`Group::exchange`]: about 0.1 ms with 2
/// processes of a host, and 0.3 ms with 4 on 2 cores. It waits for the open starts of the host. A
/// start is then a collective call of the group: where several threads use a group, they make these
/// calls in the same order on every rank.
pub struct AllToAllV<T> {
    /// The name in errors.
    name: String,
    counts: Operation<u64>,
    /// The operation that moves the data.
    pub(in crate::group) data: Operation<T>,
    /// The operation that moves the data of starts that make the other choice of running beside
    /// compute, if starts choose.
    other: Option<Operation<T>>,
    /// Whether `data` runs beside compute.
    is_beside_compute: bool,
    table: CountTable,
    /// Whether the counts go through the hub, because the memory of `counts` is on a device.
    through_hub: bool,
    timeout: Duration,
    /// The number of calls that have exchanged counts.
    starts: u64,
    /// Whether the last start of this rank was made on a stream.
    is_last_on_stream: bool,
    received: Vec<usize>,
    displacements: Vec<usize>,
}

impl<T> AllToAllV<T> {
    /// Starts the operation with the counts of this start, and waits until its output is complete.
    /// Returns the number of elements that have come from each rank. Collective.
    ///
    /// Work on streams that uses the input or the output must be complete before the call.
    ///
    /// # Errors
    /// Nothing has moved, and the operation can be started again, after these errors, which all
    /// ranks return:
    /// - counts or displacements that a rank must not give: lists of another length than the number
    ///   of ranks, more elements than it has room for, a block outside of the input, or blocks that
    ///   overlap. It is [`InvalidArgument`](ErrorKind::InvalidArgument) on that rank and
    ///   [`Aborted`](ErrorKind::Aborted) on the others, which names the rank;
    /// - [`InvalidArgument`](ErrorKind::InvalidArgument), naming the rank, if a rank receives more
    ///   than it has room for;
    /// - [`Mismatch`](ErrorKind::Mismatch), naming two ranks, if a rank receives another number
    ///   than it [expects](SendCounts::receive_counts).
    ///
    /// Otherwise as [`Operation::run`].
    pub fn run<'c>(&mut self, counts: impl Into<SendCounts<'c>>) -> Result<&[usize], Error> {
        self.exchange(&counts.into(), Intent::StartOnHost)?;
        self.data.run()?;
        Ok(&self.received)
    }

    /// Exchanges the counts of this start and starts it, and returns a handle by which the caller
    /// waits for its completion. Collective.
    ///
    /// It returns when the counts of all ranks are known. Then
    /// [`received_counts`](Self::received_counts) returns them.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn start<'c>(
        &mut self,
        counts: impl Into<SendCounts<'c>>,
    ) -> Result<Started<'_, T>, Error> {
        self.exchange(&counts.into(), Intent::StartOnHost)?;
        self.data.start()
    }

    /// Exchanges the counts of this start and enqueues it on the caller's stream, as
    /// [`Operation::start_on`]. Collective.
    ///
    /// The host waits for the counts of all ranks, and not for the stream: the work that the stream
    /// holds now can fill the input. A stream that captures a graph is refused, because the counts
    /// of a replay would not be known.
    ///
    /// # Errors
    /// As [`run`](Self::run), and as [`Operation::start_on`]. If one rank refuses the stream, all
    /// ranks return an error, and nothing has moved.
    pub fn start_on<'c, S: Stream>(
        &mut self,
        stream: &S,
        counts: impl Into<SendCounts<'c>>,
    ) -> Result<Lease<'_, T>, Error> {
        let intent = match self.data.state.prepared.check_stream(stream) {
            Ok(false) => Intent::StartOnStream,
            Ok(true) => Intent::Refuse(invalid(
                "the stream captures a graph, expected one that runs its work at once, because the host must know the \
                 counts of each start"
                    .to_owned(),
            )),
            Err(error) => Intent::Refuse(error),
        };

        self.exchange(&counts.into(), intent)?;
        self.data.start_on(stream)
    }

    /// Exchanges the counts of all ranks, checks them, and lays out the next start by them.
    ///
    /// A rank that refuses the start, for a reason in `intent` or by its counts, takes part, so
    /// that all ranks return an error.
    fn exchange(&mut self, counts: &SendCounts<'_>, intent: Intent) -> Result<(), Error> {
        // Starts on streams have another plan, with engines of its own, so only they are ordered
        // by their streams. When a rank has told counts for a start of the host, its output is
        // free.
        let on_stream = matches!(intent, Intent::StartOnStream);
        if !on_stream || !self.is_last_on_stream {
            self.settle()?;
        }

        let ranks = self.received.len();
        let word = self.table.start_word();
        let write_row = |row: &mut [u64]| match &intent {
            Intent::Refuse(_) => CountTable::write_refusal(row),
            Intent::StartOnHost | Intent::StartOnStream => {
                CountTable::write_row(counts, ranks, on_stream, row);
                row[0] |= word;
            }
        };
        self.starts += 1;
        if self.through_hub {
            let mut row = vec![0; CountTable::row_words(ranks)];
            write_row(&mut row);
            self.exchange_through_hub(&row)?;
        } else {
            write_row(self.counts.input_mut()?);
            self.counts.run()?;
            self.table.rows_mut().copy_from_slice(self.counts.output()?);
        }

        if self.table.has_refusal() {
            // All ranks learn the reason.
            let mine = match intent {
                Intent::Refuse(error) => Err(error),
                Intent::StartOnHost | Intent::StartOnStream => Ok(Offer::default()),
            };
            let label = format!("{}, start {}", self.name, self.starts);
            let deadline = Deadline::after(self.timeout);
            agree(self.data.state.prepared.runtime(), &label, mine, deadline)?;
        }
        self.place()?;
        self.is_last_on_stream = on_stream;
        Ok(())
    }

    /// Sets the timeout of the exchange of the counts, and that of the start after it.
    pub(in crate::group) fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
        self.counts.set_timeout(timeout);
        self.data.set_timeout(timeout);
        if let Some(other) = &mut self.other {
            other.set_timeout(timeout);
        }
    }

    /// Waits until the starts have nothing left to do.
    pub(in crate::group) fn settle(&self) -> Result<(), Error> {
        self.data.state.settle()?;
        self.other.as_ref().map_or(Ok(()), |other| other.state.settle())
    }

    /// Sets whether the next start runs beside compute, in an operation whose starts choose. All
    /// ranks compare it with the counts.
    pub(in crate::group) fn set_beside_compute(&mut self, beside_compute: bool) {
        self.table.set_beside_compute(beside_compute);
    }

    /// Sets the elements that the counts of the next start name, in an operation on bytes.
    pub(in crate::group) fn set_elements(&mut self, elements: StartElements) {
        self.table.set_elements(elements);
    }

    /// Exchanges the counts of the next start, as [`start`](Self::start) does before it starts.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub(in crate::group) fn exchange_counts(
        &mut self,
        counts: &SendCounts<'_>,
        intent: Intent,
    ) -> Result<(), Error> {
        self.exchange(counts, intent)
    }

    /// Returns the elements that the longest input and the longest output of the last exchange need
    /// if the operation has no room for one of them, which is then the reason of its error.
    pub(in crate::group) fn lacks_room(&self) -> Option<[u64; 2]> {
        self.table.needs().filter(|needs| !self.table.has_room(*needs))
    }

    /// Fills the table with the rows of all ranks, which they send through the hub.
    fn exchange_through_hub(&mut self, row: &[u64]) -> Result<(), Error> {
        let label = format!("{}, counts of start {}", self.name, self.starts);
        let offer = Offer::default().blob(encode(&row));
        let runtime = self.data.state.prepared.runtime();
        let offers = agree(runtime, &label, Ok(offer), Deadline::after(self.timeout))?;

        let rows = self.table.rows_mut().chunks_exact_mut(row.len());
        for ((peer, offer), row) in Rank::all(offers.len()).zip(&offers).zip(rows) {
            let words: Vec<u64> = decode("counts", offer, peer, 0)?;
            if words.len() != row.len() {
                let text = format!(
                    "{label}: rank {peer} sent {} words, expected {}; run the same Peerlane on all ranks",
                    words.len(),
                    row.len()
                );
                return Err(Error::new(ErrorKind::Mismatch, text).with_peer(peer));
            }
            row.copy_from_slice(&words);
        }
        Ok(())
    }

    /// Lays out the next start by the table.
    fn place(&mut self) -> Result<(), Error> {
        self.table.place().map_err(|fault| self.refused(fault))?;

        // The operation of the last start stays for the next one that makes the other choice.
        if let Some(other) = &mut self.other
            && self.is_beside_compute != self.table.is_beside_compute()
        {
            mem::swap(&mut self.data, other);
            self.is_beside_compute = !self.is_beside_compute;
        }

        self.data.state.resize(&Part::table(&self.table))?;

        let rank = self.data.state.rank;
        let received = self.received.iter_mut().zip(&mut self.displacements);
        for (provider, (count, displacement)) in Rank::all(self.table.ranks()).zip(received) {
            *count = in_memory(self.table.count(provider, rank));
            *displacement = in_memory(self.table.output_offset(provider, rank));
        }
        Ok(())
    }

    /// Returns the error of a start that all ranks refuse.
    fn refused(&self, fault: Fault) -> Error {
        let Fault { kind, text, peer, is_own } = fault;
        let (name, start, rank) = (&self.name, self.starts, self.data.state.rank);
        let error = match is_own && peer != rank {
            true => {
                let text = format!("{name}, start {start}: rank {peer} failed ({kind}): {text}");
                Error::new(ErrorKind::Aborted, text)
            }
            false => Error::new(kind, format!("{name}, start {start}: {text}")),
        };

        let error = if is_own && peer == rank { error } else { error.with_peer(peer) };
        self.data.state.prepared.runtime().life.identity.name(error)
    }

    /// Returns the number of elements that the last start receives from each rank.
    pub fn received_counts(&self) -> &[usize] {
        &self.received
    }

    /// Returns the element of the output at which the block from each rank begins.
    pub fn received_displacements(&self) -> &[usize] {
        &self.displacements
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.data.dtype()
    }

    /// Returns the bytes of the whole input for writing, as [`Operation::input_bytes_mut`].
    ///
    /// # Errors
    /// As [`Operation::input_bytes_mut`].
    pub fn input_bytes_mut(&mut self) -> Result<&mut [u8], Error> {
        self.data.input_bytes_mut()
    }

    /// Returns the bytes that the last start has received, as [`Operation::output_bytes`].
    ///
    /// # Errors
    /// As [`Operation::output_bytes`].
    pub fn output_bytes(&self) -> Result<&[u8], Error> {
        self.data.output_bytes()
    }

    /// Returns the address range of the whole input, which work on a stream can fill.
    ///
    /// # Errors
    /// As [`Operation::input_memory`].
    pub fn input_memory(&self) -> Result<MemoryRange, Error> {
        self.data.input_memory()
    }

    /// Returns the address range of what the last start receives, which work on a stream can read.
    pub fn output_memory(&self) -> MemoryRange {
        self.data.output_memory()
    }

    /// Returns the address range of what the last start receives from a rank.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no such rank.
    pub fn output_memory_of(&self, rank: Rank) -> Result<MemoryRange, Error> {
        self.data.output_memory_of(rank)
    }

    /// Returns the report that says how the data moves.
    pub fn report(&self) -> &Report {
        self.data.report()
    }

    /// Returns the error that has ended the group, if one has, as [`Operation::check`].
    ///
    /// # Errors
    /// As [`Operation::check`].
    pub fn check(&self) -> Result<(), Error> {
        self.data.check()
    }
}

impl<T: Element> AllToAllV<T> {
    /// Returns the whole input for writing, as [`Operation::input_mut`].
    ///
    /// # Errors
    /// As [`Operation::input_mut`].
    pub fn input_mut(&mut self) -> Result<&mut [T], Error> {
        self.data.input_mut()
    }

    /// Returns what the last start has received: the blocks of all ranks in rank order, without
    /// gaps. If it is not complete, waits for it first.
    ///
    /// # Errors
    /// As [`Operation::output`].
    pub fn output(&self) -> Result<&[T], Error> {
        self.data.output()
    }

    /// Returns what the last start has received from a rank. If it is not complete, waits for it
    /// first.
    ///
    /// # Errors
    /// As [`Operation::output_of`].
    pub fn output_of(&self, rank: Rank) -> Result<&[T], Error> {
        self.data.output_of(rank)
    }
}

impl<T> fmt::Debug for AllToAllV<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllToAllV")
            .field("name", &self.name)
            .field("starts", &self.starts)
            .field("report", self.report())
            .finish_non_exhaustive()
    }
}

impl Group {
    /// Returns a builder for an all-to-all in which each start has counts of its own, such as the
    /// number of tokens for the experts of each rank.
    ///
    /// A start sends at most `send_max` elements from each rank to all ranks together, and each
    /// rank receives at most `receive_max` elements from all ranks together. Both are equal on all
    /// ranks. See [`AllToAllV`].
    pub fn all_to_all_v<T: Element>(
        &mut self,
        send_max: usize,
        receive_max: usize,
    ) -> AllToAllVBuilder<'_, T> {
        AllToAllVBuilder::new(self, T::DTYPE, (send_max, receive_max))
    }

    /// Returns a builder for an [all-to-all-v](Self::all_to_all_v) whose element type is chosen at
    /// run time.
    pub fn untyped_all_to_all_v(
        &mut self,
        dtype: DType,
        send_max: usize,
        receive_max: usize,
    ) -> AllToAllVBuilder<'_, Untyped> {
        AllToAllVBuilder::new(self, dtype, (send_max, receive_max))
    }
}

/// Converts a number of elements of an input or output.
fn in_memory(elements: u64) -> usize {
    usize::try_from(elements).expect("an output of the process has as many elements")
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}
