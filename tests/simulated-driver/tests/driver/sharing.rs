//! Tests the sharing of memory between processes: legacy handles, descriptors, fabric handles.

use std::os::fd::{AsRawFd, OwnedFd};

use peerlane_simulated_driver::{Other, hear, in_own_process, tell};

use crate::api::vmm::{Block, FABRIC, POSIX_FD};
use crate::api::*;

type Handle = [u8; 64];

fn handle_of(address: u64) -> Answer<Handle> {
    let mut handle = [0; 64];
    cuda!(cuIpcGetMemHandle(&mut handle => &mut Handle, address => u64))?;
    Ok(handle)
}

/// The handle travels by value, which in C is the struct itself.
#[repr(C)]
struct ByValue(Handle);

fn open(handle: Handle) -> Answer<u64> {
    let mut address = 0;
    cuda!(cuIpcOpenMemHandle_v2(
        &mut address => &mut u64, ByValue(handle) => ByValue, 1 => u32,
    ))?;
    Ok(address)
}

fn close(address: u64) -> Answer {
    cuda!(cuIpcCloseMemHandle(address => u64))
}

#[test]
fn a_legacy_handle_opens_in_another_process() {
    in_own_process(|| {
        let driver = start();
        use_device(0);
        let mut other = Other::start("sharing::owner", &[]);
        let handle: Handle = other.hear().try_into().unwrap();
        let opened = open(handle).unwrap();
        assert_eq!(open(handle).unwrap(), opened, "opened twice, mapped once");
        assert_eq!(driver.counter("open_imports", None), 1);
        let stream = new_stream();
        assert_eq!(download(opened, 16, stream).unwrap(), [42; 16]);

        // The other process waits on its device for what is written here.
        copy(opened + 8, opened, 8, stream).unwrap();
        write_word(stream, opened + 1024, 77).unwrap();
        assert_eq!(other.hear_text(), "seen");
        close(opened).unwrap();
        assert_eq!(driver.counter("open_imports", None), 1);
        close(opened).unwrap();
        assert_eq!(close(opened), Err(1));
        assert_eq!(driver.counter("open_imports", None), 0);

        other.tell(b"free it");
        assert_eq!(other.hear_text(), "freed");
        assert_eq!(open(handle), Err(400), "the key of freed memory");
        other.end();
        assert_eq!(open(handle), Err(400), "the key of a dead process");
        assert_eq!(open([0; 64]), Err(1));
    });
}

/// In the other process.
#[test]
#[ignore = "started by the other tests of this file"]
fn owner() {
    let _driver = start();
    use_device(1);
    let (memory, stream) = (alloc(4096).unwrap(), new_stream());
    fill(memory, 42, 16, stream).unwrap();
    fill(memory + 1024, 0, 8, stream).unwrap();
    sync(stream).unwrap();
    let handle = handle_of(memory + 100).unwrap();
    assert_eq!(open(handle), Err(201), "one's own");
    tell(&handle);
    wait_word(stream, memory + 1024, 77).unwrap();
    sync(stream).unwrap();
    tell(b"seen");
    hear();
    free(memory).unwrap();
    tell(b"freed");
    hear();
}

#[test]
fn memory_of_a_killed_process_stays_mapped() {
    let _driver = start();
    use_device(0);
    let mut other = Other::start("sharing::owner", &[]);
    let opened = open(other.hear().try_into().unwrap()).unwrap();
    other.kill();
    let stream = new_stream();
    copy(opened + 8, opened, 8, stream).unwrap();
    assert_eq!(download(opened, 8, stream).unwrap(), [42; 8]);
    close(opened).unwrap();
}

#[test]
fn only_plain_memory_has_a_legacy_handle() {
    let _driver = start();
    use_device(0);
    let stream = new_stream();
    let mut pooled = 0;
    cuda!(cuMemAllocAsync(&mut pooled => &mut u64, 64 => usize, stream => usize)).unwrap();
    assert_eq!(handle_of(pooled), Err(1));
    let block = Block::new(0, 1 << 16, POSIX_FD).unwrap();
    assert_eq!(handle_of(block.map(0)), Err(1));
    assert_eq!(handle_of(std::ptr::from_ref(&stream) as u64), Err(1));
}

#[test]
fn a_descriptor_opens_in_another_process() {
    let _driver = start();
    use_device(0);
    let block = Block::new(0, 1 << 16, POSIX_FD).unwrap();
    let address = block.map(0);
    let (stream, fd) = (new_stream(), block.export_fd().unwrap());
    fill(address, 5, 1 << 16, stream).unwrap();
    sync(stream).unwrap();

    let mut other = Other::start("sharing::importer", &[]);
    other.tell(format!("{} {}", std::process::id(), fd.as_raw_fd()).as_bytes());
    assert_eq!(other.hear_text(), "written");
    let found = download(address, 1 << 16, stream).unwrap();
    assert_eq!((found[0], found[1], found[0xffff]), (9, 5, 5));
    other.end();
}

/// In the other process.
#[test]
#[ignore = "started by the other tests of this file"]
fn importer() {
    let driver = start();
    use_device(1);
    let told = String::from_utf8(hear().unwrap()).unwrap();
    let (process, number) = told.split_once(' ').unwrap();
    // In place of SCM_RIGHTS: the parent's descriptor by its name in the kernel's list.
    let path = format!("/proc/{process}/fd/{number}");
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let fd = OwnedFd::from(file);
    let block = Block::import_fd(fd.as_raw_fd()).unwrap();
    drop(fd);
    assert_eq!(block.properties().unwrap(), (0, POSIX_FD));
    let address = block.map_bytes(1, 1 << 16);
    let stream = new_stream();
    assert_eq!(driver.counter("open_imports", None), 1);
    assert_eq!(download(address, 4, stream).unwrap(), [5; 4]);
    fill(address, 9, 1, stream).unwrap();
    sync(stream).unwrap();
    tell(b"written");
    hear();
}

#[test]
fn what_is_no_block_is_refused() {
    let _driver = start();
    let file = std::fs::File::open("/dev/null").unwrap();
    assert_eq!(Block::import_fd(file.as_raw_fd()).err(), Some(1));
    assert_eq!(Block::import_fd(9999).err(), Some(1));
}

#[test]
fn fabric_handles_are_claimed_and_not_permitted() {
    let driver = start();
    use_device(0);
    let mut claimed = 0;
    cuda!(cuDeviceGetAttribute(&mut claimed => &mut i32, 128 => i32, 0 => i32)).unwrap();
    assert_eq!(claimed, 1);
    assert_eq!(Block::new(0, 1 << 16, FABRIC).err(), Some(800));
    driver.set("FABRIC", "works");
    let block = Block::new(0, 1 << 16, FABRIC).unwrap();
    assert_eq!(block.export_fd().err(), Some(1), "it was not made for descriptors");
    driver.set("FABRIC", "refused");
}
