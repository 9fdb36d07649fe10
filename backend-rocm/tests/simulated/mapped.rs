//! Tests memory that the caller has mapped, with a release that returns its handles again.

use std::ffi::c_void;

use hip_sys::{
    Library, hipMemAccessDesc, hipMemAccessFlags, hipMemAllocationHandleType as Handle,
    hipMemAllocationProp, hipMemAllocationType, hipMemLocation, hipMemLocationType,
};
use peerlane_hal::{Fabric as _, PeerMemory as _, Rank, Region as _, Role};
use peerlane_simulated_driver::in_own_process;

use crate::support::{driver_of, ensure, pattern, put_and_read, ranks, register, soon};

const RELEASE: &str = "7.15";
const SEGMENT_BYTES: usize = 2 << 20;

/// Maps segments of a device at adjacent addresses, and returns the first. They are never freed.
fn mapped(device: i32, segments: usize) -> u64 {
    let hip = Library::load().expect("the simulated driver is installed");
    let location =
        hipMemLocation { type_: hipMemLocationType::hipMemLocationTypeDevice, id: device };
    let mut properties = hipMemAllocationProp {
        type_: hipMemAllocationType::hipMemAllocationTypePinned,
        location,
        ..hipMemAllocationProp::default()
    };
    properties.__bindgen_anon_1.requestedHandleTypes = Handle::hipMemHandleTypePosixFileDescriptor;
    // SAFETY: the number is that of a device.
    ensure(unsafe { (hip.set_device)(device) }, "hipSetDevice");
    let (mut start, null): (*mut c_void, _) = (std::ptr::null_mut(), std::ptr::null_mut());
    let bytes = segments * SEGMENT_BYTES;
    // SAFETY: the result is stored in a local.
    let code = unsafe { (hip.mem_address_reserve)(&raw mut start, bytes, 0, null, 0) };
    ensure(code, "hipMemAddressReserve");
    for segment in 0..segments {
        let mut memory = std::ptr::null_mut();
        let create = hip.mem_create;
        // SAFETY: both point to locals.
        let code = unsafe { create(&raw mut memory, SEGMENT_BYTES, &raw const properties, 0) };
        ensure(code, "hipMemCreate");
        let at = start.wrapping_byte_add(segment * SEGMENT_BYTES);
        // SAFETY: the range was reserved above, and nothing is mapped in it.
        ensure(unsafe { (hip.mem_map)(at, SEGMENT_BYTES, 0, memory, 0) }, "hipMemMap");
    }
    let flags = hipMemAccessFlags::hipMemAccessFlagsProtReadWrite;
    let access = hipMemAccessDesc { location, flags };
    // SAFETY: the whole range is mapped.
    ensure(unsafe { (hip.mem_set_access)(start, bytes, &raw const access, 1) }, "hipMemSetAccess");
    start as u64
}

#[test]
fn a_region_may_begin_in_one_segment_and_end_in_another() {
    in_own_process(|| {
        let (driver, _turn) = driver_of(RELEASE);
        let mut fabrics = ranks(2, false).unwrap();
        let start = mapped(1, 3) + SEGMENT_BYTES as u64 - 100;
        let bytes = SEGMENT_BYTES as u64 + 300;
        let region = register(&fabrics[1], start, bytes, Role::Data).unwrap();
        let key = fabrics[1].memory().export(&region).unwrap();
        assert!(driver.calls("hipMemRetainAllocationHandle") > 0);
        let remote = fabrics[0].memory().import(Rank(1), &key, soon()).unwrap();
        let seen = put_and_read(&mut fabrics, &remote, &region, 3);
        assert_eq!(seen, pattern(3, region.bytes() as usize));
    });
}
