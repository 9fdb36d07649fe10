//! Starts the runtime, which any call does, and keeps the current device of each thread.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::{Arc, OnceLock};

use super::Hip;
use crate::calls::calls;
use crate::device::session::Session;
use crate::device::settings::Setting;
use crate::runtime::code::{INVALID_VALUE, NO_DEVICE, Outcome, Status, UNKNOWN, hip_words};
use crate::runtime::out::{Out, store};
use crate::runtime::start::{read_environment, variable};
use crate::runtime::visible::parse;
use crate::runtime::{Api, pci, primary, rocm};

/// Devices that this process sees, by ordinal, as the machine numbers them.
static VISIBLE: OnceLock<Outcome<Vec<u32>>> = OnceLock::new();

thread_local! {
    static CURRENT: Cell<c_int> = const { Cell::new(0) };
}

/// Returns [`VISIBLE`]; starts the runtime.
pub(super) fn visible() -> Outcome<&'static [u32]> {
    let visible = VISIBLE.get_or_init(|| {
        read_environment()?;
        let visible = select();
        if visible.is_empty() { Err(NO_DEVICE) } else { Ok(visible) }
    });
    visible.as_deref().map_err(|code| *code)
}

/// Returns [`VISIBLE`] if the runtime was started; does not start it.
pub(super) fn started() -> Option<&'static [u32]> {
    VISIBLE.get()?.as_deref().ok()
}

/// Selects the devices from the visible agents; their order may differ from that of the agents.
fn select() -> Vec<u32> {
    let mut devices = rocm::visible_agents();
    if Setting::HipOrder.is("reversed") {
        devices.reverse();
    }
    let expected = variable("HIP_VISIBLE_DEVICES").or_else(|| variable("CUDA_VISIBLE_DEVICES"));
    parse(expected.as_deref(), &devices, |device| format!("GPU-{}", pci::unique_id(device)))
}

/// Returns the session of the thread's device, if it still works.
pub(super) fn current() -> Outcome<Arc<Session>> {
    let session = primary::open(Hip::physical(CURRENT.get())?)?;
    session.fault().map_or(Ok(session.clone()), |fault| Err(fault.into()))
}

#[unsafe(no_mangle)]
extern "C" fn hipInit(flags: c_uint) -> Status {
    // Starts first, because the environment that `visible` reads may name this call as one that fails.
    let started = visible().map(|_| ());
    Hip::enter("hipInit", || if flags == 0 { started } else { Err(INVALID_VALUE) })
}

calls! {
    [Hip hipSetDevice](device: c_int) => {
        Hip::physical(device)?;
        CURRENT.set(device);
        Ok(())
    };
    [Hip hipGetDevice](device: Out<'_, c_int>) => {
        visible()?;
        store(device, CURRENT.get())
    };
    // On this platform the driver reports the runtime's version.
    [Hip hipDriverGetVersion](version: Out<'_, c_int>) => store(version, version_number()?);
    [Hip hipRuntimeGetVersion](version: Out<'_, c_int>) => store(version, version_number()?);
}

fn version_number() -> Outcome<c_int> {
    // Works without a device, so `visible` may not have read the environment.
    read_environment()?;
    c_int::try_from(rocm::hip_version()).map_err(|_| UNKNOWN)
}

#[unsafe(no_mangle)]
extern "C" fn hipGetErrorName(code: Status) -> *const c_char {
    hip_words(code).map_or(c"hipErrorUnknown", |(name, _)| name).as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn hipGetErrorString(code: Status) -> *const c_char {
    let text: &CStr = hip_words(code).map_or(c"unknown error", |(_, text)| text);
    text.as_ptr()
}

calls! {
    [Hip hipDrvGetErrorName](code: Status, text: Out<'_, *const c_char>) =>
        store_words(hip_words(code).map(|(name, _)| name), text);
    [Hip hipDrvGetErrorString](code: Status, text: Out<'_, *const c_char>) =>
        store_words(hip_words(code).map(|(_, words)| words), text);
}

fn store_words(words: Option<&'static CStr>, text: Out<'_, *const c_char>) -> Outcome {
    store(text, words.map_or(std::ptr::null(), CStr::as_ptr))?;
    words.map(|_| ()).ok_or(INVALID_VALUE)
}
