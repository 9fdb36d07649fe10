//! Functions that no real driver has, by which tests change what happens and see what happened.
//! `harness::control` calls them.

use std::ffi::{CStr, c_char, c_int};
use std::time::Duration;

use super::context;
use super::device::physical;
use crate::device::fault::Fault;
use crate::device::machine::memory;
use crate::device::{counters, script, settings};

/// Done, or not.
const DONE: c_int = 0;
const REFUSED: c_int = 1;

/// A text of the caller's; empty for null.
fn text<'a>(text: *const c_char) -> &'a str {
    if text.is_null() {
        return "";
    }
    // SAFETY: `harness::control` gives text that ends with a zero and outlives the call.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or_default()
}

#[unsafe(no_mangle)]
extern "C" fn peerlane_sim_fail(call: *const c_char, after: u32, code: c_int, always: c_int) {
    script::fail(text(call), u64::from(after), code, always != 0);
}

#[unsafe(no_mangle)]
extern "C" fn peerlane_sim_delay_us(call: *const c_char, micros: u64) {
    script::delay(text(call), Duration::from_micros(micros));
}

#[unsafe(no_mangle)]
extern "C" fn peerlane_sim_clear() {
    script::clear();
}

#[unsafe(no_mangle)]
extern "C" fn peerlane_sim_calls(call: *const c_char) -> u64 {
    script::count(text(call))
}

#[unsafe(no_mangle)]
extern "C" fn peerlane_sim_set(setting: *const c_char, value: *const c_char) -> c_int {
    match settings::change(text(setting), text(value)) {
        Ok(()) => DONE,
        Err(problem) => {
            eprintln!("simulated driver: {problem}");
            REFUSED
        }
    }
}

/// -1 for a name that is not known; a device below 0 stands for all together.
#[unsafe(no_mangle)]
extern "C" fn peerlane_sim_counter(counter: *const c_char, device: c_int) -> i64 {
    let device = physical(device).ok();
    counters::read(text(counter), device).unwrap_or(-1)
}

#[unsafe(no_mangle)]
extern "C" fn peerlane_sim_reset_counters() {
    counters::reset();
}

/// Breaks the context of a device with this code, as a hardware error would.
#[unsafe(no_mangle)]
extern "C" fn peerlane_sim_break(device: c_int, code: c_int) -> c_int {
    let session = physical(device).ok().and_then(context::session_of);
    let Some(session) = session else { return REFUSED };
    session.break_with(Fault::Asked(code));
    DONE
}

/// Destroys the context of a device under its users. Memory of the device goes with it; pinned
/// memory of the host stays readable, so that tests can look at what a program does next.
#[unsafe(no_mangle)]
extern "C" fn peerlane_sim_destroy_context(device: c_int) -> c_int {
    let session = physical(device).ok().and_then(context::session_of);
    let Some(session) = session else { return REFUSED };
    session.destroy();
    let id = session.id();
    let lost = memory().select(|range| range.session() == Some(id) && !range.is_host());
    for range in lost {
        let _ = memory().remove(range.base, |found| found.id == range.id);
    }
    DONE
}
