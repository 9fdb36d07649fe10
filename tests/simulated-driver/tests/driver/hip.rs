//! Tests what HIP does differently from CUDA. What both do alike is tested with CUDA's symbols.

use std::time::Duration;

use crate::api::hip::*;

fn blocked(stream: usize) -> bool {
    std::thread::sleep(Duration::from_millis(10));
    query(stream) == Err(600)
}

#[test]
fn a_thread_begins_on_the_first_device() {
    let _driver = start();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut device = -1;
            hip!(hipGetDevice(&mut device => &mut i32)).unwrap();
            assert_eq!(device, 0);
            let memory = malloc(64).unwrap();
            use_device(3);
            let mut attributes = [0_u64; 4];
            hip!(hipPointerGetAttributes(&mut attributes => &mut [u64; 4], memory => u64)).unwrap();
            assert_eq!(attributes[0], 2, "memory of device 0");
            assert_eq!(attributes[1], memory);
            assert_eq!(hip!(hipSetDevice(6 => i32)), Err(101));
            hip!(hipGetDevice(&mut device => &mut i32)).unwrap();
            assert_eq!(device, 3);
        });
    });
}

#[test]
fn copies_of_every_kind_move_bytes() {
    let _driver = start();
    use_device(0);
    let stream = new_stream();
    let (from, to) = (zeros(4096), zeros(4096));
    for (round, kind) in (1..).zip([DEVICE_TO_DEVICE, DEFAULT, NO_CU]) {
        fill(from, round, 4096, stream).unwrap();
        copy(to, from, 4096, kind, stream).unwrap();
        assert_eq!(download(to, 4096, stream).unwrap(), [round; 4096]);
    }
    assert_eq!(copy(to, from, 64, 77, stream), Err(1));
    hip!(hipMemcpyDtoDAsync(to => u64, from => u64, 8 => usize, stream => usize)).unwrap();
    sync(stream).unwrap();
}

#[test]
fn a_copy_without_compute_units_may_do_nothing() {
    let driver = start();
    use_device(0);
    let stream = new_stream();
    let (from, to) = (malloc(64).unwrap(), zeros(64));
    driver.set("NO_CU", "drop");
    copy(to, from, 64, NO_CU, stream).unwrap();
    assert_eq!(download(to, 64, stream).unwrap(), [0; 64], "no error, and nothing copied");
    driver.set("NO_CU", "refuse");
    assert_eq!(copy(to, from, 64, NO_CU, stream), Err(801));
    driver.set("NO_CU", "works");
}

#[test]
fn a_wait_looks_at_the_bits_of_its_mask() {
    let _driver = start();
    use_device(0);
    let (memory, stream, other) = (zeros(64), new_stream(), new_stream());
    wait_word(stream, memory, 2, 0xff).unwrap();
    write_word(other, memory, 0x100).unwrap();
    sync(other).unwrap();
    assert!(blocked(stream), "what is outside of the mask does not count");
    write_word(other, memory, 0x102).unwrap();
    sync(stream).unwrap();
}

#[test]
fn a_strict_machine_waits_on_signal_memory_only() {
    let driver = start();
    use_device(0);
    let stream = new_stream();
    let (plain, signal) = (zeros(64), malloc_with(8, 2).unwrap());
    assert_eq!(malloc_with(16, 2), Err(1), "signals are of 8 bytes");
    driver.set("WAIT_MEMORY", "signal");
    assert_eq!(wait_word(stream, plain, 0, u64::MAX), Err(1));
    write_word(stream, signal, 5).unwrap();
    wait_word(stream, signal, 5, u64::MAX).unwrap();
    sync(stream).unwrap();
    driver.set("WAIT_MEMORY", "any");
    free(signal).unwrap();
}

#[test]
fn giving_memory_back_waits_for_the_device() {
    let driver = start();
    use_device(1);
    let (memory, flag, stream) = (zeros(64), zeros(8), new_stream());
    wait_word(stream, flag, 1, u64::MAX).unwrap();
    std::thread::scope(|scope| {
        let freed = scope.spawn(|| free(memory));
        std::thread::sleep(Duration::from_millis(30));
        assert!(!freed.is_finished(), "a stream of the device waits");
        write_word(new_stream(), flag, 1).unwrap();
        freed.join().unwrap().unwrap();
    });
    driver.set("FREE_WAITS", "off");
    wait_word(stream, flag, 2, u64::MAX).unwrap();
    free(malloc(64).unwrap()).unwrap();
    write_word(new_stream(), flag, 2).unwrap();
    driver.set("FREE_WAITS", "on");
}

#[test]
fn no_bytes_get_no_address() {
    let _driver = start();
    assert_eq!(malloc(0), Ok(0));
    assert_eq!(free(0), Ok(()));
}

#[test]
fn peers_are_reached_once_access_is_enabled() {
    let driver = start();
    use_device(2);
    let theirs = zeros(64);
    use_device(4);
    let (own, stream) = (malloc(64).unwrap(), new_stream());
    fill(own, 7, 64, stream).unwrap();
    hip!(hipDeviceEnablePeerAccess(2 => i32, 0 => u32)).unwrap();
    assert_eq!(hip!(hipDeviceEnablePeerAccess(2 => i32, 0 => u32)), Err(704));
    hip!(hipMemcpyPeerAsync(
        theirs => u64, 2 => i32, own => u64, 4 => i32, 64 => usize, stream => usize,
    ))
    .unwrap();
    assert_eq!(download(theirs, 64, stream).unwrap(), [7; 64]);
    driver.set("P2P", "off");
    let mut can = -1;
    hip!(hipDeviceCanAccessPeer(&mut can => &mut i32, 4 => i32, 3 => i32)).unwrap();
    assert_eq!(can, 0);
    assert_eq!(hip!(hipDeviceEnablePeerAccess(3 => i32, 0 => u32)), Err(217));
    driver.set("P2P", "on");
}

#[test]
fn links_and_addresses_are_those_of_the_machine() {
    let driver = start();
    driver.set("HIVE", "3");
    let link = |from: i32, to: i32| {
        let (mut kind, mut hops) = (0, 0);
        hip!(hipExtGetLinkTypeAndHopCount(
            from => i32, to => i32, &mut kind => &mut u32, &mut hops => &mut u32,
        ))
        .map(|()| (kind, hops))
    };
    assert_eq!(link(0, 2), Ok((4, 1)), "XGMI");
    assert_eq!(link(0, 3), Ok((2, 3)), "PCIe, over both processors");
    assert_eq!(link(1, 1), Err(1));
    driver.set("HIVE", "16");
    assert_eq!(pci_id(5), "0000:15:00.0");
    let mut uuid = [0_u8; 16];
    hip!(hipDeviceGetUuid(&mut uuid => &mut [u8; 16], 1 => i32)).unwrap();
    assert_eq!(&uuid, b"53494d5500000001");
    let mut bus = 0;
    hip!(hipDeviceGetAttribute(&mut bus => &mut i32, 67 => i32, 1 => i32)).unwrap();
    assert_eq!(bus, 0x11);
}

#[test]
fn the_last_error_stays_until_it_is_asked_for() {
    let _driver = start();
    let _ = hip!(hipGetLastError());
    assert_eq!(hip!(hipSetDevice(99 => i32)), Err(101));
    assert_eq!(hip!(hipSetDevice(0 => i32)), Ok(()));
    assert_eq!(hip!(hipPeekAtLastError()), Err(101));
    assert_eq!(hip!(hipGetLastError()), Err(101));
    assert_eq!(hip!(hipGetLastError()), Ok(()));
    let name = symbol("hipGetErrorName");
    // SAFETY: this is the declaration of the function in hip_runtime_api.h.
    let name = unsafe {
        std::mem::transmute::<*mut std::ffi::c_void, extern "C" fn(i32) -> *const std::ffi::c_char>(
            name,
        )
    };
    let text = |code| {
        // SAFETY: names are of the whole life of the library.
        unsafe { std::ffi::CStr::from_ptr(name(code)) }.to_str().unwrap()
    };
    assert_eq!([text(700), text(12_345)], ["hipErrorIllegalAddress", "hipErrorUnknown"]);
}

#[test]
fn memory_goes_to_network_cards_by_its_base() {
    let driver = start();
    use_device(0);
    let memory = malloc(1 << 16).unwrap();
    let export = |address: u64| {
        let mut fd = -1;
        hip!(hipMemGetHandleForAddressRange(
            &mut fd => &mut i32, address => u64, 4096 => usize, 1 => i32, 0 => u64,
        ))
        .map(|()| fd)
    };
    assert!(export(memory).is_ok_and(|fd| fd >= 0));
    assert_eq!(export(memory + 4096), Err(1));
    driver.set("DMABUF", "off");
    assert_eq!(export(memory), Err(801));
    driver.set("DMABUF", "on");
}
