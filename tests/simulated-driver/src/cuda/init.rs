//! Starting the driver, its version, and the names of its results.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::OnceLock;

use super::call::enter;
use super::code::{
    CUresult, Code, INVALID_VALUE, NO_DEVICE, NOT_INITIALIZED, Outcome, UNKNOWN, words,
};
use super::device::{parse_visible, uuid_text};
use super::types::{Out, store};
use crate::device::script;
use crate::device::settings::{self, PREFIX, Setting};

/// The devices that this process sees, numbered as the machine does, in the order of ordinals.
static VISIBLE: OnceLock<Vec<u32>> = OnceLock::new();

/// As [`VISIBLE`]; an error before the driver was started.
pub(crate) fn visible() -> Outcome<&'static [u32]> {
    VISIBLE.get().map(Vec::as_slice).ok_or(NOT_INITIALIZED)
}

/// Reads the environment, once in the life of the process.
fn start() -> Outcome {
    static STARTED: OnceLock<Outcome> = OnceLock::new();
    *STARTED.get_or_init(|| {
        let read = settings::read_environment()
            .and_then(|()| script::read(&variable(&format!("{PREFIX}FAIL")).unwrap_or_default()));
        if let Err(problem) = read {
            eprintln!("simulated driver: {problem}");
            return Err(UNKNOWN);
        }
        let count = u32::try_from(Setting::Devices.value()).map_err(|_| UNKNOWN)?;
        let wanted = variable("CUDA_VISIBLE_DEVICES");
        let visible = parse_visible(wanted.as_deref(), count, uuid_text);
        if visible.is_empty() {
            return Err(NO_DEVICE);
        }
        VISIBLE.get_or_init(|| visible);
        Ok(())
    })
}

fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|text| text.to_string_lossy().into_owned())
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
    enter("cuGetErrorName", || say(words(code).map(|(name, _)| name), text))
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorString(code: CUresult, text: Out<'_, *const c_char>) -> CUresult {
    enter("cuGetErrorString", || say(words(code).map(|(_, words)| words), text))
}

fn say(words: Option<&'static CStr>, text: Out<'_, *const c_char>) -> Outcome<()> {
    store(text, words.map_or(std::ptr::null(), CStr::as_ptr))?;
    words.map(|_| ()).ok_or(Code(INVALID_VALUE.0))
}
