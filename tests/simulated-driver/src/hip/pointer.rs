//! What the runtime knows about an address.

use std::ffi::{c_int, c_void};

use super::Hip;
use super::call::enter;
use super::types::{hipDeviceptr_t, hipError_t, hipPointerAttribute_t};
use crate::device::machine::memory;
use crate::device::memory::Range;
use crate::device::settings::Setting;
use crate::runtime::code::{INVALID_VALUE, Outcome};
use crate::runtime::out::{Out, store};
use crate::runtime::{Face, pointer};

/// Memory types were numbered otherwise before.
const NEW_TYPES: u64 = 60_000;
const UNREGISTERED: u32 = 0;

fn attributes_of(range: &Range, address: u64) -> hipPointerAttribute_t {
    let kind = pointer::kind(range);
    let old = Setting::RocmVersion.value() < NEW_TYPES;
    hipPointerAttribute_t {
        kind: if old { kind - 1 } else { kind },
        device: pointer::place::<Hip>(range).unwrap_or(-1),
        device_pointer: address,
        host_pointer: if range.is_host() { address } else { 0 },
        is_managed: 0,
        allocation_flags: 0,
    }
}

fn attributes(address: u64) -> Outcome<hipPointerAttribute_t> {
    Hip::ready()?;
    match memory().find(address) {
        Some(range) => Ok(attributes_of(&range, address)),
        None if Setting::RocmVersion.value() < NEW_TYPES => Err(INVALID_VALUE),
        // No error: memory of the host that nobody registered.
        None => Ok(hipPointerAttribute_t {
            kind: UNREGISTERED,
            device: -2,
            device_pointer: 0,
            host_pointer: 0,
            is_managed: 0,
            allocation_flags: 0,
        }),
    }
}

#[unsafe(no_mangle)]
extern "C" fn hipPointerGetAttributes(
    out: Out<'_, hipPointerAttribute_t>,
    address: hipDeviceptr_t,
) -> hipError_t {
    enter("hipPointerGetAttributes", || store(out, attributes(address)?))
}

#[unsafe(no_mangle)]
extern "C" fn hipPointerGetAttribute(
    out: *mut c_void,
    attribute: c_int,
    address: hipDeviceptr_t,
) -> hipError_t {
    enter("hipPointerGetAttribute", || pointer::attribute::<Hip>(out, attribute, address))
}
