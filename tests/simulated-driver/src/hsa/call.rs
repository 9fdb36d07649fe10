//! Runs the body of a call.

use super::init::is_started;
use super::status::{ERROR, NOT_INITIALIZED, Outcome, Status};
use super::types::hsa_status_t;
use crate::runtime::call;

/// Runs the body of a call, unless a test wants it to fail or nobody has started the runtime.
pub(super) fn enter(name: &'static str, body: impl FnOnce() -> Outcome) -> hsa_status_t {
    enter_stopped(name, || if is_started() { body() } else { Err(NOT_INITIALIZED) })
}

/// As [`enter`], also before the runtime is started.
pub(super) fn enter_stopped(name: &'static str, body: impl FnOnce() -> Outcome) -> hsa_status_t {
    call::guard(name, body, |code| Status(code.cast_unsigned()), ERROR)
        .map_or_else(|status| status.0, |()| 0)
}
