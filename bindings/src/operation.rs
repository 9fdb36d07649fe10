//! Operations whose element type is known only at run time, and which own the state of their last
//! start.

use std::ffi::c_void;
use std::fmt;
use std::time::Duration;

use peerlane::collective::Collective;
use peerlane::element::with_element;
use peerlane::group::{Matrix, OperationBuilder, Report};
use peerlane::hal::BackendId;
use peerlane::{
    Algorithm, BlockLens, DType, Deadline, Element, Error, ErrorKind, Group, MemoryRange,
    Operation, Operator, OwnedStart, Part, Window,
};

use crate::report;

/// Describes an operation, with the options that the builder of [`Group::operation`] has.
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
    /// The number of chunks of a block, or `None` for the best number.
    pub chunks: Option<u32>,
    /// Whether the input of a rank is its block of the output.
    pub in_place: bool,
    /// Set by [`capturable`](Self::capturable).
    capturable: bool,
    /// Whether each start can have its own lengths and places.
    pub resizable: bool,
    /// Whether the lengths and places of starts are compared also where the host cannot read the
    /// flags directly.
    pub check_starts: bool,
    /// The number of rows of inputs or outputs that are matrices, and which of them are; `None` if
    /// none is.
    pub matrix: Option<(usize, Matrix)>,
    /// The name in errors, beside the collective.
    pub label: Option<String>,
    /// Whether fallbacks are errors.
    pub strict: bool,
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
            // Only the method `capturable` sets it, whose caller makes a promise.
            capturable: false,
            resizable: false,
            check_starts: false,
            matrix: None,
            label: None,
            strict: false,
            timeout: None,
            input: None,
            output: None,
        }
    }

    /// Allows starts of the operation to be recorded into graphs.
    ///
    /// # Safety
    /// As [`OperationBuilder::capturable`].
    pub unsafe fn capturable(&mut self) {
        self.capturable = true;
    }

    /// Prepares the operation. Collective.
    ///
    /// # Errors
    /// As [`OperationBuilder::prepare`].
    pub fn prepare(self, group: &mut Group) -> Result<AnyOperation, Error> {
        let backend = group.selection().local;
        let state = with_element!(self.dtype, T => self.prepare_as::<T>(group))?;
        Ok(AnyOperation { state, backend })
    }

    fn prepare_as<T: Element>(self, group: &mut Group) -> Result<Box<dyn Operate>, Error>
    where
        Operation<T>: Send,
    {
        let mut builder: OperationBuilder<'_, T> = group.operation(self.collective, self.lens);
        if self.collective.is_reduction() {
            builder = builder.operator(self.operator);
        }

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
        if let Some((rows, sides)) = self.matrix {
            builder = builder.matrix(rows, sides);
        }
        if let Some(label) = &self.label {
            builder = builder.label(label);
        }

        if self.strict {
            builder = builder.strict(true);
        }
        if self.check_starts {
            builder = builder.check_starts(true);
        }

        if let Some((window, begin)) = &self.input {
            builder = builder.input_from(&window.cast(), *begin);
        }
        if let Some((window, begin)) = &self.output {
            builder = builder.output_into(&window.cast(), *begin);
        }

        for (is_set, set) in [
            (self.in_place, OperationBuilder::in_place as fn(_) -> _),
            (self.resizable, OperationBuilder::resizable),
        ] {
            builder = if is_set { set(builder) } else { builder };
        }

        if self.capturable {
            // SAFETY: the caller of `capturable` guarantees the same.
            builder = unsafe { builder.capturable() };
        }
        Ok(Box::new(State::Idle(Box::new(builder.prepare()?))))
    }
}

/// An operation of any element type.
pub struct AnyOperation {
    state: Box<dyn Operate>,
    backend: BackendId,
}

impl AnyOperation {
    /// Starts the operation and waits until its output is complete. Collective.
    ///
    /// # Errors
    /// As [`Operation::run`], and if a start is open.
    pub fn run(&mut self) -> Result<(), Error> {
        let run = self.state.run();
        self.noted(run)
    }

    /// Starts the operation; [`wait`](Self::wait) finishes the start. Collective.
    ///
    /// # Errors
    /// As [`Operation::start`], and if a start is open.
    pub fn start(&mut self) -> Result<(), Error> {
        let started = self.state.start();
        self.noted(started)
    }

    /// Waits for the open start, at most `limit`, or up to its timeout. Returns whether it is
    /// complete.
    ///
    /// # Errors
    /// As [`OwnedStart::wait_until`], and if no start is open.
    pub fn wait(&mut self, limit: Option<Duration>) -> Result<bool, Error> {
        self.state.wait(limit.map_or(Wait::ToEnd, Wait::Until))
    }

    /// Waits for the open start until `part` has passed, as one of several calls. Returns whether
    /// it is complete.
    ///
    /// # Errors
    /// As [`OwnedStart::wait_part`], and if no start is open.
    pub fn wait_part(&mut self, part: Duration) -> Result<bool, Error> {
        self.state.wait(Wait::Part(part))
    }

    /// Enqueues a start on a stream of the vendor, and returns the output.
    /// [`end_lease`](Self::end_lease) must follow. Collective.
    ///
    /// # Errors
    /// As [`Operation::start_on`], and if a start is open or leased.
    ///
    /// # Safety
    /// `stream` is a stream of the device of this rank. It lives until the operation was started on
    /// another one or was dropped.
    pub unsafe fn start_on(&mut self, stream: *mut c_void) -> Result<MemoryRange, Error> {
        // SAFETY: this function has the same contract.
        let started = unsafe { self.state.start_on(stream, self.backend) };
        self.noted(started)
    }

    /// Ends the lease of the last start on a stream, because the work that reads its output is on
    /// that stream now.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if no start is leased.
    pub fn end_lease(&mut self) -> Result<(), Error> {
        self.state.end_lease()
    }

    /// Ends the lease of the last start on a stream if there is one, as
    /// [`end_lease`](Self::end_lease).
    pub fn end_lease_if_any(&mut self) {
        // The only error is that no start is leased.
        let _ = self.state.end_lease();
    }

    /// Sets lengths and places of the next starts.
    ///
    /// # Errors
    /// As [`Operation::resize`], and if a start is open.
    pub fn resize(&mut self, part: Part<'_>) -> Result<(), Error> {
        let resized = self.state.resize(part);
        self.noted(resized)
    }

    /// Notes the error of a start that was refused. The other ranks wait for the start, and learn
    /// of it when they ask.
    fn noted<R>(&self, result: Result<R, Error>) -> Result<R, Error> {
        result.inspect_err(|error| {
            if error.kind() == ErrorKind::InvalidArgument {
                self.state.note_refusal(error);
            }
        })
    }

    /// Returns the address range of the input.
    ///
    /// # Errors
    /// As [`Operation::input_memory`], and if a start is open.
    pub fn input_memory(&mut self) -> Result<MemoryRange, Error> {
        self.state.memory(false)
    }

    /// Returns the address range of the output of the last start.
    ///
    /// # Errors
    /// If a start is open.
    pub fn output_memory(&mut self) -> Result<MemoryRange, Error> {
        self.state.memory(true)
    }

    /// Returns the error of the start on a stream that has ended the group, if one has.
    ///
    /// # Errors
    /// As [`Operation::check`].
    pub fn check(&mut self) -> Result<(), Error> {
        self.state.check()
    }

    /// Returns the report as one JSON object.
    ///
    /// # Errors
    /// If a start is open.
    pub fn report(&mut self) -> Result<String, Error> {
        Ok(report::json(self.state.report()?).to_string())
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

/// How long a wait for a start lasts.
enum Wait {
    /// Up to the timeout of the start.
    ToEnd,
    /// Up to a limit of the caller.
    Until(Duration),
    /// One part of a wait up to the timeout of the start.
    Part(Duration),
}

trait Operate: Send {
    /// Notes a start that was refused, for ranks that ask what this rank waits for.
    fn note_refusal(&self, error: &Error);
    fn run(&mut self) -> Result<(), Error>;
    fn start(&mut self) -> Result<(), Error>;
    fn wait(&mut self, how: Wait) -> Result<bool, Error>;
    /// Enqueues a start on a stream, and returns its output.
    ///
    /// # Safety
    /// As for [`AnyOperation::start_on`].
    unsafe fn start_on(
        &mut self,
        stream: *mut c_void,
        backend: BackendId,
    ) -> Result<MemoryRange, Error>;
    fn end_lease(&mut self) -> Result<(), Error>;
    fn resize(&mut self, part: Part<'_>) -> Result<(), Error>;
    fn memory(&mut self, of_output: bool) -> Result<MemoryRange, Error>;
    fn check(&mut self) -> Result<(), Error>;
    fn report(&mut self) -> Result<&Report, Error>;
}

enum State<T: Element> {
    Idle(Box<Operation<T>>),
    Started(Box<OwnedStart<T>>),
    /// The caller has the output of a start on a stream. A [`Lease`](peerlane::Lease) would borrow
    /// the operation; this state refuses other starts in its place.
    Leased(Box<Operation<T>>),
    Failed,
}

impl<T: Element> State<T> {
    fn idle(&mut self) -> Result<&mut Operation<T>, Error> {
        match self {
            Self::Idle(operation) => Ok(operation),
            Self::Started(_) => Err(invalid("a start is open; wait for it first")),
            Self::Leased(_) => Err(invalid("a start on a stream is leased; end the lease first")),
            Self::Failed => Err(invalid("a start has failed; prepare another operation")),
        }
    }

    /// Takes the operation out of the state, which is `Failed` until the caller sets another one.
    fn take(&mut self) -> Result<Box<Operation<T>>, Error> {
        self.idle()?;
        match std::mem::replace(self, Self::Failed) {
            Self::Idle(operation) => Ok(operation),
            _ => unreachable!("checked above"),
        }
    }
}

impl<T: Element> Operate for State<T>
where
    Operation<T>: Send,
{
    fn note_refusal(&self, error: &Error) {
        match self {
            Self::Idle(operation) | Self::Leased(operation) => operation.note_refusal(error),
            Self::Started(started) => started.note_refusal(error),
            // The ranks know from the group why it has ended.
            Self::Failed => {}
        }
    }

    fn run(&mut self) -> Result<(), Error> {
        self.idle()?.run()
    }

    fn start(&mut self) -> Result<(), Error> {
        *self = Self::Started(Box::new(self.take()?.into_started()?));
        Ok(())
    }

    fn wait(&mut self, how: Wait) -> Result<bool, Error> {
        let Self::Started(started) = self else {
            return Err(invalid("no start is open; start the operation first"));
        };
        let is_done = match how {
            Wait::Until(Duration::ZERO) => started.poll()?,
            Wait::Until(limit) => started.wait_until(Deadline::after(limit))?,
            Wait::Part(part) => started.wait_part(Deadline::after(part))?,
            Wait::ToEnd => true,
        };

        // A start that fails leaves the state failed.
        if is_done && let Self::Started(started) = std::mem::replace(self, Self::Failed) {
            *self = Self::Idle(Box::new(started.wait()?));
        }
        Ok(is_done)
    }

    unsafe fn start_on(
        &mut self,
        stream: *mut c_void,
        backend: BackendId,
    ) -> Result<MemoryRange, Error> {
        let operation = self.idle()?;
        let lease = match backend {
            BackendId::CUDA => {
                // SAFETY: the contract of this function says that the stream is one of this rank's
                // device, and lives long enough.
                let stream = unsafe { peerlane::cuda::Stream::from_raw(stream) };
                operation.start_on(&stream)?
            }
            BackendId::ROCM => {
                // SAFETY: the contract of this function says that the stream is one of this rank's
                // device, and lives long enough.
                let stream = unsafe { peerlane::rocm::Stream::from_raw(stream) };
                operation.start_on(&stream)?
            }
            _ => {
                return Err(invalid(format!(
                    "the group is on the backend {backend}, which has no streams; start the operation on the host"
                )));
            }
        };

        let output = lease.output();
        *self = Self::Leased(self.take()?);
        Ok(output)
    }

    fn end_lease(&mut self) -> Result<(), Error> {
        match std::mem::replace(self, Self::Failed) {
            Self::Leased(operation) => {
                *self = Self::Idle(operation);
                Ok(())
            }
            other => {
                *self = other;
                Err(invalid("no start on a stream is leased"))
            }
        }
    }

    fn resize(&mut self, part: Part<'_>) -> Result<(), Error> {
        self.idle()?.resize(part)?;
        Ok(())
    }

    fn memory(&mut self, of_output: bool) -> Result<MemoryRange, Error> {
        let operation = self.idle()?;
        Ok(if of_output { operation.output_memory() } else { operation.input_memory()? })
    }

    fn check(&mut self) -> Result<(), Error> {
        match self {
            Self::Leased(operation) => operation.check(),
            Self::Started(_) => Ok(()),
            _ => self.idle()?.check(),
        }
    }

    fn report(&mut self) -> Result<&Report, Error> {
        Ok(self.idle()?.report())
    }
}

#[cfg(test)]
mod tests {
    use peerlane::bootstrap::{Bootstrap, in_process};
    use peerlane::host;

    use super::*;

    #[test]
    fn a_leased_operation_refuses_all_but_a_check_until_the_lease_ends() {
        in_process::run(1, |bootstrap| {
            let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
            let mut group = Group::open(bootstrap, fabric)?;
            let operation = group.all_gather::<u8>(8).prepare()?;
            // The host has no streams, so the state after a start on a stream is made here.
            let mut state = State::Leased(Box::new(operation));

            let leased = "a start on a stream is leased; end the lease first";
            let said = |result: Result<(), Error>| result.unwrap_err().to_string();
            assert_eq!(said(state.run()), leased);
            assert_eq!(said(state.start()), leased);
            assert_eq!(said(state.resize(Part::len(1))), leased);
            assert_eq!(said(state.memory(true).map(drop)), leased);
            assert_eq!(said(state.report().map(drop)), leased);
            state.check()?;

            state.end_lease()?;
            state.run()?;
            assert_eq!(said(state.end_lease()), "no start on a stream is leased");
            drop(state);
            group.close()
        })
        .unwrap();
    }

    #[test]
    fn a_start_on_a_stream_that_fails_leaves_the_operation_as_it_is() {
        in_process::run(1, |bootstrap| {
            let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
            let mut group = Group::open(bootstrap, fabric)?;
            let request = Request::new(Collective::AllGather, DType::U8, 8.into());
            let mut operation = request.prepare(&mut group)?;

            // SAFETY: the host has no streams, so the pointer is not used.
            let refused = unsafe { operation.start_on(std::ptr::null_mut()) }.unwrap_err();
            assert!(refused.to_string().contains("which has no streams"), "{refused}");
            operation.run()?;
            drop(operation);
            group.close()
        })
        .unwrap();
    }
}
