//! Operations: description, preparation, starts on the host and on streams, reports.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::Mutex;
use std::time::Duration;

use peerlane::{Algorithm, BlockLens, Error, ErrorKind, Group, Part, Rank, Window};
use peerlane_bindings::{AnyOperation, Request, Stream};

use crate::group::{GROUPS, GroupHandle, check_header, text};
use crate::handle::{Table, clear, lock};
use crate::status::{Failure, Status, call};
use crate::window::{WINDOWS, WindowHandle, write};
use crate::{descriptor_into, milliseconds, numbers, text_into};

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
    /// NULL, or the number of elements that this rank sends to each rank in an all-to-all whose
    /// blocks differ, instead of `count`. Each rank gives its own numbers.
    pub send_counts: *const usize,
    /// The number of elements that this rank receives from each rank, if `send_counts` is set. It
    /// is what the other rank sends.
    pub receive_counts: *const usize,
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
    /// Whether ranks compare the sizes and places of starts also where the host cannot read the
    /// flags directly, as on GPUs. All ranks set the same.
    pub check_starts: bool,
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
    /// Whether starts tell when each block of the output has arrived, for
    /// `peerlane_operation_wait_block` and `peerlane_operation_wait_block_on`. All ranks set the
    /// same.
    pub arrivals: bool,
    /// Whether starts wait for each block of the input until `peerlane_operation_depart` or
    /// `peerlane_operation_depart_on` lets it depart. All ranks set the same.
    pub departures: bool,
}

/// An operation, or `None` after it was destroyed.
static OPERATIONS: Table<Mutex<Option<AnyOperation>>> = Table::new("operation", 4);

pub(crate) fn with<R>(
    handle: *const OperationHandle,
    body: impl FnOnce(&mut AnyOperation) -> Result<R, Error>,
) -> Result<R, Failure> {
    OPERATIONS.with(handle.addr(), body)
}

/// Calls `body` with an operation and a stream of its backend, or the error of a backend without
/// streams.
///
/// # Safety
/// `stream` is one that [`Stream::from_raw`] takes.
pub(crate) unsafe fn with_stream<R>(
    handle: *const OperationHandle,
    stream: *mut c_void,
    body: impl FnOnce(&mut AnyOperation, Result<Stream, Error>) -> Result<R, Error>,
) -> Result<R, Failure> {
    with(handle, |operation| {
        // SAFETY: this function has the same contract.
        let stream = unsafe { Stream::from_raw(operation.backend(), stream) };
        body(operation, stream)
    })
}

/// Prepares an operation: plans and verifies it, and takes memory. Collective.
///
/// On success `*operation` is a handle that must be passed to `peerlane_operation_destroy`. Calls
/// with the same operation from several threads take turns.
///
/// # Safety
/// `options` and `operation` are NULL or point to such objects. `counts`, `send_counts` and
/// `receive_counts` of the options are NULL or have one number for each rank, and `algorithm`,
/// `engine` and `label` are NULL or end in zero.
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
        unsafe { OPERATIONS.store_into(Mutex::new(Some(prepared)), operation) }
    })
}

/// Prepares `count` operations in one agreement of all ranks, which costs little more than for one.
/// Collective.
///
/// On success `operations[i]` is the handle of the operation of `options[i]`, and
/// `peerlane_operation_destroy` must be called for each. If one of the operations cannot be
/// prepared on some rank, none is on any rank, and all handles are NULL. All ranks give the same
/// number of operations, in the same order.
///
/// # Safety
/// `options` and `operations` are NULL or have `count` such objects, and each of the options is as
/// in `peerlane_operation_prepare`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_prepare_all(
    group: *mut GroupHandle,
    options: *const OperationOptions,
    count: usize,
    operations: *mut *mut OperationHandle,
) -> Status {
    call(|| {
        // SAFETY: the contract of this function says that `operations` is NULL or has `count`
        // handles.
        let cleared = unsafe { clear_all(operations, count) };

        // Every refused argument is an error of `requests`, so that the other ranks learn of it.
        let requests = |group: &Group| {
            cleared?;
            // SAFETY: the contract of this function says that `options` is NULL or has `count`
            // options, and covers what they point to.
            unsafe { requests(group, options, count) }
        };

        let prepared = GROUPS.get(group.addr())?.collective(requests, |group, requests| {
            // SAFETY: the header says at `capturable` when the replays of a C program must be
            // complete.
            Ok(Request::prepare_all(requests, group, |builder| unsafe { builder.capturable() })?)
        })?;

        // SAFETY: the contract of this function says that there are `count` handles, and as many
        // operations were prepared.
        unsafe { give_all(prepared, operations) }
    })
}

/// Refuses NULL for a list of handles, or an empty list, and otherwise clears the handles.
///
/// # Safety
/// `operations` is NULL or valid for writes of `count` handles.
unsafe fn clear_all(operations: *mut *mut OperationHandle, count: usize) -> Result<(), Failure> {
    if count == 0 {
        // Without operations there is no agreement, in which the others would learn the number.
        return Err(Failure::argument("count is 0, expected at least 1, as on the other ranks"));
    }
    for index in 0..count {
        let operation = operations.wrapping_add(if operations.is_null() { 0 } else { index });
        // SAFETY: the contract of this function says that it is NULL or valid for writes.
        unsafe { clear(operation, "operations") }?;
    }
    Ok(())
}

/// Returns what each of the options of a C program describes.
///
/// # Safety
/// `options` is NULL or has `count` options, each as [`request`] expects them.
unsafe fn requests(
    group: &Group,
    options: *const OperationOptions,
    count: usize,
) -> Result<Vec<Request>, Failure> {
    // SAFETY: the contract of this function says that `options` is NULL or points to options.
    let first = unsafe { options.as_ref() };
    let first = first
        .ok_or_else(|| Failure::argument("options is NULL, expected what the operations do"))?;
    // Options of another version have another size, so that those after the first one are not
    // where this library expects them.
    check_header(first.header_version)?;

    // SAFETY: it is not NULL, and the contract of this function says that it has `count` options
    // then.
    let options = unsafe { std::slice::from_raw_parts(options, count) };
    let describe = |(index, options): (usize, &OperationOptions)| {
        // SAFETY: this function has the same contract for each of the options.
        let described = unsafe { request(group, options) };
        described.map_err(|failure| failure.within(&format!("options[{index}]")))
    };
    options.iter().enumerate().map(describe).collect()
}

/// Stores operations, and writes their handles to `to`: all of them, or none.
///
/// # Safety
/// `to` is valid for writes of as many handles.
unsafe fn give_all(
    prepared: Vec<AnyOperation>,
    to: *mut *mut OperationHandle,
) -> Result<(), Failure> {
    for (index, operation) in prepared.into_iter().enumerate() {
        // SAFETY: the contract of this function says that there are as many handles.
        let given =
            unsafe { OPERATIONS.store_into(Mutex::new(Some(operation)), to.wrapping_add(index)) };
        let Err(failure) = given else { continue };

        for stored in 0..index {
            let place = to.wrapping_add(stored);
            // SAFETY: the contract of this function says that it is valid, and an earlier pass has
            // written it.
            let handle = unsafe { place.replace(ptr::null_mut()) };
            drop(OPERATIONS.remove(handle.addr()));
        }
        return Err(failure);
    }
    Ok(())
}

/// Returns what the options of a C program describe.
///
/// # Safety
/// `counts`, `send_counts` and `receive_counts` are NULL or have one number for each rank, and
/// `algorithm`, `engine` and `label` are NULL or end in zero.
unsafe fn request(group: &Group, options: &OperationOptions) -> Result<Request, Failure> {
    check_header(options.header_version)?;

    let collective = numbers::collective(options.collective)?;
    let operator = numbers::operator(options.reduction)?;
    let dtype = numbers::dtype(options.dtype)?;
    let beside_compute = numbers::setting("beside_compute", options.beside_compute)?;

    // SAFETY: the contract of this function says that the strings of the options end in zero.
    let algorithm = unsafe { algorithm_of(options.algorithm) }?;

    let timeout = milliseconds("timeout_ms", options.timeout_ms)?;
    // SAFETY: the contract of this function says that the lists are NULL or have one number for
    // each rank.
    let lens = unsafe { block_lens(group.ranks(), options) }?;

    let mut request = Request::new(collective.with_root(Rank(options.root)), dtype, lens);
    (request.operator, request.algorithm) = (operator, algorithm);
    request.chunks = (options.chunks > 0).then_some(options.chunks);
    request.in_place = options.in_place;
    request.capturable = options.capturable;
    request.resizable = options.resizable;
    request.check_starts = options.check_starts;
    (request.arrivals, request.departures) = (options.arrivals, options.departures);
    request.strict = options.strict;
    request.beside_compute = beside_compute;

    // SAFETY: the contract of this function says that the strings of the options end in zero.
    request.label = unsafe { text(options.label, "label") }?.map(str::to_owned);
    // SAFETY: as above.
    request.engine = unsafe { text(options.engine, "engine") }?.map(str::to_owned);
    request.timeout = (!timeout.is_zero()).then_some(timeout);
    request.input = window(options.input)?.map(|window| (window, options.input_begin));
    request.output = window(options.output)?.map(|window| (window, options.output_begin));
    Ok(request)
}

/// Returns the lengths of the blocks that the options describe.
///
/// # Safety
/// `counts`, `send_counts` and `receive_counts` are NULL or have one number for each rank.
unsafe fn block_lens(ranks: usize, options: &OperationOptions) -> Result<BlockLens, Failure> {
    let lists = [options.counts, options.send_counts, options.receive_counts];
    // SAFETY: the contract of this function says that each is NULL or has one number for each rank.
    let [counts, send, receive] = lists.map(|list| unsafe { list_at(list, ranks) });

    match (counts, pair_counts(send, receive)?) {
        (None, None) => Ok(options.count.into()),
        (Some(counts), None) => Ok(counts.into()),
        (None, Some([send, receive])) => Ok(BlockLens::send_receive(send, receive)),
        (Some(_), Some(_)) => {
            Err(Failure::argument("counts and send_counts are set, expected one of them, or none"))
        }
    }
}

/// Returns what this rank sends to each rank and receives from it, or refuses one list without the
/// other.
pub(crate) fn pair_counts<'l>(
    send: Option<&'l [usize]>,
    receive: Option<&'l [usize]>,
) -> Result<Option<[&'l [usize]; 2]>, Failure> {
    let (missing, given) = match (send, receive) {
        (None, None) => return Ok(None),
        (Some(send), Some(receive)) => return Ok(Some([send, receive])),
        (Some(_), None) => ("receive_counts", "send_counts"),
        (None, Some(_)) => ("send_counts", "receive_counts"),
    };
    let text = format!("{missing} is NULL, expected a number for each rank, as in {given}");
    Err(Failure::argument(text))
}

/// Returns a list of the caller, or `None` for NULL.
///
/// # Safety
/// `list` is NULL or has `len` numbers, which stay unchanged for `'l`.
pub(crate) unsafe fn list_at<'l>(list: *const usize, len: usize) -> Option<&'l [usize]> {
    if list.is_null() {
        return None;
    }
    // SAFETY: it is not NULL, and the contract of this function says that it has `len` numbers
    // then.
    Some(unsafe { std::slice::from_raw_parts(list, len) })
}

/// Returns the algorithm of a name, or `None` for NULL.
///
/// # Safety
/// `name` is NULL or ends in zero.
pub(crate) unsafe fn algorithm_of(name: *const c_char) -> Result<Option<Algorithm>, Failure> {
    // SAFETY: this function has the same contract.
    let name = unsafe { text(name, "algorithm") }?;
    let algorithm = name.map(str::parse).transpose();
    algorithm.map_err(|error| Failure::argument(format!("algorithm: {error}")))
}

/// Returns the window of a handle, or `None` for NULL.
pub(crate) fn window(handle: *const WindowHandle) -> Result<Option<Window<u8>>, Failure> {
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
        let part = placed(Part::len(count), input_begin, output_begin);
        with(operation, |operation| operation.resize(part))
    })
}

/// Sets the number of elements of the block of each rank for the next starts of a resizable
/// operation, and the places as `peerlane_operation_resize`.
///
/// All ranks set the same numbers before the same start.
///
/// # Safety
/// `counts` is NULL or has one number for each rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_resize_counts(
    operation: *mut OperationHandle,
    counts: *const usize,
    input_begin: usize,
    output_begin: usize,
) -> Status {
    call(|| {
        with(operation, |operation| {
            // SAFETY: this function has the same contract.
            let counts = unsafe { list_for(operation, "counts", counts) }?;
            operation.resize(placed(Part::lens(counts), input_begin, output_begin))
        })
    })
}

/// Sets the numbers of elements that this rank sends to each rank and receives from it, for the
/// next starts of a resizable all-to-all, and the places as `peerlane_operation_resize`.
///
/// Every block stays where the numbers of the preparation put it. Each rank gives its own numbers;
/// what a rank sends is what the other one receives.
///
/// # Safety
/// `send_counts` and `receive_counts` are NULL or have one number for each rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_resize_pairs(
    operation: *mut OperationHandle,
    send_counts: *const usize,
    receive_counts: *const usize,
    input_begin: usize,
    output_begin: usize,
) -> Status {
    call(|| {
        with(operation, |operation| {
            // SAFETY: this function has the same contract.
            let send = unsafe { list_for(operation, "send_counts", send_counts) }?;
            // SAFETY: as above, for the numbers of elements that are received.
            let receive = unsafe { list_for(operation, "receive_counts", receive_counts) }?;
            let part = Part::send_receive(send, receive);
            operation.resize(placed(part, input_begin, output_begin))
        })
    })
}

/// Returns a part with the places that a C program gives.
fn placed(part: Part<'_>, input_begin: usize, output_begin: usize) -> Part<'_> {
    let mut part = part;
    if input_begin != AS_PREPARED {
        part = part.input(input_begin);
    }
    if output_begin != AS_PREPARED {
        part = part.output(output_begin);
    }
    part
}

/// Returns a list with one number for each rank, or refuses NULL.
///
/// # Safety
/// `list` is NULL or has one number for each rank, and stays unchanged for `'l`.
unsafe fn list_for<'l>(
    operation: &AnyOperation,
    name: &str,
    list: *const usize,
) -> Result<&'l [usize], Error> {
    // SAFETY: this function has the same contract.
    let list = unsafe { list_at(list, operation.ranks()) };
    list.ok_or_else(|| {
        let text = format!("{name} is NULL, expected a number for each rank");
        operation.refuse(Error::new(ErrorKind::InvalidArgument, text))
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
    let wait = |limit| with(operation, |operation| operation.wait(limit));
    // SAFETY: this function has the same contract for `is_done`.
    call(|| unsafe { wait_into(limit_ms, is_done, wait) })
}

/// Waits up to a limit that a C program gives, and writes whether the wait has succeeded.
///
/// # Safety
/// `is_done` is NULL or valid for writes.
pub(crate) unsafe fn wait_into(
    limit_ms: i64,
    is_done: *mut bool,
    wait: impl FnOnce(Option<Duration>) -> Result<bool, Failure>,
) -> Result<(), Failure> {
    let limit = u64::try_from(limit_ms).ok().map(Duration::from_millis);
    if limit.is_some() && is_done.is_null() {
        return Err(Failure::argument(
            "is_done is NULL, expected where to write whether the output is complete",
        ));
    }

    let done = wait(limit)?;
    if !is_done.is_null() {
        // SAFETY: it is not NULL, and the contract of this function says that it is valid for
        // writes then.
        unsafe { is_done.write(done) };
    }
    Ok(())
}

/// Writes a file descriptor for an event loop, which becomes readable when the open start is
/// complete or the group has ended.
///
/// `peerlane_operation_wait` then returns the result at once. Do not read from the descriptor, and
/// do not close it: the operation keeps it until it is destroyed. It is the same for each start,
/// and the next start makes it unreadable. While no start is open, the call is an error.
///
/// # Safety
/// `descriptor` is NULL or points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_descriptor(
    operation: *mut OperationHandle,
    descriptor: *mut c_int,
) -> Status {
    // SAFETY: this function has the same contract for `descriptor`.
    call(|| unsafe { descriptor_into(descriptor, || with(operation, AnyOperation::descriptor)) })
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
        // SAFETY: this function has the same contract for the stream.
        let memory = unsafe { with_stream(operation, stream, AnyOperation::start_on) }?;

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
