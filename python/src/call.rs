//! Converts errors to exceptions, and detaches waits from the interpreter so that Ctrl-C ends them.

use std::fmt::Display;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use peerlane::group::Caller;
use peerlane::{Error, ErrorKind};
use peerlane_bindings::check_process;
use peerlane_toolkit::limits;
use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::PyTimeoutError;
use pyo3::intern;
use pyo3::prelude::*;

/// How often a wait looks for signals such as that of Ctrl-C.
pub(crate) const SIGNALS: Duration = Duration::from_millis(50);
/// How much of a refused value an error shows.
const SHOWN_CHARS_MAX: usize = 200;

/// Converts an error to `peerlane.Error`.
pub(crate) fn raised(error: &Error) -> PyErr {
    Python::attach(|py| {
        let made = py.import(intern!(py, "peerlane._errors")).and_then(|module| {
            let rank = error.peer().map(|peer| peer.0);
            module.call_method1("of_native", (error.kind().to_string(), error.to_string(), rank))
        });
        made.map_or_else(|failed| failed, PyErr::from_value)
    })
}

pub(crate) fn invalid(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

pub(crate) fn invalid_argument(text: impl Into<String>) -> PyErr {
    raised(&invalid(text))
}

/// Makes a short call of the library without the interpreter.
pub(crate) fn short<R: Send>(
    py: Python<'_>,
    body: impl FnOnce() -> Result<R, Error> + Send,
) -> PyResult<R> {
    py.detach(|| {
        check_process()?;
        body()
    })
    .map_err(|error| raised(&error))
}

/// Waits for a start by calls of `part`, which get the time that is left and return whether the
/// start is complete. Ctrl-C and `limit` end the wait, and the start goes on.
pub(crate) fn wait(
    py: Python<'_>,
    limit: Option<Duration>,
    part: impl Fn(Option<Duration>) -> Result<bool, Error> + Sync,
) -> PyResult<()> {
    let begun = Instant::now();
    loop {
        let left = limit.map(|limit| limit.saturating_sub(begun.elapsed()));
        if short(py, || part(left))? {
            return Ok(());
        }

        py.check_signals()?;
        if left == Some(Duration::ZERO) {
            let text = format!(
                "the start is not complete after {} s; it goes on, and `wait` can be called again",
                limit.unwrap_or_default().as_secs_f64()
            );
            return Err(PyTimeoutError::new_err(text));
        }
    }
}

/// A call that runs on a thread of its own.
pub(crate) struct Running<R>(Mutex<Receiver<Result<R, Error>>>);

/// Begins a call that can wait for other ranks.
pub(crate) fn begin<R: Send + 'static>(
    body: impl FnOnce() -> Result<R, Error> + Send + 'static,
) -> PyResult<Running<R>> {
    check_process().map_err(|error| raised(&error))?;
    let (sender, receiver) = channel();
    // For other ranks, it is the thread of Python that makes the call.
    let caller = Caller::current();
    let spawned = limits::spawn("peerlane call", move || {
        caller.take_over();
        // Nobody receives after Ctrl-C.
        let _ = sender.send(body());
    });
    spawned.map_err(|error| raised(&error.into()))?;
    Ok(Running(Mutex::new(receiver)))
}

impl<R: Send> Running<R> {
    /// Waits for the call. Ctrl-C ends the wait; the call then goes on up to its deadline.
    pub(crate) fn wait(&self, py: Python<'_>) -> PyResult<R> {
        loop {
            match py.detach(|| lock(&self.0).recv_timeout(SIGNALS)) {
                Ok(result) => return result.map_err(|error| raised(&error)),
                Err(RecvTimeoutError::Timeout) => py.check_signals()?,
                Err(RecvTimeoutError::Disconnected) => {
                    let text = "a bug of Peerlane: the call panicked, see the text above";
                    return Err(raised(&Error::new(ErrorKind::Other, text)));
                }
            }
        }
    }
}

/// Makes a call that can wait for other ranks on a thread, so that Ctrl-C ends the wait.
pub(crate) fn long<R: Send + 'static>(
    py: Python<'_>,
    body: impl FnOnce() -> Result<R, Error> + Send + 'static,
) -> PyResult<R> {
    begin(body)?.wait(py)
}

/// Converts an argument, or says its name, its value and what is expected.
pub(crate) fn argument<'py, T: FromPyObjectOwned<'py>>(
    name: &str,
    value: &Bound<'py, PyAny>,
    expected: &str,
) -> PyResult<T> {
    value.extract().map_err(|_| refused(name, value, expected))
}

/// Converts an argument that is a whole number. Floating-point numbers are refused, even without a
/// fraction.
pub(crate) fn whole<'py, T: Whole + FromPyObjectOwned<'py>>(
    name: &str,
    value: &Bound<'py, PyAny>,
) -> PyResult<T> {
    value
        .extract()
        .map_err(|_| refused(name, value, &format!("a whole number from {} to {}", T::MIN, T::MAX)))
}

fn refused(name: &str, value: &Bound<'_, PyAny>, expected: &str) -> PyErr {
    // The text of a value can be missing: Python writes no integer of more than 4300 digits.
    let shown = value.repr().and_then(|text| text.extract::<String>());
    let shown = shown.unwrap_or_else(|_| format!("a {}", value.get_type()));
    let shown: String = shown.chars().take(SHOWN_CHARS_MAX).collect();
    invalid_argument(format!("{name} is {shown}, expected {expected}"))
}

/// Converts an argument as [`whole`] does, or returns `None` for `None`.
pub(crate) fn whole_if_any<'py, T: Whole + FromPyObjectOwned<'py>>(
    name: &str,
    value: Option<&Bound<'py, PyAny>>,
) -> PyResult<Option<T>> {
    value.map(|value| whole(name, value)).transpose()
}

/// An integer type of arguments, with the bounds that errors name.
pub(crate) trait Whole: Display {
    const MIN: Self;
    const MAX: Self;
}

macro_rules! whole {
    ($($integer:ty),*) => {
        $(impl Whole for $integer {
            const MIN: Self = <$integer>::MIN;
            const MAX: Self = <$integer>::MAX;
        })*
    };
}

whole!(u32, i64, usize);

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a time in seconds as a duration.
pub(crate) fn seconds(name: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Duration>> {
    let convert = |value: &Bound<'_, PyAny>| {
        let value: f64 = argument(name, value, "a positive number of seconds")?;
        let duration = Duration::try_from_secs_f64(value).ok();
        let fits = duration.filter(|duration| !duration.is_zero());
        fits.ok_or_else(|| {
            invalid_argument(format!("{name} is {value}, expected a positive number of seconds"))
        })
    };
    value.map(convert).transpose()
}

/// Returns the limit of a wait in seconds as a duration. The time left until a deadline that has
/// passed is zero or negative, and such a wait looks once.
pub(crate) fn limit(name: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Duration>> {
    let convert = |value: &Bound<'_, PyAny>| {
        let expected = "a finite number of seconds below 2^63";
        let seconds: f64 = argument(name, value, expected)?;
        if seconds.is_finite() && seconds <= 0.0 {
            return Ok(Duration::ZERO);
        }
        Duration::try_from_secs_f64(seconds)
            .map_err(|_| invalid_argument(format!("{name} is {seconds}, expected {expected}")))
    };
    value.map(convert).transpose()
}

/// Takes an object of the library and drops it, which may wait, without the interpreter.
///
/// A forked child forgets the object, and does not lock: a thread that exists only in the parent
/// may hold the lock.
pub(crate) fn drop_locked<T: Send>(object: &Mutex<Option<T>>) {
    if check_process().is_ok() {
        drop_detached(lock(object).take());
    }
}

/// Drops an object of the library, which may wait, without the interpreter; in a forked child,
/// forgets it.
pub(crate) fn drop_detached<T: Send>(object: Option<T>) {
    if check_process().is_err() {
        std::mem::forget(object);
        return;
    }
    let mut object = Some(object);
    Python::try_attach(|py| py.detach(|| drop(object.take())));
}

/// Returns the object of a mutex that nothing else uses, whatever a thread of the parent of a
/// forked child has done with it.
pub(crate) fn take_owned<T>(object: &mut Mutex<Option<T>>) -> Option<T> {
    object.get_mut().unwrap_or_else(PoisonError::into_inner).take()
}

/// Converts an argument that is a string.
pub(crate) fn text(name: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    argument(name, value, "a string")
}

/// Converts an argument that is a string, or returns `None` for `None`.
pub(crate) fn text_if_any(
    name: &str,
    value: Option<&Bound<'_, PyAny>>,
) -> PyResult<Option<String>> {
    value.map(|value| text(name, value)).transpose()
}
