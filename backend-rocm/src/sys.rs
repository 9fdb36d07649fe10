//! Loads HIP and the HSA runtime with their function tables, once per process.
//!
//! HIP is loaded first, because it brings the HSA runtime that it was built with and the second table must
//! be of the same one. Streams, memory and IPC need only HIP, so a missing HSA runtime is an error only for
//! features that use it.
//!
//! Results are plain integers in newtypes, because a runtime may be newer than this crate.

use std::ffi::{CStr, c_char};

pub(crate) use hip_sys as hip;
use hip_sys::hipError_t;
pub(crate) use hsa_sys as hsa;
use hsa_sys::hsa_status_t;

/// The name that HIP returns for every code that it does not know, which is the name of code 999.
const UNKNOWN_NAME: &str = "hipErrorUnknown";

#[derive(Debug)]
pub(crate) struct Hip {
    pub(crate) calls: &'static hip::Library,
    /// The version of the loaded HIP runtime, which may differ from that of the headers.
    pub(crate) version: Version,
    pub(crate) memory_types: hip::MemoryTypes,
    pub(crate) imports_by_pointer: bool,
}

#[derive(Debug)]
pub(crate) struct Hsa {
    pub(crate) calls: &'static hsa::Library,
    pub(crate) interface: (u16, u16),
}

impl Hip {
    pub(crate) fn label(&self) -> String {
        format!("HIP {} ({})", self.version, self.calls.file().display())
    }

    pub(crate) fn result_of(&self, code: hipError_t) -> RocmResult {
        let query = |call: unsafe extern "C" fn(hipError_t) -> *const c_char| {
            // SAFETY: HIP accepts any code.
            let text = unsafe { call(code) };
            // SAFETY: HIP returned a static string, or null.
            unsafe { static_text(text) }
        };
        let name = query(self.calls.get_error_name);
        if code != hipError_t::hipErrorUnknown && name == UNKNOWN_NAME {
            return RocmResult::unknown(code.0, self.label());
        }
        RocmResult { code: code.0, name, text: query(self.calls.get_error_string) }
    }
}

pub(crate) fn status_of(calls: &hsa::Library, status: hsa_status_t) -> RocmResult {
    let mut text = std::ptr::null();
    // SAFETY: the call stores a pointer to a static string, or leaves the local unchanged.
    let queried = unsafe { (calls.status_string)(status, &raw mut text) };
    if queried != hsa_status_t::HSA_STATUS_SUCCESS {
        let runtime = format!("the HSA runtime ({})", calls.file().display());
        return RocmResult::unknown(status.0, runtime);
    }
    // SAFETY: the call above stored a static string.
    let text = unsafe { static_text(text) };
    // The runtime returns name and explanation as one text.
    let (name, text) = text.split_once(": ").unwrap_or((&text, ""));
    RocmResult { code: status.0, name: name.to_owned(), text: text.to_owned() }
}

/// Copies a static text of a runtime, where a null pointer stands for an empty text.
///
/// # Safety
/// `text` is null or a static string that is terminated by a zero.
unsafe fn static_text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller upholds the contract of this function.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// The version of a ROCm runtime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The major version, which is 7 in 7.2.
    pub major: u32,
    /// The minor version, which is 2 in 7.2.
    pub minor: u32,
    /// The build number of the runtime.
    pub patch: u32,
}

impl Version {
    /// Decodes the HIP version number that `hipRuntimeGetVersion` returns, such as 70253211.
    pub(crate) fn from_hip(number: i32) -> Self {
        let number = number.unsigned_abs();
        Self { major: number / 10_000_000, minor: number / 100_000 % 100, patch: number % 100_000 }
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { major, minor, patch } = self;
        write!(f, "{major}.{minor}.{patch}")
    }
}

/// A result code of HIP or of the HSA runtime, with its name and explanation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RocmResult {
    /// The numeric value of the runtime's result code.
    pub code: u32,
    /// The name of the code, such as `hipErrorOutOfMemory`, or an empty text if the runtime does not know
    /// it.
    pub name: String,
    /// The runtime's explanation of the code, or an empty text if it has none. For a code without a name,
    /// this is the runtime that was asked.
    pub text: String,
}

impl RocmResult {
    pub(crate) fn unknown(code: u32, runtime: String) -> Self {
        Self { code, name: String::new(), text: runtime }
    }
}

impl std::fmt::Display for RocmResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { code, name, text } = self;
        match (name.as_str(), text.as_str()) {
            ("", "") => write!(f, "unknown result code {code}"),
            ("", runtime) => write!(f, "unknown result code {code} of {runtime}"),
            (name, "") => write!(f, "{name} ({code})"),
            (name, text) => write!(f, "{name} ({code}), {text}"),
        }
    }
}

impl std::error::Error for RocmResult {}
