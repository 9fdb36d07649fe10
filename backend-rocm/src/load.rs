//! Loads and initialises HIP and the HSA runtime, once per process.
//!
//! HIP is loaded first, because it brings the HSA runtime that it was built with and the second table must
//! be of the same one. Streams, memory and IPC need only HIP, so a missing HSA runtime is an error only for
//! features that use it.

use std::ffi::c_int;
use std::sync::OnceLock;

use crate::error::Error;
use crate::sys::hip::{self, hipError_t};
use crate::sys::hsa::{self, hsa_status_t};
use crate::sys::{Hip, Hsa, Version};

impl Hip {
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
}

impl Hsa {
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
