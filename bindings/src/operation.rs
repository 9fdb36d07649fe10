//! Keeps operations between calls of other languages, with the state of their last start.
//!
//! | state | refuses |
//! | --- | --- |
//! | idle | a wait, the end of a lease |
//! | started | all but a wait and a check |
//! | leased | all but the end of the lease and a check |
//! | beside | all but waits for blocks, departures, the end and a check |
//! | failed | everything |

use std::fmt;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use peerlane::collective::Collective;
use peerlane::group::{Matrix, OperationBuilder, OperationDescription};
use peerlane::hal::BackendId;
use peerlane::{
    Algorithm, BlockChunk, BlockLens, BlockPart, DType, Error, ErrorKind, Group, MemoryRange,
    Operator, OwnedBesideStart, OwnedStart, Part, Rank, Untyped, UntypedOperation, Window,
};

use crate::report;
use crate::stream::Stream;

type Builder<'g> = OperationBuilder<'g, Untyped>;

/// Describes an operation, with the options that the builder of [`Group::untyped_operation`] has.
#[derive(Debug)]
pub struct Request {
    /// The collective.
    pub collective: Collective,
    /// The type of the elements.
    pub dtype: DType,
    /// The lengths of the blocks in elements.
    pub lens: BlockLens,
    /// How a reduction joins elements; other collectives ignore it.
    pub operator: Operator,
    /// The algorithm, or `None` for the fastest one.
    pub algorithm: Option<Algorithm>,
    /// The kind of engines, or `None` for that of the group.
    pub engine: Option<String>,
    /// The number of chunks of a block, or `None` for the best number.
    pub chunks: Option<u32>,
    /// Whether the input of a rank is its block of the output.
    pub in_place: bool,
    /// Whether starts of the operation can be recorded into graphs.
    pub capturable: bool,
    /// Whether each start can have its own lengths and places.
    pub resizable: bool,
    /// Whether the lengths and places of starts are compared also where the host cannot read the
    /// flags directly.
    pub check_starts: bool,
    /// Whether starts tell when each block of the output has arrived.
    pub arrivals: bool,
    /// Whether starts wait for each block of the input until it departs.
    pub departures: bool,
    /// The number of rows of inputs or outputs that are matrices, and which of them are; `None` if
    /// none is.
    pub matrix: Option<(usize, Matrix)>,
    /// The name in errors, beside the collective.
    pub label: Option<String>,
    /// Whether fallbacks are errors.
    pub strict: bool,
    /// Whether the operation runs beside kernels of the caller, or `None` for the setting of the
    /// group.
    pub beside_compute: Option<bool>,
    /// The timeout of a start, or `None` for that of the group.
    pub timeout: Option<Duration>,
    /// The window of the input with the element at which the input begins, or `None` for memory of
    /// the operation.
    pub input: Option<(Window<u8>, usize)>,
    /// The window of the output with the element at which the output begins, or `None` for memory
    /// of the operation.
    pub output: Option<(Window<u8>, usize)>,
}

impl Request {
    /// Creates a request without options and windows.
    pub fn new(collective: Collective, dtype: DType, lens: BlockLens) -> Self {
        Self {
            collective,
            dtype,
            lens,

            operator: Operator::Sum,
            algorithm: None,
            chunks: None,
            in_place: false,
            capturable: false,
            resizable: false,
            check_starts: false,
            arrivals: false,
            departures: false,
            matrix: None,
            engine: None,
            label: None,
            strict: false,
            beside_compute: None,
            timeout: None,
            input: None,
            output: None,
        }
    }

    /// Prepares the operation. Collective.
    ///
    /// If [`capturable`](Self::capturable) is set, `make_capturable` calls
    /// [`OperationBuilder::capturable`], because only the caller knows its promise.
    ///
    /// # Errors
    /// As [`OperationBuilder::prepare`].
    pub fn prepare(
        self,
        group: &mut Group,
        make_capturable: impl FnOnce(Builder<'_>) -> Builder<'_>,
    ) -> Result<AnyOperation, Error> {
        let (backend, ranks) = (group.selection().local, group.ranks());
        let builder = self.builder(group, make_capturable);
        let state = State::Idle(builder.prepare()?);
        Ok(AnyOperation { state, backend, ranks })
    }

    /// Prepares several operations in one agreement of all ranks, as [`Group::prepare_all`].
    /// Collective.
    ///
    /// `make_capturable` is that of [`prepare`](Self::prepare). If one of the operations cannot be
    /// prepared on some rank, none is on any rank.
    ///
    /// # Errors
    /// As [`OperationBuilder::prepare`].
    pub fn prepare_all(
        requests: Vec<Self>,
        group: &mut Group,
        make_capturable: impl Fn(Builder<'_>) -> Builder<'_>,
    ) -> Result<Vec<AnyOperation>, Error> {
        let (backend, ranks) = (group.selection().local, group.ranks());
        let descriptions: Vec<OperationDescription<Untyped>> = requests
            .into_iter()
            .map(|request| request.builder(group, &make_capturable).describe())
            .collect();

        let prepared = group.prepare_all(descriptions)?.into_iter();
        let operations = prepared.map(|operation| AnyOperation {
            state: State::Idle(operation),
            backend,
            ranks,
        });
        Ok(operations.collect())
    }

    /// Returns a builder with all options, of which `make_capturable` sets one.
    fn builder<'g>(
        self,
        group: &'g mut Group,
        make_capturable: impl FnOnce(Builder<'g>) -> Builder<'g>,
    ) -> Builder<'g> {
        let mut builder = group.untyped_operation(self.collective, self.dtype, self.lens);
        builder = builder.operator(self.operator);

        // What is not set keeps the default of the builder.
        if let Some(algorithm) = self.algorithm {
            builder = builder.algorithm(algorithm);
        }
        if let Some(chunks) = self.chunks {
            builder = builder.chunks(chunks);
        }
        if let Some(timeout) = self.timeout {
            builder = builder.timeout(timeout);
        }
        if let Some(beside_compute) = self.beside_compute {
            builder = builder.beside_compute(beside_compute);
        }
        if let Some((rows, sides)) = self.matrix {
            builder = builder.matrix(rows, sides);
        }
        if let Some(engine) = self.engine {
            builder = builder.engine(engine);
        }
        if let Some(label) = self.label {
            builder = builder.label(label);
        }

        if self.in_place {
            builder = builder.in_place();
        }
        if self.resizable {
            builder = builder.resizable();
        }
        if self.arrivals {
            builder = builder.arrivals();
        }
        if self.departures {
            builder = builder.departures();
        }
        if self.strict {
            builder = builder.strict(true);
        }
        if self.check_starts {
            builder = builder.check_starts(true);
        }

        if let Some((window, begin)) = &self.input {
            builder = builder.input_from(&window.untyped(), *begin);
        }
        if let Some((window, begin)) = &self.output {
            builder = builder.output_into(&window.untyped(), *begin);
        }
        if self.capturable {
            builder = make_capturable(builder);
        }
        builder
    }
}

/// An operation of any element type, with the state of its last start.
pub struct AnyOperation {
    state: State,
    backend: BackendId,
    ranks: usize,
}

enum State {
    Idle(UntypedOperation),
    Started(OwnedStart<Untyped>),
    /// The caller has the output of a start on a stream. A [`Lease`](peerlane::Lease) would borrow
    /// the operation; this state refuses other starts in its place.
    Leased(UntypedOperation),
    /// A start runs beside streams of the caller.
    Beside(OwnedBesideStart<Untyped>),
    Failed,
}

/// Returns the block of a rank, or one chunk of it.
pub fn block_part(block: u32, chunk: Option<u32>) -> BlockPart {
    let block = Rank(block);
    chunk.map_or(BlockPart::Block(block), |chunk| BlockPart::Chunk(BlockChunk { block, chunk }))
}

impl AnyOperation {
    /// Returns the backend of the group, whose streams the operation can be started on.
    pub fn backend(&self) -> BackendId {
        self.backend
    }

    /// Returns the number of ranks of the group.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Notes that the caller has refused an argument of a start, and returns the error.
    ///
    /// The other ranks wait for the start, and learn of the refusal when they ask.
    pub fn refuse(&self, error: Error) -> Error {
        self.note_error(&error);
        error
    }

    /// Starts the operation and waits until its output is complete. Collective.
    ///
    /// # Errors
    /// As [`UntypedOperation::run`], and if a start is open.
    pub fn run(&mut self) -> Result<(), Error> {
        let run = self.idle().and_then(UntypedOperation::run);
        self.noted(run)
    }

    /// Starts the operation; [`wait`](Self::wait) finishes the start. Collective.
    ///
    /// # Errors
    /// As [`UntypedOperation::start`], and if a start is open.
    pub fn start(&mut self) -> Result<(), Error> {
        let started = self.take().and_then(UntypedOperation::into_started);
        let started = started.map(|started| self.state = State::Started(started));
        self.noted(started)
    }

    /// Waits for the open start, at most `limit`, or up to its timeout. Returns whether it is
    /// complete.
    ///
    /// # Errors
    /// As [`OwnedStart::wait_for`], and if no start is open.
    pub fn wait(&mut self, limit: Option<Duration>) -> Result<bool, Error> {
        let started = self.started()?;
        let is_done = match limit {
            Some(Duration::ZERO) => started.poll()?,
            Some(limit) => started.wait_for(limit)?,
            None => true,
        };
        self.finish_if(is_done)
    }

    /// Waits for the open start until `part` has passed, as one of several calls. Returns whether
    /// it is complete.
    ///
    /// # Errors
    /// As [`OwnedStart::wait_part`], and if no start is open.
    pub fn wait_part(&mut self, part: Duration) -> Result<bool, Error> {
        let is_done = self.started()?.wait_part(part)?;
        self.finish_if(is_done)
    }

    /// Returns the descriptor of the open start, which becomes readable when the start is complete
    /// or the group has ended.
    ///
    /// The operation keeps it open until it is dropped; do not read from it.
    ///
    /// # Errors
    /// As [`OwnedStart::descriptor`], and if no start is open.
    pub fn descriptor(&mut self) -> Result<RawFd, Error> {
        Ok(self.started()?.descriptor()?.as_raw_fd())
    }

    /// Enqueues a start on a stream of the vendor, and returns the output.
    /// [`end_lease`](Self::end_lease) must follow. Collective.
    ///
    /// # Errors
    /// As [`UntypedOperation::start_on`]; if a start is open or leased; the error of the stream if
    /// it has one.
    pub fn start_on(&mut self, stream: Result<Stream, Error>) -> Result<MemoryRange, Error> {
        let output = self.enqueue(stream);
        self.noted(output)
    }

    fn enqueue(&mut self, stream: Result<Stream, Error>) -> Result<MemoryRange, Error> {
        let operation = self.idle()?;
        let output = match stream? {
            Stream::Cuda(stream) => operation.start_on(&stream)?.output(),
            Stream::Rocm(stream) => operation.start_on(&stream)?.output(),
        };

        self.state = State::Leased(self.take()?);
        Ok(output)
    }

    /// Ends the lease of the last start on a stream, because the work that reads its output is on
    /// that stream now.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if no start is leased.
    pub fn end_lease(&mut self) -> Result<(), Error> {
        match std::mem::replace(&mut self.state, State::Failed) {
            State::Leased(operation) => {
                self.state = State::Idle(operation);
                Ok(())
            }
            other => {
                self.state = other;
                Err(invalid("no start on a stream is leased"))
            }
        }
    }

    /// Ends the lease of the last start on a stream if there is one, as
    /// [`end_lease`](Self::end_lease).
    pub fn end_lease_if_any(&mut self) {
        // The only error is that no start is leased.
        let _ = self.end_lease();
    }

    /// Starts the operation beside a stream of the vendor, and returns the output.
    /// [`finish`](Self::finish) must follow. Collective.
    ///
    /// # Errors
    /// As [`UntypedOperation::start_beside`]; if a start is open or leased; the error of the stream
    /// if it has one.
    pub fn start_beside(&mut self, stream: Result<Stream, Error>) -> Result<MemoryRange, Error> {
        let started = self.begin_beside(stream);
        self.noted(started)
    }

    fn begin_beside(&mut self, stream: Result<Stream, Error>) -> Result<MemoryRange, Error> {
        self.idle()?;
        let stream = stream?;
        let operation = self.take()?;
        let started = match stream {
            Stream::Cuda(stream) => operation.into_beside(&stream),
            Stream::Rocm(stream) => operation.into_beside(&stream),
        };

        match started {
            Ok(started) => {
                let output = started.output();
                self.state = State::Beside(started);
                Ok(output)
            }
            Err(failed) => {
                let (operation, error) = *failed;
                self.state = State::Idle(operation);
                Err(error)
            }
        }
    }

    /// Has later work on a stream of the vendor follow the arrival of a block.
    ///
    /// # Errors
    /// As [`OwnedBesideStart::wait_on`], and if no start is beside a stream.
    pub fn wait_block_on(
        &mut self,
        block: BlockPart,
        stream: Result<Stream, Error>,
    ) -> Result<(), Error> {
        let started = self.beside()?;
        match stream? {
            Stream::Cuda(stream) => started.wait_on(block, &stream),
            Stream::Rocm(stream) => started.wait_on(block, &stream),
        }
    }

    /// Lets the start read a block behind the work that a stream of the vendor holds.
    ///
    /// # Errors
    /// As [`OwnedBesideStart::depart_on`], and if no start is beside a stream.
    pub fn depart_on(
        &mut self,
        block: BlockPart,
        stream: Result<Stream, Error>,
    ) -> Result<(), Error> {
        let started = self.beside()?;
        match stream? {
            Stream::Cuda(stream) => started.depart_on(block, &stream),
            Stream::Rocm(stream) => started.depart_on(block, &stream),
        }
    }

    /// Finishes the start beside streams.
    ///
    /// # Errors
    /// As [`OwnedBesideStart::finish`], and if no start is beside a stream.
    pub fn finish(&mut self) -> Result<(), Error> {
        self.beside()?;
        match std::mem::replace(&mut self.state, State::Failed) {
            State::Beside(started) => {
                let (operation, joined) = started.finish();
                self.state = State::Idle(operation);
                joined
            }
            _ => unreachable!("checked above"),
        }
    }

    /// Waits on the host until a block of the open start has arrived, at most `limit`, or up to the
    /// timeout of the start. Returns whether it has.
    ///
    /// # Errors
    /// As [`OwnedStart::wait_for_block`] and [`OwnedBesideStart::wait_for_block`], and if no start
    /// is open.
    pub fn wait_block(&mut self, block: BlockPart, limit: Option<Duration>) -> Result<bool, Error> {
        // The timeout of the start ends a longer wait.
        let limit = limit.unwrap_or(Duration::MAX);
        match &mut self.state {
            State::Beside(started) => started.wait_for_block(block, limit),
            _ => self.started()?.wait_for_block(block, limit),
        }
    }

    /// Lets the open start of the host read a block of the input.
    ///
    /// # Errors
    /// As [`OwnedStart::depart`], and if no start is open.
    pub fn depart(&mut self, block: BlockPart) -> Result<(), Error> {
        self.started()?.depart(block)
    }

    /// Returns the address range of a block of the output of the open start, or of the last one.
    ///
    /// # Errors
    /// As [`OwnedStart::output_of`].
    pub fn block_memory(&mut self, block: Rank) -> Result<MemoryRange, Error> {
        match &mut self.state {
            State::Beside(started) => started.output_of(block),
            State::Started(started) => started.output_of(block),
            _ => self.idle()?.output_memory_of(block),
        }
    }

    /// Returns the chunks of the output in the order in which they arrive.
    ///
    /// # Errors
    /// If a start is open.
    pub fn arrivals(&mut self) -> Result<&[BlockChunk], Error> {
        Ok(self.idle()?.arrivals())
    }

    /// Returns the chunks of the input in the order in which starts read them.
    ///
    /// # Errors
    /// If a start is open.
    pub fn departures(&mut self) -> Result<&[BlockChunk], Error> {
        Ok(self.idle()?.departures())
    }

    /// Sets lengths and places of the next starts.
    ///
    /// # Errors
    /// As [`UntypedOperation::resize`], and if a start is open.
    pub fn resize(&mut self, part: Part<'_>) -> Result<(), Error> {
        let resized = self.idle().and_then(|operation| operation.resize(part).map(drop));
        self.noted(resized)
    }

    /// Returns the address range of the input.
    ///
    /// # Errors
    /// As [`UntypedOperation::input_memory`], and if a start is open.
    pub fn input_memory(&mut self) -> Result<MemoryRange, Error> {
        self.idle()?.input_memory()
    }

    /// Returns the address range of the output of the last start.
    ///
    /// # Errors
    /// If a start is open.
    pub fn output_memory(&mut self) -> Result<MemoryRange, Error> {
        Ok(self.idle()?.output_memory())
    }

    /// Returns the error of the start on a stream that has ended the group, if one has.
    ///
    /// # Errors
    /// As [`UntypedOperation::check`].
    pub fn check(&mut self) -> Result<(), Error> {
        match &self.state {
            State::Leased(operation) => operation.check(),
            State::Beside(started) => started.operation().check(),
            State::Started(_) => Ok(()),
            _ => self.idle()?.check(),
        }
    }

    /// Returns the report as one JSON object.
    ///
    /// # Errors
    /// If a start is open.
    pub fn report(&mut self) -> Result<String, Error> {
        Ok(report::json(self.idle()?.report()).to_string())
    }

    fn idle(&mut self) -> Result<&mut UntypedOperation, Error> {
        match &mut self.state {
            State::Idle(operation) => Ok(operation),
            State::Started(_) => Err(invalid("a start is open; wait for it first")),
            State::Leased(_) => Err(invalid("a start on a stream is leased; end the lease first")),
            State::Beside(_) => Err(invalid("a start is beside a stream; finish it first")),
            State::Failed => Err(invalid("a start has failed; prepare another operation")),
        }
    }

    /// Takes the operation out of the state, which is `Failed` until the caller sets another one.
    fn take(&mut self) -> Result<UntypedOperation, Error> {
        self.idle()?;
        match std::mem::replace(&mut self.state, State::Failed) {
            State::Idle(operation) => Ok(operation),
            _ => unreachable!("checked above"),
        }
    }

    fn started(&mut self) -> Result<&mut OwnedStart<Untyped>, Error> {
        match &mut self.state {
            State::Started(started) => Ok(started),
            _ => Err(invalid("no start is open; start the operation first")),
        }
    }

    fn beside(&mut self) -> Result<&mut OwnedBesideStart<Untyped>, Error> {
        match &mut self.state {
            State::Beside(started) => Ok(started),
            _ => Err(invalid("no start is beside a stream; start the operation beside one first")),
        }
    }

    /// Waits for the rest of the open start if `is_done` is set, and returns `is_done`.
    fn finish_if(&mut self, is_done: bool) -> Result<bool, Error> {
        if !is_done {
            return Ok(false);
        }

        // A start that fails leaves the state failed.
        if let State::Started(started) = std::mem::replace(&mut self.state, State::Failed) {
            self.state = State::Idle(started.wait()?);
        }
        Ok(true)
    }

    /// Notes the error of a start that was refused. The other ranks wait for the start, and learn
    /// of it when they ask.
    fn noted<R>(&self, result: Result<R, Error>) -> Result<R, Error> {
        result.inspect_err(|error| {
            if error.kind() == ErrorKind::InvalidArgument {
                self.note_error(error);
            }
        })
    }

    fn note_error(&self, error: &Error) {
        match &self.state {
            State::Idle(operation) | State::Leased(operation) => operation.note_refusal(error),
            State::Started(started) => started.note_refusal(error),
            State::Beside(started) => started.operation().note_refusal(error),
            // The ranks know from the group why it has ended.
            State::Failed => {}
        }
    }
}

impl fmt::Debug for AnyOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyOperation").field("backend", &self.backend).finish_non_exhaustive()
    }
}

fn invalid(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

#[cfg(test)]
mod tests {
    use peerlane::bootstrap::{Bootstrap, in_process};
    use peerlane::host;

    use super::*;

    /// Runs `body` with an operation of a group of one rank on the host.
    fn with_operation(body: impl Fn(&mut AnyOperation) -> Result<(), Error> + Sync) {
        in_process::run(1, |bootstrap| {
            let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
            let mut group = Group::open(bootstrap, fabric)?;
            let request = Request::new(Collective::AllGather, DType::U8, 8.into());
            let mut operation = request.prepare(&mut group, |builder| builder)?;
            body(&mut operation)?;
            drop(operation);
            group.close()
        })
        .unwrap();
    }

    fn said<R: fmt::Debug>(result: Result<R, Error>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn a_leased_operation_refuses_all_but_a_check_until_the_lease_ends() {
        with_operation(|operation| {
            // The host has no streams, so the state after a start on a stream is made here.
            operation.state = State::Leased(operation.take()?);

            let leased = "a start on a stream is leased; end the lease first";
            assert_eq!(said(operation.run()), leased);
            assert_eq!(said(operation.start()), leased);
            assert_eq!(said(operation.resize(Part::len(1))), leased);
            assert_eq!(said(operation.output_memory()), leased);
            assert_eq!(said(operation.report()), leased);
            operation.check()?;

            operation.end_lease()?;
            operation.run()?;
            assert_eq!(said(operation.end_lease()), "no start on a stream is leased");
            Ok(())
        });
    }

    #[test]
    fn an_open_start_refuses_all_but_a_wait_and_a_check() {
        with_operation(|operation| {
            let none = "no start is open; start the operation first";
            assert_eq!(said(operation.wait(None)), none);
            assert_eq!(said(operation.wait_part(Duration::ZERO)), none);

            operation.start()?;
            let open = "a start is open; wait for it first";
            assert_eq!(said(operation.start()), open);
            assert_eq!(said(operation.input_memory()), open);
            operation.check()?;

            assert!(operation.wait(None)?);
            operation.run()
        });
    }

    #[test]
    fn a_start_on_a_stream_that_fails_leaves_the_operation_as_it_is() {
        with_operation(|operation| {
            // The conversion of the pointer fails on the host, which has no streams.
            let refused = || Err(invalid("which has no streams"));
            assert_eq!(said(operation.start_on(refused())), "which has no streams");

            operation.start()?;
            let open = "a start is open; wait for it first";
            assert_eq!(said(operation.start_on(refused())), open);
            assert!(operation.wait(None)?);
            operation.run()
        });
    }
}
