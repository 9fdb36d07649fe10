//! Devices: which there are, what they are like, and which reach each other.

use std::ffi::{CStr, c_char, c_int};

use super::Hip;
use super::call::enter;
use super::init::current;
use super::types::{hipDevice_t, hipError_t, hipUUID};
use crate::device::settings::{Setting, reaches};
use crate::device::topology;
use crate::runtime::code::{
    INVALID_DEVICE, INVALID_VALUE, Outcome, PEER_ACCESS_ALREADY_ENABLED, PEER_ACCESS_NOT_ENABLED,
    PEER_ACCESS_UNSUPPORTED, UNKNOWN,
};
use crate::runtime::out::{Out, store, store_text};
use crate::runtime::{Face, pci, rocm};

#[unsafe(no_mangle)]
extern "C" fn hipGetDeviceCount(count: Out<'_, c_int>) -> hipError_t {
    enter("hipGetDeviceCount", || {
        store(count, c_int::try_from(Hip::visible()?.len()).map_err(|_| UNKNOWN)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipDeviceGet(device: Out<'_, hipDevice_t>, ordinal: c_int) -> hipError_t {
    enter("hipDeviceGet", || Hip::physical(ordinal).and_then(|_| store(device, ordinal)))
}

#[unsafe(no_mangle)]
extern "C" fn hipDeviceGetName(
    name: *mut c_char,
    length: c_int,
    device: hipDevice_t,
) -> hipError_t {
    enter("hipDeviceGetName", || {
        Hip::physical(device)?;
        store_text(name, length, rocm::NAME)
    })
}

/// Letters, not a number.
#[unsafe(no_mangle)]
extern "C" fn hipDeviceGetUuid(out: Out<'_, hipUUID>, device: hipDevice_t) -> hipError_t {
    enter("hipDeviceGetUuid", || {
        let letters = pci::unique_id(Hip::physical(device)?).into_bytes();
        store(out, hipUUID(letters.try_into().map_err(|_| UNKNOWN)?))
    })
}

/// With small letters.
fn pci_id(physical: u32) -> String {
    pci::address(physical).to_lowercase()
}

#[unsafe(no_mangle)]
extern "C" fn hipDeviceGetPCIBusId(
    id: *mut c_char,
    length: c_int,
    device: hipDevice_t,
) -> hipError_t {
    enter("hipDeviceGetPCIBusId", || store_text(id, length, &pci_id(Hip::physical(device)?)))
}

#[unsafe(no_mangle)]
extern "C" fn hipDeviceGetByPCIBusId(
    device: Out<'_, hipDevice_t>,
    id: *const c_char,
) -> hipError_t {
    enter("hipDeviceGetByPCIBusId", || {
        if id.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller gives text that ends with a zero.
        let wanted = unsafe { CStr::from_ptr(id) }.to_string_lossy().to_lowercase();
        let mut seen = Hip::visible()?.iter();
        let found = seen.position(|physical| pci_id(*physical) == wanted);
        store(device, c_int::try_from(found.ok_or(INVALID_DEVICE)?).map_err(|_| UNKNOWN)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipDeviceGetAttribute(
    value: Out<'_, c_int>,
    attribute: c_int,
    device: hipDevice_t,
) -> hipError_t {
    enter("hipDeviceGetAttribute", || {
        let number = attribute_of(Hip::physical(device)?, attribute)?;
        store(value, c_int::try_from(number).map_err(|_| UNKNOWN)?)
    })
}

/// By the numbers of hip_runtime_api.h since 5.5; what is not simulated is 0.
fn attribute_of(physical: u32, attribute: c_int) -> Outcome<u64> {
    Ok(match attribute {
        // Asynchronous engines, as HIP counts them.
        2 => Setting::CopyEngines.value(),
        // Maps host memory, reaches registered memory at its own address, has concurrent kernels.
        3 | 4 | 8 => 1,
        6 => Setting::ComputeMode.value(),
        // Compute capability 9.4.
        23 => 9,
        61 => 4,
        56 => 1024,
        63 => 304,
        67 => u64::from(pci::bus(physical)),
        // Stream priorities, one address space, memory pools, registers host memory.
        78 | 85 | 88 | 90 => 1,
        87 => 64,
        89 => Setting::VirtualMemory.value(),
        92 => u64::from(topology::numa_node(physical)),
        // A large BAR; waits for values; fine-grained memory.
        10_011 | 10_013 | 10_016 => 1,
        0..=92 | 10_000..=10_020 => 0,
        _ => return Err(INVALID_VALUE),
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipDeviceCanAccessPeer(
    can: Out<'_, c_int>,
    device: hipDevice_t,
    peer: hipDevice_t,
) -> hipError_t {
    enter("hipDeviceCanAccessPeer", || {
        let (device, peer) = (Hip::physical(device)?, Hip::physical(peer)?);
        store(can, c_int::from(device != peer && reaches(device, peer)))
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipDeviceEnablePeerAccess(peer: hipDevice_t, flags: u32) -> hipError_t {
    enter("hipDeviceEnablePeerAccess", || {
        let (own, peer) = (current()?, Hip::physical(peer)?);
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if own.device() == peer {
            return Err(INVALID_DEVICE);
        }
        if !reaches(own.device(), peer) {
            return Err(PEER_ACCESS_UNSUPPORTED);
        }
        if own.reach(peer, true) { Ok(()) } else { Err(PEER_ACCESS_ALREADY_ENABLED) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipDeviceDisablePeerAccess(peer: hipDevice_t) -> hipError_t {
    enter("hipDeviceDisablePeerAccess", || {
        let (own, peer) = (current()?, Hip::physical(peer)?);
        if own.reach(peer, false) { Ok(()) } else { Err(PEER_ACCESS_NOT_ENABLED) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipDeviceGetP2PAttribute(
    value: Out<'_, c_int>,
    attribute: c_int,
    from: hipDevice_t,
    to: hipDevice_t,
) -> hipError_t {
    enter("hipDeviceGetP2PAttribute", || {
        let (from, to) = (Hip::physical(from)?, Hip::physical(to)?);
        if from == to {
            return Err(INVALID_DEVICE);
        }
        let number = match attribute {
            0 => Setting::PeerRank.value(),
            1 | 2 => u64::from(reaches(from, to)),
            3 => 0,
            _ => return Err(INVALID_VALUE),
        };
        store(value, c_int::try_from(number).map_err(|_| UNKNOWN)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipExtGetLinkTypeAndHopCount(
    from: hipDevice_t,
    to: hipDevice_t,
    kind: Out<'_, u32>,
    hops: Out<'_, u32>,
) -> hipError_t {
    enter("hipExtGetLinkTypeAndHopCount", || {
        let (from, to) = (Hip::physical(from)?, Hip::physical(to)?);
        if from == to {
            return Err(INVALID_VALUE);
        }
        let link = topology::between(from, to);
        store(kind, link.kind.number())?;
        store(hops, link.hops)
    })
}
