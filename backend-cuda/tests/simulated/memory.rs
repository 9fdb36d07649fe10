//! Tests registration, export and import between ranks of one process, on the simulated driver.

use peerlane_cuda::{Fabric, Options};
use peerlane_hal::{
    At, CopyEngine as _, Error as _, ErrorKind, Fabric as _, LinkKind, Op, PeerMemory as _, Rank,
    Region as _, RemoteKey as _, Role, Ticket,
};
use peerlane_simulated_driver::in_own_process;

use crate::support::{
    Allocation, Segments, announce, arrivals, await_arrival, driver, flag_value, pattern, pointer,
    ranks, soon,
};

/// Counters of resources of the driver, none of which may leak.
const LIVE: [&str; 5] =
    ["live_allocations", "live_mappings", "live_reservations", "live_streams", "open_imports"];

fn live_resources(driver: &peerlane_simulated_driver::Driver) -> Vec<i64> {
    LIVE.iter().map(|counter| driver.counter(counter, None)).collect()
}

/// Returns the error of a registration that must fail.
fn refused(fabric: &Fabric, address: u64, bytes: u64) -> String {
    // SAFETY: nothing is ever done with what is registered.
    let result = unsafe { fabric.memory().register(pointer(address), bytes, Role::Data) };
    let error = result.expect_err("not memory of this device");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    error.to_string()
}

#[test]
fn memory_is_zero_at_first_and_holds_what_is_copied() {
    let (_driver, _turn) = driver();
    let fabrics = ranks(1).unwrap();
    for bytes in [0, 1, 3, (1 << 20) - 1, (1 << 20) + 1, (5 << 20) + 7] {
        let region = fabrics[0].memory().allocate(bytes, Role::Data).unwrap();
        let mut seen = vec![1; bytes as usize];
        // SAFETY: nobody else accesses these bytes of the region now.
        unsafe { region.download(0, &mut seen) }.unwrap();
        assert!(seen.iter().all(|byte| *byte == 0), "{bytes} bytes");
        let wanted = pattern(7, bytes as usize);
        // SAFETY: nobody else accesses these bytes of the region now.
        unsafe { region.upload(0, &wanted) }.unwrap();
        // SAFETY: nobody else accesses these bytes of the region now.
        unsafe { region.download(0, &mut seen) }.unwrap();
        assert_eq!(seen, wanted);
    }
    let region = fabrics[0].memory().allocate(10, Role::Flags).unwrap();
    // SAFETY: nobody else accesses these bytes of the region now.
    let error = unsafe { region.upload(3, &[0; 8]) }.unwrap_err();
    assert_eq!(
        error.to_string(),
        "access out of range: 8 bytes from offset 3, but the region has 10 bytes"
    );
    // SAFETY: nobody else accesses these bytes of the region now.
    unsafe { region.upload(0, &5_u64.to_le_bytes()) }.unwrap();
    assert_eq!((flag_value(&region, 0), region.flag_value(1)), (5, None));
    assert_eq!(region.flag_value(u64::MAX), None);
    assert!(region.flags().is_none());
}

#[test]
fn bytes_reach_every_kind_of_memory_of_another_device() {
    in_own_process(|| {
        let (driver, _turn) = driver();
        let before = live_resources(&driver);
        {
            let fabrics = ranks(2).unwrap();
            assert_eq!(fabrics[0].link(Rank(1)).unwrap().kind, LinkKind::NvLink);
            assert_eq!(fabrics[0].link(Rank(0)).unwrap().kind, LinkKind::Local);
            let mut engine = fabrics[0].engine(Default::default()).unwrap();
            let (allocation, segments) = (Allocation::new(1, 4096), Segments::new(1, 3, true));
            let memory = fabrics[1].memory();
            // The mapped region starts inside the first segment and ends inside the third.
            let start = segments.address + segments.segment_bytes - 100;
            // SAFETY: both outlive their registration and its import.
            let legacy =
                unsafe { memory.register(pointer(allocation.address + 3), 999, Role::Data) }
                    .unwrap();
            let span = segments.segment_bytes + 300;
            // SAFETY: as above.
            let mapped = unsafe { memory.register(pointer(start), span, Role::Data) }.unwrap();
            let own = memory.allocate(1 << 16, Role::Data).unwrap();
            let arrivals = arrivals(&fabrics[1]);
            let key = memory.export(&arrivals).unwrap();
            let their_arrivals = fabrics[0].memory().import(Rank(1), &key, soon()).unwrap();
            for (seed, target) in [(1, &legacy), (2, &mapped), (3, &own)] {
                let key = memory.export(target).unwrap();
                let remote = fabrics[0].memory().import(Rank(1), &key, soon()).unwrap();
                let bytes = target.bytes();
                let source = fabrics[0].memory().allocate(bytes, Role::Data).unwrap();
                // SAFETY: nobody else accesses these bytes of the region now.
                unsafe { source.upload(0, &pattern(seed, bytes as usize)) }.unwrap();
                let put = Op::Put {
                    dst: At { region: &remote, offset: 0 },
                    src: At { region: &source, offset: 0 },
                    bytes,
                };
                let ops = [put, announce(&their_arrivals, u64::from(seed))];
                // SAFETY: all regions live until the ticket is complete, and no other code uses them.
                let ticket = unsafe { engine.submit(&ops) }.unwrap();
                finish(&mut engine, ticket);
                await_arrival(&arrivals, u64::from(seed));
                let mut seen = vec![0; bytes as usize];
                // SAFETY: nobody else accesses these bytes of the region now.
                unsafe { target.download(0, &mut seen) }.unwrap();
                assert_eq!(seen, pattern(seed, bytes as usize));
            }
        }
        // An engine keeps its pages for the next engine, so allocations are not compared.
        let after = live_resources(&driver);
        assert_eq!(before[1..], after[1..], "{LIVE:?}");
    });
}

fn finish(engine: &mut peerlane_cuda::Engine, ticket: Ticket) {
    let deadline = soon();
    while engine.completed().unwrap() < ticket {
        assert!(!deadline.has_passed(), "{ticket:?} is not complete");
        std::thread::yield_now();
    }
}

#[test]
fn memory_of_other_kinds_is_refused_with_its_kind() {
    let (_driver, _turn) = driver();
    let fabrics = ranks(1).unwrap();
    let fabric = &fabrics[0];
    let here = Box::new([0_u8; 64]);
    let text = refused(fabric, here.as_ptr() as u64, 64);
    assert!(text.contains("does not know this address"), "{text}");

    let allocation = Allocation::new(0, 1000);
    let address = allocation.address;
    let text = refused(fabric, address + 900, 1 << 30);
    assert!(text.contains("the allocation at"), "{text}");
    let text = refused(fabric, address, u64::MAX);
    assert!(text.contains("exceeds the 64-bit address space"), "{text}");
    drop(allocation);
    let text = refused(fabric, address, 1000);
    assert!(text.contains("does not know this address"), "{text}");

    let other = Allocation::new(1, 1000);
    let text = refused(fabric, other.address, 1000);
    assert!(text.contains("the memory belongs to device 1, expected device 0 ("), "{text}");

    let segments = Segments::new(0, 2, true);
    let text = refused(fabric, segments.address, 2 * segments.segment_bytes + 1);
    assert!(text.contains("they end at"), "{text}");
    // SAFETY: nothing is ever done with what is registered.
    let flags = unsafe { fabric.memory().register(pointer(segments.address + 4), 8, Role::Flags) };
    assert_eq!(flags.unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn the_key_of_freed_memory_is_refused() {
    let (_driver, _turn) = driver();
    let fabrics = ranks(2).unwrap();
    let region = fabrics[1].memory().allocate(64, Role::Data).unwrap();
    let key = fabrics[1].memory().export(&region).unwrap();
    let import = |key| fabrics[0].memory().import(Rank(1), key, soon());
    let held = import(&key).unwrap();
    drop(region);
    // Existing imports stay valid; new imports fail.
    assert_eq!(import(&key).unwrap_err().kind(), ErrorKind::InvalidKey);
    assert_eq!(held.peer(), Rank(1));
    let error = fabrics[0].memory().import(Rank(0), &key, soon()).unwrap_err();
    assert_eq!(error.to_string(), "remote key belongs to rank 1, expected a key of rank 0");
}

#[test]
fn a_region_of_no_bytes_can_be_exported() {
    let (_driver, _turn) = driver();
    let fabrics = ranks(2).unwrap();
    let memory = fabrics[1].memory();
    // SAFETY: there is nothing to touch.
    let nothing = unsafe { memory.register(std::ptr::NonNull::dangling(), 0, Role::Data) }.unwrap();
    let key = memory.export(&nothing).unwrap();
    assert_eq!(key.region_bytes(), 0);
    fabrics[0].memory().import(Rank(1), &key, soon()).unwrap();
}

#[test]
fn an_allocation_that_is_too_large_names_the_bytes() {
    let (_driver, _turn) = driver();
    let fabrics = ranks(1).unwrap();
    for bytes in [1 << 50, u64::MAX] {
        let error = fabrics[0].memory().allocate(bytes, Role::Data).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
        let start = format!("cannot allocate {bytes} bytes on device 0 (");
        assert!(error.to_string().starts_with(&start), "{error}");
    }
}

#[test]
fn without_descriptors_memory_is_plain_and_strict_refuses_that() {
    let (driver, _turn) = driver();
    let fabrics = ranks(2).unwrap();
    let strict = Options { device: 2, strict: true, ..Options::default() };
    let strict = Fabric::open_with(Rank(0), 1, strict).unwrap();
    driver.fail_always("cuMemCreate", 0, 801);
    let region = fabrics[0].memory().allocate(64, Role::Data).unwrap();
    // SAFETY: nobody else accesses these bytes of the region now.
    unsafe { region.upload(0, &pattern(1, 64)) }.unwrap();
    let key = fabrics[0].memory().export(&region).unwrap();
    fabrics[1].memory().import(Rank(0), &key, soon()).unwrap();
    let error = strict.memory().allocate(64, Role::Data).unwrap_err();
    driver.clear();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().starts_with("cuMemCreate failed on device 2 ("), "{error}");
}

#[test]
fn nics_get_a_dma_buf_and_the_flush_that_it_needs() {
    let (driver, _turn) = driver();
    let open = |nic_writes| {
        driver.set("NIC_WRITES", nic_writes);
        let fabrics = ranks(1).unwrap();
        let region = fabrics[0].memory().allocate(5000, Role::Data).unwrap();
        let (buffer, flush) = (region.dma_buf(), region.flush());
        driver.set("NIC_WRITES", "flush");
        (buffer, flush)
    };
    let (buffer, flush) = open("flush");
    assert_eq!(buffer.unwrap().offset, 0);
    let before = driver.calls("cuFlushGPUDirectRDMAWrites");
    flush.expect("a flush").flush().unwrap();
    assert_eq!(driver.calls("cuFlushGPUDirectRDMAWrites") - before, 1);
    let (buffer, flush) = open("ordered");
    assert!(buffer.is_ok() && flush.is_none());
    // A device that can neither order nor flush writes of NICs exports no dma-buf.
    let (buffer, flush) = open("lost");
    let text = buffer.unwrap_err();
    assert!(
        text.starts_with("device 0 (") && text.contains("and the host cannot flush them"),
        "{text}"
    );
    assert_eq!(flush.expect("a refusal").flush().unwrap_err(), text);

    let fabrics = ranks(1).unwrap();
    let region = fabrics[0].memory().allocate(5000, Role::Data).unwrap();
    driver.set("DMABUF", "off");
    let text = region.dma_buf().unwrap_err();
    driver.set("DMABUF", "on");
    assert!(text.starts_with("cuMemGetHandleForAddressRange failed on device 0 ("), "{text}");
}

#[test]
fn a_stuck_device_does_not_block_a_read() {
    let (driver, _turn) = driver();
    let fabrics = ranks(1).unwrap();
    let flags = fabrics[0].memory().allocate(8, Role::Flags).unwrap();
    driver.fail_always("cuEventQuery", 0, 600);
    assert_eq!(flags.flag_value(0), None);
    driver.clear();
    assert_eq!(flag_value(&flags, 0), 0);
}

#[test]
fn opening_reports_the_cause() {
    let (driver, _turn) = driver();
    let open = |rank, ranks, device| Fabric::open(Rank(rank), ranks, device).unwrap_err();
    let error = open(2, 2, 0);
    assert_eq!(
        error.to_string(),
        "rank 2 is out of range: expected a rank below 2, the number of ranks"
    );
    let error = open(0, 1, 9);
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(
        error.to_string().starts_with("device 9 does not exist: expected a number below"),
        "{error}"
    );
    driver.fail("cuDevicePrimaryCtxRetain", 0, 46);
    let error = open(0, 1, 0);
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("exclusive compute mode"), "{error}");
    driver.fail("cuDevicePrimaryCtxRetain", 0, 9999);
    let error = open(0, 1, 0);
    assert_eq!(error.kind(), ErrorKind::Other);
    assert!(error.to_string().contains("result code 9999"), "{error}");
}

#[test]
fn a_closed_fabric_and_another_group_are_reported() {
    let (_driver, _turn) = driver();
    let mut fabric = Fabric::open(Rank(0), 2, 0).unwrap();
    let other = Fabric::open(Rank(1), 3, 1).unwrap();
    let error = fabric.connect(Rank(1), &other.address(), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    assert_eq!(
        error.to_string(),
        "number of ranks differs: rank 1 opened the fabric for 3 ranks, rank 0 for 2; pass the \
         same number on all ranks"
    );
    let peer = Fabric::open(Rank(1), 2, 1).unwrap();
    let address = peer.address();
    drop(peer);
    let error = fabric.connect(Rank(1), &address, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost);
    let region = other.memory().allocate(8, Role::Data).unwrap();
    let key = other.memory().export(&region).unwrap();
    let error = fabric.memory().import(Rank(1), &key, soon()).unwrap_err();
    assert_eq!(error.to_string(), "rank 1 is not connected: call `connect` before `import`");
}

#[test]
fn the_devices_are_described() {
    let (_driver, _turn) = driver();
    let devices = peerlane_cuda::discover().unwrap();
    assert_eq!(devices.len(), 4);
    for (ordinal, device) in devices.iter().enumerate() {
        assert_eq!(device.ordinal as usize, ordinal);
        assert_eq!(device.copy_engines, 3);
        assert!(device.abilities.posix_handles && device.memory_bytes > 0);
        assert!(device.uuid_text().starts_with("GPU-"));
    }
    assert_eq!(peerlane_cuda::driver_version().unwrap(), (13, 0));
    assert!(peerlane_cuda::link(0, 1).unwrap().peer_access);
    let trials = peerlane_cuda::try_handles(0).unwrap();
    trials.posix.unwrap();
    trials.legacy.unwrap();
    // Claimed by the attribute and refused, as without a channel to the fabric manager.
    assert!(devices[0].abilities.fabric_handles);
    assert_eq!(trials.fabric.unwrap_err().kind(), ErrorKind::Unavailable);
}
