//! Devices: which there are, what they are like, and which reach each other.

use std::ffi::{CStr, c_char, c_int};

use super::Cuda;
use super::types::{CUdevice, CUresult, CUuuid};
use crate::device::memory;
use crate::device::settings::{Setting, reaches};
use crate::runtime::call::enter;
use crate::runtime::code::{INVALID_DEVICE, INVALID_VALUE, Outcome, UNKNOWN};
use crate::runtime::out::{Out, store, store_text};
use crate::runtime::{Face, pci};

const NAME: &CStr = c"Simulated GPU";

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetCount(count: Out<'_, c_int>) -> CUresult {
    enter("cuDeviceGetCount", || {
        store(count, c_int::try_from(Cuda::visible()?.len()).map_err(|_| UNKNOWN)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGet(device: Out<'_, CUdevice>, ordinal: c_int) -> CUresult {
    enter("cuDeviceGet", || Cuda::physical(ordinal).and_then(|_| store(device, ordinal)))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, device: CUdevice) -> CUresult {
    enter("cuDeviceGetName", || {
        Cuda::physical(device)?;
        store_text(name, length, &NAME.to_string_lossy())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetUuid(out: Out<'_, CUuuid>, device: CUdevice) -> CUresult {
    enter("cuDeviceGetUuid", || store(out, CUuuid(pci::uuid(Cuda::physical(device)?))))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetUuid_v2(out: Out<'_, CUuuid>, device: CUdevice) -> CUresult {
    enter("cuDeviceGetUuid_v2", || store(out, CUuuid(pci::uuid(Cuda::physical(device)?))))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceTotalMem_v2(bytes: Out<'_, usize>, device: CUdevice) -> CUresult {
    enter("cuDeviceTotalMem_v2", || {
        let (total, _) = memory::capacity(Cuda::physical(device)?);
        store(bytes, usize::try_from(total).map_err(|_| UNKNOWN)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetPCIBusId(id: *mut c_char, length: c_int, device: CUdevice) -> CUresult {
    enter("cuDeviceGetPCIBusId", || store_text(id, length, &pci::address(Cuda::physical(device)?)))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetByPCIBusId(device: Out<'_, CUdevice>, id: *const c_char) -> CUresult {
    enter("cuDeviceGetByPCIBusId", || {
        if id.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller gives text that ends with a zero.
        let wanted = unsafe { CStr::from_ptr(id) }.to_string_lossy().to_uppercase();
        let mut seen = Cuda::visible()?.iter();
        let found =
            seen.position(|physical| pci::address(*physical) == wanted).ok_or(INVALID_DEVICE)?;
        store(device, CUdevice::try_from(found).map_err(|_| UNKNOWN)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetAttribute(
    value: Out<'_, c_int>,
    attribute: c_int,
    device: CUdevice,
) -> CUresult {
    enter("cuDeviceGetAttribute", || {
        let number = attribute_of(Cuda::physical(device)?, attribute)?;
        store(value, c_int::try_from(number).map_err(|_| UNKNOWN)?)
    })
}

/// By the numbers of cuda.h; what is not simulated is 0.
fn attribute_of(physical: u32, attribute: c_int) -> Outcome<u64> {
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
        // The host flushes what network cards have written; the owner sees it in order.
        117 => u64::from(Setting::CardWrites.is("flush")),
        118 => u64::from(Setting::CardWrites.is("ordered")) * 100,
        124 => Setting::DmaBuf.value(),
        125 => u64::from(!Setting::LegacyShare.is("off")),
        128 if !Setting::FabricHandles.is("none") => Setting::VirtualMemory.value(),
        other if (1..=160).contains(&other) => 0,
        _ => return Err(INVALID_VALUE),
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceCanAccessPeer(
    can: Out<'_, c_int>,
    device: CUdevice,
    peer: CUdevice,
) -> CUresult {
    enter("cuDeviceCanAccessPeer", || {
        let (device, peer) = (Cuda::physical(device)?, Cuda::physical(peer)?);
        store(can, c_int::from(device != peer && reaches(device, peer)))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetP2PAttribute(
    value: Out<'_, c_int>,
    attribute: c_int,
    from: CUdevice,
    to: CUdevice,
) -> CUresult {
    enter("cuDeviceGetP2PAttribute", || {
        let (from, to) = (Cuda::physical(from)?, Cuda::physical(to)?);
        if from == to {
            return Err(INVALID_DEVICE);
        }
        let number = match attribute {
            1 => Setting::PeerRank.value(),
            2 | 3 => u64::from(reaches(from, to)),
            4 => 0,
            _ => return Err(INVALID_VALUE),
        };
        store(value, c_int::try_from(number).map_err(|_| UNKNOWN)?)
    })
}
