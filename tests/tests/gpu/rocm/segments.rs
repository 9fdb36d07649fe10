//! Maps memory in consecutive segments, as the expandable segments of an allocator do.

use std::ffi::c_void;

use hip_sys::{
    Library, hipMemAccessDesc, hipMemAccessFlags, hipMemAllocationGranularity_flags,
    hipMemAllocationHandleType, hipMemAllocationProp, hipMemAllocationProp__bindgen_ty_1,
    hipMemAllocationType, hipMemGenericAllocationHandle_t, hipMemLocation, hipMemLocationType,
};
use peerlane_tests::{Failure, Outcome};

use super::gpu::{Gpu, granted};

/// The release from which the backend can share memory that the caller has mapped.
const GIVES_HANDLES_AGAIN: i32 = 71_500_000;

/// Segments that lie one behind the other in the address space.
pub(crate) struct Segments {
    hip: &'static Library,
    pub(crate) address: u64,
    pub(crate) segment_bytes: usize,
    whole: usize,
    handles: Vec<hipMemGenericAllocationHandle_t>,
}

impl Segments {
    pub(crate) fn new(gpu: &Gpu, count: usize) -> Outcome<Self> {
        let (hip, mut version) = (gpu.hip, 0);
        // SAFETY: the result is stored in a local.
        let code = unsafe { (hip.runtime_get_version)(&raw mut version) };
        granted("hipRuntimeGetVersion", code)?;
        if version < GIVES_HANDLES_AGAIN {
            let text = format!("HIP {version} does not give handles of mapped memory out again");
            return Err(Failure::new(text));
        }
        let handles = hipMemAllocationProp__bindgen_ty_1 {
            requestedHandleTypes: hipMemAllocationHandleType::hipMemHandleTypePosixFileDescriptor,
        };
        let properties = hipMemAllocationProp {
            type_: hipMemAllocationType::hipMemAllocationTypePinned,
            __bindgen_anon_1: handles,
            location: hipMemLocation {
                type_: hipMemLocationType::hipMemLocationTypeDevice,
                id: gpu.ordinal.cast_signed(),
            },
            ..Default::default()
        };
        let least = hipMemAllocationGranularity_flags::hipMemAllocationGranularityMinimum;
        let mut unit = 0;
        // SAFETY: the result is stored in a local.
        granted("hipMemGetAllocationGranularity", unsafe {
            (hip.mem_get_allocation_granularity)(&raw mut unit, &raw const properties, least)
        })?;
        let (mut base, whole) = (std::ptr::null_mut(), count * unit);
        // SAFETY: the result is stored in a local.
        granted("hipMemAddressReserve", unsafe {
            (hip.mem_address_reserve)(&raw mut base, whole, 0, std::ptr::null_mut(), 0)
        })?;
        // From here on, dropping it undoes what is done.
        let mut segments =
            Self { hip, address: base as u64, segment_bytes: unit, whole, handles: Vec::new() };
        for index in 0..count {
            let mut handle = std::ptr::null_mut();
            // SAFETY: both are locals.
            granted("hipMemCreate", unsafe {
                (hip.mem_create)(&raw mut handle, unit, &raw const properties, 0)
            })?;
            let at = segments.at(index);
            // SAFETY: inside what was reserved, and free.
            granted("hipMemMap", unsafe { (hip.mem_map)(at, unit, 0, handle, 0) })?;
            segments.handles.push(handle);
        }
        let access = hipMemAccessDesc {
            location: properties.location,
            flags: hipMemAccessFlags::hipMemAccessFlagsProtReadWrite,
        };
        // SAFETY: all of it is mapped.
        granted("hipMemSetAccess", unsafe {
            (hip.mem_set_access)(base, whole, &raw const access, 1)
        })?;
        Ok(segments)
    }

    fn at(&self, index: usize) -> *mut c_void {
        (self.address + (index * self.segment_bytes) as u64) as *mut c_void
    }
}

impl Drop for Segments {
    fn drop(&mut self) {
        for (index, handle) in self.handles.iter().enumerate() {
            // SAFETY: one of the mappings above; the tests finish their streams before.
            let _ = unsafe { (self.hip.mem_unmap)(self.at(index), self.segment_bytes) };
            // SAFETY: created above.
            let _ = unsafe { (self.hip.mem_release)(*handle) };
        }
        // SAFETY: reserved above, and nothing is mapped there now.
        let _ = unsafe { (self.hip.mem_address_free)(self.address as *mut c_void, self.whole) };
    }
}
