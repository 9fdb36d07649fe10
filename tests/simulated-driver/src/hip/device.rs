//! Describes the devices as HIP does.

use std::ffi::{CStr, c_char, c_int};

use super::Hip;
use super::init::current;
use crate::calls::calls;
use crate::device::settings::{Setting, reaches};
use crate::device::topology;
use crate::runtime::code::{
    INVALID_DEVICE, INVALID_VALUE, Outcome, PEER_ACCESS_ALREADY_ENABLED, PEER_ACCESS_NOT_ENABLED,
    PEER_ACCESS_UNSUPPORTED, Status, UNKNOWN,
};
use crate::runtime::out::{Out, store, store_text};
use crate::runtime::{Api, pci, rocm};

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct hipUUID([u8; 16]);

calls! {
    [Hip hipDeviceGetName](name: *mut c_char, length: c_int, device: c_int) => {
        Hip::physical(device)?;
        store_text(name, length, rocm::NAME)
    };
    // HIP's UUID is text, not a number.
    [Hip hipDeviceGetUuid](out: Out<'_, hipUUID>, device: c_int) => {
        let letters = pci::unique_id(Hip::physical(device)?).into_bytes();
        store(out, hipUUID(letters.try_into().map_err(|_| UNKNOWN)?))
    };
}

/// Returns the PCI address in lower case.
fn pci_id(physical: u32) -> String {
    pci::address(physical).to_lowercase()
}

calls! {
    [Hip hipDeviceGetPCIBusId](id: *mut c_char, length: c_int, device: c_int) =>
        store_text(id, length, &pci_id(Hip::physical(device)?));
}

#[unsafe(no_mangle)]
extern "C" fn hipDeviceGetByPCIBusId(device: Out<'_, c_int>, id: *const c_char) -> Status {
    Hip::enter("hipDeviceGetByPCIBusId", || {
        if id.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller gives text that ends with a zero.
        let expected = unsafe { CStr::from_ptr(id) }.to_string_lossy().to_lowercase();
        let mut seen = Hip::visible()?.iter();
        let found = seen.position(|physical| pci_id(*physical) == expected);
        store(device, c_int::try_from(found.ok_or(INVALID_DEVICE)?).map_err(|_| UNKNOWN)?)
    })
}

/// Returns an attribute of a device by the number in hip_runtime_api.h since 5.5; 0 for one that is
/// not simulated.
pub(super) fn attribute(physical: u32, attribute: c_int) -> Outcome<u64> {
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
extern "C" fn hipDeviceEnablePeerAccess(peer: c_int, flags: u32) -> Status {
    Hip::enter("hipDeviceEnablePeerAccess", || {
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

calls! {
    [Hip hipDeviceDisablePeerAccess](peer: c_int) => {
        let (own, peer) = (current()?, Hip::physical(peer)?);
        if own.reach(peer, false) { Ok(()) } else { Err(PEER_ACCESS_NOT_ENABLED) }
    };
}

#[unsafe(no_mangle)]
extern "C" fn hipExtGetLinkTypeAndHopCount(
    from: c_int,
    to: c_int,
    kind: Out<'_, u32>,
    hops: Out<'_, u32>,
) -> Status {
    Hip::enter("hipExtGetLinkTypeAndHopCount", || {
        let (from, to) = (Hip::physical(from)?, Hip::physical(to)?);
        if from == to {
            return Err(INVALID_VALUE);
        }
        let link = topology::between(from, to);
        store(kind, link.kind.number())?;
        store(hops, link.hops)
    })
}
