//! Tests events, injected faults, and broken and destroyed contexts.

use std::ffi::{CStr, c_char};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use peerlane_simulated_driver::in_own_process;

use crate::api::*;

fn name_of(code: i32) -> Option<String> {
    let mut name: *const c_char = std::ptr::null();
    let answer = cuda!(cuGetErrorName(code => i32, &mut name => &mut *const c_char));
    assert_eq!(answer, if name.is_null() { Err(1) } else { Ok(()) });
    // SAFETY: a text of the driver's that ends with a zero.
    (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
}

#[test]
fn results_have_names_and_unknown_ones_none() {
    let _driver = start();
    assert_eq!(name_of(700).as_deref(), Some("CUDA_ERROR_ILLEGAL_ADDRESS"));
    assert_eq!(name_of(0).as_deref(), Some("CUDA_SUCCESS"));
    assert_eq!(name_of(9999), None);
}

#[test]
fn a_call_fails_when_asked() {
    let driver = start();
    use_device(0);
    driver.fail("cuMemAlloc_v2", 1, 2);
    driver.fail_always("cuStreamQuery", 0, 9999);
    let stream = new_stream();
    assert!(alloc(8).is_ok());
    assert_eq!(alloc(8), Err(2));
    assert!(alloc(8).is_ok());
    assert_eq!([query(stream), query(stream)], [Err(9999); 2]);
    driver.clear();
    assert_eq!(query(stream), Ok(()));
    assert!(driver.calls("cuMemAlloc_v2") >= 3);
}

#[test]
fn a_call_takes_its_time_when_asked() {
    let driver = start();
    driver.delay("cuDeviceGetCount", Duration::from_millis(20));
    let begun = Instant::now();
    cuda!(cuDeviceGetCount(&mut 0 => &mut i32)).unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(20));
    driver.clear();
}

#[test]
fn events_order_streams_of_two_devices() {
    let _driver = start();
    use_device(1);
    let (first, event) = (new_stream(), new_event());
    let memory = zeros(64);
    wait_word(first, memory, 1).unwrap();
    assert_eq!(cuda!(cuEventQuery(event => usize)), Ok(()), "never recorded");
    record(event, first).unwrap();
    assert_eq!(cuda!(cuEventQuery(event => usize)), Err(600));

    use_device(0);
    let (second, after) = (new_stream(), new_event());
    assert_eq!(record(event, second), Err(400), "of another context");
    wait_event(second, event).unwrap();
    record(after, second).unwrap();
    assert_eq!(cuda!(cuEventQuery(after => usize)), Err(600));
    use_device(1);
    write_word(new_stream(), memory, 1).unwrap();
    use_device(0);
    cuda!(cuEventSynchronize(after => usize)).unwrap();
    cuda!(cuEventDestroy_v2(after => usize)).unwrap();
    assert_eq!(record(after, second), Err(400));
}

#[test]
fn a_full_stream_makes_its_caller_wait() {
    let driver = start();
    use_device(0);
    let (memory, stream) = (zeros(64), new_stream());
    driver.set("QUEUE_LENGTH", "4");
    driver.set("PATIENCE_MS", "50");
    wait_word(stream, memory, 1).unwrap();
    let mut answers = (0..6).map(|_| write_word(stream, memory + 8, 1));
    assert_eq!(answers.find(Answer::is_err), Some(Err(999)));
    assert_eq!(sync(stream), Err(999), "nobody waits for ever");
    driver.set("PATIENCE_MS", "20000");
    driver.set("QUEUE_LENGTH", "1024");
    write_word(new_stream(), memory, 1).unwrap();
    sync(stream).unwrap();
}

#[test]
fn copies_do_nothing_where_asked() {
    let driver = start();
    use_device(0);
    let (memory, stream) = (alloc(64).unwrap(), new_stream());
    fill(memory, 0, 32, stream).unwrap();
    fill(memory + 32, 1, 32, stream).unwrap();
    driver.set("DROP_COPIES", "local");
    copy(memory, memory + 32, 32, stream).unwrap();
    sync(stream).unwrap();
    driver.set("DROP_COPIES", "none");
    assert_eq!(download(memory, 32, stream).unwrap(), [0; 32]);
}

#[test]
fn a_broken_device_says_so_for_good_and_waits_end() {
    in_own_process(|| {
        let driver = start();
        use_device(2);
        let (memory, stream) = (zeros(64), new_stream());
        wait_word(stream, memory, 1).unwrap();
        let event = new_event();
        record(event, stream).unwrap();
        driver.break_device(2, 214);
        assert_eq!(sync(stream), Err(214));
        assert_eq!(cuda!(cuEventSynchronize(event => usize)), Err(214));
        assert_eq!(alloc(8), Err(214));
        use_device(0);
        assert!(alloc(8).is_ok(), "another device goes on");
    });
}

#[test]
fn memory_that_is_freed_too_early_breaks_the_context() {
    in_own_process(|| {
        let _driver = start();
        use_device(4);
        let (memory, gone, stream) = (zeros(64), alloc(64).unwrap(), new_stream());
        wait_word(stream, memory, 1).unwrap();
        copy(gone, memory, 64, stream).unwrap();
        free(gone).unwrap();
        write_word(new_stream(), memory, 1).unwrap();
        assert_eq!(sync(stream), Err(700));
    });
}

#[test]
fn a_destroyed_context_is_gone_and_another_can_be_had() {
    in_own_process(|| {
        let driver = start();
        use_device(3);
        let (memory, stream) = (zeros(64), new_stream());
        wait_word(stream, memory, 1).unwrap();
        driver.destroy_context(3);
        assert_eq!((sync(stream), alloc(8)), (Err(709), Err(709)));
        use_device(3);
        assert!(alloc(8).is_ok());
        assert_eq!(copy(memory, memory + 8, 8, new_stream()), Err(1), "its memory went with it");
        assert_eq!(sync(stream), Err(709));
    });
}

#[test]
fn the_last_release_takes_everything_along() {
    in_own_process(|| {
        let driver = start();
        let context = use_device(5);
        let stream = new_stream();
        alloc(4096).unwrap();
        assert_eq!(driver.counter("live_allocations", Some(5)), 1);
        cuda!(cuDevicePrimaryCtxRelease_v2(5 => i32)).unwrap();
        assert_eq!(driver.counter("live_allocations", Some(5)), 0);
        assert_eq!(driver.counter("live_bytes", Some(5)), 0);
        assert_eq!(alloc(8), Err(201));
        assert_eq!(cuda!(cuCtxSetCurrent(context => usize)), Err(201));
        assert_eq!(cuda!(cuDevicePrimaryCtxRelease_v2(5 => i32)), Err(201));
        use_device(5);
        assert_eq!(query(stream), Err(709));
        cuda!(cuDevicePrimaryCtxRelease_v2(5 => i32)).unwrap();
    });
}

#[test]
fn a_new_context_begins_after_the_last_release_has_ended_the_former() {
    in_own_process(|| {
        let _driver = start();
        // Enough to be freed that the other thread looks meanwhile.
        const ALLOCATIONS: usize = 300;
        for round in 0..10 {
            use_device(5);
            let memory: Vec<u64> = (0..ALLOCATIONS).map(|_| alloc(8).unwrap()).collect();
            let both = Barrier::new(2);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    both.wait();
                    cuda!(cuDevicePrimaryCtxRelease_v2(5 => i32)).unwrap();
                });
                both.wait();
                std::thread::sleep(Duration::from_micros(round * 100));
                use_device(5);
                let is_there = |address: &&u64| {
                    let mut base = 0;
                    cuda!(cuMemGetAddressRange_v2(
                        &mut base => &mut u64, std::ptr::null_mut() => *mut usize, **address => u64,
                    ))
                    .is_ok()
                };
                // None if the context is new, and all if it is the former.
                let found = memory.iter().filter(is_there).count();
                assert!(
                    [0, ALLOCATIONS].contains(&found),
                    "{found} allocations of a former context"
                );
            });
            cuda!(cuDevicePrimaryCtxRelease_v2(5 => i32)).unwrap();
        }
    });
}
