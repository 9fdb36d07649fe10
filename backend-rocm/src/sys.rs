//! Loads HIP and the HSA runtime with their function tables, once per process.
//!
//! HIP is loaded first, because it brings the HSA runtime that it was built with and the second table must
//! be of the same one. Streams, memory and IPC need only HIP, so a missing HSA runtime is an error only for
//! features that use it.
//!
//! Results are plain integers in newtypes, because a runtime may be newer than this crate.

use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

pub(crate) use hip_sys as hip;
use hip_sys::hipError_t;
pub(crate) use hsa_sys as hsa;
use hsa_sys::hsa_status_t;

use crate::device::Version;
use crate::error::{Error, RocmResult};

/// The name that HIP returns for every code that it does not know, which is the name of code 999.
const UNKNOWN_NAME: &str = "hipErrorUnknown";

/// The HIP runtime, loaded and initialised.
#[derive(Debug)]
pub(crate) struct Hip {
    pub(crate) calls: &'static hip::Library,
    /// The version of the runtime, which may differ from that of the headers.
    pub(crate) version: Version,
    /// The values of `hipMemoryType` in this version.
    pub(crate) memory_types: hip::MemoryTypes,
    /// Whether this version takes a pointer to the file descriptor when it imports memory.
    pub(crate) imports_by_pointer: bool,
}

/// The HSA runtime, loaded and initialised.
#[derive(Debug)]
pub(crate) struct Hsa {
    pub(crate) calls: &'static hsa::Library,
    /// The major and minor version of AMD's extension interface.
    pub(crate) interface: (u16, u16),
}

impl Hip {
    /// Loads and initialises the HIP runtime, once per process.
    ///
    /// # Errors
    /// Returns [`Error::Unavailable`] if there is no library, if it is too old, or if there is no device.
    pub(crate) fn load() -> Result<&'static Self, Error> {
        static HIP: OnceLock<Result<Hip, Error>> = OnceLock::new();
        HIP.get_or_init(Self::open).as_ref().map_err(Error::clone)
    }

    fn open() -> Result<Self, Error> {
        let calls = hip::Library::load().map_err(|error| Error::load_failed(&error))?;
        let mut number: c_int = 0;
        // SAFETY: the result is stored in a local. The call needs neither a device nor `hipInit`.
        let code = unsafe { (calls.runtime_get_version)(&raw mut number) };
        let version = Version::from_hip(if code == hipError_t::hipSuccess { number } else { 0 });
        let (memory_types, imports_by_pointer) =
            (hip::memory_types(number), hip::imports_by_pointer(number));
        let hip = Self { calls, version, memory_types, imports_by_pointer };
        // SAFETY: `hipInit` takes flags, which must be 0.
        let code = unsafe { (calls.init)(0) };
        if code == hipError_t::hipSuccess {
            Ok(hip)
        } else {
            Err(Error::hip_init_failed(&hip, code))
        }
    }

    /// Returns the version and the file of HIP for error texts.
    pub(crate) fn label(&self) -> String {
        format!("HIP {} ({})", self.version, self.calls.file().display())
    }

    /// Returns a result code with the name and explanation that HIP has for it.
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

impl Hsa {
    /// Loads HIP and then the HSA runtime, and initialises both, once per process.
    ///
    /// # Errors
    /// Returns [`Error::Unavailable`] if there is no library, if it is too old, or if there is no device.
    pub(crate) fn load() -> Result<&'static Self, Error> {
        static HSA: OnceLock<Result<Hsa, Error>> = OnceLock::new();
        HSA.get_or_init(Self::open).as_ref().map_err(Error::clone)
    }

    fn open() -> Result<Self, Error> {
        Hip::load()?;
        let calls = hsa::Library::load().map_err(|error| Error::load_failed(&error))?;
        // SAFETY: the runtime counts initialisations; HIP has made its own. It is never shut down here.
        let status = unsafe { (calls.init)() };
        if status != hsa_status_t::HSA_STATUS_SUCCESS {
            return Err(Error::hsa_init_failed(calls, status));
        }
        let number = |attribute| {
            let mut number = 0_u16;
            // SAFETY: the attribute is 16 bits wide; the result is stored in a local.
            let status = unsafe { (calls.system_get_info)(attribute, (&raw mut number).cast()) };
            if status == hsa_status_t::HSA_STATUS_SUCCESS { number } else { 0 }
        };
        let major = number(hsa::hsa_system_info_t::HSA_AMD_SYSTEM_INFO_EXT_VERSION_MAJOR);
        let minor = number(hsa::hsa_system_info_t::HSA_AMD_SYSTEM_INFO_EXT_VERSION_MINOR);
        Ok(Self { calls, interface: (major, minor) })
    }
}

/// Returns a status code with the name and explanation that the HSA runtime has for it.
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
