//! Exports the calls that start, end and describe the runtime.

use std::ffi::{CStr, c_int, c_void};
use std::sync::Mutex;

use super::call::{enter, enter_stopped};
use super::info::Value;
use super::status::{INVALID_ARGUMENT, NOT_INITIALIZED, OUT_OF_RESOURCES, Outcome};
use super::types::hsa_status_t;
use crate::device::log::now_ns;
use crate::device::settings::Setting;
use crate::device::sync::lock;
use crate::runtime::rocm;
use crate::runtime::start::read_environment;

/// How often it was started and not ended.
static STARTED: Mutex<u32> = Mutex::new(0);

/// Ticks of the clock are of 10 ns, as with the vendor.
pub(super) const TICK_NS: u64 = 10;

pub(super) fn is_started() -> bool {
    *lock(&STARTED) > 0
}

#[unsafe(no_mangle)]
extern "C" fn hsa_init() -> hsa_status_t {
    // A call that is to fail is named in the environment, which must be read before.
    let read = read_environment();
    enter_stopped("hsa_init", || {
        read?;
        if !rocm::has_driver() {
            return Err(OUT_OF_RESOURCES);
        }
        *lock(&STARTED) += 1;
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn hsa_shut_down() -> hsa_status_t {
    enter_stopped("hsa_shut_down", || {
        let mut started = lock(&STARTED);
        *started = started.checked_sub(1).ok_or(NOT_INITIALIZED)?;
        Ok(())
    })
}

fn build() -> &'static CStr {
    match Setting::HsaVersion.value() {
        0..60_000 => c"1.11.0-simulated",
        60_000..60_400 => c"1.13.0-simulated",
        60_400..70_000 => c"1.15.0-simulated",
        _ => c"1.18.0-simulated",
    }
}

/// Of the header of AMD's extensions.
fn interface_minor() -> u16 {
    match Setting::HsaVersion.value() {
        0..60_000 => 1,
        60_000..60_400 => 4,
        60_400..70_000 => 7,
        _ => 15,
    }
}

/// By the numbers of hsa.h.
fn system_info(attribute: c_int) -> Outcome<Value> {
    Ok(match attribute {
        0 => Value::Half(1),
        1 => Value::Half(1),
        2 => Value::Long(now_ns() / TICK_NS),
        3 => Value::Long(1_000_000_000 / TICK_NS),
        4 => Value::Long(u64::MAX),
        0x200 => Value::Text(build()),
        0x201 | 0x203 | 0x205 | 0x206 => Value::Flag(false),
        0x204 => Value::Flag(Setting::DmaBuf.is_on()),
        0x207 => Value::Half(1),
        0x208 => Value::Half(interface_minor()),
        _ => return Err(INVALID_ARGUMENT),
    })
}

#[unsafe(no_mangle)]
extern "C" fn hsa_system_get_info(attribute: c_int, out: *mut c_void) -> hsa_status_t {
    enter("hsa_system_get_info", || system_info(attribute)?.store(out))
}
