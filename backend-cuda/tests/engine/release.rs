//! Releasing waits from the host, also those of graphs.

use std::time::{Duration, Instant};

use cudarc::driver::{result, sys};
use peerlane_hal::{CopyEngine as _, Error as _, ErrorKind, Region as _};

use crate::support::driver;
use crate::world::{CAPTURED, Compute, Member, PLAIN, world};

const PATIENCE: Duration = Duration::from_secs(10);

/// A graph of rank 0 that waits for a peer that never comes.
fn blocked(members: &mut [Member], compute: &Compute) -> cudarc::driver::CudaGraph {
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    compute.stream.begin_capture(mode).unwrap();
    let member = &mut members[0];
    member.engine.fork(&compute.handle()).unwrap();
    member.submit(0, CAPTURED);
    member.engine.join(&compute.handle()).unwrap();
    let flags = sys::CUgraphInstantiate_flags(0);
    let graph = compute.stream.end_capture(flags).unwrap().expect("something was recorded");
    graph.launch().unwrap();
    // It signals that it is ready right before it waits.
    let start = Instant::now();
    while members[1].regions.flags.flag_value(2 * members.len() as u64) != Some(1) {
        assert!(start.elapsed() < PATIENCE, "the graph does not run");
    }
    std::thread::sleep(Duration::from_millis(20));
    assert!(!is_idle(compute), "it waits");
    graph
}

fn is_idle(compute: &Compute) -> bool {
    compute.context.bind_to_thread().unwrap();
    // SAFETY: the stream lives.
    let code = unsafe { sys::cuStreamQuery(compute.stream.cu_stream()) };
    assert!(
        [sys::CUresult::CUDA_SUCCESS, sys::CUresult::CUDA_ERROR_NOT_READY].contains(&code),
        "{code:?}"
    );
    code == sys::CUresult::CUDA_SUCCESS
}

#[test]
fn a_graph_that_waits_for_ever_is_released() {
    let (_driver, _turn) = driver();
    let mut members = world(2, 5000, None);
    let compute = Compute::new(0);
    let _graph = blocked(&mut members, &compute);
    let start = Instant::now();
    while !is_idle(&compute) {
        members[0].engine.release().unwrap();
        assert!(start.elapsed() < PATIENCE, "the graph is still blocked");
    }
    // SAFETY: no op.
    let error = unsafe { members[0].engine.submit(&[]) }.expect_err("released");
    assert_eq!(error.kind(), ErrorKind::Aborted);
}

#[test]
fn a_drop_releases_a_graph() {
    let (_driver, _turn) = driver();
    let mut members = world(2, 5000, None);
    let compute = Compute::new(0);
    let _graph = blocked(&mut members, &compute);
    let start = Instant::now();
    let member = members.remove(0);
    let Member { engine, regions, .. } = member;
    drop(engine);
    while !is_idle(&compute) {
        assert!(start.elapsed() < PATIENCE, "the graph is still blocked");
    }
    drop(regions);
}

/// Eager starts on a caller's stream, many of them, that nobody answers.
#[test]
fn starts_on_a_callers_stream_are_released() {
    let (_driver, _turn) = driver();
    let mut members = world(2, 5000, None);
    let compute = Compute::new(0);
    let member = &mut members[0];
    for epoch in 1..=20 {
        member.engine.fork(&compute.handle()).unwrap();
        member.submit(epoch, PLAIN);
        member.engine.join(&compute.handle()).unwrap();
    }
    std::thread::sleep(Duration::from_millis(20));
    assert!(!is_idle(&compute), "they wait");
    let start = Instant::now();
    while member.engine.completed().unwrap().0 < 20 {
        member.engine.release().unwrap();
        assert!(start.elapsed() < PATIENCE, "{:?}", member.engine.completed());
    }
    compute.finish();
    // SAFETY: asks for the health of the context.
    let health = unsafe { result::stream::synchronize(compute.stream.cu_stream()) };
    health.expect("the context lives");
}

/// Waits for values of both halves of the range on one flag.
#[test]
fn waits_for_unlike_values_are_released() {
    let (_driver, _turn) = driver();
    let mut members = world(1, 64, None);
    let mut last = members[0].engine.completed().unwrap();
    for value in [u64::MAX, 3, 1 << 63, u64::MAX, 1] {
        last = members[0].wait_for(0, value);
    }
    let start = Instant::now();
    while members[0].engine.completed().unwrap() < last {
        members[0].engine.release().unwrap();
        assert!(start.elapsed() < PATIENCE, "{:?}", members[0].engine.completed());
        std::thread::yield_now();
    }
}
