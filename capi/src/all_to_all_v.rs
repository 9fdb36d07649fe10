//! Runs all-to-alls in which each start has counts of its own, such as tokens for experts.

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::Mutex;
use std::time::Duration;

use peerlane::{Algorithm, DType, Error, ErrorKind, Group, SendCounts, Untyped, Window};
use peerlane_bindings::{AnyAllToAllV, Stream};

use crate::group::{GROUPS, GroupHandle, check_header, text};
use crate::handle::{Table, clear, lock};
use crate::operation::{algorithm_of, list_at, window};
use crate::status::{Failure, Status, call};
use crate::window::{WindowHandle, write};
use crate::{milliseconds, numbers, text_into};

/// A prepared all-to-all in which each start has counts of its own.
#[derive(Debug)]
pub struct AllToAllVHandle(());

/// What an all-to-all-v does. Begin with `PEERLANE_ALL_TO_ALL_V_OPTIONS_INIT`, and set what
/// differs. All ranks give equal options, except for the place of the input.
#[repr(C)]
#[derive(Debug)]
pub struct AllToAllVOptions {
    /// `PEERLANE_HEADER_VERSION`.
    pub header_version: u32,
    /// The type of the elements, one of `PEERLANE_DTYPE_F32` and so on.
    pub dtype: u32,
    /// The most elements that a rank sends to all ranks together in a start.
    pub send_max: usize,
    /// The most elements that a rank receives from all ranks together in a start.
    pub receive_max: usize,
    /// How many outputs the starts alternate between, 1 or 2, or 0 for the default, 1.
    pub outputs: u32,
    /// Whether the operation runs beside kernels of the program: one of
    /// `PEERLANE_SETTING_AS_GROUP` and so on.
    pub beside_compute: u32,
    /// The name of an algorithm, such as `"ring"`; NULL selects the fastest one.
    pub algorithm: *const c_char,
    /// The longest time of the exchange of the counts, and of the start after it, in milliseconds,
    /// or 0 for that of the group.
    pub timeout_ms: u64,
    /// The window that holds the input, or NULL if the operation allocates the input.
    pub input: *const WindowHandle,
    /// The place of the input in its window, in elements.
    pub input_begin: usize,
    /// The window that holds the output, or NULL if the operation allocates the output.
    pub output: *const WindowHandle,
    /// The place of the output in its window, in elements; it is the same on all ranks.
    pub output_begin: usize,
    /// The name of the operation in errors, or NULL for none.
    pub label: *const c_char,
}

/// An operation, or `None` after it was destroyed.
static ALL_TO_ALL_VS: Table<Mutex<Option<AnyAllToAllV>>> = Table::new("all-to-all-v", 7);

fn with<R>(
    handle: *const AllToAllVHandle,
    body: impl FnOnce(&mut AnyAllToAllV) -> Result<R, Error>,
) -> Result<R, Failure> {
    ALL_TO_ALL_VS.with(handle.addr(), body)
}

/// What the options of a C program describe.
struct Description {
    dtype: DType,
    send_max: usize,
    receive_max: usize,
    outputs: u32,
    beside_compute: Option<bool>,
    algorithm: Option<Algorithm>,
    timeout: Option<Duration>,
    input: Option<(Window<Untyped>, usize)>,
    output: Option<(Window<Untyped>, usize)>,
    label: Option<String>,
}

impl Description {
    /// Reads the options of a C program.
    ///
    /// # Safety
    /// `algorithm` and `label` are NULL or end in zero.
    unsafe fn from_options(options: &AllToAllVOptions) -> Result<Self, Failure> {
        check_header(options.header_version)?;
        let dtype = numbers::dtype(options.dtype)?;
        let beside_compute = numbers::setting("beside_compute", options.beside_compute)?;
        let timeout = milliseconds("timeout_ms", options.timeout_ms)?;

        // SAFETY: the contract of this function says that the strings of the options end in zero.
        let algorithm = unsafe { algorithm_of(options.algorithm) }?;
        // SAFETY: as above.
        let label = unsafe { text(options.label, "label") }?.map(str::to_owned);

        let [input, output] = [options.input, options.output].map(window);
        let place = |window: Option<Window<u8>>, begin| window.map(|it| (it.untyped(), begin));
        Ok(Self {
            dtype,
            send_max: options.send_max,
            receive_max: options.receive_max,
            outputs: options.outputs,
            beside_compute,
            algorithm,
            timeout: (!timeout.is_zero()).then_some(timeout),
            input: place(input?, options.input_begin),
            output: place(output?, options.output_begin),
            label,
        })
    }

    /// Prepares the operation. Collective.
    fn prepare(self, group: &mut Group) -> Result<AnyAllToAllV, Error> {
        let mut builder = group.untyped_all_to_all_v(self.dtype, self.send_max, self.receive_max);

        // What is not set keeps the default of the builder.
        if self.outputs > 0 {
            builder = builder.outputs(self.outputs);
        }
        if let Some(beside_compute) = self.beside_compute {
            builder = builder.beside_compute(beside_compute);
        }
        if let Some(algorithm) = self.algorithm {
            builder = builder.algorithm(algorithm);
        }
        if let Some(timeout) = self.timeout {
            builder = builder.timeout(timeout);
        }
        if let Some(label) = self.label {
            builder = builder.label(label);
        }

        if let Some((window, begin)) = &self.input {
            builder = builder.input_from(window, *begin);
        }
        if let Some((window, begin)) = &self.output {
            builder = builder.output_into(window, *begin);
        }
        let exchange = builder.prepare()?;
        Ok(AnyAllToAllV::new(exchange, group))
    }
}

/// Prepares an all-to-all in which each start has counts of its own, like `MPI_Alltoallv` with an
/// exchange of the counts before. Collective.
///
/// On success `*exchange` is a handle that must be passed to `peerlane_all_to_all_v_destroy`.
///
/// # Safety
/// `options` and `exchange` are NULL or point to such objects, and `algorithm` and `label` of the
/// options are NULL or end in zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_all_to_all_v_prepare(
    group: *mut GroupHandle,
    options: *const AllToAllVOptions,
    exchange: *mut *mut AllToAllVHandle,
) -> Status {
    call(|| {
        // SAFETY: the contract of this function says that `exchange` is NULL or points to a handle.
        let cleared = unsafe { clear(exchange, "exchange") };

        // Every refused argument is an error of `described`, so that the other ranks learn of it.
        let described = |_: &Group| {
            cleared?;
            // SAFETY: the contract of this function says that `options` is NULL or points to
            // options.
            let options = unsafe { options.as_ref() };
            let options = options.ok_or_else(|| {
                Failure::argument("options is NULL, expected what the all-to-all-v does")
            })?;
            // SAFETY: the contract of this function covers the strings of the options.
            unsafe { Description::from_options(options) }
        };

        let prepared = GROUPS
            .get(group.addr())?
            .collective(described, |group, described| Ok(described.prepare(group)?))?;
        // SAFETY: the contract of this function says that `exchange` points to a handle; NULL has
        // been refused.
        unsafe { ALL_TO_ALL_VS.store_into(Mutex::new(Some(prepared)), exchange) }
    })
}

/// Makes a start in which this rank sends `send_counts[r]` elements to rank r, and waits until the
/// output is complete. Collective.
///
/// The block for rank r begins at element `displacements[r]` of the input; if `displacements` is
/// NULL, the blocks follow each other. If `receive_counts` is not NULL, it says what this rank
/// expects from each rank, and another number is an error. In the output, the blocks of all ranks
/// follow each other; `peerlane_all_to_all_v_received` returns where.
///
/// If one rank refuses its arguments, or a rank has no room for what comes, all ranks return an
/// error, nothing has moved, and the operation can be started again.
///
/// # Safety
/// The lists are NULL or have one number for each rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_all_to_all_v_run(
    exchange: *mut AllToAllVHandle,
    send_counts: *const usize,
    displacements: *const usize,
    receive_counts: *const usize,
) -> Status {
    call(|| {
        with(exchange, |exchange| {
            // SAFETY: this function has the same contract.
            let counts =
                unsafe { counts_of(exchange, send_counts, displacements, receive_counts) }?;
            exchange.run(counts)
        })
    })
}

/// Makes a start as `peerlane_all_to_all_v_run` and places it on a stream, as
/// `peerlane_operation_start_on`. Collective.
///
/// The host waits for the counts of all ranks, and not for the stream. A stream that is captured is
/// refused. `*output` is the device address of the output of this start; it may be NULL. Enqueue
/// what reads the output, and then call `peerlane_all_to_all_v_end_lease`.
///
/// # Safety
/// The lists are NULL or have one number for each rank. `stream` is a stream of the device of this
/// rank, but no default stream, and lives until the operation has been started on another one or
/// has been destroyed. `output` is NULL or points to an address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_all_to_all_v_start_on(
    exchange: *mut AllToAllVHandle,
    stream: *mut c_void,
    send_counts: *const usize,
    displacements: *const usize,
    receive_counts: *const usize,
    output: *mut *mut c_void,
) -> Status {
    call(|| {
        let memory = with(exchange, |exchange| {
            // SAFETY: this function has the same contract.
            let counts =
                unsafe { counts_of(exchange, send_counts, displacements, receive_counts) }?;
            // SAFETY: this function has the same contract for the stream.
            let stream = unsafe { Stream::from_raw(exchange.backend(), stream) };
            exchange.start_on(stream, counts)
        })?;

        // SAFETY: the contract of this function says that `output` is NULL or points to an address.
        unsafe { write(&memory, output, ptr::null_mut()) };
        Ok(())
    })
}

/// Returns the counts of a start, or refuses it on all ranks.
///
/// # Safety
/// The lists are NULL or have one number for each rank, and stay unchanged for `'l`.
unsafe fn counts_of<'l>(
    exchange: &mut AnyAllToAllV,
    send_counts: *const usize,
    displacements: *const usize,
    receive_counts: *const usize,
) -> Result<SendCounts<'l>, Error> {
    let lists = [send_counts, displacements, receive_counts];
    let ranks = exchange.ranks();
    // SAFETY: this function has the same contract.
    let [send, displacements, receive] = lists.map(|list| unsafe { list_at(list, ranks) });

    let Some(send) = send else {
        let text = "send_counts is NULL, expected a number for each rank";
        return Err(exchange.refuse(Error::new(ErrorKind::InvalidArgument, text)));
    };
    let mut counts = SendCounts::new(send);
    if let Some(displacements) = displacements {
        counts = counts.displacements(displacements);
    }
    if let Some(receive) = receive {
        counts = counts.receive_counts(receive);
    }
    Ok(counts)
}

/// Writes how many elements the last start receives from each rank to `counts`, and the elements of
/// the output at which their blocks begin to `displacements`; either may be NULL.
///
/// # Safety
/// `counts` and `displacements` are NULL or have room for one number for each rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_all_to_all_v_received(
    exchange: *mut AllToAllVHandle,
    counts: *mut usize,
    displacements: *mut usize,
) -> Status {
    call(|| {
        with(exchange, |exchange| {
            // SAFETY: the contract of this function says that it is NULL or has room.
            unsafe { write_list(exchange.received_counts(), counts) };
            // SAFETY: the contract of this function says that it is NULL or has room.
            unsafe { write_list(exchange.received_displacements(), displacements) };
            Ok(())
        })
    })
}

/// Writes a list, unless `to` is NULL.
///
/// # Safety
/// `to` is NULL or valid for writes of as many numbers.
unsafe fn write_list(list: &[usize], to: *mut usize) {
    if !to.is_null() {
        // SAFETY: it is not NULL, and the contract of this function says that it is valid then. The
        // list is memory of the library, which does not overlap with that of the caller.
        unsafe { ptr::copy_nonoverlapping(list.as_ptr(), to, list.len()) };
    }
}

/// Writes the address and the size in bytes of the whole input of this rank, as
/// `peerlane_operation_input`.
///
/// # Safety
/// `address` and `bytes` are NULL or point to such values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_all_to_all_v_input(
    exchange: *mut AllToAllVHandle,
    address: *mut *mut c_void,
    bytes: *mut usize,
) -> Status {
    call(|| {
        let memory = with(exchange, |exchange| exchange.input_memory())?;
        // SAFETY: the contract of this function says that both are NULL or valid for writes.
        unsafe { write(&memory, address, bytes) };
        Ok(())
    })
}

/// Writes the address and the size in bytes of what the last start has received, as
/// `peerlane_operation_output`.
///
/// # Safety
/// `address` and `bytes` are NULL or point to such values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_all_to_all_v_output(
    exchange: *mut AllToAllVHandle,
    address: *mut *mut c_void,
    bytes: *mut usize,
) -> Status {
    call(|| {
        let memory = with(exchange, |exchange| Ok(exchange.output_memory()))?;
        // SAFETY: the contract of this function says that both are NULL or valid for writes.
        unsafe { write(&memory, address, bytes) };
        Ok(())
    })
}

/// Says that what reads the output of the last start on a stream is on that stream, as
/// `peerlane_operation_end_lease`.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_all_to_all_v_end_lease(exchange: *mut AllToAllVHandle) -> Status {
    call(|| with(exchange, AnyAllToAllV::end_lease))
}

/// Returns the error of a start on a stream that has failed, or `PEERLANE_STATUS_OK`.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_all_to_all_v_check(exchange: *mut AllToAllVHandle) -> Status {
    call(|| with(exchange, |exchange| exchange.check()))
}

/// Writes how the data moves to `buffer`, as `peerlane_operation_report`.
///
/// # Safety
/// `buffer` is NULL or has `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_all_to_all_v_report(
    exchange: *mut AllToAllVHandle,
    buffer: *mut c_char,
    size: usize,
) -> Status {
    call(|| {
        let report = with(exchange, |exchange| Ok(exchange.report()))?;
        // SAFETY: the contract of this function says that `buffer` is NULL or has `size` bytes.
        unsafe { text_into(&report, buffer, size) }
    })
}

/// Destroys an all-to-all-v. If a call of another thread uses it, this call first waits for that.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_all_to_all_v_destroy(exchange: *mut AllToAllVHandle) -> Status {
    call(|| {
        let object = ALL_TO_ALL_VS.remove(exchange.addr())?;
        // The calls that have found it before it was removed end first, or find nothing.
        drop(lock(&object).take());
        Ok(())
    })
}
