//! Devices: which there are, what they are like, and which reach each other.

use std::ffi::{CStr, c_char, c_int};

use super::call::enter;
use super::code::{CUresult, INVALID_DEVICE, INVALID_VALUE, Outcome, UNKNOWN};
use super::init::visible;
use super::types::{CUdevice, CUuuid, Out, store};
use crate::device::memory;
use crate::device::settings::{Setting, reaches};

const NAME: &CStr = c"Simulated GPU";
/// The bus of the first device.
const FIRST_BUS: u32 = 0x10;

/// The device behind an ordinal, numbered as the machine does.
pub(crate) fn physical(device: CUdevice) -> Outcome<u32> {
    let ordinal = usize::try_from(device).map_err(|_| INVALID_DEVICE)?;
    visible()?.get(ordinal).copied().ok_or(INVALID_DEVICE)
}

/// The ordinal of a device here; `None` if this process does not see it.
pub(crate) fn ordinal(physical: u32) -> Option<CUdevice> {
    let place = visible().ok()?.iter().position(|device| *device == physical)?;
    CUdevice::try_from(place).ok()
}

fn uuid(physical: u32) -> [u8; 16] {
    let mut bytes = *b"simulated gpu 00";
    bytes[14] = b'0' + (physical / 10) as u8;
    bytes[15] = b'0' + (physical % 10) as u8;
    bytes
}

/// As tools print it.
pub(super) fn uuid_text(physical: u32) -> String {
    let hex: String = uuid(physical).iter().map(|byte| format!("{byte:02x}")).collect();
    let (a, b, c, d, e) = (&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
    format!("GPU-{a}-{b}-{c}-{d}-{e}")
}

/// The devices that `CUDA_VISIBLE_DEVICES` leaves, up to the first entry that names none.
pub(super) fn parse_visible(
    wanted: Option<&str>,
    count: u32,
    uuid: impl Fn(u32) -> String,
) -> Vec<u32> {
    let Some(wanted) = wanted else { return (0..count).collect() };
    let mut visible = Vec::new();
    for entry in wanted.split(',').map(str::trim) {
        let found = match entry.parse::<u32>() {
            Ok(index) => Some(index).filter(|index| *index < count),
            Err(_) if entry.len() > "GPU-".len() => {
                (0..count).find(|device| uuid(*device).starts_with(entry))
            }
            Err(_) => None,
        };
        let Some(device) = found else { break };
        // A device that is named twice makes the whole list void.
        if visible.contains(&device) {
            return Vec::new();
        }
        visible.push(device);
    }
    visible
}

fn pci_id(physical: u32) -> String {
    format!("0000:{:02X}:00.0", FIRST_BUS + physical)
}

/// Writes text with its end, cut to the length.
fn store_text(out: *mut c_char, length: c_int, text: &str) -> Outcome {
    let room = usize::try_from(length).ok().filter(|room| *room > 0 && !out.is_null());
    let room = room.ok_or(INVALID_VALUE)?;
    let taken = &text.as_bytes()[..text.len().min(room - 1)];
    // SAFETY: the caller's buffer has this length, and the text with its end is not longer.
    unsafe { std::ptr::copy_nonoverlapping(taken.as_ptr(), out.cast(), taken.len()) };
    // SAFETY: as above.
    let end = unsafe { out.add(taken.len()) };
    // SAFETY: as above.
    unsafe { end.write(0) };
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetCount(count: Out<'_, c_int>) -> CUresult {
    enter("cuDeviceGetCount", || {
        store(count, c_int::try_from(visible()?.len()).map_err(|_| UNKNOWN)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGet(device: Out<'_, CUdevice>, ordinal: c_int) -> CUresult {
    enter("cuDeviceGet", || physical(ordinal).and_then(|_| store(device, ordinal)))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, device: CUdevice) -> CUresult {
    enter("cuDeviceGetName", || {
        physical(device)?;
        store_text(name, length, &NAME.to_string_lossy())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetUuid(out: Out<'_, CUuuid>, device: CUdevice) -> CUresult {
    enter("cuDeviceGetUuid", || store(out, CUuuid(uuid(physical(device)?))))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetUuid_v2(out: Out<'_, CUuuid>, device: CUdevice) -> CUresult {
    enter("cuDeviceGetUuid_v2", || store(out, CUuuid(uuid(physical(device)?))))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceTotalMem_v2(bytes: Out<'_, usize>, device: CUdevice) -> CUresult {
    enter("cuDeviceTotalMem_v2", || {
        let (total, _) = memory::capacity(physical(device)?);
        store(bytes, usize::try_from(total).map_err(|_| UNKNOWN)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetPCIBusId(id: *mut c_char, length: c_int, device: CUdevice) -> CUresult {
    enter("cuDeviceGetPCIBusId", || store_text(id, length, &pci_id(physical(device)?)))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetByPCIBusId(device: Out<'_, CUdevice>, id: *const c_char) -> CUresult {
    enter("cuDeviceGetByPCIBusId", || {
        if id.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller gives text that ends with a zero.
        let wanted = unsafe { CStr::from_ptr(id) }.to_string_lossy().to_uppercase();
        let mut seen = visible()?.iter();
        let found = seen.position(|physical| pci_id(*physical) == wanted).ok_or(INVALID_DEVICE)?;
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
        let number = attribute_of(physical(device)?, attribute)?;
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
        33 => u64::from(FIRST_BUS + physical),
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
        125 => Setting::LegacyShare.value(),
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
        let (device, peer) = (physical(device)?, physical(peer)?);
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
        let (from, to) = (physical(from)?, physical(to)?);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn visible(wanted: &str) -> Vec<u32> {
        parse_visible(Some(wanted), 4, uuid_text)
    }

    #[test]
    fn visible_devices_are_parsed_as_the_vendor_does() {
        assert_eq!(parse_visible(None, 3, uuid_text), [0, 1, 2]);
        assert_eq!(visible("3,1"), [3, 1]);
        assert_eq!(visible("1,9,2"), [1]);
        assert_eq!(visible("-1"), []);
        assert_eq!(visible(""), []);
        assert_eq!(visible("2,2"), []);
        assert_eq!(visible(&uuid_text(2)), [2]);
        assert_eq!(visible("GPU-0000"), []);
    }

    #[test]
    fn a_uuid_looks_like_one() {
        assert_eq!(uuid_text(7), "GPU-73696d75-6c61-7465-6420-677075203037");
    }
}
