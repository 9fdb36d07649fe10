//! Raw calls, and the only files that have any: the tables of [`hip_sys`] and [`hsa_sys`], loaded and
//! started once for the process.
//!
//! HIP is loaded first: it brings the HSA runtime that it was built with, and the second table must be
//! of that one. Streams, memory and IPC need HIP alone, so a missing HSA runtime is an error only of
//! what asks for it.
//!
//! Results are plain integers inside newtypes, because a runtime may be newer than this crate.

use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

pub(crate) use hip_sys as hip;
use hip_sys::hipError_t;
pub(crate) use hsa_sys as hsa;
use hsa_sys::hsa_status_t;

use crate::device::Version;
use crate::error::{Error, RocmResult};

/// HIP, started.
#[derive(Debug)]
pub(crate) struct Hip {
    /// The functions.
    pub(crate) calls: &'static hip::Library,
    /// Of the runtime, not of the headers.
    pub(crate) version: Version,
    /// How this version numbers kinds of memory.
    pub(crate) memory_types: hip::MemoryTypes,
    /// How this version takes a file descriptor of memory.
    pub(crate) imports_by_pointer: bool,
}

/// The HSA runtime, started.
#[derive(Debug)]
pub(crate) struct Hsa {
    /// The functions.
    pub(crate) calls: &'static hsa::Library,
    /// Major and minor version of AMD's part of the interface.
    pub(crate) interface: (u16, u16),
}

impl Hip {
    /// HIP of this machine, loaded and started once.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: no library, one that is too old, or no device.
    pub(crate) fn load() -> Result<&'static Self, Error> {
        static HIP: OnceLock<Result<Hip, Error>> = OnceLock::new();
        HIP.get_or_init(Self::open).as_ref().map_err(Error::clone)
    }

    fn open() -> Result<Self, Error> {
        let calls = hip::Library::load().map_err(|error| Error::no_library(&error))?;
        let mut number: c_int = 0;
        // SAFETY: the result is stored in a local. It needs no device and no `hipInit`.
        let code = unsafe { (calls.runtime_get_version)(&raw mut number) };
        let version = Version::of_hip(if code == hipError_t::hipSuccess { number } else { 0 });
        let (memory_types, imports_by_pointer) =
            (hip::memory_types(number), hip::imports_by_pointer(number));
        let hip = Self { calls, version, memory_types, imports_by_pointer };
        // SAFETY: `hipInit` takes flags, which must be 0.
        let code = unsafe { (calls.init)(0) };
        if code == hipError_t::hipSuccess { Ok(hip) } else { Err(Error::no_start(&hip, code)) }
    }

    /// Its release and its file.
    pub(crate) fn named(&self) -> String {
        format!("HIP {} ({})", self.version, self.calls.file().display())
    }

    /// The result with the name and the explanation that the runtime gives it.
    pub(crate) fn result_of(&self, code: hipError_t) -> RocmResult {
        let ask = |call: unsafe extern "C" fn(hipError_t) -> *const c_char| {
            // SAFETY: any number may be asked for.
            text(unsafe { call(code) })
        };
        let name = ask(self.calls.get_error_name);
        // HIP gives every number that it does not know the name of 999.
        if code != hipError_t::hipErrorUnknown && name == UNKNOWN_NAME {
            return RocmResult::nameless(code.0, self.named());
        }
        RocmResult { code: code.0, name, text: ask(self.calls.get_error_string) }
    }
}

const UNKNOWN_NAME: &str = "hipErrorUnknown";

impl Hsa {
    /// The HSA runtime of this machine, loaded and started once, after HIP.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: no library, one that is too old, or no device.
    pub(crate) fn load() -> Result<&'static Self, Error> {
        static HSA: OnceLock<Result<Hsa, Error>> = OnceLock::new();
        HSA.get_or_init(Self::open).as_ref().map_err(Error::clone)
    }

    fn open() -> Result<Self, Error> {
        Hip::load()?;
        let calls = hsa::Library::load().map_err(|error| Error::no_library(&error))?;
        // SAFETY: starts are counted; HIP has its own. The runtime is never shut down here.
        let status = unsafe { (calls.init)() };
        if status != hsa_status_t::HSA_STATUS_SUCCESS {
            return Err(Error::no_hsa_start(calls, status));
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

/// The status with the name and the explanation that the runtime gives it, which are one text.
pub(crate) fn status_of(calls: &hsa::Library, status: hsa_status_t) -> RocmResult {
    let mut found = std::ptr::null();
    // SAFETY: the call stores a pointer to a static string, or leaves the local as it is.
    let asked = unsafe { (calls.status_string)(status, &raw mut found) };
    if asked != hsa_status_t::HSA_STATUS_SUCCESS {
        let runtime = format!("the HSA runtime ({})", calls.file().display());
        return RocmResult::nameless(status.0, runtime);
    }
    let whole = text(found);
    let (name, text) = whole.split_once(": ").unwrap_or((&whole, ""));
    RocmResult { code: status.0, name: name.to_owned(), text: text.to_owned() }
}

/// A static string of a runtime.
fn text(found: *const c_char) -> String {
    if found.is_null() {
        return String::new();
    }
    // SAFETY: a static string of the runtime that ends with a zero.
    unsafe { CStr::from_ptr(found) }.to_string_lossy().into_owned()
}
