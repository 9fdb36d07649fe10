//! Tests the release of starts whose peers never come.

use std::time::{Duration, Instant};

use peerlane_hal::{CopyEngine as _, Error as _, ErrorKind, FusedProgress, Ticket};

use super::on_stream;
use super::world::{Case, Collective, Member, PATIENCE, fabrics, world};
use crate::backend::{Compute, Mode};
use crate::support::driver;

/// How long starts may take to drain that do nothing.
const DRAIN: Duration = Duration::from_secs(5);

fn progress(member: &mut Member) -> FusedProgress {
    member.progress()
}

fn await_begun(member: &mut Member) {
    let since = Instant::now();
    while progress(member).begun == 0 {
        assert!(since.elapsed() < PATIENCE, "no start begins");
        std::thread::yield_now();
    }
}

fn replay_wait(member: &mut Member) -> Option<Duration> {
    member.engine.streams().unwrap().replay_wait().unwrap()
}

#[test]
fn a_start_without_peers_is_released() {
    let (_driver, _turn) = driver();
    let fabrics = fabrics(2);
    for collective in [Collective::GatherTagged, Collective::GatherDirect] {
        let mut members = world(&fabrics, Case::new(collective, 2, 1000, 3));
        let member = &mut members[0];
        assert_eq!((progress(member), replay_wait(member)), (FusedProgress::default(), None));

        let tickets = [member.start(), member.start()];
        await_begun(member);
        assert!(replay_wait(member).is_some(), "the first look");
        std::thread::sleep(Duration::from_millis(10));
        let waited = replay_wait(member).expect("a start waits");
        assert!(waited >= Duration::from_millis(10), "{waited:?}");
        assert_eq!(progress(member), FusedProgress { begun: 1, done: 0 });
        assert_eq!(member.engine.completed().unwrap(), Ticket::NONE);

        assert!(member.release_all(tickets[1]), "{collective:?}: a start stays blocked");
        assert_eq!(progress(member), FusedProgress { begun: 2, done: 2 });
        assert_eq!(replay_wait(member), None);
        // SAFETY: nothing is started.
        let error = unsafe { member.engine.fused().unwrap().start(0, 0) }.expect_err("released");
        assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
    }
}

#[test]
fn a_thousand_queued_launches_drain() {
    let (driver, _turn) = driver();
    let blocked_waits = || driver.counter("blocked_waits", Some(0));
    let before = blocked_waits();
    let fabrics = fabrics(2);
    let mut members = world(&fabrics, Case::new(Collective::GatherTagged, 2, 70_001, 16));
    let member = &mut members[0];
    let compute = Compute::new(0);
    compute.begin_capture(Mode::Relaxed);
    for _ in 0..10 {
        on_stream(member, &compute);
    }
    let graph = compute.end_capture();

    (0..100).for_each(|_| graph.launch());
    await_begun(member);
    let since = Instant::now();
    while blocked_waits() == before {
        assert!(since.elapsed() < PATIENCE, "the first start does not wait");
        std::thread::yield_now();
    }
    assert!(!compute.is_idle() && progress(member).done == 0, "the first start waits");

    let since = Instant::now();
    member.engine.release().unwrap();
    while !compute.is_idle() {
        assert!(since.elapsed() < DRAIN, "{:?}", progress(member));
        std::thread::yield_now();
    }
    assert_eq!(progress(member), FusedProgress { begun: 1000, done: 1000 });

    // A graph that is launched afterwards ends at once as well.
    graph.launch();
    compute.finish();
    assert_eq!(progress(member).done, 1010);
    assert_eq!(blocked_waits() - before, 1, "no start waits behind the first");
}

#[test]
fn a_broken_device_ends_a_start_that_polls() {
    peerlane_simulated_driver::in_own_process(|| {
        let (driver, _turn) = driver();
        let fabrics = fabrics(2);
        let mut members = world(&fabrics, Case::new(Collective::GatherDirect, 2, 1000, 3));
        members[0].start();
        await_begun(&mut members[0]);
        driver.break_device(0, 700);
        let since = Instant::now();
        while members[0].engine.completed().is_ok() {
            assert!(since.elapsed() < PATIENCE, "the fault is not reported");
        }
    });
}
