//! Tests registration, export and import between ranks of one process, on the simulated driver.

use peerlane_hal::{
    Error as _, ErrorKind, Fabric as _, LinkKind, PeerMemory as _, Rank, Region as _,
    RemoteKey as _, Role,
};
use peerlane_rocm::{Fabric, Key};

use crate::support::{
    Allocation, contents, driver, flag_value, pattern, put_and_read, ranks, register, soon,
};

/// Returns the error of a registration that must fail.
fn refused(fabric: &Fabric, address: u64, bytes: u64, role: Role) -> String {
    let error =
        register(fabric, address, bytes, role).expect_err("the memory cannot be registered");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    error.to_string()
}

#[test]
fn allocated_memory_is_zero_and_can_be_written() {
    let (_driver, _turn) = driver();
    let fabrics = ranks(1, false).unwrap();
    for bytes in [0, 1, 3, (1 << 20) - 1, (1 << 20) + 1, (3 << 20) + 7] {
        for role in [Role::Data, Role::Flags] {
            let region = fabrics[0].memory().allocate(bytes, role).unwrap();
            assert!(contents(&region).iter().all(|byte| *byte == 0), "{bytes} bytes as {role:?}");
            let expected = pattern(7, bytes as usize);
            // SAFETY: nobody else accesses these bytes of the region now.
            unsafe { region.upload(0, &expected) }.unwrap();
            assert_eq!(contents(&region), expected);
        }
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
}

#[test]
fn bytes_reach_every_kind_of_memory_of_another_device() {
    let (driver, _turn) = driver();
    let mut fabrics = ranks(2, false).unwrap();
    assert_eq!(fabrics[0].link(Rank(1)).unwrap().kind, LinkKind::Xgmi);
    assert_eq!(fabrics[0].link(Rank(0)).unwrap().kind, LinkKind::Local);
    let allocation = Allocation::new(1, 4096);
    let theirs = register(&fabrics[1], allocation.address + 3, 999, Role::Data).unwrap();
    let before = driver.calls("hipMemMap");
    let ours = fabrics[1].memory().allocate(1 << 16, Role::Data).unwrap();
    assert_eq!(driver.calls("hipMemMap") - before, 1, "the memory has a descriptor");
    let flags = fabrics[1].memory().allocate(64, Role::Flags).unwrap();
    let export = |region| fabrics[1].memory().export(region).unwrap();
    let keys = [&theirs, &ours, &flags].map(export);
    for (seed, (region, key)) in [&theirs, &ours, &flags].into_iter().zip(&keys).enumerate() {
        let remote = fabrics[0].memory().import(Rank(1), key, soon()).unwrap();
        let seen = put_and_read(&mut fabrics, &remote, region, seed as u8);
        assert_eq!(seen, pattern(seed as u8, region.bytes() as usize));
    }
}

#[test]
fn flags_lie_in_fine_grained_memory() {
    let (driver, _turn) = driver();
    let fabrics = ranks(1, false).unwrap();
    let before = driver.calls("hipExtMallocWithFlags");
    let flags = fabrics[0].memory().allocate(64, Role::Flags).unwrap();
    assert_eq!(driver.calls("hipExtMallocWithFlags") - before, 1);
    let data = fabrics[0].memory().allocate(64, Role::Data).unwrap();
    assert_eq!(driver.calls("hipExtMallocWithFlags") - before, 1);
    drop((flags, data));
    let fine = Allocation::with_flags(0, 64, hip_sys::hipDeviceMallocFinegrained);
    register(&fabrics[0], fine.address, 64, Role::Flags).unwrap();
    let text = refused(&fabrics[0], fine.address + 4, 8, Role::Flags);
    assert!(text.ends_with("expected a multiple of 8 bytes"), "{text}");
    let coarse = Allocation::new(0, 64);
    let text = refused(&fabrics[0], coarse.address, 64, Role::Flags);
    assert!(text.contains(" are in coarse-grained memory, "), "{text}");
    assert!(text.contains("hipExtMallocWithFlags with hipDeviceMallocFinegrained"), "{text}");
    register(&fabrics[0], coarse.address, 64, Role::Data).unwrap();
}

#[test]
fn other_memory_is_rejected_with_the_reason() {
    let (_driver, _turn) = driver();
    let fabrics = ranks(1, false).unwrap();
    let refused = |address, bytes| refused(&fabrics[0], address, bytes, Role::Data);
    let here = Box::new([0_u8; 64]);
    let text = refused(here.as_ptr() as u64, 64);
    assert!(text.contains("does not know this address"), "{text}");

    let allocation = Allocation::new(0, 1000);
    let address = allocation.address;
    let text = refused(address + 900, 1 << 30);
    assert!(text.contains("the allocation at"), "{text}");
    let text = refused(address, u64::MAX);
    assert!(text.contains("exceeds the 64-bit address space"), "{text}");
    drop(allocation);
    let text = refused(address, 1000);
    assert!(text.contains("does not know this address"), "{text}");

    let other = Allocation::new(1, 1000);
    let text = refused(other.address, 1000);
    assert!(text.contains("the memory belongs to device 1, expected device 0 ("), "{text}");
}

#[test]
fn keys_of_freed_memory_and_of_other_backends_are_rejected() {
    let (_driver, _turn) = driver();
    let fabrics = ranks(2, false).unwrap();
    let region = fabrics[1].memory().allocate(64, Role::Data).unwrap();
    let key = fabrics[1].memory().export(&region).unwrap();
    let import = |rank, key| fabrics[0].memory().import(Rank(rank), key, soon());
    let held = import(1, &key).unwrap();
    drop(region);
    let error = import(1, &key).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidKey);
    assert!(error.to_string().contains("has freed the memory ("), "{error}");
    assert_eq!(held.peer(), Rank(1));
    let error = import(0, &key).unwrap_err();
    assert_eq!(error.to_string(), "remote key belongs to rank 1, expected a key of rank 0");
    // The bytes of a key of another vendor.
    let mut foreign = key.encode();
    foreign[6] = 2;
    let error = Key::decode(&foreign).unwrap_err();
    assert_eq!(
        error.to_string(),
        "remote key belongs to the backend cuda, expected rocm; open the same backend on both ranks"
    );
}

#[test]
fn an_allocation_that_is_too_large_names_the_bytes() {
    let (_driver, _turn) = driver();
    let fabrics = ranks(1, false).unwrap();
    for (bytes, role) in [(1 << 50, Role::Data), (u64::MAX, Role::Data), (1 << 50, Role::Flags)] {
        let error = fabrics[0].memory().allocate(bytes, role).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
        let start = format!("cannot allocate {bytes} bytes on device 0 (");
        assert!(error.to_string().starts_with(&start), "{error}");
    }
}

#[test]
fn devices_without_peer_access_are_staged_on_the_host() {
    let (driver, _turn) = driver();
    driver.set("P2P", "off");
    let staged = ranks(2, false);
    let strict = ranks(2, true);
    driver.set("P2P", "on");
    let mut fabrics = staged.unwrap();
    let link = fabrics[0].link(Rank(1)).unwrap();
    assert_eq!((link.kind, link.bytes_per_second), (LinkKind::HostStaged, None));
    let region = fabrics[1].memory().allocate(5000, Role::Data).unwrap();
    let key = fabrics[1].memory().export(&region).unwrap();
    let remote = fabrics[0].memory().import(Rank(1), &key, soon()).unwrap();
    assert_eq!(put_and_read(&mut fabrics, &remote, &region, 9), pattern(9, 5000));
    let error = strict.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let text = error.to_string();
    assert!(text.contains("HIP offers no peer access between these devices"), "{text}");
    assert!(text.contains("the option `strict` forbids copies through host memory"), "{text}");
}

#[test]
fn nics_get_a_dma_buf_and_the_flush_that_it_needs() {
    let (driver, _turn) = driver();
    let allocation = Allocation::new(0, 1 << 16);
    let open = |nic_writes| {
        driver.set("NIC_WRITES", nic_writes);
        let fabrics = ranks(1, false).unwrap();
        let region = register(&fabrics[0], allocation.address + 96, 5000, Role::Data).unwrap();
        let (buffer, flush) = (region.dma_buf(), region.flush());
        driver.set("NIC_WRITES", "flush");
        (buffer, flush)
    };
    let (buffer, flush) = open("flush");
    // The dma-buf covers the whole allocation.
    assert_eq!(buffer.unwrap().offset, 96);
    flush.expect("a flush").flush().unwrap();
    let (buffer, flush) = open("ordered");
    assert!(buffer.is_ok() && flush.is_none());
    // A NIC must not write to memory whose writes cannot be flushed.
    let (buffer, flush) = open("lost");
    let text = buffer.unwrap_err();
    assert!(text.starts_with("hsa_agent_get_info (HDP registers) failed on device 0 ("), "{text}");
    assert_eq!(flush.expect("an error").flush().unwrap_err(), text);

    let fabrics = ranks(1, false).unwrap();
    let region = register(&fabrics[0], allocation.address, 8, Role::Data).unwrap();
    driver.set("DMABUF", "off");
    let text = region.dma_buf().unwrap_err();
    driver.set("DMABUF", "on");
    assert!(text.starts_with("hsa_amd_portable_export_dmabuf failed on device 0 ("), "{text}");
}

#[test]
fn a_failed_query_gives_no_flag_value() {
    let (driver, _turn) = driver();
    let fabrics = ranks(1, false).unwrap();
    let flags = fabrics[0].memory().allocate(8, Role::Flags).unwrap();
    driver.fail_always("hipEventQuery", 0, 600);
    assert_eq!(flags.flag_value(0), None);
    driver.clear();
    assert_eq!(flag_value(&flags, 0), 0);
}

#[test]
fn invalid_arguments_of_open_are_named() {
    let (_driver, _turn) = driver();
    let open = |rank, ranks, device| Fabric::open(Rank(rank), ranks, device).unwrap_err();
    let error = open(2, 2, 0);
    assert_eq!(
        error.to_string(),
        "rank 2 is out of range: expected a rank below 2, the number of ranks"
    );
    let error = open(0, 1, 99);
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(
        error.to_string().starts_with("device 99 does not exist: expected a number below"),
        "{error}"
    );
}
