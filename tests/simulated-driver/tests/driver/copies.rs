//! Tests copies, fills and copy engines.

use peerlane_simulated_driver::in_own_process;

use crate::api::*;

#[test]
fn bytes_go_there_and_back() {
    let _driver = start();
    use_device(0);
    let stream = new_stream();
    let bytes: Vec<u8> = (0..100_000).map(|at| (at % 251) as u8).collect();
    let (from, to) = (alloc(bytes.len()).unwrap(), alloc(bytes.len()).unwrap());
    upload(from, &bytes, stream).unwrap();
    fill(to, 7, bytes.len(), stream).unwrap();
    copy(to + 1, from + 1, bytes.len() - 2, stream).unwrap();
    let found = download(to, bytes.len(), stream).unwrap();
    assert_eq!(found[1..bytes.len() - 1], bytes[1..bytes.len() - 1]);
    assert_eq!((found[0], found[bytes.len() - 1]), (7, 7));
}

#[test]
fn new_memory_is_not_zero() {
    let _driver = start();
    use_device(0);
    let address = alloc(64).unwrap();
    assert_eq!(download(address, 64, new_stream()).unwrap(), [0xa5; 64]);
}

#[test]
fn copies_take_turns_at_the_engines() {
    in_own_process(|| {
        let driver = start();
        use_device(3);
        driver.set("COPY_DELAY_US", "1000000");
        let streams: Vec<usize> = (0..5).map(|_| new_stream()).collect();
        let memory = alloc(4096).unwrap();
        for (at, stream) in streams.iter().enumerate() {
            copy(memory + at as u64 * 64, memory + 2048, 64, *stream).unwrap();
        }
        assert_eq!(query(streams[0]), Err(600));
        streams.iter().for_each(|stream| sync(*stream).unwrap());
        driver.set("COPY_DELAY_US", "0");
        assert_eq!(driver.counter("most_copies_running", Some(3)), 3);
        assert_eq!(driver.counter("most_copies_at_once", Some(3)), 5);
        assert_eq!(driver.counter("copies_that_waited", Some(3)), 2);
    });
}

#[test]
fn a_copy_to_a_peer_needs_access() {
    let _driver = start();
    let peer = use_device(2);
    let theirs = alloc(4096).unwrap();
    use_device(1);
    let ours = alloc(4096).unwrap();
    let stream = new_stream();
    fill(ours, 3, 4096, stream).unwrap();
    assert_eq!(write_word(stream, theirs, 1), Err(1));
    cuda!(cuCtxEnablePeerAccess(peer => usize, 0 => u32)).unwrap();
    assert_eq!(cuda!(cuCtxEnablePeerAccess(peer => usize, 0 => u32)), Err(704));
    copy(theirs, ours, 4096, stream).unwrap();
    assert_eq!(download(theirs, 4096, stream).unwrap(), [3; 4096]);
}

#[test]
fn what_is_no_device_memory_is_refused() {
    let _driver = start();
    use_device(0);
    let stream = new_stream();
    let memory = alloc(100).unwrap();
    let host = [0_u8; 8];
    assert_eq!(copy(memory, host.as_ptr() as u64, 8, stream), Err(1));
    assert_eq!(copy(memory + 96, memory, 8, stream), Err(1));
    assert_eq!(free(memory + 8), Err(1));
    free(memory).unwrap();
    assert_eq!(copy(memory, memory, 8, stream), Err(1));
}

#[test]
fn without_a_context_nothing_goes() {
    let _driver = start();
    std::thread::spawn(|| assert_eq!(alloc(8), Err(201))).join().unwrap();
}

#[test]
fn the_default_stream_is_counted_and_orders_itself() {
    let driver = start();
    use_device(0);
    let before = driver.counter("default_stream_uses", Some(0));
    let mut blocking = 0;
    cuda!(cuStreamCreate(&mut blocking => &mut usize, 0 => u32)).unwrap();
    let memory = zeros(16);
    wait_word(blocking, memory, 1).unwrap();
    write_word(0, memory + 8, 9).unwrap();
    assert_eq!(query(0), Err(600), "it waits for the blocking stream");
    write_word(new_stream(), memory, 1).unwrap();
    sync(0).unwrap();
    assert!(driver.counter("default_stream_uses", Some(0)) >= before + 3);
}
