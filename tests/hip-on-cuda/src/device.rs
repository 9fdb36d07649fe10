//! Exports the calls on devices, and keeps each thread's current device.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use hip_sys::{hipDevice_t, hipDeviceAttribute_t, hipError_t, hipUUID};

use crate::calls::hip;
use crate::cuda::{CUcontext, CUresult, Cuda, cuda};
use crate::result::{INVALID_DEVICE, INVALID_VALUE, NO_DEVICE, SUCCESS, remembered};

/// More devices than a host has.
const DEVICES_MAX: usize = 64;
/// 7.2.0, of which the two functions that it added are missing.
const VERSION: c_int = 70_200_000;

thread_local! {
    static CURRENT: Cell<c_int> = const { Cell::new(0) };
}

/// The primary contexts, as addresses; retained as long as the process.
static CONTEXTS: [OnceLock<Result<usize, CUresult>>; DEVICES_MAX] =
    [const { OnceLock::new() }; DEVICES_MAX];

/// The primary context of a device.
pub(crate) fn context(cuda: &Cuda, device: c_int) -> Result<CUcontext, CUresult> {
    let place = usize::try_from(device).ok().and_then(|device| CONTEXTS.get(device));
    let retain = || {
        let mut context = std::ptr::null_mut();
        // SAFETY: the result is stored in a local; the driver refuses what is no device.
        let result = unsafe { (cuda.cuDevicePrimaryCtxRetain)(&raw mut context, device) };
        if result == SUCCESS { Ok(context as usize) } else { Err(result) }
    };
    place.ok_or(INVALID_DEVICE)?.get_or_init(retain).map(|context| context as CUcontext)
}

/// The device of a context.
pub(crate) fn device_of(context: CUcontext) -> Option<c_int> {
    let found = CONTEXTS.iter().position(|it| it.get() == Some(&Ok(context as usize)))?;
    c_int::try_from(found).ok()
}

/// Makes the context of the thread's device current, if another one is.
pub(crate) fn make_current(cuda: &Cuda) -> Result<(), CUresult> {
    let wanted = context(cuda, CURRENT.get())?;
    let mut current = std::ptr::null_mut();
    // SAFETY: the result is stored in a local.
    let result = unsafe { (cuda.cuCtxGetCurrent)(&raw mut current) };
    if result == SUCCESS && current == wanted {
        return Ok(());
    }
    // SAFETY: the context is retained for ever.
    let result = unsafe { (cuda.cuCtxSetCurrent)(wanted) };
    if result == SUCCESS { Ok(()) } else { Err(result) }
}

fn count(cuda: &Cuda) -> c_int {
    let mut count = 0;
    // SAFETY: the result is stored in a local.
    let result = unsafe { (cuda.cuDeviceGetCount)(&raw mut count) };
    if result == SUCCESS { count } else { 0 }
}

/// Stores a number where HIP is told to.
///
/// # Safety
/// `out` is null or may be written.
unsafe fn store(out: *mut c_int, value: c_int) -> CUresult {
    if out.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's.
    unsafe { out.write(value) };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn hipInit(_flags: c_uint) -> hipError_t {
    remembered(if cuda().is_some_and(|cuda| count(cuda) > 0) { SUCCESS } else { NO_DEVICE })
}
const _: hip_sys::hipInit = hipInit;

#[unsafe(no_mangle)]
unsafe extern "C" fn hipRuntimeGetVersion(out: *mut c_int) -> hipError_t {
    // SAFETY: the caller's.
    remembered(unsafe { store(out, VERSION) })
}
const _: hip_sys::hipRuntimeGetVersion = hipRuntimeGetVersion;

#[unsafe(no_mangle)]
unsafe extern "C" fn hipDriverGetVersion(out: *mut c_int) -> hipError_t {
    // SAFETY: the caller's.
    unsafe { hipRuntimeGetVersion(out) }
}
const _: hip_sys::hipDriverGetVersion = hipDriverGetVersion;

#[unsafe(no_mangle)]
unsafe extern "C" fn hipGetDevice(out: *mut c_int) -> hipError_t {
    // SAFETY: the caller's.
    remembered(unsafe { store(out, CURRENT.get()) })
}
const _: hip_sys::hipGetDevice = hipGetDevice;

#[unsafe(no_mangle)]
extern "C" fn hipSetDevice(device: c_int) -> hipError_t {
    let Some(cuda) = cuda() else { return remembered(NO_DEVICE) };
    if !(0..count(cuda)).contains(&device) {
        return remembered(INVALID_DEVICE);
    }
    CURRENT.set(device);
    remembered(make_current(cuda).err().unwrap_or(SUCCESS))
}
const _: hip_sys::hipSetDevice = hipSetDevice;

/// The driver's number of an attribute that the backend asks for.
fn number_of(attribute: hipDeviceAttribute_t) -> Option<c_int> {
    Some(match attribute {
        hipDeviceAttribute_t::hipDeviceAttributeMultiprocessorCount => 16,
        hipDeviceAttribute_t::hipDeviceAttributeAsyncEngineCount => 40,
        hipDeviceAttribute_t::hipDeviceAttributeUnifiedAddressing => 41,
        hipDeviceAttribute_t::hipDeviceAttributeVirtualMemoryManagementSupported => 102,
        // Of 64 bits, which is what HIP promises with it.
        hipDeviceAttribute_t::hipDeviceAttributeCanUseStreamWaitValue => 122,
        _ => return None,
    })
}

/// Stores what carries bytes between two devices, as the HSA runtime numbers links, and how far it is.
///
/// # Safety
/// Both may be written.
unsafe fn link(cuda: &Cuda, devices: (c_int, c_int), kind: *mut u32, hops: *mut u32) -> CUresult {
    const NATIVE_ATOMICS: c_int = 3;
    const PCIE: u32 = 2;
    const XGMI: u32 = 4;
    if kind.is_null() || hops.is_null() {
        return INVALID_VALUE;
    }
    let (from, to) = devices;
    let mut atomics = 0;
    // SAFETY: the result is stored in a local; the driver refuses what is no device.
    let result =
        unsafe { (cuda.cuDeviceGetP2PAttribute)(&raw mut atomics, NATIVE_ATOMICS, from, to) };
    if result != SUCCESS {
        return result;
    }
    // SAFETY: the caller's.
    unsafe { kind.write(if atomics == 1 { XGMI } else { PCIE }) };
    // SAFETY: as above.
    unsafe { hops.write(1) };
    SUCCESS
}

hip! {
    fn hipGetDeviceCount(out: *mut c_int) = |cuda| (cuda.cuDeviceGetCount)(out);
    fn hipDeviceGetName(text: *mut c_char, bytes: c_int, device: hipDevice_t) =
        |cuda| (cuda.cuDeviceGetName)(text, bytes, device);
    fn hipDeviceGetUuid(out: *mut hipUUID, device: hipDevice_t) =
        |cuda| (cuda.cuDeviceGetUuid)(out.cast::<c_void>(), device);
    fn hipDeviceTotalMem(out: *mut usize, device: hipDevice_t) =
        |cuda| (cuda.cuDeviceTotalMem)(out, device);
    fn hipDeviceGetPCIBusId(text: *mut c_char, bytes: c_int, device: c_int) =
        |cuda| (cuda.cuDeviceGetPCIBusId)(text, bytes, device);
    fn hipDeviceGetAttribute(out: *mut c_int, attribute: hipDeviceAttribute_t, device: c_int) =
        |cuda| number_of(attribute)
            .map_or(INVALID_VALUE, |number| (cuda.cuDeviceGetAttribute)(out, number, device));
    fn hipDeviceCanAccessPeer(out: *mut c_int, device: c_int, peer: c_int) =
        |cuda| (cuda.cuDeviceCanAccessPeer)(out, device, peer);
    fn hipDeviceEnablePeerAccess(peer: c_int, flags: c_uint) =
        |cuda| match context(cuda, peer) {
            Ok(context) => (cuda.cuCtxEnablePeerAccess)(context, flags),
            Err(refusal) => refusal,
        };
    fn hipExtGetLinkTypeAndHopCount(from: c_int, to: c_int, kind: *mut u32, hops: *mut u32) =
        |cuda| link(cuda, (from, to), kind, hops);
    fn hipDeviceGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) =
        |cuda| (cuda.cuCtxGetStreamPriorityRange)(least, greatest);
}
