//! Defines results, by the numbers and texts of hsa.h.

use std::ffi::{CStr, c_char};

use super::call::enter_stopped;
use super::types::hsa_status_t;
use crate::device::memory::NoMemory;
use crate::device::memory::share::CannotOpen;
use crate::runtime::code::Code;
use crate::runtime::out::Out;

/// A status other than 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Status(pub(super) hsa_status_t);

pub(super) type Outcome<T = ()> = Result<T, Status>;

pub(super) const ERROR: Status = Status(0x1000);
pub(super) const INVALID_ARGUMENT: Status = Status(0x1001);
pub(super) const INVALID_ALLOCATION: Status = Status(0x1003);
pub(super) const INVALID_AGENT: Status = Status(0x1004);
pub(super) const INVALID_SIGNAL: Status = Status(0x1006);
pub(super) const OUT_OF_RESOURCES: Status = Status(0x1008);
pub(super) const NOT_INITIALIZED: Status = Status(0x100b);
pub(super) const INVALID_MEMORY_POOL: Status = Status(40);

const WORDS: &[(hsa_status_t, &CStr)] = &[
    (0, c"HSA_STATUS_SUCCESS: The function has been executed successfully."),
    (1, c"HSA_STATUS_INFO_BREAK: A traversal was ended early."),
    (ERROR.0, c"HSA_STATUS_ERROR: A generic error has occurred."),
    (INVALID_ARGUMENT.0, c"HSA_STATUS_ERROR_INVALID_ARGUMENT: An argument is not as documented."),
    (INVALID_ALLOCATION.0, c"HSA_STATUS_ERROR_INVALID_ALLOCATION: The allocation is not valid."),
    (INVALID_AGENT.0, c"HSA_STATUS_ERROR_INVALID_AGENT: The agent is invalid."),
    (INVALID_SIGNAL.0, c"HSA_STATUS_ERROR_INVALID_SIGNAL: The signal is invalid."),
    (OUT_OF_RESOURCES.0, c"HSA_STATUS_ERROR_OUT_OF_RESOURCES: Resources cannot be allocated."),
    (NOT_INITIALIZED.0, c"HSA_STATUS_ERROR_NOT_INITIALIZED: The runtime is not initialized."),
    (0x1016, c"HSA_STATUS_ERROR_EXCEPTION: A device has raised an exception."),
    (INVALID_MEMORY_POOL.0, c"HSA_STATUS_ERROR_INVALID_MEMORY_POOL: The memory pool is invalid."),
    (43, c"HSA_STATUS_ERROR_MEMORY_FAULT: A device touched memory that it may not."),
];

impl From<NoMemory> for Status {
    fn from(reason: NoMemory) -> Self {
        match reason {
            NoMemory::Exhausted => OUT_OF_RESOURCES,
            NoMemory::BadRange => INVALID_ALLOCATION,
        }
    }
}

impl From<CannotOpen> for Status {
    fn from(reason: CannotOpen) -> Self {
        match reason {
            CannotOpen::Malformed | CannotOpen::OwnProcess | CannotOpen::Stale => INVALID_ARGUMENT,
            CannotOpen::Refused => ERROR,
        }
    }
}

/// What HIP says of a device has no words here.
impl From<Code> for Status {
    fn from(_: Code) -> Self {
        OUT_OF_RESOURCES
    }
}

/// Stores a result; without a place for it the argument is invalid.
pub(super) fn store<T>(out: Out<'_, T>, value: T) -> Outcome {
    out.ok_or(INVALID_ARGUMENT)?.write(value);
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn hsa_status_string(
    status: hsa_status_t,
    text: Out<'_, *const c_char>,
) -> hsa_status_t {
    enter_stopped("hsa_status_string", || {
        let found = WORDS.iter().find(|(known, _)| *known == status);
        store(text, found.ok_or(INVALID_ARGUMENT)?.1.as_ptr())
    })
}
