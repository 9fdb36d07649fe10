//! Runs the body of a call: injects faults, measures the host time, and catches panics.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use super::code::{Code, Outcome, Status};
use crate::device::capture::{self, Mode};
use crate::device::counters::{Counter, NO_DEVICE};
use crate::device::script;

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// Runs the body of a call, unless a test lets it fail.
pub(crate) fn enter(name: &'static str, body: impl FnOnce() -> Outcome) -> Status {
    guard(name, body, Code, super::code::UNKNOWN).map_or_else(|code| code.0, |()| 0)
}

/// Runs the body of a call with a result of any kind: `scripted` converts the code that a test
/// injects, `panicked` replaces a panic.
pub(crate) fn guard<E>(
    name: &'static str,
    body: impl FnOnce() -> Result<(), E>,
    scripted: impl FnOnce(Status) -> E,
    panicked: E,
) -> Result<(), E> {
    let start = Instant::now();
    let outcome = match script::begin(name) {
        Some(code) => Err(scripted(code)),
        // A body that panics may leave state half changed; that state is behind locks, see `device::sync`.
        None => catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(panicked)),
    };
    let nanos = i64::try_from(start.elapsed().as_nanos()).unwrap_or(i64::MAX);
    Counter::HostNanos.add(NO_DEVICE, nanos);
    outcome
}

/// Fails if a capture of this thread, or a global one of another thread, forbids the call.
pub(crate) fn refuse_during_capture() -> Outcome {
    Ok(capture::refuse_unsafe_call(MODE.get())?)
}

/// Sets what this thread may do during captures, and returns the previous mode.
pub(crate) fn exchange_mode(mode: Mode) -> Mode {
    MODE.replace(mode)
}
