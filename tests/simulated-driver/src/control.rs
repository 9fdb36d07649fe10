//! Functions that no real driver has, by which tests change what happens and see what happened.
//! `harness::control` calls them.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::time::Duration;

use crate::cuda::Cuda;
use crate::device::fault::Fault;
use crate::device::log::{self, Transfer};
use crate::device::machine::memory;
use crate::device::{counters, script, settings};
use crate::hip::Hip;
use crate::runtime::{Api, primary};

/// Done, or not.
const DONE: c_int = 0;
const REFUSED: c_int = 1;

/// Returns the device of an ordinal of the API that was started; if none was, the ordinal is a device.
fn physical(ordinal: c_int) -> Option<u32> {
    if Cuda::visible().is_ok() {
        return Cuda::physical(ordinal).ok();
    }
    Hip::started(ordinal).or_else(|| u32::try_from(ordinal).ok())
}

/// A text of the caller's; empty for null.
fn text<'a>(text: *const c_char) -> &'a str {
    if text.is_null() {
        return "";
    }
    // SAFETY: `harness::control` gives text that ends with a zero and outlives the call.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or_default()
}

/// Lets this process find this library under a name. The loader looks for the name where a search
/// path of this library leads, finds this very file, and keeps the name with it.
#[unsafe(no_mangle)]
extern "C" fn peerlane_sim_adopt(name: *const c_char) -> c_int {
    // SAFETY: the caller gives text that ends with a zero; what is found is this library, which is
    // loaded, or another that the caller is told of.
    let found = unsafe { libc::dlopen(name, libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if found.is_null() {
        return REFUSED;
    }
    // SAFETY: the handle is one of the loader's.
    let own = unsafe { libc::dlsym(found, c"peerlane_sim_adopt".as_ptr()) };
    if std::ptr::eq(own, peerlane_sim_adopt as *const c_void) { DONE } else { REFUSED }
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
    let device = physical(device);
    counters::read(text(counter), device).unwrap_or(-1)
}

/// Writes what the numbered engines did, as far as there is room, and says how much that is.
#[unsafe(no_mangle)]
extern "C" fn peerlane_sim_log(out: *mut Transfer, room: usize) -> usize {
    let log = log::read();
    for (at, transfer) in log.iter().take(room).enumerate() {
        // SAFETY: `harness::control` gives room for so many.
        let place = unsafe { out.add(at) };
        // SAFETY: as above.
        unsafe { place.write(*transfer) };
    }
    log.len()
}

#[unsafe(no_mangle)]
extern "C" fn peerlane_sim_clear_log() {
    log::clear();
}

#[unsafe(no_mangle)]
extern "C" fn peerlane_sim_reset_counters() {
    counters::reset();
}

/// Breaks the context of a device with this code, as a hardware error would.
#[unsafe(no_mangle)]
extern "C" fn peerlane_sim_break(device: c_int, code: c_int) -> c_int {
    let session = physical(device).and_then(primary::session);
    let Some(session) = session else { return REFUSED };
    session.break_with(Fault::Asked(code));
    DONE
}

/// Destroys the context of a device under its users. Memory of the device goes with it; pinned
/// memory of the host stays readable, so that tests can look at what a program does next.
#[unsafe(no_mangle)]
extern "C" fn peerlane_sim_destroy_context(device: c_int) -> c_int {
    let session = physical(device).and_then(primary::session);
    let Some(session) = session else { return REFUSED };
    session.destroy();
    let id = session.id();
    let lost = memory().select(|range| range.session() == Some(id) && !range.is_host());
    for range in lost {
        let _ = memory().remove(range.base, |found| found.id == range.id);
    }
    DONE
}
