//! Starting the runtime, which any call does, its version, the current device, and the names of its
//! results.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::{Arc, OnceLock};

use super::Hip;
use super::call::enter;
use super::types::hipError_t;
use crate::device::session::Session;
use crate::device::settings::Setting;
use crate::runtime::code::{INVALID_VALUE, NO_DEVICE, Outcome, UNKNOWN, hip_words};
use crate::runtime::out::{Out, store};
use crate::runtime::start::{read_environment, variable};
use crate::runtime::visible::parse;
use crate::runtime::{Face, pci, primary, rocm};

/// The devices that this process sees, numbered as the machine does, in the order of ordinals.
static VISIBLE: OnceLock<Outcome<Vec<u32>>> = OnceLock::new();

thread_local! {
    static CURRENT: Cell<c_int> = const { Cell::new(0) };
}

/// As [`VISIBLE`].
pub(super) fn visible() -> Outcome<&'static [u32]> {
    let visible = VISIBLE.get_or_init(|| {
        read_environment()?;
        let visible = select();
        if visible.is_empty() { Err(NO_DEVICE) } else { Ok(visible) }
    });
    visible.as_deref().map_err(|code| *code)
}

pub(super) fn started() -> Option<&'static [u32]> {
    VISIBLE.get()?.as_deref().ok()
}

/// What is left of the agents, in an order that need not be theirs.
fn select() -> Vec<u32> {
    let mut devices = rocm::visible_agents();
    if Setting::HipOrder.is("reversed") {
        devices.reverse();
    }
    let wanted = variable("HIP_VISIBLE_DEVICES").or_else(|| variable("CUDA_VISIBLE_DEVICES"));
    parse(wanted.as_deref(), &devices, |device| format!("GPU-{}", pci::unique_id(device)))
}

/// The session of the thread's device, if it still works.
pub(super) fn current() -> Outcome<Arc<Session>> {
    let session = primary::open(Hip::physical(CURRENT.get())?)?;
    session.fault().map_or(Ok(session.clone()), |fault| Err(fault.into()))
}

#[unsafe(no_mangle)]
extern "C" fn hipInit(flags: c_uint) -> hipError_t {
    // A call that is to fail is named in the environment, which must be read before.
    let started = visible().map(|_| ());
    enter("hipInit", || if flags == 0 { started } else { Err(INVALID_VALUE) })
}

#[unsafe(no_mangle)]
extern "C" fn hipSetDevice(device: c_int) -> hipError_t {
    enter("hipSetDevice", || {
        Hip::physical(device)?;
        CURRENT.set(device);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipGetDevice(device: Out<'_, c_int>) -> hipError_t {
    enter("hipGetDevice", || {
        visible()?;
        store(device, CURRENT.get())
    })
}

/// The driver's version is the runtime's on this platform.
#[unsafe(no_mangle)]
extern "C" fn hipDriverGetVersion(version: Out<'_, c_int>) -> hipError_t {
    enter("hipDriverGetVersion", || store(version, number()?))
}

#[unsafe(no_mangle)]
extern "C" fn hipRuntimeGetVersion(version: Out<'_, c_int>) -> hipError_t {
    enter("hipRuntimeGetVersion", || store(version, number()?))
}

fn number() -> Outcome<c_int> {
    // Answered without a device as well.
    read_environment()?;
    c_int::try_from(rocm::hip_version()).map_err(|_| UNKNOWN)
}

#[unsafe(no_mangle)]
extern "C" fn hipGetErrorName(code: hipError_t) -> *const c_char {
    hip_words(code).map_or(c"hipErrorUnknown", |(name, _)| name).as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn hipGetErrorString(code: hipError_t) -> *const c_char {
    let text: &CStr = hip_words(code).map_or(c"unknown error", |(_, text)| text);
    text.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn hipDrvGetErrorName(code: hipError_t, text: Out<'_, *const c_char>) -> hipError_t {
    enter("hipDrvGetErrorName", || say(hip_words(code).map(|(name, _)| name), text))
}

#[unsafe(no_mangle)]
extern "C" fn hipDrvGetErrorString(code: hipError_t, text: Out<'_, *const c_char>) -> hipError_t {
    enter("hipDrvGetErrorString", || say(hip_words(code).map(|(_, words)| words), text))
}

fn say(words: Option<&'static CStr>, text: Out<'_, *const c_char>) -> Outcome {
    store(text, words.map_or(std::ptr::null(), CStr::as_ptr))?;
    words.map(|_| ()).ok_or(INVALID_VALUE)
}
