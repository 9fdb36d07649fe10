//! Files of the caller that cannot be registered are refused with the reason, and a registered file
//! shows the bytes of its buffer.

use std::fs::File;
use std::io::pipe;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;

use insta::assert_snapshot;
use peerlane_collectives::bootstrap::in_process;
use peerlane_collectives::element::Element;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Buffer, Group};
use peerlane_hal::Rank;
use peerlane_host as host;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};

fn group_of_one() -> Group {
    let bootstrap = in_process::group(1).unwrap().remove(0);
    Group::open(bootstrap, host::Fabric::open(Rank(0), 1).unwrap()).unwrap()
}

fn arena(bytes: u64) -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create("arena", flags).unwrap());
    file.set_len(bytes).unwrap();
    file
}

fn register<T: Element>(
    group: &Group,
    descriptor: impl AsFd,
    offset: u64,
    len: usize,
) -> Result<Buffer<T>, Error> {
    // SAFETY: the tests shorten no file, and access it only while no operation is open.
    unsafe { group.register_descriptor(descriptor, offset, len) }
}

/// Returns the error of a registration, without the numbers that differ between machines.
fn refusal(group: &Group, descriptor: impl AsFd, offset: u64, len: usize) -> String {
    let refused = register::<u32>(group, descriptor, offset, len).expect_err("it is refused");
    let text = format!("{}: {refused}", refused.kind());
    let page = rustix::param::page_size();
    text.replace(&format!(" {page}"), " PAGE").replace(&format!(" {}", 2 * page), " 2 PAGES")
}

#[test]
fn what_cannot_be_registered_is_refused_with_what_was_expected() {
    let group = group_of_one();
    let page = rustix::param::page_size() as u64;
    let file = arena(2 * page);
    assert_snapshot!(refusal(&group, &file, 100, 8), @"invalid argument: cannot register a buffer: offset is 100 bytes, expected a multiple of PAGE, the page size of /memfd:arena (deleted)");
    assert_snapshot!(refusal(&group, &file, page, 100_000), @"invalid argument: cannot register a buffer: /memfd:arena (deleted) has 2 PAGES bytes, expected at least 400000 bytes from offset PAGE");
    assert_snapshot!(refusal(&group, &file, 1 << 60, 1), @"invalid argument: cannot register a buffer: /memfd:arena (deleted) has 2 PAGES bytes, expected at least 4 bytes from offset 1152921504606846976");
    assert_snapshot!(refusal(&group, &file, 0, usize::MAX / 2), @"invalid argument: len is 9223372036854775807 elements of u32, which exceed the address space");

    let (reader, _writer) = pipe().unwrap();
    let text = refusal(&group, &reader, 0, 8);
    assert!(text.contains("the descriptor is that of a pipe, pipe:["), "{text}");
    let read_only = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    assert_snapshot!(refusal(&group, &read_only, 0, 8), @"invalid argument: cannot register a buffer: the descriptor of /memfd:arena (deleted) was opened for reading only (O_RDONLY), expected for reading and writing (O_RDWR)");
    fcntl_add_seals(&file, SealFlags::WRITE).unwrap();
    assert_snapshot!(refusal(&group, &file, 0, 8), @"invalid argument: cannot register a buffer: /memfd:arena (deleted) has the seal F_SEAL_WRITE, expected a file that peers can write to");
    group.close().unwrap();
}

#[test]
fn a_registered_file_shows_the_bytes_of_its_buffer() {
    let group = group_of_one();
    let page = rustix::param::page_size() as u64;
    let file = arena(2 * page);
    let mut buffer = register::<u16>(&group, &file, page, 5).unwrap();
    buffer.as_mut_slice().unwrap().copy_from_slice(&[1, 2, 3, 4, 5]);
    let mut seen = [0; 10];
    file.read_exact_at(&mut seen, page).unwrap();
    assert_eq!(seen.map(u16::from), [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]);
    file.write_all_at(&[9, 9], page + 2).unwrap();
    assert_eq!(buffer.as_slice().unwrap(), [1, 0x0909, 3, 4, 5]);

    // The seal outlives the buffer, and other seals are left to the caller.
    assert_eq!(fcntl_get_seals(&file), Ok(SealFlags::SHRINK));
    drop(buffer);
    file.set_len(page).unwrap_err();
    file.set_len(3 * page).unwrap();

    let empty = register::<u64>(&group, &file, 3 * page, 0).unwrap();
    assert_eq!(empty.len(), 0);
    group.close().unwrap();
}
