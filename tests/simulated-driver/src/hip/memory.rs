//! Exports the calls on memory that only HIP has, or that differ from CUDA's.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use super::Hip;
use crate::calls::{Address, Block, calls};
use crate::device::machine;
use crate::device::memory::share::{name, offset, with_offset};
use crate::device::memory::{Kind, Range};
use crate::device::settings::Setting;
use crate::runtime::code::{INVALID_VALUE, NOT_SUPPORTED, Outcome, Status};
use crate::runtime::out::{Out, store};
use crate::runtime::share::Handle;
use crate::runtime::vmm::Properties;
use crate::runtime::{Api, memory, pointer, primary, rocm, share, vmm};

/// Flags of [`hipExtMallocWithFlags`].
const FINE_GRAINED: c_uint = 1;
const SIGNAL_MEMORY: c_uint = 2;
const UNCACHED: c_uint = 3;
const CONTIGUOUS: c_uint = 4;
const SIGNAL_BYTES: usize = 8;

/// Allocates memory. HIP returns a null pointer for no bytes, which is not an error.
fn allocate(
    address: Out<'_, Address>,
    bytes: usize,
    allocate: impl FnOnce(Out<'_, Address>) -> Outcome,
) -> Outcome {
    Hip::ready()?;
    if bytes == 0 { store(address, 0) } else { allocate(address) }
}

/// Waits for every stream of the memory's device, as HIP does before it frees memory. For host
/// memory that is the device that allocated it.
fn drain_for(address: Address) -> Outcome {
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

fn free(address: Address) -> Outcome {
    drain_for(address)?;
    memory::free::<Hip>(address)
}

calls! {
    [Hip hipMalloc](address: Out<'_, Address>, bytes: usize) =>
        allocate(address, bytes, |address| memory::allocate::<Hip>(address, bytes));
}

#[unsafe(no_mangle)]
extern "C" fn hipExtMallocWithFlags(
    address: Out<'_, Address>,
    bytes: usize,
    flags: c_uint,
) -> Status {
    Hip::enter("hipExtMallocWithFlags", || {
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

calls! {
    [Hip hipFree](address: Address) => free(address);
    [Hip hipHostFree](address: *mut c_void) => {
        drain_for(address as Address)?;
        memory::free_host::<Hip>(address)
    };
}

/// First release that makes memory which can be exported as a descriptor.
const DESCRIPTORS_SINCE: u64 = 60_000;
/// First release that takes a descriptor in place of a pointer to one.
const BY_NUMBER: u64 = 70_100;

/// Returns a shared handle as releases since 7.1 pass it. Older releases pass a pointer to a
/// descriptor.
fn descriptor(shared: *mut c_void, kind: c_int) -> *mut c_void {
    let old = Setting::RocmVersion.value() < BY_NUMBER;
    if !old || kind != vmm::HANDLE_POSIX_FD || (shared as usize) < 4096 {
        return shared;
    }
    // SAFETY: for this kind the caller gives the place of an int.
    let number = unsafe { shared.cast::<c_int>().read() };
    number as usize as *mut c_void
}

#[unsafe(no_mangle)]
extern "C" fn hipMemCreate(
    handle: Out<'_, Block>,
    bytes: usize,
    prop: Option<&Properties>,
    flags: c_ulonglong,
) -> Status {
    Hip::enter("hipMemCreate", || {
        let leaves = prop.is_some_and(|prop| prop.requested_handle_types != 0);
        if leaves && Setting::RocmVersion.value() < DESCRIPTORS_SINCE {
            return Err(NOT_SUPPORTED);
        }
        vmm::create::<Hip>(handle, bytes, prop, flags)
    })
}

calls! {
    [Hip hipMemImportFromShareableHandle](
        out: Out<'_, Block>,
        shared: *mut c_void,
        kind: c_int,
    ) => vmm::import::<Hip>(out, descriptor(shared, kind), kind);
    [Hip hipIpcGetMemHandle](out: Out<'_, Handle>, address: Address) => {
        let range = share::shared::<Hip>(address)?;
        store(out, Handle(with_offset(name(&range.backing), address - range.base)))
    };
    [Hip hipIpcOpenMemHandle](address: Out<'_, Address>, handle: Handle, flags: c_uint) =>
        share::open::<Hip>(address, &handle, flags, offset(&handle.0));
    [Hip hipIpcCloseMemHandle](address: Address) => {
        let base = machine::memory().find(address).map(|range| range.base);
        share::close::<Hip>(|opened| Some(opened) == base)
    };
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct hipPointerAttribute_t {
    kind: c_uint,
    device: c_int,
    device_pointer: u64,
    host_pointer: u64,
    is_managed: c_int,
    allocation_flags: c_uint,
}

const _: () = assert!(size_of::<hipPointerAttribute_t>() == 32);

/// First release with today's numbers of memory types.
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
    match machine::memory().find(address) {
        Some(range) => Ok(attributes_of(&range, address)),
        None if Setting::RocmVersion.value() < NEW_TYPES => Err(INVALID_VALUE),
        // Host memory that is not registered is not an error.
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

calls! {
    [Hip hipPointerGetAttributes](out: Out<'_, hipPointerAttribute_t>, address: Address) =>
        store(out, attributes(address)?);
}
