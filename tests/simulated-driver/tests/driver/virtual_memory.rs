//! Tests virtual memory management, and the attributes of addresses.

use peerlane_simulated_driver::in_own_process;

use crate::api::vmm::{Block, POSIX_FD, map, reserve, set_access, unmap, unreserve};
use crate::api::*;

const UNIT: usize = 64 << 10;

fn attribute<T: Default>(attribute: i32, address: u64) -> Answer<T> {
    let mut value = T::default();
    cuda!(cuPointerGetAttribute(&mut value => &mut T, attribute => i32, address => u64))?;
    Ok(value)
}

fn range_of(address: u64) -> Answer<(u64, usize)> {
    let (mut base, mut bytes) = (0, 0);
    cuda!(cuMemGetAddressRange_v2(
        &mut base => &mut u64, &mut bytes => &mut usize, address => u64,
    ))?;
    Ok((base, bytes))
}

#[test]
fn sizes_are_whole_units() {
    let _driver = start();
    assert_eq!(Block::new(0, UNIT + 4096, 0).err(), Some(1));
    assert_eq!(Block::new(9, UNIT, 0).err(), Some(101));
    let block = Block::new(0, 2 * UNIT, 0).unwrap();
    let address = reserve(4 * UNIT);
    assert!(address.is_multiple_of(UNIT as u64));
    assert_eq!(map(address + 4096, UNIT, block.handle), Err(1));
    assert_eq!(map(address + 3 * UNIT as u64, 2 * UNIT, block.handle), Err(1), "past its end");
    map(address, 2 * UNIT, block.handle).unwrap();
    assert_eq!(map(address, 2 * UNIT, block.handle), Err(1), "something is there");
    assert_eq!(unreserve(address, 4 * UNIT), Err(1), "something is there");
    assert_eq!(unmap(address, UNIT), Err(1), "half a block");
    unmap(address, 2 * UNIT).unwrap();
    unreserve(address, 4 * UNIT).unwrap();
}

#[test]
fn segments_side_by_side_are_one_span() {
    let _driver = start();
    use_device(0);
    let stream = new_stream();
    let blocks = [0, 1].map(|_| Block::new(0, UNIT, POSIX_FD).unwrap());
    let address = reserve(2 * UNIT);
    for (block, at) in blocks.iter().zip([address, address + UNIT as u64]) {
        map(at, UNIT, block.handle).unwrap();
        set_access(at, UNIT, 0, 3).unwrap();
    }
    fill(address + 8, 6, 2 * UNIT - 16, stream).unwrap();
    let found = download(address + UNIT as u64 - 8, 16, stream).unwrap();
    assert_eq!(found, [6; 16]);
    assert_eq!(range_of(address + UNIT as u64 + 5), Ok((address + UNIT as u64, UNIT)));

    let (mut handle, second) = (0, address + UNIT as u64);
    cuda!(cuMemRetainAllocationHandle(&mut handle => &mut u64, second => u64)).unwrap();
    assert_eq!(handle, blocks[1].handle);
    cuda!(cuMemRelease(handle => u64)).unwrap();
}

#[test]
fn a_mapping_outlives_the_handle() {
    let driver = start();
    use_device(1);
    let before = driver.counter("live_bytes", Some(1));
    let block = Block::new(1, UNIT, 0).unwrap();
    let address = block.map(1);
    drop(block);
    let stream = new_stream();
    fill(address, 1, UNIT, stream).unwrap();
    sync(stream).unwrap();
    let mut handle = 0;
    cuda!(cuMemRetainAllocationHandle(&mut handle => &mut u64, address => u64)).unwrap();
    unmap(address, UNIT).unwrap();
    assert_eq!(driver.counter("live_bytes", Some(1)), before + UNIT as i64);
    cuda!(cuMemRelease(handle => u64)).unwrap();
    assert_eq!(driver.counter("live_bytes", Some(1)), before);
    assert_eq!(cuda!(cuMemRelease(handle => u64)), Err(400));
}

#[test]
fn without_access_a_copy_breaks_the_context() {
    in_own_process(|| {
        let _driver = start();
        use_device(3);
        let stream = new_stream();
        let block = Block::new(2, UNIT, 0).unwrap();
        let address = reserve(UNIT);
        map(address, UNIT, block.handle).unwrap();
        let own = alloc(64).unwrap();
        assert_eq!(write_word(stream, address, 1), Err(1));
        copy(address, own, 64, stream).unwrap();
        assert_eq!(sync(stream), Err(700));
        assert_eq!(alloc(64), Err(700), "for good");
    });
}

#[test]
fn the_driver_knows_its_addresses() {
    let _driver = start();
    let context = use_device(0);
    let plain = alloc(100).unwrap();
    assert_eq!(attribute(1, plain + 7), Ok(context));
    assert_eq!(attribute(2, plain), Ok(2_u32));
    assert_eq!(attribute(9, plain), Ok(0_i32));
    assert_eq!(attribute(10, plain), Ok(1_u8));
    assert_eq!(attribute(14, plain), Ok(0_u64));
    assert_eq!(range_of(plain + 99), Ok((plain, 100)));
    assert_eq!(range_of(plain + 100), Err(1));

    let block = Block::new(1, UNIT, POSIX_FD).unwrap();
    let mapped = block.map(0);
    assert_eq!(attribute(1, mapped), Ok(0_usize));
    assert_eq!(attribute(9, mapped), Ok(1_i32));
    assert_eq!(attribute(10, mapped), Ok(0_u8));
    assert_eq!(attribute(14, mapped), Ok(POSIX_FD as u64));

    let first: u64 = attribute(7, plain).unwrap();
    free(plain).unwrap();
    let second = alloc(100).unwrap();
    assert_ne!(attribute(7, second), Ok(first), "a new buffer, whatever its address");
    assert_eq!(attribute::<u32>(2, std::ptr::from_ref(&first) as u64), Err(1));
}

#[test]
fn a_device_has_an_end() {
    let driver = start();
    use_device(0);
    driver.set("MEMORY_MIB", "64");
    assert_eq!(alloc(128 << 20), Err(2));
    assert_eq!(Block::new(0, 128 << 20, 0).err(), Some(2));
    driver.set("MEMORY_MIB", "4096");
}
