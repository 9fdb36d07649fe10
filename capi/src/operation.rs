//! Operations: description, preparation, starts on the host and on streams, reports.

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::Mutex;
use std::time::Duration;

use peerlane::collective::Collective;
use peerlane::group::{OperationBuilder, Report};
use peerlane::hal::BackendId;
use peerlane::{
    DType, Deadline, Element, Group, Lease, MemoryRange, Operation, Operator, OwnedStart, Part,
    Rank, Window,
};
use serde_json::{Value, json};

use crate::group::{GROUPS, GroupHandle, check_header, text};
use crate::handle::{Table, clear, lock};
use crate::status::{Failure, Status, call};
use crate::text_into;
use crate::window::{WINDOWS, WindowHandle, write};

/// A prepared collective operation.
#[derive(Debug)]
pub struct OperationHandle(());

/// What an operation does. Begin with `PEERLANE_OPERATION_OPTIONS_INIT`, and set what differs. All ranks give equal options, except
/// for places in windows.
#[repr(C)]
#[derive(Debug)]
pub struct OperationOptions {
    /// `PEERLANE_HEADER_VERSION`.
    pub header_version: u32,
    /// The collective, one of `PEERLANE_COLLECTIVE_ALL_GATHER` and so on.
    pub collective: u32,
    /// The type of the elements, one of `PEERLANE_DTYPE_F32` and so on.
    pub dtype: u32,
    /// How a reduction joins elements, one of `PEERLANE_REDUCTION_SUM` and so on.
    pub reduction: u32,
    /// The rank that a broadcast, gather, scatter or reduce has as its root.
    pub root: u32,
    /// The number of elements of a block: what a rank gives to an output. In an all-reduce and a reduce, the number of elements of the
    /// whole array.
    pub count: usize,
    /// NULL, or the number of elements of the block of each rank, instead of `count`.
    pub counts: *const usize,
    /// The name of an algorithm, such as `"ring"`; NULL selects the fastest one.
    pub algorithm: *const c_char,
    /// The number of chunks of a block, or 0 for the best number.
    pub chunks: u32,
    /// Whether the input of a rank is its block of the output.
    pub in_place: bool,
    /// Whether starts can be recorded into graphs.
    pub capturable: bool,
    /// Whether `peerlane_operation_resize` can set another size before a start.
    pub resizable: bool,
    /// Whether fallbacks, and compute units that copy or add, are errors.
    pub strict: bool,
    /// The longest time of a start in milliseconds, or 0 for that of the group.
    pub timeout_ms: u64,
    /// The window of the input, or NULL for memory of the operation.
    pub input: *const WindowHandle,
    /// The place of the input in its window, in elements.
    pub input_begin: usize,
    /// The window of the output, or NULL for memory of the operation.
    pub output: *const WindowHandle,
    /// The place of the output in its window, in elements.
    pub output_begin: usize,
}

/// An operation of any type.
trait Operate: Send {
    fn run(&mut self) -> Result<(), Failure>;
    fn start(&mut self) -> Result<(), Failure>;
    fn wait(&mut self, limit: Option<Duration>) -> Result<bool, Failure>;
    fn start_on(&mut self, stream: *mut c_void, backend: BackendId)
    -> Result<MemoryRange, Failure>;
    fn end_lease(&mut self) -> Result<(), Failure>;
    fn resize(&mut self, part: Part<'_>) -> Result<(), Failure>;
    fn memory(&mut self, of_output: bool) -> Result<MemoryRange, Failure>;
    fn check(&mut self) -> Result<(), Failure>;
    fn report(&mut self) -> Result<String, Failure>;
}

enum State<T: Element> {
    Idle(Box<Operation<T>>),
    Started(Box<OwnedStart<T>>),
    Leased(Leased<T>),
    Failed,
}

/// An operation with the lease that borrows it.
struct Leased<T: Element> {
    /// `None` after the lease has ended.
    lease: Option<Lease<'static, T>>,
    operation: *mut Operation<T>,
}

// SAFETY: the pointer is that of a box that nothing else has, and operations and leases may move to other threads.
unsafe impl<T: Element> Send for Leased<T> where Operation<T>: Send {}

impl<T: Element> Leased<T> {
    fn end(mut self) -> Box<Operation<T>> {
        self.lease = None;
        let operation = std::mem::replace(&mut self.operation, ptr::null_mut());
        // SAFETY: it came from a box, and the lease has ended.
        unsafe { Box::from_raw(operation) }
    }
}

impl<T: Element> Drop for Leased<T> {
    fn drop(&mut self) {
        self.lease = None;
        if !self.operation.is_null() {
            // SAFETY: it came from a box, and the lease has ended.
            drop(unsafe { Box::from_raw(self.operation) });
        }
    }
}

impl<T: Element> State<T> {
    fn idle(&mut self) -> Result<&mut Operation<T>, Failure> {
        match self {
            Self::Idle(operation) => Ok(operation),
            Self::Started(_) => {
                Err(Failure::argument("a start is open; call peerlane_operation_wait first"))
            }
            Self::Leased(..) => Err(Failure::argument(
                "a start on a stream is leased; call peerlane_operation_end_lease first",
            )),
            Self::Failed => Err(Failure::argument("a start has failed; destroy the operation")),
        }
    }

    /// Takes the operation out of the state, which is `Failed` until the caller sets another one.
    fn take(&mut self) -> Result<Box<Operation<T>>, Failure> {
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
    fn run(&mut self) -> Result<(), Failure> {
        Ok(self.idle()?.run()?)
    }

    fn start(&mut self) -> Result<(), Failure> {
        *self = Self::Started(Box::new(self.take()?.into_started()?));
        Ok(())
    }

    fn wait(&mut self, limit: Option<Duration>) -> Result<bool, Failure> {
        let Self::Started(started) = self else {
            return Err(Failure::argument("no start is open; call peerlane_operation_start first"));
        };
        let is_done = match limit {
            Some(Duration::ZERO) => started.poll()?,
            Some(limit) => started.wait_until(Deadline::after(limit))?,
            None => true,
        };
        if is_done && let Self::Started(started) = std::mem::replace(self, Self::Failed) {
            *self = Self::Idle(Box::new(started.wait()?));
        }
        Ok(is_done)
    }

    fn start_on(
        &mut self,
        stream: *mut c_void,
        backend: BackendId,
    ) -> Result<MemoryRange, Failure> {
        let raw = Box::into_raw(self.take()?);
        // SAFETY: the operation stays at its place until the lease has ended.
        let operation = unsafe { &mut *raw };
        let lease = match backend {
            BackendId::CUDA => {
                // SAFETY: the C program keeps the stream alive as the header says.
                let stream = unsafe { peerlane::cuda::Stream::from_raw(stream) };
                operation.start_on(&stream)
            }
            BackendId::ROCM => {
                // SAFETY: as above.
                let stream = unsafe { peerlane::rocm::Stream::from_raw(stream) };
                operation.start_on(&stream)
            }
            _ => {
                // SAFETY: it came from a box, and there is no lease.
                *self = Self::Idle(unsafe { Box::from_raw(raw) });
                return Err(Failure::argument(format!(
                    "the group is on the backend {backend}, which has no streams; use peerlane_operation_run"
                )));
            }
        };
        match lease {
            Ok(lease) => {
                let output = lease.output();
                *self = Self::Leased(Leased { lease: Some(lease), operation: raw });
                Ok(output)
            }
            Err(error) => {
                // SAFETY: as above.
                *self = Self::Idle(unsafe { Box::from_raw(raw) });
                Err(error.into())
            }
        }
    }

    fn end_lease(&mut self) -> Result<(), Failure> {
        match std::mem::replace(self, Self::Failed) {
            Self::Leased(leased) => {
                *self = Self::Idle(leased.end());
                Ok(())
            }
            other => {
                *self = other;
                Err(Failure::argument("no start on a stream is leased"))
            }
        }
    }

    fn resize(&mut self, part: Part<'_>) -> Result<(), Failure> {
        self.idle()?.resize(part)?;
        Ok(())
    }

    fn memory(&mut self, of_output: bool) -> Result<MemoryRange, Failure> {
        let operation = self.idle()?;
        Ok(if of_output { operation.output_memory() } else { operation.input_memory()? })
    }

    fn check(&mut self) -> Result<(), Failure> {
        match self {
            // SAFETY: the pointer is valid, and a check only reads.
            Self::Leased(leased) => Ok(unsafe { &*leased.operation }.check()?),
            Self::Started(_) => Ok(()),
            _ => Ok(self.idle()?.check()?),
        }
    }

    fn report(&mut self) -> Result<String, Failure> {
        Ok(json(self.idle()?.report()).to_string())
    }
}

fn json(report: &Report) -> Value {
    let lanes = report.lanes.iter().map(|lane| {
        json!({
            "lane": lane.lane.0, "tier": lane.tier.to_string(), "backend": lane.backend.to_string(), "kind": lane.kind,
            "queued_waits": lane.queued_waits, "polled": lane.polled,
        })
    });
    let tiers = report.tiers.iter().map(|tier| {
        json!({
            "tier": tier.tier.to_string(), "put_bytes": tier.put_bytes, "got_bytes": tier.got_bytes,
            "own_bytes": tier.own_bytes, "compute_bytes": tier.compute_bytes,
        })
    });
    json!({
        "collective": report.collective.to_string(), "algorithm": report.algorithm.to_string(), "ranks": report.ranks,
        "chunks": report.chunks, "outputs": report.outputs, "capturable": report.capturable,
        "input_bytes": report.input_bytes, "output_bytes": report.output_bytes, "total_bytes": report.total_bytes,
        "lanes": lanes.collect::<Vec<_>>(), "tiers": tiers.collect::<Vec<_>>(),
        "fallbacks": report.fallbacks.iter().map(ToString::to_string).collect::<Vec<_>>(), "proof": report.proof,
    })
}

pub(crate) struct OperationObject {
    operation: Mutex<Box<dyn Operate>>,
    backend: BackendId,
}

static OPERATIONS: Table<OperationObject> = Table::new("operation", 4);

fn with<R>(
    handle: *const OperationHandle,
    body: impl FnOnce(&mut dyn Operate, BackendId) -> Result<R, Failure>,
) -> Result<R, Failure> {
    let object = OPERATIONS.get(handle.addr())?;
    let mut operation = lock(&object.operation);
    body(&mut **operation, object.backend)
}

/// Returns the value with a number of the header.
fn numbered<T>(
    field: &str,
    number: u32,
    values: impl IntoIterator<Item = T>,
) -> Result<T, Failure> {
    let mut values: Vec<T> = values.into_iter().collect();
    if (number as usize) < values.len() {
        return Ok(values.swap_remove(number as usize));
    }
    let last = values.len() - 1;
    Err(Failure::argument(format!("{field} is {number}, expected 0 to {last}")))
}

/// Options whose pointers have been read.
struct Request {
    collective: Collective,
    operator: Operator,
    lens: Result<usize, Vec<usize>>,
    algorithm: Option<peerlane::Algorithm>,
    input: Option<Window<u8>>,
    output: Option<Window<u8>>,
}

fn prepare<T: Element>(
    group: &mut Group,
    options: &OperationOptions,
    request: Request,
) -> Result<Box<dyn Operate>, Failure>
where
    Operation<T>: Send,
{
    let mut builder: OperationBuilder<'_, T> = match request.lens {
        Ok(len) => group.operation(request.collective, len),
        Err(lens) => group.operation(request.collective, lens),
    };
    if request.collective.is_reduction() {
        builder = builder.operator(request.operator);
    }
    if let Some(algorithm) = request.algorithm {
        builder = builder.algorithm(algorithm);
    }
    if options.chunks > 0 {
        builder = builder.chunks(options.chunks);
    }
    if options.timeout_ms > 0 {
        builder = builder.timeout(Duration::from_millis(options.timeout_ms));
    }
    if options.strict {
        builder = builder.strict(true);
    }
    if let Some(window) = &request.input {
        builder = builder.input_from(&window.cast(), options.input_begin);
    }
    if let Some(window) = &request.output {
        builder = builder.output_into(&window.cast(), options.output_begin);
    }
    for (is_set, set) in [
        (options.in_place, OperationBuilder::in_place as fn(_) -> _),
        (options.capturable, OperationBuilder::capturable),
        (options.resizable, OperationBuilder::resizable),
    ] {
        builder = if is_set { set(builder) } else { builder };
    }
    Ok(Box::new(State::Idle(Box::new(builder.prepare()?))))
}

/// Prepares an operation: plans and verifies it, and takes memory. Collective.
///
/// On success `*operation` is a handle that `peerlane_operation_destroy` must get. Calls with the same operation from several threads
/// take turns.
///
/// # Safety
/// `options` and `operation` are NULL or point to such objects; `counts` has one number for each rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_prepare(
    group: *mut GroupHandle,
    options: *const OperationOptions,
    operation: *mut *mut OperationHandle,
) -> Status {
    call(|| {
        clear(operation, "operation")?;
        // SAFETY: the caller guarantees it.
        let options = unsafe { options.as_ref() };
        let options = options.ok_or_else(|| {
            Failure::argument("options is NULL, expected what the operation does")
        })?;
        check_header(options.header_version)?;
        let object = GROUPS.get(group.addr())?;
        let window = |handle: *const WindowHandle| match handle.is_null() {
            true => Ok(None),
            false => WINDOWS.get(handle.addr())?.with(|window| Ok(Some(window.cast()))),
        };
        let collective = numbered("collective", options.collective, Collective::all())?;
        let operator = numbered("reduction", options.reduction, Operator::ALL)?;
        let dtype = numbered("dtype", options.dtype, DType::ALL)?;
        let algorithm = text(options.algorithm, "algorithm")?.map(str::parse).transpose();
        let algorithm =
            algorithm.map_err(|error| Failure::argument(format!("algorithm: {error}")))?;
        let (operation_object, backend) = object.with(|group| {
            let lens = if options.counts.is_null() {
                Ok(options.count)
            } else {
                // SAFETY: the caller gives one number for each rank.
                let counts = unsafe { std::slice::from_raw_parts(options.counts, group.ranks()) };
                Err(counts.to_vec())
            };
            let request = Request {
                collective: collective.with_root(Rank(options.root)),
                operator,
                lens,
                algorithm,
                input: window(options.input)?,
                output: window(options.output)?,
            };
            let backend = group.selection().local;
            let prepared = match dtype {
                DType::U8 => prepare::<u8>(group, options, request),
                DType::U16 => prepare::<u16>(group, options, request),
                DType::U32 => prepare::<u32>(group, options, request),
                DType::U64 => prepare::<u64>(group, options, request),
                DType::I8 => prepare::<i8>(group, options, request),
                DType::I16 => prepare::<i16>(group, options, request),
                DType::I32 => prepare::<i32>(group, options, request),
                DType::I64 => prepare::<i64>(group, options, request),
                DType::F8E4M3 => prepare::<peerlane::element::F8E4M3>(group, options, request),
                DType::F8E5M2 => prepare::<peerlane::element::F8E5M2>(group, options, request),
                DType::F16 => prepare::<half::f16>(group, options, request),
                DType::Bf16 => prepare::<half::bf16>(group, options, request),
                DType::F32 => prepare::<f32>(group, options, request),
                DType::F64 => prepare::<f64>(group, options, request),
                dtype => Err(Failure::argument(format!("dtype {dtype} is not supported"))),
            };
            Ok((prepared?, backend))
        })?;
        let object = OperationObject { operation: Mutex::new(operation_object), backend };
        OPERATIONS.give(object, operation)
    })
}

/// Writes the address and the size in bytes of the input of this rank; either may be NULL.
///
/// The address is one of the host or of a GPU, as the memory of the group. With two outputs in turn, ask again after each start.
///
/// # Safety
/// `address` and `bytes` are NULL or point to such values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_input(
    operation: *mut OperationHandle,
    address: *mut *mut c_void,
    bytes: *mut usize,
) -> Status {
    memory(operation, address, bytes, false)
}

/// Writes the address and the size in bytes of the output of the last start on this rank, as `peerlane_operation_input`.
///
/// # Safety
/// `address` and `bytes` are NULL or point to such values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_output(
    operation: *mut OperationHandle,
    address: *mut *mut c_void,
    bytes: *mut usize,
) -> Status {
    memory(operation, address, bytes, true)
}

fn memory(
    operation: *mut OperationHandle,
    address: *mut *mut c_void,
    bytes: *mut usize,
    of_output: bool,
) -> Status {
    call(|| {
        let memory = with(operation, |operation, _| operation.memory(of_output))?;
        write(&memory, address, bytes);
        Ok(())
    })
}

/// Sets the number of elements of a block, and the places in the windows in elements, for the next starts of a resizable operation.
///
/// All ranks set the same number before the same start. A place of 0 means the place with which the operation was prepared.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_operation_resize(
    operation: *mut OperationHandle,
    count: usize,
    input_begin: usize,
    output_begin: usize,
) -> Status {
    call(|| {
        let mut part = Part::len(count);
        if input_begin > 0 {
            part = part.input(input_begin);
        }
        if output_begin > 0 {
            part = part.output(output_begin);
        }
        with(operation, |operation, _| operation.resize(part))
    })
}

/// Starts the operation and waits until the output is complete. Collective.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_operation_run(operation: *mut OperationHandle) -> Status {
    call(|| with(operation, |operation, _| operation.run()))
}

/// Starts the operation. `peerlane_operation_wait` finishes the start. Collective.
///
/// Processors of the host move bytes only in calls of the library, unless a device does.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_operation_start(operation: *mut OperationHandle) -> Status {
    call(|| with(operation, |operation, _| operation.start()))
}

/// Waits for a start, at most `limit_ms` milliseconds: 0 does not wait, and a negative number waits up to the timeout of the operation.
///
/// `*is_done` is whether the output is complete; it may be NULL if `limit_ms` is negative.
///
/// # Safety
/// `is_done` is NULL or points to a bool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_wait(
    operation: *mut OperationHandle,
    limit_ms: i64,
    is_done: *mut bool,
) -> Status {
    call(|| {
        let limit = u64::try_from(limit_ms).ok().map(Duration::from_millis);
        if limit.is_some() && is_done.is_null() {
            return Err(Failure::argument(
                "is_done is NULL, expected where to write whether the output is complete",
            ));
        }
        let done = with(operation, |operation, _| operation.wait(limit))?;
        if !is_done.is_null() {
            // SAFETY: it is not NULL, and the caller gives a valid place.
            unsafe { is_done.write(done) };
        }
        Ok(())
    })
}

/// Places a start on a stream: a `CUstream` or `cudaStream_t` on NVIDIA GPUs, a `hipStream_t` on AMD GPUs. The host does not wait. Collective.
///
/// `*output` is the device address of the output of this start; it may be NULL. Enqueue what reads the output, and then call
/// `peerlane_operation_end_lease`. While the stream is captured, the start is recorded instead.
///
/// # Safety
/// `stream` is a stream of the device of this rank, but no default stream, and lives until the operation has been started on another
/// one or has been destroyed. `output` is NULL or points to an address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_start_on(
    operation: *mut OperationHandle,
    stream: *mut c_void,
    output: *mut *mut c_void,
) -> Status {
    call(|| {
        let memory = with(operation, |operation, backend| operation.start_on(stream, backend))?;
        write(&memory, output, ptr::null_mut());
        Ok(())
    })
}

/// Says that what reads the output of the last start on a stream is on that stream, so that the operation can be started again.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_operation_end_lease(operation: *mut OperationHandle) -> Status {
    call(|| with(operation, |operation, _| operation.end_lease()))
}

/// Returns the error with which a start on a stream or a replay of a graph has failed, or `PEERLANE_STATUS_OK`.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_operation_check(operation: *mut OperationHandle) -> Status {
    call(|| with(operation, |operation, _| operation.check()))
}

/// Writes how the operation runs, its engines and its fallbacks, to `buffer` as one JSON object, as `peerlane_group_selection`
/// writes its text. The fields are those of the JSON lines of the program `peerlane`.
///
/// # Safety
/// `buffer` is NULL or has `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_report(
    operation: *mut OperationHandle,
    buffer: *mut c_char,
    size: usize,
) -> Status {
    call(|| text_into(&with(operation, |operation, _| operation.report())?, buffer, size))
}

/// Destroys an operation. If a start is open, the call waits for it.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_operation_destroy(operation: *mut OperationHandle) -> Status {
    call(|| OPERATIONS.remove(operation.addr()).map(drop))
}
