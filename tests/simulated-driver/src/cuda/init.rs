//! Starting the driver, its version, and the names of its results.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::OnceLock;

use super::types::CUresult;
use crate::device::settings::Setting;
use crate::runtime::call::enter;
use crate::runtime::code::{
    Code, INVALID_VALUE, NO_DEVICE, NOT_INITIALIZED, Outcome, UNKNOWN, cuda_words,
};
use crate::runtime::out::{Out, store};
use crate::runtime::pci;
use crate::runtime::start::{read_environment, variable};
use crate::runtime::visible::parse;

/// The devices that this process sees, numbered as the machine does, in the order of ordinals.
static VISIBLE: OnceLock<Vec<u32>> = OnceLock::new();

/// As [`VISIBLE`]; an error before the driver was started.
pub(super) fn visible() -> Outcome<&'static [u32]> {
    VISIBLE.get().map(Vec::as_slice).ok_or(NOT_INITIALIZED)
}

fn start() -> Outcome {
    static STARTED: OnceLock<Outcome> = OnceLock::new();
    *STARTED.get_or_init(|| {
        read_environment()?;
        let count = u32::try_from(Setting::Devices.value()).map_err(|_| UNKNOWN)?;
        let devices: Vec<u32> = (0..count).collect();
        let wanted = variable("CUDA_VISIBLE_DEVICES");
        let visible = parse(wanted.as_deref(), &devices, pci::uuid_text);
        if visible.is_empty() {
            return Err(NO_DEVICE);
        }
        VISIBLE.get_or_init(|| visible);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: c_uint) -> CUresult {
    // A call that is to fail is named in the environment, which must be read before.
    let started = start();
    enter("cuInit", || if flags == 0 { started } else { Err(INVALID_VALUE) })
}

#[unsafe(no_mangle)]
extern "C" fn cuDriverGetVersion(version: Out<'_, c_int>) -> CUresult {
    enter("cuDriverGetVersion", || {
        let number = c_int::try_from(Setting::DriverVersion.value()).map_err(|_| UNKNOWN)?;
        store(version, number)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorName(code: CUresult, text: Out<'_, *const c_char>) -> CUresult {
    enter("cuGetErrorName", || say(cuda_words(code).map(|(name, _)| name), text))
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorString(code: CUresult, text: Out<'_, *const c_char>) -> CUresult {
    enter("cuGetErrorString", || say(cuda_words(code).map(|(_, words)| words), text))
}

fn say(words: Option<&'static CStr>, text: Out<'_, *const c_char>) -> Outcome<()> {
    store(text, words.map_or(std::ptr::null(), CStr::as_ptr))?;
    words.map(|_| ()).ok_or(Code(INVALID_VALUE.0))
}
