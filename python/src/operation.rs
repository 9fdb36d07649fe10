//! Defines the Python class of prepared operations.

use std::ffi::c_void;
use std::ptr;
use std::sync::Mutex;
use std::time::Duration;

use peerlane::hal::BackendId;
use peerlane::{BlockChunk, BlockPart, DType, Error, Part, Rank};
use peerlane_bindings::{AnyOperation, Stream, block_part};
use pyo3::prelude::*;

use crate::call::{
    SIGNALS, argument, drop_detached, drop_locked, invalid, limit, lock, short, take_owned, wait,
    whole, whole_if_any,
};
use crate::group::{LENS, Lens};
use crate::memory::{Memory, RawRange};

/// A prepared collective operation, which can start any number of times.
#[pyclass(frozen)]
pub(crate) struct Operation {
    operation: Mutex<Option<AnyOperation>>,
    dtype: DType,
    backend: BackendId,
    device: Option<u32>,
}

impl Drop for Operation {
    fn drop(&mut self) {
        drop_detached(take_owned(&mut self.operation));
    }
}

impl Operation {
    pub(crate) fn new(
        operation: AnyOperation,
        dtype: DType,
        backend: BackendId,
        device: Option<u32>,
    ) -> Self {
        Self { operation: Mutex::new(Some(operation)), dtype, backend, device }
    }

    fn with<R>(
        &self,
        body: impl FnOnce(&mut AnyOperation) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let mut operation = lock(&self.operation);
        body(operation.as_mut().ok_or_else(|| invalid("the operation was dropped"))?)
    }

    /// Calls `body` as `with` does, after the caller has enqueued what reads the output of the last
    /// start on a stream.
    fn next<R>(
        &self,
        body: impl FnOnce(&mut AnyOperation) -> Result<R, Error>,
    ) -> Result<R, Error> {
        self.with(|operation| {
            operation.end_lease_if_any();
            body(operation)
        })
    }

    /// Returns the stream of a handle, or the error of a backend without streams, which the
    /// operation then returns.
    fn stream(&self, handle: &Bound<'_, PyAny>) -> PyResult<Result<Stream, Error>> {
        let handle: usize = whole("stream", handle)?;
        let stream = ptr::with_exposed_provenance_mut::<c_void>(handle);
        // SAFETY: the documentation of `Operation` in Python requires streams that live until the
        // operation has started on others.
        Ok(unsafe { Stream::from_raw(self.backend, stream) })
    }

    fn view(slf: &Bound<'_, Self>, range: &RawRange) -> Memory {
        let this = slf.get();
        let device = range.device(this.backend, this.device);
        Memory::within(range, this.dtype, device, slf.clone().into_any().unbind())
    }
}

/// Returns the part of an operation that Python names by a block and a chunk.
fn part(block: &Bound<'_, PyAny>, chunk: Option<&Bound<'_, PyAny>>) -> PyResult<BlockPart> {
    Ok(block_part(whole("block", block)?, whole_if_any("chunk", chunk)?))
}

fn pairs(chunks: &[BlockChunk]) -> Vec<(u32, u32)> {
    chunks.iter().map(|chunk| (chunk.block.0, chunk.chunk)).collect()
}

#[pymethods]
impl Operation {
    /// Returns the input of this rank.
    #[getter]
    fn input(slf: &Bound<'_, Self>) -> PyResult<Memory> {
        let this = slf.get();
        let range = short(slf.py(), || this.next(|it| it.input_memory().map(RawRange::from)))?;
        Ok(Self::view(slf, &range))
    }

    /// Returns the output of the last start.
    #[getter]
    fn output(slf: &Bound<'_, Self>) -> PyResult<Memory> {
        let this = slf.get();
        let range = short(slf.py(), || this.next(|it| it.output_memory().map(RawRange::from)))?;
        Ok(Self::view(slf, &range))
    }

    /// Starts the operation and waits until the output is complete.
    #[pyo3(signature = (timeout=None))]
    fn run(&self, py: Python<'_>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let has_limit = limit("timeout", timeout)?.is_some();
        let is_done = short(py, || {
            self.next(|operation| {
                operation.start()?;
                if has_limit {
                    operation.wait(Some(Duration::ZERO))
                } else {
                    operation.wait_part(SIGNALS)
                }
            })
        })?;
        if is_done { Ok(()) } else { self.wait(py, timeout) }
    }

    /// Starts the operation; `wait` finishes the start.
    fn start(&self, py: Python<'_>) -> PyResult<()> {
        short(py, || self.next(AnyOperation::start))
    }

    /// Waits until the output of the open start is complete.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let limit = limit("timeout", timeout)?;
        wait(py, limit, |left| {
            self.with(|operation| match left {
                Some(left) => operation.wait(Some(left.min(SIGNALS))),
                None => operation.wait_part(SIGNALS),
            })
        })
    }

    /// Returns whether the output of the open start is complete, without waiting.
    fn is_done(&self, py: Python<'_>) -> PyResult<bool> {
        short(py, || self.with(|operation| operation.wait(Some(Duration::ZERO))))
    }

    /// Enqueues a start on a stream of CUDA or ROCm, by its handle, and returns the output.
    fn start_on(slf: &Bound<'_, Self>, stream: &Bound<'_, PyAny>) -> PyResult<Memory> {
        let this = slf.get();
        let stream = this.stream(stream)?;
        let range = short(slf.py(), || {
            this.next(|operation| operation.start_on(stream).map(RawRange::from))
        })?;
        Ok(Self::view(slf, &range))
    }

    /// Enqueues a start beside a stream, by its handle, and returns the output.
    fn start_beside(slf: &Bound<'_, Self>, stream: &Bound<'_, PyAny>) -> PyResult<Memory> {
        let this = slf.get();
        let stream = this.stream(stream)?;
        let range = short(slf.py(), || {
            this.next(|operation| operation.start_beside(stream).map(RawRange::from))
        })?;
        Ok(Self::view(slf, &range))
    }

    /// Has later work on a stream follow the arrival of a block.
    #[pyo3(signature = (stream, block, chunk=None))]
    fn wait_block_on(
        &self,
        py: Python<'_>,
        stream: &Bound<'_, PyAny>,
        block: &Bound<'_, PyAny>,
        chunk: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (stream, part) = (self.stream(stream)?, part(block, chunk)?);
        short(py, || self.with(|operation| operation.wait_block_on(part, stream)))
    }

    /// Lets the start read a block behind the work that a stream holds, or at once without one.
    #[pyo3(signature = (block, chunk=None, stream=None))]
    fn depart(
        &self,
        py: Python<'_>,
        block: &Bound<'_, PyAny>,
        chunk: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let stream = stream.map(|stream| self.stream(stream)).transpose()?;
        let part = part(block, chunk)?;
        short(py, || {
            self.with(|operation| match stream {
                Some(stream) => operation.depart_on(part, stream),
                None => operation.depart(part),
            })
        })
    }

    /// Has the stream of the start go on behind the whole start and the readers of its blocks.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        short(py, || self.with(AnyOperation::finish))
    }

    /// Waits until a block of the open start has arrived.
    #[pyo3(signature = (block, chunk=None, timeout=None))]
    fn wait_block(
        &self,
        py: Python<'_>,
        block: &Bound<'_, PyAny>,
        chunk: Option<&Bound<'_, PyAny>>,
        timeout: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (part, limit) = (part(block, chunk)?, limit("timeout", timeout)?);
        wait(py, limit, |left| {
            let left = left.map_or(SIGNALS, |left| left.min(SIGNALS));
            self.with(|operation| operation.wait_block(part, Some(left)))
        })
    }

    /// Returns a block of the output of the open start, of which the caller knows that it is there.
    fn block(slf: &Bound<'_, Self>, block: &Bound<'_, PyAny>) -> PyResult<Memory> {
        let this = slf.get();
        let block = Rank(whole("block", block)?);
        let range = short(slf.py(), || {
            this.with(|operation| operation.block_memory(block).map(RawRange::from))
        })?;
        Ok(Self::view(slf, &range))
    }

    /// Returns the chunks of the output in the order in which they arrive, as pairs.
    #[getter]
    fn arrivals(&self, py: Python<'_>) -> PyResult<Vec<(u32, u32)>> {
        short(py, || self.next(|operation| operation.arrivals().map(pairs)))
    }

    /// Returns the chunks of the input in the order in which starts read them, as pairs.
    #[getter]
    fn departures(&self, py: Python<'_>) -> PyResult<Vec<(u32, u32)>> {
        short(py, || self.next(|operation| operation.departures().map(pairs)))
    }

    /// Sets lengths and places, in elements, of the next starts.
    #[pyo3(signature = (lens, input=None, output=None))]
    fn resize(
        &self,
        py: Python<'_>,
        lens: &Bound<'_, PyAny>,
        input: Option<&Bound<'_, PyAny>>,
        output: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let lens: Lens = argument("count", lens, LENS)?;
        let input: Option<usize> = whole_if_any("input", input)?;
        let output: Option<usize> = whole_if_any("output", output)?;

        short(py, || {
            let mut part = match &lens {
                Lens::Equal(len) => Part::len(*len),
                Lens::ByRank(lens) => Part::lens(lens),
                Lens::SendReceive(send, receive) => Part::send_receive(send, receive),
            };
            if let Some(begin) = input {
                part = part.input(begin);
            }
            if let Some(begin) = output {
                part = part.output(begin);
            }
            self.next(|operation| operation.resize(part))
        })
    }

    /// Raises the error of a start on a stream or a replay of a graph that has failed.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        short(py, || self.with(AnyOperation::check))
    }

    /// Returns how the operation runs, as JSON.
    fn report(&self, py: Python<'_>) -> PyResult<String> {
        short(py, || self.next(|operation| operation.report()))
    }

    /// Frees the operation. Its memory is used again after all ranks have done so.
    fn drop(&self, py: Python<'_>) {
        // Another thread may hold the lock, and needs the interpreter to go on.
        py.detach(|| drop_locked(&self.operation));
    }
}
