//! Asking HIP for its devices.

use std::ffi::{CStr, c_char, c_int};

use peerlane_toolkit::device::Fault;

use super::{Device, PciAddress, absence, numa};
use crate::error::Error;
use crate::sys::Hip;
use crate::sys::hip::{hipDeviceAttribute_t, hipError_t, hipUUID};

const TEXT_BYTES: usize = 256;

/// All devices, in the order of their ordinals.
pub(crate) fn all(hip: &Hip) -> Result<Vec<Device>, Error> {
    (0..count(hip)?).map(|ordinal| open(hip, ordinal)).collect()
}

/// The device of this process that peers know by that identity, if it is visible here.
pub(crate) fn find(hip: &Hip, identity: &[u8; 16]) -> Result<Option<Device>, Error> {
    Ok(all(hip)?.into_iter().find(|device| device.identity() == *identity))
}

fn count(hip: &Hip) -> Result<u32, Error> {
    let mut count = 0;
    // SAFETY: the result is stored in a local.
    let code = unsafe { (hip.calls.get_device_count)(&raw mut count) };
    refuse(hip, "hipGetDeviceCount", code)?;
    if count < 1 {
        // `hipInit` says so as a rule; some runtimes only count none.
        return Err(Error::no_start(hip, hipError_t::hipErrorNoDevice));
    }
    Ok(count.unsigned_abs())
}

/// The device with that ordinal, and all about it; HIP's number of it is the ordinal too.
///
/// # Errors
/// Of kind [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) for an ordinal that is too
/// large; HIP's refusal.
pub(crate) fn open(hip: &Hip, ordinal: u32) -> Result<Device, Error> {
    let count = count(hip)?;
    let Some(number) = c_int::try_from(ordinal).ok().filter(|_| ordinal < count) else {
        let visible = absence::visible(|name| std::env::var(name).ok());
        return Err(Error::Fault(Fault::Argument(format!(
            "device is {ordinal}, wanted less than the number of visible GPUs, {count}; {visible}"
        ))));
    };
    describe(hip, number, ordinal)
}

fn describe(hip: &Hip, device: c_int, ordinal: u32) -> Result<Device, Error> {
    let calls = hip.calls;
    let name = text(hip, "hipDeviceGetName", |text, bytes| {
        // SAFETY: the runtime writes at most `bytes` bytes to `text`, ended by a zero.
        unsafe { (calls.device_get_name)(text, bytes, device) }
    })?;
    let address = text(hip, "hipDeviceGetPCIBusId", |text, bytes| {
        // SAFETY: as above.
        unsafe { (calls.device_get_pci_bus_id)(text, bytes, device) }
    })?;
    let pci = PciAddress::parse(&address).ok_or_else(|| {
        Error::Fault(Fault::Mismatch(format!(
            "the PCI address of device {ordinal} ({name}) is \"{address}\", wanted one such as \
             0000:c1:00.0, from hipDeviceGetPCIBusId of {}",
            calls.file().display()
        )))
    })?;
    let mut uuid = hipUUID::default();
    // SAFETY: the result is stored in a local.
    let code = unsafe { (calls.device_get_uuid)(&raw mut uuid, device) };
    refuse(hip, "hipDeviceGetUuid", code)?;
    let mut memory = 0;
    // SAFETY: as above.
    let code = unsafe { (calls.device_total_mem)(&raw mut memory, device) };
    refuse(hip, "hipDeviceTotalMem", code)?;
    let units = hipDeviceAttribute_t::hipDeviceAttributeMultiprocessorCount;
    let virtual_memory = hipDeviceAttribute_t::hipDeviceAttributeVirtualMemoryManagementSupported;
    Ok(Device {
        ordinal,
        name,
        uuid: uuid.bytes.map(c_char::cast_unsigned),
        pci,
        memory_bytes: memory as u64,
        numa_node: numa::node(numa::DEVICES, pci),
        compute_units: u32::try_from(attribute(hip, device, units)?).unwrap_or(0),
        // A runtime that does not know the attribute has not the ability.
        virtual_memory: attribute(hip, device, virtual_memory).is_ok_and(|value| value != 0),
    })
}

/// An attribute of a device.
pub(crate) fn attribute(
    hip: &Hip,
    device: c_int,
    attribute: hipDeviceAttribute_t,
) -> Result<c_int, Error> {
    let mut value = 0;
    // SAFETY: the result is stored in a local.
    let code = unsafe { (hip.calls.device_get_attribute)(&raw mut value, attribute, device) };
    refuse(hip, "hipDeviceGetAttribute", code)?;
    Ok(value)
}

fn text(
    hip: &Hip,
    call: &'static str,
    ask: impl FnOnce(*mut c_char, c_int) -> hipError_t,
) -> Result<String, Error> {
    let mut text = [0_u8; TEXT_BYTES];
    refuse(hip, call, ask(text.as_mut_ptr().cast(), TEXT_BYTES as c_int))?;
    let ended = CStr::from_bytes_until_nul(&text).unwrap_or_default();
    Ok(ended.to_string_lossy().into_owned())
}

fn refuse(hip: &Hip, call: &'static str, code: hipError_t) -> Result<(), Error> {
    if code == hipError_t::hipSuccess { Ok(()) } else { Err(Error::hip(hip, call, None, code)) }
}
