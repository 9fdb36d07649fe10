//! Makes immediate calls: collectives on any memory, without an operation that the program
//! prepares.

use std::ffi::c_void;
use std::mem;
use std::sync::Mutex;
use std::time::Duration;

use peerlane::collective::Collective;
use peerlane::group::{ImmediateStart, WindowPart};
use peerlane::{DType, Error, Group, Rank};
use peerlane_bindings::{Array, Call, Location, Stream};

use crate::group::{GROUPS, GroupHandle, check_header};
use crate::handle::{Table, clear, lock};
use crate::operation::{list_at, pair_counts, wait_into};
use crate::status::{Failure, Status, call};
use crate::window::{WINDOWS, WindowHandle};
use crate::{milliseconds, numbers};

/// An immediate call that was started.
#[derive(Debug)]
pub struct CallHandle(());

/// What an immediate call does. Begin with `PEERLANE_CALL_OPTIONS_INIT`, and set what differs. All
/// ranks give equal options, except for addresses.
///
/// The input and the output are memory at an address, or a part of a window if their window is set,
/// which is used without a copy. All ranks then name the part at the same place, also those whose
/// input or output the collective does not need. NULL without elements is an input or output
/// without elements, or none if the collective needs none on this rank. The number of elements of a
/// block follows from those of the input and the output.
#[repr(C)]
#[derive(Debug)]
pub struct CallOptions {
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
    /// Whether the call runs beside kernels of the program: one of `PEERLANE_SETTING_AS_GROUP` and
    /// so on.
    pub beside_compute: u32,
    /// NULL, or the number of elements of the block of each rank, if they differ.
    pub counts: *const usize,
    /// NULL, or the number of elements that this rank sends to each rank in an all-to-all whose
    /// blocks differ. Each rank gives its own numbers; the blocks follow each other in the input
    /// and in the output. Such a call is not recorded into a graph.
    pub send_counts: *const usize,
    /// The number of elements that this rank receives from each rank, if `send_counts` is set. It
    /// is what the other rank sends.
    pub receive_counts: *const usize,
    /// The longest time of the call in milliseconds, or 0 for that of the group.
    pub timeout_ms: u64,
    /// The address of the input, or NULL. On GPUs it is one of the device of this rank.
    pub input: *const c_void,
    /// The number of elements of the input.
    pub input_count: usize,
    /// The window that holds the input instead, or NULL.
    pub input_window: *const WindowHandle,
    /// The place of the input in its window, in elements.
    pub input_begin: usize,
    /// The address of the output, or NULL. It can be that of the input: the call is in place then.
    pub output: *mut c_void,
    /// The number of elements of the output.
    pub output_count: usize,
    /// The window that holds the output instead, or NULL.
    pub output_window: *const WindowHandle,
    /// The place of the output in its window, in elements.
    pub output_begin: usize,
}

/// A call that was started.
struct StartedCall(CallState);

enum CallState {
    Open(ImmediateStart),
    Ended(Result<(), Error>),
}

/// A call, or `None` after it was destroyed.
static CALLS: Table<Mutex<Option<StartedCall>>> = Table::new("call", 6);

impl StartedCall {
    /// Waits for the call, and returns whether it is complete. Once it is, each wait returns the
    /// same result.
    fn wait(&mut self, limit: Option<Duration>) -> Result<bool, Error> {
        let start = match &mut self.0 {
            CallState::Open(start) => start,
            CallState::Ended(result) => return result.clone().map(|()| true),
        };

        let waited = match limit {
            Some(limit) => start.wait_for(limit),
            None => self.finish(),
        };
        if !matches!(waited, Ok(false)) {
            self.0 = CallState::Ended(waited.clone().map(drop));
        }
        waited
    }

    /// Waits up to the timeout of the call.
    fn finish(&mut self) -> Result<bool, Error> {
        match mem::replace(&mut self.0, CallState::Ended(Ok(()))) {
            CallState::Open(start) => start.wait()?,
            CallState::Ended(result) => result?,
        }
        Ok(true)
    }
}

impl Drop for StartedCall {
    fn drop(&mut self) {
        // The memory of the call belongs to the program again. A program that destroys the call
        // does not want its result.
        let _ = self.wait(None);
    }
}

/// Makes a call without a preparation by the program, and waits until the output is complete.
/// Collective.
///
/// The first call of a kind prepares an operation, which the group keeps for the next ones. Memory
/// outside of windows is copied to and from memory of the group.
///
/// Arguments that are refused on one rank are an error on all: at once if the call prepares an
/// operation, and otherwise when the other ranks have waited for this one for long.
///
/// # Safety
/// `options` is NULL or points to options. Their `counts`, `send_counts` and `receive_counts` are
/// NULL or have one number for each rank. Unless it is NULL, `input` is the address of
/// `input_count` elements that this rank can read, and `output` that of `output_count` elements
/// that it can also write, aligned for the type. Nobody else accesses them until the call has
/// returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_call_run(
    group: *mut GroupHandle,
    options: *const CallOptions,
) -> Status {
    call(|| {
        // SAFETY: the contract of this function covers the memory until the wait has returned.
        let started = unsafe { started(group, options, Ok(())) }?;
        // The wait does not hold up other calls with the group.
        Ok(started.wait()?)
    })
}

/// Starts a call as `peerlane_call_run`, and returns without waiting for its output. Collective.
///
/// On success `*call` is a handle that must be passed to `peerlane_call_destroy`. The next
/// immediate call of the group on the host first completes this one. Processors of the host move
/// bytes only in calls of the library, unless a device does.
///
/// # Safety
/// `options` is NULL or points to options, and `call` is NULL or points to a handle. The options
/// are as in `peerlane_call_run`, and nobody else accesses their memory until
/// `peerlane_call_wait` has said that the call is complete, or an error, or the call was destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_call_start(
    group: *mut GroupHandle,
    options: *const CallOptions,
    call: *mut *mut CallHandle,
) -> Status {
    crate::status::call(|| {
        // SAFETY: the contract of this function says that `call` is NULL or points to a handle.
        let cleared = unsafe { clear(call, "call") };
        // SAFETY: the contract of this function covers the memory until the call is complete, for
        // which the object of the handle waits when it is dropped.
        let started = unsafe { started(group, options, cleared) }?;
        let object = Mutex::new(Some(StartedCall(CallState::Open(started))));
        // SAFETY: the contract of this function says that `call` points to a handle; NULL has been
        // refused.
        unsafe { CALLS.store_into(object, call) }
    })
}

/// Enqueues a call on a stream, as `peerlane_operation_start_on` its start, and returns at once.
/// Collective.
///
/// The call comes after the work that the stream holds now, and before work that is enqueued next.
/// The host waits for other ranks only if the call prepares an operation or compares new numbers of
/// elements or places. The output is defined if `peerlane_group_check` returns
/// `PEERLANE_STATUS_OK` after the stream was synchronised.
///
/// While the stream is captured, the call is recorded instead. All replays of the graph must be
/// complete before the group is closed or destroyed, or a window of the call is released, and
/// graphs with recorded calls are replayed one after the other.
///
/// # Safety
/// `options` are as in `peerlane_call_run`, and nobody else accesses their memory until the stream
/// has made the call, or all replays. `stream` is a stream of the device of this rank, but no
/// default stream, and lives until the group is closed or destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_call_run_on(
    group: *mut GroupHandle,
    options: *const CallOptions,
    stream: *mut c_void,
) -> Status {
    call(|| {
        let enqueue = |group: &mut Group, call: Call| {
            // SAFETY: this function has the same contract for the stream.
            let stream = unsafe { Stream::from_raw(group.selection().local, stream) };
            // SAFETY: the contract of this function covers the memory, and the replays of graphs.
            unsafe { call.run_on(group, stream) }
        };
        // SAFETY: the contract of this function covers the options, with their counts.
        unsafe { described(group, options, Ok(()), enqueue) }
    })
}

/// Waits for a call that was started, at most `limit_ms` milliseconds, as
/// `peerlane_operation_wait`: 0 does not wait, and a negative number waits up to the timeout of the
/// call.
///
/// `*is_done` is whether the output is complete; it may be NULL if `limit_ms` is negative. After
/// the call is complete, each wait returns the same result.
///
/// # Safety
/// `is_done` is NULL or points to a bool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_call_wait(
    call: *mut CallHandle,
    limit_ms: i64,
    is_done: *mut bool,
) -> Status {
    let wait = |limit| CALLS.with(call.addr(), |call| call.wait(limit));
    // SAFETY: this function has the same contract for `is_done`.
    crate::status::call(|| unsafe { wait_into(limit_ms, is_done, wait) })
}

/// Destroys the handle of a call. If the call is not complete, waits for it first, up to its
/// timeout.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_call_destroy(call: *mut CallHandle) -> Status {
    crate::status::call(|| {
        let object = CALLS.remove(call.addr())?;
        // The waits that have found the call before it was removed end first, or find nothing.
        drop(lock(&object).take());
        Ok(())
    })
}

/// Starts a call on the host, unless `checked` is the error of another argument.
///
/// # Safety
/// `options` is NULL or points to options, with lists that are NULL or have one number for each
/// rank, and memory as [`Call::start_once`] requires.
unsafe fn started(
    group: *mut GroupHandle,
    options: *const CallOptions,
    checked: Result<(), Failure>,
) -> Result<ImmediateStart, Failure> {
    // SAFETY: the contract of this function covers the memory.
    let start = |group: &mut Group, call: Call| unsafe { call.start_once(group) };
    // SAFETY: the contract of this function covers the options, with their counts.
    unsafe { described(group, options, checked, start) }
}

/// Makes the call that the options of a C program describe, unless they or `checked` are refused.
/// The other ranks then learn of it.
///
/// # Safety
/// `options` is NULL or points to options, with lists that are NULL or have one number for each
/// rank.
unsafe fn described<R>(
    group: *mut GroupHandle,
    options: *const CallOptions,
    checked: Result<(), Failure>,
    make: impl FnOnce(&mut Group, Call) -> Result<R, Error>,
) -> Result<R, Failure> {
    GROUPS.get(group.addr())?.with(|group| {
        // SAFETY: the contract of this function says that `options` is NULL or points to options.
        let (collective, options) = match readable(unsafe { options.as_ref() }) {
            Ok(found) => found,
            Err(refused) => return Err(refuse_unknown(group, refused.into()).into()),
        };

        // A call is long, so it is filled in its place.
        let mut call = Call::new(collective);
        let described = checked.and_then(|()| {
            // SAFETY: the contract of this function covers the lists.
            unsafe { describe(&mut call, (group.rank(), group.ranks()), options) }
        });
        match described {
            Ok(()) => Ok(make(group, call)?),
            // All ranks exchange messages then, even if they have made the call before.
            Err(refused) if has_pairs(options) => Err(group.refuse_splits(refused.into()).into()),
            Err(refused) => Err(group.refuse_immediate(collective, refused.into()).into()),
        }
    })
}

/// Returns whether each pair of ranks has a length of its own.
fn has_pairs(options: &CallOptions) -> bool {
    !options.send_counts.is_null() || !options.receive_counts.is_null()
}

/// Returns the collective and the options, if they are of this version.
fn readable(options: Option<&CallOptions>) -> Result<(Collective, &CallOptions), Failure> {
    let options =
        options.ok_or_else(|| Failure::argument("options is NULL, expected what the call does"))?;
    check_header(options.header_version)?;
    let collective = numbers::collective(options.collective)?;
    Ok((collective.with_root(Rank(options.root)), options))
}

/// Tells the other ranks that this rank refuses a call of a collective that it does not know, and
/// returns the error.
fn refuse_unknown(group: &mut Group, error: Error) -> Error {
    // Whether the others exchange messages depends on their collective. If any operation is kept,
    // theirs probably is.
    let mut all = Collective::ALL.iter();
    match all.any(|collective| group.note_immediate_refusal(*collective, &error)) {
        true => error,
        false => group.refuse(error),
    }
}

/// Sets all of a call but its collective as the options of a C program say.
///
/// # Safety
/// `counts`, `send_counts` and `receive_counts` are NULL or have `ranks` numbers.
unsafe fn describe(
    call: &mut Call,
    (rank, ranks): (Rank, usize),
    options: &CallOptions,
) -> Result<(), Failure> {
    let dtype = numbers::dtype(options.dtype)?;
    call.operator = numbers::operator(options.reduction)?;
    call.beside_compute = numbers::setting("beside_compute", options.beside_compute)?;
    let timeout = milliseconds("timeout_ms", options.timeout_ms)?;
    call.timeout = (!timeout.is_zero()).then_some(timeout);

    let lists = [options.counts, options.send_counts, options.receive_counts];
    // SAFETY: this function has the same contract.
    let [counts, send, receive] = lists.map(|list| unsafe { list_at(list, ranks) });
    let pairs = pair_counts(send, receive)?;
    let [needs_input, needs_output] = needs(call.collective, rank, options);

    let input = Side {
        name: "input",
        address: options.input.expose_provenance(),
        count: options.input_count,
        window: options.input_window,
        begin: options.input_begin,
        is_needed: needs_input,
    };
    let output = Side {
        name: "output",
        address: options.output.expose_provenance(),
        count: options.output_count,
        window: options.output_window,
        begin: options.output_begin,
        is_needed: needs_output,
    };

    input.place_in(&mut call.input, dtype)?;
    output.place_in(&mut call.output, dtype)?;
    if let Some(counts) = counts {
        call.counts = Some(counts.to_vec());
    }
    if let Some([send, receive]) = pairs {
        call.splits = Some((send.to_vec(), receive.to_vec()));
    }
    Ok(())
}

/// Returns whether a collective needs the input and the output on a rank.
fn needs(collective: Collective, rank: Rank, options: &CallOptions) -> [bool; 2] {
    if matches!(collective, Collective::Broadcast { .. }) {
        // Its array is the output, or the input on the root.
        let has_input = !options.input.is_null() || !options.input_window.is_null();
        return [false, !has_input];
    }
    [collective.is_provider(rank), collective.is_receiver(rank)]
}

/// The input or the output in the options of a C program.
struct Side {
    name: &'static str,
    address: usize,
    count: usize,
    window: *const WindowHandle,
    begin: usize,
    /// Whether the collective needs it on this rank, so that NULL without elements is an array
    /// without elements, and not none.
    is_needed: bool,
}

impl Side {
    /// Sets the array, or `None` if this rank has none.
    fn place_in(&self, array: &mut Option<Array>, dtype: DType) -> Result<(), Failure> {
        let len = self.count;
        if Self::bytes_of(len, dtype).is_none() {
            return Err(self.too_many("count", len, dtype));
        }

        let location = match (self.address, self.window.is_null()) {
            (0, true) if len == 0 && !self.is_needed => return Ok(()),
            (0, true) if len > 0 => return Err(self.missing()),
            (address, true) => Location::Address(address),
            (0, false) => Location::Part(self.part(dtype)?),
            (address, false) => {
                let name = self.name;
                return Err(Failure::argument(format!(
                    "{name} is {address:#x}, expected NULL, because {name}_window is set"
                )));
            }
        };
        *array = Some(Array { location, dtype, unit: 1, len });
        Ok(())
    }

    /// Returns the part of the window.
    fn part(&self, dtype: DType) -> Result<WindowPart, Failure> {
        let begin = Self::bytes_of(self.begin, dtype);
        let begin = begin.ok_or_else(|| self.too_many("begin", self.begin, dtype))?;
        let part = WINDOWS.get(self.window.addr()).and_then(|window| {
            window.with(|window| Ok(window.untyped_part(dtype, begin, self.count)?))
        });
        part.map_err(|failure| failure.within(self.name))
    }

    /// Returns the bytes of some elements, if an allocation can have as many.
    fn bytes_of(elements: usize, dtype: DType) -> Option<usize> {
        let bytes = elements.checked_mul(dtype.bytes());
        bytes.filter(|bytes| isize::try_from(*bytes).is_ok())
    }

    #[cold]
    fn too_many(&self, field: &str, elements: usize, dtype: DType) -> Failure {
        let name = self.name;
        let most = isize::MAX.unsigned_abs() / dtype.bytes();
        let text = format!("{name}_{field} is {elements}, expected at most {most} for {dtype}");
        Failure::argument(text)
    }

    #[cold]
    fn missing(&self) -> Failure {
        let Self { name, count, .. } = *self;
        Failure::argument(format!(
            "{name} is NULL, expected the address of {count} elements; set {name}_count to 0 for \
             none, or {name}_window for a part of a window"
        ))
    }
}
