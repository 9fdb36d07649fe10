//! Describes the devices as CUDA does.

use std::ffi::{CStr, c_char, c_int};

use super::Cuda;
use crate::calls::calls;
use crate::device::settings::Setting;
use crate::runtime::call::enter;
use crate::runtime::code::{INVALID_DEVICE, INVALID_VALUE, Outcome, Status, UNKNOWN};
use crate::runtime::out::{Out, store, store_text};
use crate::runtime::{Api, pci};

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct CUuuid([u8; 16]);

const NAME: &CStr = c"Simulated GPU";

calls! {
    [Cuda cuDeviceGetName](name: *mut c_char, length: c_int, device: c_int) => {
        Cuda::physical(device)?;
        store_text(name, length, &NAME.to_string_lossy())
    };
    [Cuda cuDeviceGetUuid, Cuda cuDeviceGetUuid_v2](out: Out<'_, CUuuid>, device: c_int) =>
        store(out, CUuuid(pci::uuid(Cuda::physical(device)?)));
    [Cuda cuDeviceGetPCIBusId](id: *mut c_char, length: c_int, device: c_int) =>
        store_text(id, length, &pci::address(Cuda::physical(device)?));
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetByPCIBusId(device: Out<'_, c_int>, id: *const c_char) -> Status {
    enter("cuDeviceGetByPCIBusId", || {
        if id.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller gives text that ends with a zero.
        let expected = unsafe { CStr::from_ptr(id) }.to_string_lossy().to_uppercase();
        let mut seen = Cuda::visible()?.iter();
        let found =
            seen.position(|physical| pci::address(*physical) == expected).ok_or(INVALID_DEVICE)?;
        store(device, c_int::try_from(found).map_err(|_| UNKNOWN)?)
    })
}

/// Returns an attribute of a device by the number in cuda.h; 0 for one that is not simulated.
pub(super) fn attribute(physical: u32, attribute: c_int) -> Outcome<u64> {
    Ok(match attribute {
        // The most threads of a block, and of a warp.
        1 => 1024,
        10 => 32,
        // Multiprocessors.
        16 => 132,
        // Maps host memory; has concurrent kernels, one address space, priorities.
        19 | 31 | 41 | 78 => 1,
        20 => Setting::ComputeMode.value(),
        33 => u64::from(pci::bus(physical)),
        40 => Setting::CopyEngines.value(),
        // Compute capability 9.0.
        75 => 9,
        // Registers host memory, and reaches it at its own address.
        91 | 99 => 1,
        // A stream waits for 64 bits; and with NOR.
        122 => Setting::LongWords.value(),
        94 | 123 => 1,
        102 => Setting::VirtualMemory.value(),
        103 => Setting::VirtualMemory.value() * Setting::Descriptors.value(),
        // Memory pools; GPUDirect RDMA.
        115 | 116 => 1,
        // The host can flush the writes of NICs; the owner sees them in order.
        117 => u64::from(Setting::NicWrites.is("flush")),
        118 => u64::from(Setting::NicWrites.is("ordered")) * 100,
        124 => Setting::DmaBuf.value(),
        125 => u64::from(!Setting::LegacyShare.is("off")),
        128 if !Setting::FabricHandles.is("none") => Setting::VirtualMemory.value(),
        other if (1..=160).contains(&other) => 0,
        _ => return Err(INVALID_VALUE),
    })
}
