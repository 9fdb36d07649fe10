//! What every call has in common: faults on demand, the time it takes, and no panic that leaves it.

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

/// Runs the body of a call, unless a test wants it to fail.
pub(crate) fn enter(name: &'static str, body: impl FnOnce() -> Outcome) -> Status {
    guard(name, body, Code, super::code::UNKNOWN).map_or_else(|code| code.0, |()| 0)
}

/// As [`enter`], for results of any kind: `scripted` is what a test asks for, `panicked` what is
/// answered in place of a panic.
pub(crate) fn guard<E>(
    name: &'static str,
    body: impl FnOnce() -> Result<(), E>,
    scripted: impl FnOnce(Status) -> E,
    panicked: E,
) -> Result<(), E> {
    let start = Instant::now();
    let outcome = match script::begin(name) {
        Some(code) => Err(scripted(code)),
        // What a body leaves half done is behind locks, see `device::sync`.
        None => catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(panicked)),
    };
    let nanos = i64::try_from(start.elapsed().as_nanos()).unwrap_or(i64::MAX);
    Counter::HostNanos.add(NO_DEVICE, nanos);
    outcome
}

/// For calls that a capture forbids, its own or that of another thread.
pub(crate) fn refuse_during_capture() -> Outcome {
    Ok(capture::refuse_unsafe_call(MODE.get())?)
}

/// Sets what this thread may do during captures, and gives what was set before.
pub(crate) fn exchange_mode(mode: Mode) -> Mode {
    MODE.replace(mode)
}
