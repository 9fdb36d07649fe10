//! Exports signals.
//!
//! The calls that load and change signals cannot return an error. For an unknown signal they print
//! a message and return 0.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::agent::Agent;
use super::call::enter;
use super::init::TICK_NS;
use super::status::{INVALID_ARGUMENT, INVALID_SIGNAL, Outcome, store};
use super::types::{hsa_agent_t, hsa_signal_t, hsa_signal_value_t, hsa_status_t};
use crate::device::signal::{Condition, Signal};
use crate::runtime::out::Out;

/// Attributes: for GPUs alone, for other processes.
const GPU_ONLY: u64 = 1;
const IPC: u64 = 2;

pub(super) fn find(signal: hsa_signal_t) -> Outcome<Arc<Signal>> {
    Signal::find(signal.0).ok_or(INVALID_SIGNAL)
}

fn with<T: Default>(signal: hsa_signal_t, call: &str, look: impl FnOnce(&Signal) -> T) -> T {
    match Signal::find(signal.0) {
        Some(signal) => look(&signal),
        None => {
            eprintln!("simulated driver: {call} of {:#x}, which is no signal", signal.0);
            T::default()
        }
    }
}

fn create(
    value: hsa_signal_value_t,
    count: u32,
    consumers: *const hsa_agent_t,
    attributes: u64,
    out: Out<'_, hsa_signal_t>,
) -> Outcome {
    if out.is_none() || attributes & !(GPU_ONLY | IPC) != 0 || (count > 0 && consumers.is_null()) {
        return Err(INVALID_ARGUMENT);
    }
    if count > 0 {
        // SAFETY: the caller gives an array of this length.
        let consumers = unsafe { std::slice::from_raw_parts(consumers, count as usize) };
        consumers.iter().try_for_each(|agent| Agent::find(*agent).map(|_| ()))?;
    }
    store(out, hsa_signal_t(Signal::create(value, attributes & IPC != 0)?))
}

#[unsafe(no_mangle)]
extern "C" fn hsa_signal_create(
    value: hsa_signal_value_t,
    count: u32,
    consumers: *const hsa_agent_t,
    out: Out<'_, hsa_signal_t>,
) -> hsa_status_t {
    enter("hsa_signal_create", || create(value, count, consumers, 0, out))
}

#[unsafe(no_mangle)]
extern "C" fn hsa_amd_signal_create(
    value: hsa_signal_value_t,
    count: u32,
    consumers: *const hsa_agent_t,
    attributes: u64,
    out: Out<'_, hsa_signal_t>,
) -> hsa_status_t {
    enter("hsa_amd_signal_create", || create(value, count, consumers, attributes, out))
}

#[unsafe(no_mangle)]
extern "C" fn hsa_signal_destroy(signal: hsa_signal_t) -> hsa_status_t {
    enter("hsa_signal_destroy", || match signal.0 {
        0 => Err(INVALID_ARGUMENT),
        handle if Signal::destroy(handle) => Ok(()),
        _ => Err(INVALID_SIGNAL),
    })
}

#[unsafe(no_mangle)]
extern "C" fn hsa_amd_signal_value_pointer(
    signal: hsa_signal_t,
    out: Out<'_, u64>,
) -> hsa_status_t {
    enter("hsa_amd_signal_value_pointer", || store(out, find(signal)?.value_address()))
}

fn wait(
    signal: hsa_signal_t,
    call: &str,
    condition: c_int,
    with_value: hsa_signal_value_t,
    ticks: u64,
) -> hsa_signal_value_t {
    let condition = match condition {
        0 => Condition::Equal,
        1 => Condition::Other,
        2 => Condition::Less,
        _ => Condition::AtLeast,
    };
    let timeout = ticks.checked_mul(TICK_NS).map(Duration::from_nanos);
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    with(signal, call, |signal| signal.wait(condition, with_value, deadline, || false))
}

/// Loads and waits, which are as strict here in every order of memory.
macro_rules! loads {
    ($($load:ident, $wait:ident;)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $load(signal: hsa_signal_t) -> hsa_signal_value_t {
            with(signal, stringify!($load), Signal::load)
        }

        #[unsafe(no_mangle)]
        extern "C" fn $wait(
            signal: hsa_signal_t,
            condition: c_int,
            value: hsa_signal_value_t,
            ticks: u64,
            _state: c_int,
        ) -> hsa_signal_value_t {
            wait(signal, stringify!($wait), condition, value, ticks)
        }
    )*};
}

/// Changes of the value, likewise.
macro_rules! changes {
    ($($name:ident = |$signal:ident, $value:ident| $change:expr;)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name(signal: hsa_signal_t, value: hsa_signal_value_t) {
            let $value = value;
            with(signal, stringify!($name), |$signal| $change);
        }
    )*};
}

loads! {
    hsa_signal_load_relaxed, hsa_signal_wait_relaxed;
    hsa_signal_load_scacquire, hsa_signal_wait_scacquire;
}

changes! {
    hsa_signal_store_relaxed = |signal, value| signal.store(value);
    hsa_signal_store_screlease = |signal, value| signal.store(value);
    hsa_signal_add_relaxed = |signal, value| signal.add(value);
    hsa_signal_add_screlease = |signal, value| signal.add(value);
    hsa_signal_subtract_relaxed = |signal, value| signal.add(value.wrapping_neg());
    hsa_signal_subtract_screlease = |signal, value| signal.add(value.wrapping_neg());
}
