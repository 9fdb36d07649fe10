//! Tests the memory operations of streams.

use std::time::Duration;

use crate::api::*;

/// Four words of zero, and a stream.
fn words() -> (u64, usize) {
    use_device(0);
    (zeros(32), new_stream())
}

fn blocked(stream: usize) -> bool {
    std::thread::sleep(Duration::from_millis(10));
    query(stream) == Err(600)
}

#[test]
fn a_wait_holds_its_stream_and_no_other() {
    let driver = start();
    let blocked_waits = || driver.counter("blocked_waits", Some(0));
    let before = blocked_waits();
    let (memory, stream) = words();
    wait_word(stream, memory, 5).unwrap();
    write_word(stream, memory + 8, 1).unwrap();
    let other = new_stream();
    write_word(other, memory, 4).unwrap();
    sync(other).unwrap();
    assert!(blocked(stream));
    assert_eq!(download(memory + 8, 8, other).unwrap(), [0; 8]);
    write_word(other, memory, 6).unwrap();
    sync(stream).unwrap();

    // A wait that passes at once has not blocked.
    wait_word(stream, memory, 6).unwrap();
    sync(stream).unwrap();
    assert_eq!(blocked_waits() - before, 1);
    assert_eq!(download(memory + 8, 8, other).unwrap(), 1_u64.to_le_bytes());
}

#[test]
fn at_least_is_cyclic() {
    let _driver = start();
    let (memory, stream) = words();
    let other = new_stream();
    write_word(other, memory, u64::MAX).unwrap();
    sync(other).unwrap();
    wait_word(stream, memory, 2).unwrap();
    assert!(blocked(stream), "2 comes after the largest word");
    write_word(other, memory, 2).unwrap();
    sync(stream).unwrap();
}

#[test]
fn a_batch_keeps_its_order() {
    let _driver = start();
    let (memory, stream) = words();
    let batch_of = [
        word(WRITE_64, memory, 1),
        word(WAIT_64, memory + 8, 3),
        word(WRITE_64, memory + 8, 0),
        word(WRITE_64, memory + 16, 1),
    ];
    batch(stream, &batch_of).unwrap();
    let other = new_stream();
    wait_word(other, memory, 1).unwrap();
    sync(other).unwrap();
    assert!(blocked(stream));
    write_word(other, memory + 8, 3).unwrap();
    sync(stream).unwrap();
    let found = download(memory, 32, other).unwrap();
    assert_eq!(found[8..24], [0, 1_u64].map(u64::to_le_bytes).concat());
}

#[test]
fn a_wrong_batch_is_refused_whole() {
    let _driver = start();
    let (memory, stream) = words();
    assert_eq!(batch(stream, &[]), Err(1));
    assert_eq!(batch(stream, &vec![word(WRITE_64, memory, 1); 256]), Err(1));
    batch(stream, &vec![word(WRITE_64, memory, 1); 255]).unwrap();
    for wrong in [word(WRITE_64, memory + 4, 2), word(WRITE_64, 64, 2), word(99, memory, 2)] {
        assert_eq!(batch(stream, &[word(WRITE_64, memory, 2), wrong]), Err(1));
    }
    sync(stream).unwrap();
    assert_eq!(download(memory, 8, stream).unwrap(), 1_u64.to_le_bytes());
}

#[test]
fn the_host_releases_a_wait_through_its_own_memory() {
    let _driver = start();
    let (_, stream) = words();
    let mut flag: *mut u64 = std::ptr::null_mut();
    cuda!(cuMemHostAlloc(&mut flag => &mut *mut u64, 8 => usize, 3 => u32)).unwrap();
    // SAFETY: allocated above, aligned, and freed never.
    let word = unsafe { std::sync::atomic::AtomicU64::from_ptr(flag) };
    word.store(0, std::sync::atomic::Ordering::SeqCst);
    wait_word(stream, flag as u64, 1).unwrap();
    assert!(blocked(stream));
    word.store(1, std::sync::atomic::Ordering::SeqCst);
    sync(stream).unwrap();
}

#[test]
fn memory_of_the_caller_can_be_pinned() {
    let _driver = start();
    let (_, stream) = words();
    let flags = Box::leak(Box::new([0_u64; 512]));
    let address = flags.as_mut_ptr();
    assert_eq!(write_word(stream, address as u64, 1), Err(1));
    cuda!(cuMemHostRegister_v2(address => *mut u64, 4096 => usize, 3 => u32)).unwrap();
    let again = cuda!(cuMemHostRegister_v2(address => *mut u64, 8 => usize, 3 => u32));
    assert_eq!(again, Err(712));
    write_word(stream, address as u64, 1).unwrap();
    sync(stream).unwrap();
    cuda!(cuMemHostUnregister(address => *mut u64)).unwrap();
    assert_eq!(cuda!(cuMemHostUnregister(address => *mut u64)), Err(713));
    // SAFETY: leaked above, and no stream has it any more.
    assert_eq!(unsafe { address.read() }, 1);
}

#[test]
fn writes_to_a_peer_are_refused_or_lost_where_asked() {
    let driver = start();
    let peer = use_device(1);
    let theirs = zeros(8);
    use_device(2);
    cuda!(cuCtxEnablePeerAccess(peer => usize, 0 => u32)).unwrap();
    let stream = new_stream();
    driver.set("PEER_WRITES", "refuse");
    assert_eq!(write_word(stream, theirs, 1), Err(801));
    driver.set("PEER_WRITES", "drop");
    write_word(stream, theirs, 1).unwrap();
    assert_eq!(download(theirs, 8, stream).unwrap(), [0; 8]);
    driver.set("PEER_WRITES", "allow");
    write_word(stream, theirs, 1).unwrap();
    assert_eq!(download(theirs, 8, stream).unwrap(), 1_u64.to_le_bytes());
}
