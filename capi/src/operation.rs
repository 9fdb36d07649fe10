//! Operations: description, preparation, starts on the host and on streams, reports.

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::Mutex;
use std::time::Duration;

use peerlane::collective::Collective;
use peerlane::{BlockLens, DType, Error, Group, Operator, Part, Rank, Window};
use peerlane_bindings::{AnyOperation, Request, Stream};

use crate::group::{GROUPS, GroupHandle, check_header, text};
use crate::handle::{Table, clear, lock};
use crate::numbers::{CollectiveNumber, ReductionNumber, SettingNumber};
use crate::status::{Failure, Status, call};
use crate::window::{WINDOWS, WindowHandle, write};
use crate::{milliseconds, text_into};

/// The place that tells `peerlane_operation_resize` to keep the place of the preparation:
/// `PEERLANE_AS_PREPARED`.
const AS_PREPARED: usize = usize::MAX;

/// A prepared collective operation.
#[derive(Debug)]
pub struct OperationHandle(());

/// What an operation does. Begin with `PEERLANE_OPERATION_OPTIONS_INIT`, and set what differs. All
/// ranks give equal options, except for places in windows.
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
    /// The number of elements of a block: what a rank gives to an output. In an all-reduce, a
    /// reduce and scans, that of the whole array.
    pub count: usize,
    /// NULL, or the number of elements of the block of each rank, instead of `count`.
    pub counts: *const usize,
    /// The name of an algorithm, such as `"ring"`; NULL selects the fastest one.
    pub algorithm: *const c_char,
    /// The number of chunks of a block, or 0 for the best number.
    pub chunks: u32,
    /// Whether the input of a rank is its block of the output.
    pub in_place: bool,
    /// Whether starts can be recorded into graphs. All replays of such graphs must be complete
    /// before the operation is destroyed, or its group is closed or destroyed. While a replay is in
    /// progress, the host must not access the memory of the operation.
    pub capturable: bool,
    /// Whether `peerlane_operation_resize` can set another size before a start.
    pub resizable: bool,
    /// Whether fallbacks, and compute units that copy or add, are errors.
    pub strict: bool,
    /// Whether the operation runs beside kernels of the program, and so takes few compute units,
    /// even if that is slower on an idle device: one of `PEERLANE_SETTING_AS_GROUP` and so on.
    pub beside_compute: u32,
    /// The longest time of a start in milliseconds, or 0 for that of the group.
    pub timeout_ms: u64,
    /// The window that holds the input, or NULL if the operation allocates the input.
    pub input: *const WindowHandle,
    /// The place of the input in its window, in elements.
    pub input_begin: usize,
    /// The window that holds the output, or NULL if the operation allocates the output.
    pub output: *const WindowHandle,
    /// The place of the output in its window, in elements.
    pub output_begin: usize,
    /// The name of the operation in errors, beside its collective, or NULL for none.
    pub label: *const c_char,
    /// The kind of engines, such as `"streams"`; NULL selects that of the group, or else the
    /// fastest one. All ranks set the same.
    pub engine: *const c_char,
}

/// An operation, or `None` after it was destroyed.
static OPERATIONS: Table<Mutex<Option<AnyOperation>>> = Table::new("operation", 4);

fn with<R>(
    handle: *const OperationHandle,
    body: impl FnOnce(&mut AnyOperation) -> Result<R, Error>,
) -> Result<R, Failure> {
    let object = OPERATIONS.get(handle.addr())?;
    let mut operation = lock(&object);
    let destroyed = || Failure::argument("the operation has been destroyed by another thread");
    Ok(body(operation.as_mut().ok_or_else(destroyed)?)?)
}

/// Returns the value that has `number` in the header, where `number_of` returns the number of each
/// of `values`.
fn numbered<T: Copy>(
    field: &str,
    number: u32,
    values: &[T],
    number_of: impl Fn(T) -> u32,
) -> Result<T, Failure> {
    let found = values.iter().copied().find(|value| number_of(*value) == number);
    found.ok_or_else(|| {
        let last = values.iter().map(|value| number_of(*value)).max().unwrap_or(0);
        Failure::argument(format!("{field} is {number}, expected 0 to {last}"))
    })
}

/// Prepares an operation: plans and verifies it, and takes memory. Collective.
///
/// On success `*operation` is a handle that must be passed to `peerlane_operation_destroy`. Calls
/// with the same operation from several threads take turns.
///
/// # Safety
/// `options` and `operation` are NULL or point to such objects. `counts` of the options is NULL or
/// has one number for each rank, and `algorithm`, `engine` and `label` are NULL or end in zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_prepare(
    group: *mut GroupHandle,
    options: *const OperationOptions,
    operation: *mut *mut OperationHandle,
) -> Status {
    call(|| {
        // SAFETY: the contract of this function says that `operation` is NULL or points to a
        // handle.
        let cleared = unsafe { clear(operation, "operation") };

        // Every refused argument is an error of `request`, so that the other ranks learn of it.
        let request = |group: &Group| {
            cleared?;
            // SAFETY: the contract of this function says that `options` is NULL or points to
            // options.
            let options = unsafe { options.as_ref() };
            let options = options.ok_or_else(|| {
                Failure::argument("options is NULL, expected what the operation does")
            })?;
            // SAFETY: the contract of this function covers the options, with what they point to.
            unsafe { request(group, options) }
        };

        let prepared = GROUPS.get(group.addr())?.collective(request, |group, request| {
            // SAFETY: the header says at `capturable` when the replays of a C program must be
            // complete.
            Ok(request.prepare(group, |builder| unsafe { builder.capturable() })?)
        })?;

        // SAFETY: the contract of this function says that `operation` points to a handle; NULL has
        // been refused.
        unsafe { OPERATIONS.give(Mutex::new(Some(prepared)), operation) }
    })
}

/// Returns what the options of a C program describe.
///
/// # Safety
/// `counts` is NULL or has one number for each rank, and `algorithm`, `engine` and `label` are NULL
/// or end in zero.
unsafe fn request(group: &Group, options: &OperationOptions) -> Result<Request, Failure> {
    check_header(options.header_version)?;

    let number_of = |collective| CollectiveNumber::from_collective(collective) as u32;
    let collective = numbered("collective", options.collective, Collective::ALL, number_of)?;
    let number_of = |operator| ReductionNumber::from_operator(operator) as u32;
    let operator = numbered("reduction", options.reduction, &Operator::ALL, number_of)?;
    let dtype = numbered("dtype", options.dtype, &DType::ALL, DType::c_number)?;

    let number_of = |setting| setting as u32;
    let settings = &SettingNumber::ALL;
    let beside_compute = numbered("beside_compute", options.beside_compute, settings, number_of)?;

    // SAFETY: the contract of this function says that the strings of the options end in zero.
    let algorithm = unsafe { text(options.algorithm, "algorithm") }?;
    let algorithm = algorithm.map(str::parse).transpose();
    let algorithm = algorithm.map_err(|error| Failure::argument(format!("algorithm: {error}")))?;

    let timeout = milliseconds("timeout_ms", options.timeout_ms)?;
    let lens: BlockLens = if options.counts.is_null() {
        options.count.into()
    } else {
        // SAFETY: it is not NULL, and the contract of this function says that it has one number for
        // each rank then.
        unsafe { std::slice::from_raw_parts(options.counts, group.ranks()) }.into()
    };

    let mut request = Request::new(collective.with_root(Rank(options.root)), dtype, lens);
    (request.operator, request.algorithm) = (operator, algorithm);
    request.chunks = (options.chunks > 0).then_some(options.chunks);
    request.in_place = options.in_place;
    request.capturable = options.capturable;
    request.resizable = options.resizable;
    request.strict = options.strict;
    request.beside_compute = beside_compute.value();

    // SAFETY: the contract of this function says that the strings of the options end in zero.
    request.label = unsafe { text(options.label, "label") }?.map(str::to_owned);
    // SAFETY: as above.
    request.engine = unsafe { text(options.engine, "engine") }?.map(str::to_owned);
    request.timeout = (!timeout.is_zero()).then_some(timeout);
    request.input = window(options.input)?.map(|window| (window, options.input_begin));
    request.output = window(options.output)?.map(|window| (window, options.output_begin));
    Ok(request)
}

/// Returns the window of a handle, or `None` for NULL.
fn window(handle: *const WindowHandle) -> Result<Option<Window<u8>>, Failure> {
    if handle.is_null() {
        return Ok(None);
    }
    WINDOWS.get(handle.addr())?.with(|window| Ok(Some(window.cast())))
}

/// Writes the address and the size in bytes of the input of this rank; either may be NULL.
///
/// The address is one of the host or of a GPU, as the memory of the group. With two outputs in
/// turn, ask again after each start.
///
/// # Safety
/// `address` and `bytes` are NULL or point to such values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_input(
    operation: *mut OperationHandle,
    address: *mut *mut c_void,
    bytes: *mut usize,
) -> Status {
    // SAFETY: this function has the same contract.
    unsafe { memory(operation, address, bytes, false) }
}

/// Writes the address and the size in bytes of the output of the last start on this rank, as
/// `peerlane_operation_input`.
///
/// # Safety
/// `address` and `bytes` are NULL or point to such values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_output(
    operation: *mut OperationHandle,
    address: *mut *mut c_void,
    bytes: *mut usize,
) -> Status {
    // SAFETY: this function has the same contract.
    unsafe { memory(operation, address, bytes, true) }
}

/// Writes the address and the size of the input or of the output.
///
/// # Safety
/// `address` and `bytes` are NULL or valid for writes.
unsafe fn memory(
    operation: *mut OperationHandle,
    address: *mut *mut c_void,
    bytes: *mut usize,
    of_output: bool,
) -> Status {
    call(|| {
        let memory = with(operation, |operation| match of_output {
            true => operation.output_memory(),
            false => operation.input_memory(),
        })?;

        // SAFETY: the contract of this function says that both are NULL or valid for writes.
        unsafe { write(&memory, address, bytes) };
        Ok(())
    })
}

/// Sets the number of elements of a block, and the places in the windows in elements, for the next
/// starts of a resizable operation.
///
/// All ranks set the same number before the same start. `PEERLANE_AS_PREPARED` as a place means the
/// place that the options of the operation had, or the beginning of memory that the operation has
/// allocated.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_operation_resize(
    operation: *mut OperationHandle,
    count: usize,
    input_begin: usize,
    output_begin: usize,
) -> Status {
    call(|| {
        let mut part = Part::len(count);
        if input_begin != AS_PREPARED {
            part = part.input(input_begin);
        }
        if output_begin != AS_PREPARED {
            part = part.output(output_begin);
        }

        with(operation, |operation| operation.resize(part))
    })
}

/// Starts the operation and waits until the output is complete. Collective.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_operation_run(operation: *mut OperationHandle) -> Status {
    call(|| with(operation, |operation| operation.run()))
}

/// Starts the operation. `peerlane_operation_wait` finishes the start. Collective.
///
/// Processors of the host move bytes only in calls of the library, unless a device does.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_operation_start(operation: *mut OperationHandle) -> Status {
    call(|| with(operation, |operation| operation.start()))
}

/// Waits for a start, at most `limit_ms` milliseconds: 0 does not wait, and a negative number waits
/// up to the timeout of the operation.
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

        let done = with(operation, |operation| operation.wait(limit))?;
        if !is_done.is_null() {
            // SAFETY: it is not NULL, and the contract of this function says that it points to a
            // bool then.
            unsafe { is_done.write(done) };
        }
        Ok(())
    })
}

/// Places a start on a stream: a `CUstream` or `cudaStream_t` on NVIDIA GPUs, a `hipStream_t` on
/// AMD GPUs. The host does not wait. Collective.
///
/// `*output` is the device address of the output of this start; it may be NULL. Enqueue what reads
/// the output, and then call `peerlane_operation_end_lease`. While the stream is captured, the
/// start is recorded instead.
///
/// # Safety
/// `stream` is a stream of the device of this rank, but no default stream, and lives until the
/// operation has been started on another one or has been destroyed. `output` is NULL or points to
/// an address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_start_on(
    operation: *mut OperationHandle,
    stream: *mut c_void,
    output: *mut *mut c_void,
) -> Status {
    call(|| {
        let memory = with(operation, |operation| {
            // SAFETY: this function has the same contract for the stream.
            let stream = unsafe { Stream::from_raw(operation.backend(), stream) };
            operation.start_on(stream)
        })?;

        // SAFETY: the contract of this function says that `output` is NULL or points to an address.
        unsafe { write(&memory, output, ptr::null_mut()) };
        Ok(())
    })
}

/// Says that what reads the output of the last start on a stream is on that stream, so that the
/// operation can be started again.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_operation_end_lease(operation: *mut OperationHandle) -> Status {
    call(|| with(operation, |operation| operation.end_lease()))
}

/// Returns the error of a start on a stream or a replay of a graph that has failed, or
/// `PEERLANE_STATUS_OK`.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_operation_check(operation: *mut OperationHandle) -> Status {
    call(|| with(operation, |operation| operation.check()))
}

/// Writes how the operation runs, its engines and its fallbacks, to `buffer` as one JSON object, as
/// `peerlane_group_selection` writes its text. The fields are those of the JSON lines of the
/// program `peerlane`.
///
/// # Safety
/// `buffer` is NULL or has `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_report(
    operation: *mut OperationHandle,
    buffer: *mut c_char,
    size: usize,
) -> Status {
    call(|| {
        let report = with(operation, |operation| operation.report())?;
        // SAFETY: the contract of this function says that `buffer` is NULL or has `size` bytes.
        unsafe { text_into(&report, buffer, size) }
    })
}

/// Destroys an operation. If a start is open, or a call of another thread uses the operation, this
/// call first waits for that.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_operation_destroy(operation: *mut OperationHandle) -> Status {
    call(|| {
        let object = OPERATIONS.remove(operation.addr())?;
        // The calls that have found the operation before it was removed end first, or find nothing.
        drop(lock(&object).take());
        Ok(())
    })
}
