//! Memory that the runtime allocates: on a device, and pinned on the host.

use std::ffi::{c_int, c_uint, c_void};

use super::Hip;
use super::call::enter;
use super::types::{hipDeviceptr_t, hipError_t};
use crate::device::machine;
use crate::device::memory::Kind;
use crate::device::settings::Setting;
use crate::runtime::code::{INVALID_VALUE, Outcome};
use crate::runtime::out::{Out, store};
use crate::runtime::{Face, memory, primary, rocm};

/// Of [`hipExtMallocWithFlags`].
const FINE_GRAINED: c_uint = 1;
const SIGNAL_MEMORY: c_uint = 2;
const UNCACHED: c_uint = 3;
const CONTIGUOUS: c_uint = 4;
const SIGNAL_BYTES: usize = 8;

/// No bytes get no address, and that is no error.
fn allocate(
    address: Out<'_, hipDeviceptr_t>,
    bytes: usize,
    allocate: impl FnOnce(Out<'_, hipDeviceptr_t>) -> Outcome,
) -> Outcome {
    Hip::ready()?;
    if bytes == 0 { store(address, 0) } else { allocate(address) }
}

/// Waits for every stream of the memory's device, of the host's of that which allocated it, as the
/// vendor does.
fn drain_for(address: hipDeviceptr_t) -> Outcome {
    let range = machine::memory().find(address).filter(|range| range.base == address);
    if let Some(range) = range.filter(|_| Setting::FreeWaits.is_on()) {
        let session = primary::session(range.device());
        for queue in session.iter().flat_map(|session| session.queues()) {
            if !queue.is_capturing() {
                queue.drain()?;
            }
        }
    }
    Ok(())
}

fn free(address: hipDeviceptr_t) -> Outcome {
    drain_for(address)?;
    memory::free::<Hip>(address)
}

#[unsafe(no_mangle)]
extern "C" fn hipMalloc(address: Out<'_, hipDeviceptr_t>, bytes: usize) -> hipError_t {
    enter("hipMalloc", || {
        allocate(address, bytes, |address| memory::allocate::<Hip>(address, bytes))
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipExtMallocWithFlags(
    address: Out<'_, hipDeviceptr_t>,
    bytes: usize,
    flags: c_uint,
) -> hipError_t {
    enter("hipExtMallocWithFlags", || {
        allocate(address, bytes, |address| {
            let session = Hip::current()?;
            let (plain, signal) =
                (Kind::Plain { session: session.id() }, Kind::Signal { session: session.id() });
            let (kind, grain) = match flags {
                0 | CONTIGUOUS => (plain, rocm::COARSE_GRAINED),
                FINE_GRAINED | UNCACHED => (plain, rocm::FINE_GRAINED),
                SIGNAL_MEMORY if bytes == SIGNAL_BYTES => (signal, rocm::FINE_GRAINED),
                _ => return Err(INVALID_VALUE),
            };
            let base = machine::memory().allocate(session.device(), bytes as u64, kind)?;
            if let Some(range) = machine::memory().find(base) {
                range.set_note(grain);
            }
            store(address, base)
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipFree(address: hipDeviceptr_t) -> hipError_t {
    enter("hipFree", || free(address))
}

#[unsafe(no_mangle)]
extern "C" fn hipMemGetInfo(free: Out<'_, usize>, total: Out<'_, usize>) -> hipError_t {
    enter("hipMemGetInfo", || memory::info::<Hip>(free, total))
}

/// Portable, device-mapped, write-combined; uncached, of the node that the user chose, coherent and not.
const HOST_FLAGS: c_uint = 0xf000_0007;
/// Portable, device-mapped, of memory of devices, to read only; uncached.
const REGISTER_FLAGS: c_uint = 0x8000_000f;

#[unsafe(no_mangle)]
extern "C" fn hipHostMalloc(
    address: Out<'_, *mut c_void>,
    bytes: usize,
    flags: c_uint,
) -> hipError_t {
    enter("hipHostMalloc", || memory::allocate_host::<Hip>(address, bytes, flags, HOST_FLAGS))
}

#[unsafe(no_mangle)]
extern "C" fn hipHostFree(address: *mut c_void) -> hipError_t {
    enter("hipHostFree", || {
        drain_for(address as hipDeviceptr_t)?;
        memory::free_host::<Hip>(address)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipHostRegister(address: *mut c_void, bytes: usize, flags: c_uint) -> hipError_t {
    enter("hipHostRegister", || memory::register::<Hip>(address, bytes, flags, REGISTER_FLAGS))
}

#[unsafe(no_mangle)]
extern "C" fn hipHostUnregister(address: *mut c_void) -> hipError_t {
    enter("hipHostUnregister", || memory::unregister::<Hip>(address))
}

#[unsafe(no_mangle)]
extern "C" fn hipHostGetDevicePointer(
    out: Out<'_, hipDeviceptr_t>,
    address: *mut c_void,
    flags: c_uint,
) -> hipError_t {
    enter("hipHostGetDevicePointer", || memory::device_pointer::<Hip>(out, address, flags))
}

#[unsafe(no_mangle)]
extern "C" fn hipMemGetAddressRange(
    base: Out<'_, hipDeviceptr_t>,
    bytes: Out<'_, usize>,
    address: hipDeviceptr_t,
) -> hipError_t {
    enter("hipMemGetAddressRange", || memory::range::<Hip>(base, bytes, address))
}

#[unsafe(no_mangle)]
extern "C" fn hipDeviceTotalMem(bytes: Out<'_, usize>, device: c_int) -> hipError_t {
    enter("hipDeviceTotalMem", || {
        store(bytes, crate::device::memory::capacity(Hip::physical(device)?).0 as usize)
    })
}
