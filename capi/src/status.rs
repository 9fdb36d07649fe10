//! Errors as C programs see them: a status from each call, and the text and the rank of the last
//! error of the thread.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use peerlane::{Error, ErrorKind, Rank};

/// The result of a call. Every other value than `PEERLANE_STATUS_OK` is an error, which
/// `peerlane_error_text` describes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The call has succeeded.
    Ok = 0,
    /// The local device stopped working.
    DeviceLost = 1,
    /// A peer has ended or can no longer be reached; `peerlane_error_rank` names it.
    PeerLost = 2,
    /// A call did not complete before its deadline.
    Timeout = 3,
    /// A remote key is malformed or names freed memory.
    InvalidKey = 4,
    /// Values that must be equal on all ranks differ. `peerlane_error_rank` names a rank, but not
    /// if two ranks have made the same start with different lengths or places: the text says which
    /// two.
    Mismatch = 5,
    /// An argument is invalid: a handle that is NULL, foreign or destroyed, a size, a range.
    InvalidArgument = 6,
    /// Memory, handles or file descriptors are exhausted.
    OutOfMemory = 7,
    /// The queue of an engine has no room.
    QueueFull = 8,
    /// The group was aborted.
    Aborted = 9,
    /// A device, driver, library or permission is missing; the text says what to install.
    Unavailable = 10,
    /// Another failure, or a bug of the library.
    Other = 11,
}

impl From<ErrorKind> for Status {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::DeviceLost => Self::DeviceLost,
            ErrorKind::PeerLost => Self::PeerLost,
            ErrorKind::Timeout => Self::Timeout,
            ErrorKind::InvalidKey => Self::InvalidKey,
            ErrorKind::Mismatch => Self::Mismatch,
            ErrorKind::InvalidArgument => Self::InvalidArgument,
            ErrorKind::OutOfMemory => Self::OutOfMemory,
            ErrorKind::QueueFull => Self::QueueFull,
            ErrorKind::Aborted => Self::Aborted,
            ErrorKind::Unavailable => Self::Unavailable,
            _ => Self::Other,
        }
    }
}

/// An error of a call.
pub(crate) struct Failure {
    kind: ErrorKind,
    pub(crate) text: String,
    rank: i32,
    /// The number of bytes that a buffer must have, or 0 if the error is another one.
    needed: usize,
}

impl Failure {
    pub(crate) fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into(), rank: -1, needed: 0 }
    }

    /// Returns the error of a buffer of the caller that is too small for a text.
    pub(crate) fn small_buffer(size: usize, needed: usize) -> Self {
        let text = format!("the buffer has {size} bytes, expected at least {needed}");
        Self { needed, ..Self::argument(text) }
    }

    /// Adds the name of what the error is about.
    pub(crate) fn within(self, name: &str) -> Self {
        Self { text: format!("{name}: {}", self.text), ..self }
    }

    #[cfg(test)]
    pub(crate) fn needed(&self) -> usize {
        self.needed
    }

    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidArgument, text)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let rank = error.peer().and_then(|peer| i32::try_from(peer.0).ok());
        Self { rank: rank.unwrap_or(-1), ..Self::new(error.kind(), error.to_string()) }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let error = Self::new(failure.kind, failure.text);
        match u32::try_from(failure.rank) {
            Ok(rank) => error.with_peer(Rank(rank)),
            Err(_) => error,
        }
    }
}

/// The bytes of [`LATE_TEXT`], with the zero at its end.
const LATE_TEXT_BYTES: usize = 512;

thread_local! {
    /// The text of the last error of a thread.
    ///
    /// It is destroyed before C and C++ programs run the last destructors of a thread: those of
    /// keys, of variables that were made before, and, in the main thread, of static objects. These
    /// call the library too, so no access may require the variable.
    static TEXT: RefCell<CString> = RefCell::default();
    /// The text of the last error of a thread after `TEXT` was destroyed. It has no destructor, so
    /// it can always be accessed.
    static LATE_TEXT: Cell<[u8; LATE_TEXT_BYTES]> = const { Cell::new([0; LATE_TEXT_BYTES]) };
    /// The rank of the last error of a thread.
    static RANK: Cell<i32> = const { Cell::new(-1) };
    /// The number of bytes that the buffer of the last call of a thread must have.
    static NEEDED: Cell<usize> = const { Cell::new(0) };
}

/// Runs the body of a call, and keeps its error for the thread. A panic does not leave the library.
pub(crate) fn call(body: impl FnOnce() -> Result<(), Failure>) -> Status {
    let checked = || {
        peerlane_bindings::check_process()?;
        body()
    };
    let failure = match catch_unwind(AssertUnwindSafe(checked)) {
        Ok(Ok(())) => return Status::Ok,
        Ok(Err(failure)) => failure,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
            Failure::new(ErrorKind::Other, format!("a bug of Peerlane: {text}"))
        }
    };

    let text = CString::new(failure.text.replace('\0', " ")).unwrap_or_default();
    RANK.set(failure.rank);
    NEEDED.set(failure.needed);
    keep_text(text);
    failure.kind.into()
}

/// Keeps the text of an error for the thread: its beginning, if the destructors of the thread run.
fn keep_text(text: CString) {
    let is_kept = TEXT.try_with(|kept| kept.replace(text.clone())).is_ok();
    if is_kept {
        return;
    }

    let bytes = text.as_bytes();
    let beginning = &bytes[..bytes.len().min(LATE_TEXT_BYTES - 1)];
    let mut late = [0; LATE_TEXT_BYTES];
    late[..beginning.len()].copy_from_slice(beginning);
    LATE_TEXT.set(late);
}

/// Returns the text of the last error of this thread. It stays valid until the next call of this
/// thread that fails.
///
/// In the destructors of a thread, and of static objects, a long text is cut.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_error_text() -> *const c_char {
    let text = TEXT.try_with(|text| text.borrow().as_ptr());
    text.unwrap_or_else(|_| LATE_TEXT.with(|text| text.as_ptr().cast()))
}

/// Returns the rank that the last error of this thread is about, or -1.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_error_rank() -> i32 {
    RANK.get()
}

/// Returns how many bytes the buffer needs, with the zero at its end, if the last error of this
/// thread is that the buffer of the call is too small; otherwise 0.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_error_needed_bytes() -> usize {
    NEEDED.get()
}

/// Returns the name of a status, such as `peer lost`. The text is constant.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_status_name(status: i32) -> *const c_char {
    const NAMES: [&CStr; 12] = [
        c"ok",
        c"device lost",
        c"peer lost",
        c"timeout",
        c"invalid key",
        c"mismatch",
        c"invalid argument",
        c"out of memory",
        c"queue full",
        c"aborted",
        c"unavailable",
        c"other",
    ];

    let name = usize::try_from(status).ok().and_then(|status| NAMES.get(status));
    name.copied().unwrap_or(c"unknown status").as_ptr()
}
