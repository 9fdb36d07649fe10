//! What every call has in common, and the error that a thread saw last.

use std::cell::Cell;

use super::types::hipError_t;
use crate::runtime::call;
use crate::runtime::code::{NOT_READY, Outcome};

thread_local! {
    static LAST: Cell<hipError_t> = const { Cell::new(0) };
}

/// As [`call::enter`]; an error stays until it is asked for.
pub(super) fn enter(name: &'static str, body: impl FnOnce() -> Outcome) -> hipError_t {
    let result = call::enter(name, body);
    if result != 0 && result != NOT_READY.0 {
        LAST.set(result);
    }
    result
}

#[unsafe(no_mangle)]
extern "C" fn hipGetLastError() -> hipError_t {
    LAST.take()
}

#[unsafe(no_mangle)]
extern "C" fn hipPeekAtLastError() -> hipError_t {
    LAST.get()
}
