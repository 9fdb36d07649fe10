//! Asking the driver for its devices.

use std::ffi::{CStr, c_char, c_int};

use peerlane_toolkit::device::Fault;

use super::{Abilities, ComputeMode, Device};
use crate::error::Error;
use crate::sys::{self, CUdevice, CUuuid, Driver};

const TEXT_BYTES: usize = 256;

/// All devices, in the order of their ordinals.
pub(super) fn all(driver: &Driver) -> Result<Vec<Device>, Error> {
    (0..count(driver)?).map(|ordinal| Ok(open(driver, ordinal)?.1)).collect()
}

/// The device of this process with that UUID, if it is visible here.
pub(crate) fn find(driver: &Driver, uuid: &[u8; 16]) -> Result<Option<(CUdevice, Device)>, Error> {
    for ordinal in 0..count(driver)? {
        let (device, found) = open(driver, ordinal)?;
        if found.uuid == *uuid {
            return Ok(Some((device, found)));
        }
    }
    Ok(None)
}

fn count(driver: &Driver) -> Result<u32, Error> {
    let mut count = 0;
    // SAFETY: the result is stored in a local.
    let code = unsafe { (driver.device_get_count)(&raw mut count) };
    refuse(driver, "cuDeviceGetCount", code)?;
    if count < 1 {
        // `cuInit` says so as a rule; some drivers only count none.
        return Err(Error::no_start(driver, sys::CUDA_ERROR_NO_DEVICE));
    }
    Ok(count.unsigned_abs())
}

/// The device with that ordinal, and all about it.
pub(super) fn open(driver: &Driver, ordinal: u32) -> Result<(CUdevice, Device), Error> {
    let count = count(driver)?;
    let Some(number) = c_int::try_from(ordinal).ok().filter(|_| ordinal < count) else {
        let visible = match std::env::var("CUDA_VISIBLE_DEVICES") {
            Ok(list) => format!("CUDA_VISIBLE_DEVICES is \"{list}\""),
            Err(_) => "CUDA_VISIBLE_DEVICES is not set".to_owned(),
        };
        return Err(Fault::Argument(format!(
            "device is {ordinal}, wanted less than the number of visible GPUs, {count}; {visible}"
        ))
        .into());
    };
    let mut device = 0;
    // SAFETY: the result is stored in a local.
    let code = unsafe { (driver.device_get)(&raw mut device, number) };
    refuse(driver, "cuDeviceGet", code)?;
    Ok((device, describe(driver, device, ordinal)?))
}

fn describe(driver: &Driver, device: CUdevice, ordinal: u32) -> Result<Device, Error> {
    let attribute = |number| attribute(driver, device, number);
    let count = |number| attribute(number).map(|count: c_int| u32::try_from(count).unwrap_or(0));
    let flag = |number| ability(driver, device, number);
    let name = text(driver, "cuDeviceGetName", |text, bytes| {
        // SAFETY: the driver writes at most `bytes` bytes to `text`, ended by a zero.
        unsafe { (driver.device_get_name)(text, bytes, device) }
    })?;
    let pci_bus_id = text(driver, "cuDeviceGetPCIBusId", |text, bytes| {
        // SAFETY: as above.
        unsafe { (driver.device_get_pci_bus_id)(text, bytes, device) }
    })?;
    let mut uuid = CUuuid::default();
    // SAFETY: the result is stored in a local.
    let code = unsafe { (driver.device_get_uuid)(&raw mut uuid, device) };
    refuse(driver, "cuDeviceGetUuid_v2", code)?;
    let mut memory = 0;
    // SAFETY: as above.
    let code = unsafe { (driver.device_total_mem)(&raw mut memory, device) };
    refuse(driver, "cuDeviceTotalMem_v2", code)?;
    let virtual_memory = flag(sys::ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
    Ok(Device {
        ordinal,
        // The driver API has no better sign of an instance of a divided GPU.
        mig: name.contains("MIG "),
        name,
        uuid: uuid.bytes,
        pci_bus_id: pci_bus_id.to_ascii_lowercase(),
        memory_bytes: memory as u64,
        copy_engines: count(sys::ATTRIBUTE_ASYNC_ENGINE_COUNT)?,
        multiprocessors: count(sys::ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        compute_capability: (
            count(sys::ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            count(sys::ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        compute_mode: ComputeMode::of(attribute(sys::ATTRIBUTE_COMPUTE_MODE)?),
        abilities: Abilities {
            virtual_memory,
            posix_handles: virtual_memory
                && flag(sys::ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
            fabric_handles: virtual_memory && flag(sys::ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED),
            dma_buf: flag(sys::ATTRIBUTE_DMA_BUF_SUPPORTED),
            rdma_virtual_memory: flag(sys::ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),
            stream_values_64: flag(sys::ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS),
        },
    })
}

/// An attribute of a device.
pub(crate) fn attribute(driver: &Driver, device: CUdevice, number: c_int) -> Result<c_int, Error> {
    let mut value = 0;
    // SAFETY: the result is stored in a local.
    let code = unsafe { (driver.device_get_attribute)(&raw mut value, number, device) };
    refuse(driver, "cuDeviceGetAttribute", code)?;
    Ok(value)
}

/// An attribute that an older driver may not know, and then has not.
fn ability(driver: &Driver, device: CUdevice, number: c_int) -> bool {
    attribute(driver, device, number).is_ok_and(|value| value != 0)
}

fn text(
    driver: &Driver,
    call: &'static str,
    ask: impl FnOnce(*mut c_char, c_int) -> sys::CUresult,
) -> Result<String, Error> {
    let mut text = [0_u8; TEXT_BYTES];
    refuse(driver, call, ask(text.as_mut_ptr().cast(), TEXT_BYTES as c_int))?;
    let ended = CStr::from_bytes_until_nul(&text).unwrap_or_default();
    Ok(ended.to_string_lossy().into_owned())
}

fn refuse(driver: &Driver, call: &'static str, code: sys::CUresult) -> Result<(), Error> {
    if code == sys::CUDA_SUCCESS { Ok(()) } else { Err(Error::driver(driver, call, None, code)) }
}
