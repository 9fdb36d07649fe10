//! Tests captures, and graphs that are launched repeatedly.

use std::time::{Duration, Instant};

use crate::api::graph::{
    GLOBAL, RELAXED, THREAD_LOCAL, begin, end, instantiate, launch, order, status,
};
use crate::api::*;

/// Memory full of zeros, and two streams.
fn bench(device: i32) -> (u64, usize, usize) {
    use_device(device);
    (zeros(4096), new_stream(), new_stream())
}

fn value_at(address: u64) -> u64 {
    let found = download(address, 8, new_stream()).unwrap();
    u64::from_le_bytes(found.try_into().unwrap())
}

#[test]
fn a_capture_runs_nothing_and_a_replay_everything() {
    let _driver = start();
    let (memory, stream, other) = bench(0);
    begin(stream, THREAD_LOCAL).unwrap();
    assert_eq!(status(stream), Ok(1));
    // Two-state flags, as a captured start has them: wait for 1, reset, copy, tell.
    batch(stream, &[word(WAIT_64, memory, 1), word(WRITE_64, memory, 0)]).unwrap();
    copy(memory + 64, memory + 128, 8, stream).unwrap();
    write_word(stream, memory + 8, 1).unwrap();
    let program = instantiate(end(stream).unwrap());
    assert_eq!(status(stream), Ok(0));
    assert_eq!((query(stream), value_at(memory + 8)), (Ok(()), 0));

    for round in 1..=3 {
        write_word(other, memory + 128, round).unwrap();
        launch(program, stream).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(query(stream), Err(600), "it waits for its flag");
        write_word(other, memory, 1).unwrap();
        wait_word(other, memory + 8, 1).unwrap();
        write_word(other, memory + 8, 0).unwrap();
        sync(stream).unwrap();
        sync(other).unwrap();
        assert_eq!(value_at(memory + 64), round);
        assert_eq!(value_at(memory), 0, "reset");
    }
    cuda!(cuGraphExecDestroy(program => usize)).unwrap();
    assert_eq!(launch(program, stream), Err(400));
}

#[test]
fn branches_run_side_by_side() {
    let _driver = start();
    let (memory, stream, side) = bench(1);
    begin(stream, THREAD_LOCAL).unwrap();
    order(stream, side).unwrap();
    assert_eq!(status(side), Ok(1), "pulled in");
    // Each branch waits for the other: one after the other they would never end.
    write_word(stream, memory, 1).unwrap();
    wait_word(stream, memory + 8, 1).unwrap();
    write_word(side, memory + 8, 1).unwrap();
    wait_word(side, memory, 1).unwrap();
    order(side, stream).unwrap();
    write_word(stream, memory + 16, 1).unwrap();
    let program = instantiate(end(stream).unwrap());
    assert_eq!(status(side), Ok(0), "let go");
    launch(program, stream).unwrap();
    sync(stream).unwrap();
    assert_eq!(value_at(memory + 16), 1);
}

#[test]
fn launches_follow_each_other_and_eager_work() {
    let driver = start();
    let (memory, stream, side) = bench(2);
    driver.set("COPY_DELAY_US", "20000");
    begin(stream, GLOBAL).unwrap();
    copy(memory + 8, memory, 8, stream).unwrap();
    copy(memory + 16, memory + 8, 8, stream).unwrap();
    let program = instantiate(end(stream).unwrap());
    wait_word(stream, memory + 32, 1).unwrap();
    launch(program, stream).unwrap();
    launch(program, side).unwrap();
    assert_eq!(query(side), Err(600), "a launch does not wait");
    let begun = Instant::now();
    write_word(new_stream(), memory + 32, 1).unwrap();
    sync(side).unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(80), "one after the other");
    driver.set("COPY_DELAY_US", "0");
    write_word(stream, memory, 7).unwrap();
    launch(program, stream).unwrap();
    write_word(stream, memory + 24, 1).unwrap();
    sync(stream).unwrap();
    assert_eq!((value_at(memory + 16), value_at(memory + 24)), (7, 1));
}

#[test]
fn work_that_is_not_joined_ends_the_capture() {
    let _driver = start();
    let (memory, stream, side) = bench(0);
    begin(stream, THREAD_LOCAL).unwrap();
    order(stream, side).unwrap();
    write_word(side, memory, 1).unwrap();
    assert_eq!(end(side), Err(903), "it did not begin there");
    assert_eq!(end(stream), Err(901), "which spoilt it");

    begin(stream, THREAD_LOCAL).unwrap();
    order(stream, side).unwrap();
    write_word(side, memory, 1).unwrap();
    assert_eq!(end(stream), Err(904));
    assert_eq!((status(stream), status(side)), (Ok(0), Ok(0)));
    assert_eq!(end(stream), Err(401));
    write_word(side, memory, 2).unwrap();
    sync(side).unwrap();
    assert_eq!(value_at(memory), 2);
}

#[test]
fn work_outside_is_no_part_of_it() {
    let _driver = start();
    let (memory, stream, side) = bench(0);
    wait_word(side, memory, 1).unwrap();
    let outside = new_event();
    record(outside, side).unwrap();
    begin(stream, THREAD_LOCAL).unwrap();
    assert_eq!(wait_event(stream, outside), Err(905));
    assert_eq!(status(stream), Ok(2));
    assert_eq!(write_word(stream, memory, 1), Err(901));
    assert_eq!(end(stream), Err(901));

    begin(stream, THREAD_LOCAL).unwrap();
    let inside = new_event();
    record(inside, stream).unwrap();
    assert_eq!(end(stream).map(|_| ()), Ok(()));
    assert_eq!(cuda!(cuEventQuery(inside => usize)), Err(907));
    assert_eq!(wait_event(side, inside), Err(907));
    write_word(stream, memory, 1).unwrap();
    sync(side).unwrap();
}

#[test]
fn asking_a_capture_spoils_it() {
    let _driver = start();
    let (memory, stream, _) = bench(0);
    for ask in [query, sync] {
        begin(stream, RELAXED).unwrap();
        write_word(stream, memory, 1).unwrap();
        assert_eq!(ask(stream), Err(900));
        assert_eq!(end(stream), Err(901));
    }
    assert_eq!(begin(0, RELAXED), Err(900), "not on the default stream");
}

#[test]
fn modes_say_who_may_disturb() {
    let _driver = start();
    let (_, stream, _) = bench(0);
    let event = new_event();
    let ask = || cuda!(cuEventQuery(event => usize));
    let ask_elsewhere = || {
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| {
                use_device(0);
                ask()
            });
            asked.join().unwrap()
        })
    };
    begin(stream, RELAXED).unwrap();
    assert_eq!((ask(), ask_elsewhere(), alloc(8).is_ok()), (Ok(()), Ok(()), true));
    end(stream).unwrap();

    begin(stream, THREAD_LOCAL).unwrap();
    assert_eq!((ask_elsewhere(), status(stream)), (Ok(()), Ok(1)));
    assert_eq!(alloc(8), Err(900));
    assert_eq!(end(stream), Err(901));

    begin(stream, GLOBAL).unwrap();
    assert_eq!(ask_elsewhere(), Err(900));
    assert_eq!(end(stream), Err(901));

    begin(stream, GLOBAL).unwrap();
    let mut mode = RELAXED;
    cuda!(cuThreadExchangeStreamCaptureMode(&mut mode => &mut i32)).unwrap();
    assert_eq!((mode, alloc(8).is_ok()), (GLOBAL, true));
    cuda!(cuThreadExchangeStreamCaptureMode(&mut mode => &mut i32)).unwrap();
    end(stream).unwrap();
}

#[test]
fn a_capture_ends_on_its_thread() {
    let _driver = start();
    let (_, stream, _) = bench(0);
    begin(stream, THREAD_LOCAL).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            use_device(0);
            assert_eq!(end(stream), Err(908));
        });
    });
    end(stream).unwrap();
    assert_eq!(begin(stream, GLOBAL), Ok(()));
    assert_eq!(begin(stream, GLOBAL), Err(401));
    end(stream).unwrap();
}

#[test]
fn words_in_a_capture_can_be_lost_or_come_too_early() {
    let driver = start();
    let (memory, stream, _) = bench(3);
    let captured = |how: &str| {
        driver.set("CAPTURED_WORDS", how);
        begin(stream, RELAXED).unwrap();
        let answer = write_word(stream, memory, 1);
        driver.set("CAPTURED_WORDS", "record");
        (answer, instantiate(end(stream).unwrap()))
    };
    assert_eq!(captured("refuse").0, Err(801));
    let (answer, program) = captured("drop");
    launch(program, stream).unwrap();
    sync(stream).unwrap();
    assert_eq!((answer, value_at(memory)), (Ok(()), 0));
    assert_eq!((captured("now").0, value_at(memory)), (Ok(()), 1));
}
