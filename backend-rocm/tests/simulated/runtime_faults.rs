//! Tests that known faults of ROCm runtimes are detected or tolerated.
//!
//! The abilities of a device are tested once per process, so each test has a process of its own, and each case in it
//! devices of its own.

use std::time::{Duration, Instant};

use peerlane_hal::{
    CopyEngine as _, Error as _, ErrorKind, Fabric as _, Flag, Op, PeerMemory as _, Rank, Role,
};
use peerlane_rocm::EngineKind;
use peerlane_simulated_driver::{Driver, in_own_process};

use crate::backend::{Compute, Fabric, Mode, Options, connected, driver, soon};
use crate::streams::world::{Member, PLAIN, world_on};

/// Number of simulated devices.
const DEVICES: &str = "16";

fn machine() -> (Driver, std::sync::MutexGuard<'static, ()>) {
    let (driver, turn) = driver();
    driver.set("DEVICES", DEVICES);
    (driver, turn)
}

/// Runs one all-gather with other bytes in every epoch, and checks the output.
fn ensure_gathers(members: &mut [Member], epoch: u64, what: &str) {
    let seed = |rank: usize| (16 * rank) as u8 ^ epoch as u8;
    members.iter().for_each(|member| member.fill(seed(member.me)));
    let tickets: Vec<_> = members.iter_mut().map(|member| member.submit(epoch, PLAIN)).collect();
    for (member, ticket) in members.iter_mut().zip(tickets) {
        member.finish(ticket);
        member.ensure_gathered(seed, what);
    }
}

/// Copies without compute units that copy nothing, or are rejected (ROCm/rocm-systems#11318).
#[test]
fn copies_without_cu_that_copy_nothing_are_not_used() {
    in_own_process(|| {
        for (first, fault) in [(0, "drop"), (2, "refuse")] {
            let (driver, _turn) = machine();
            driver.set("NO_CU", fault);
            let mut members = world_on(first, 2, 70_001, None);
            let before = driver.counter("no_cu_copies", None);
            for epoch in 1..=3 {
                ensure_gathers(&mut members, epoch, fault);
            }
            assert_eq!(driver.counter("no_cu_copies", None), before, "{fault}");
            drop(members);
            driver.set("NO_CU", "works");
        }
        let (driver, _turn) = machine();
        let mut members = world_on(12, 2, 70_001, None);
        let before = driver.counter("no_cu_copies", None);
        ensure_gathers(&mut members, 1, "no fault");
        // Each of two ranks makes the self copy and one to the peer.
        assert_eq!(driver.counter("no_cu_copies", None) - before, 4);
    });
}

/// Batched memory operations that run concurrently (ROCm/rocm-systems#8911), or are rejected (#2633).
#[test]
fn batches_out_of_order_are_not_used() {
    in_own_process(|| {
        for (first, fault) in [(4, true), (5, false)] {
            let (driver, _turn) = machine();
            if fault {
                driver.set("BATCH_ORDER", "parallel");
            } else {
                driver.fail("hipStreamBatchMemOp", 0, 1);
            }
            let mut members = world_on(first, 1, 1000, None);
            driver.set("BATCH_ORDER", "parallel");
            assert!(!members[0].engine.caps().flags_batched, "{fault}");
            let before = driver.calls("hipStreamBatchMemOp");
            ensure_gathers(&mut members, 1, "one by one");
            assert_eq!(driver.calls("hipStreamBatchMemOp"), before);
            drop(members);
            driver.set("BATCH_ORDER", "kept");
        }
    });
}

/// Memory operations that run at once while they are captured, or that are not captured.
#[test]
fn captures_that_do_not_work_are_rejected() {
    in_own_process(|| {
        for (first, fault) in [(6, "now"), (7, "drop"), (8, "refuse")] {
            let (driver, _turn) = machine();
            driver.set("CAPTURED_WORDS", fault);
            let mut members = world_on(first, 1, 500, None);
            driver.set("CAPTURED_WORDS", "record");
            let compute = Compute::new(first as usize);
            compute.begin_capture(Mode::Global);
            let error = members[0]
                .engine
                .streams()
                .unwrap()
                .fork(&compute.handle())
                .expect_err("captures are broken");
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{fault}: {error}");
            compute.end_empty_capture();
            ensure_gathers(&mut members, 1, fault);
        }
    });
}

/// One copy above 128 MiB stalls its engine (ROCm/rocm-systems#9927).
#[test]
fn long_copies_are_divided() {
    in_own_process(|| {
        let (driver, _turn) = machine();
        driver.set("STALL_MIB", "128");
        let shard = (128 << 20) + 4097;
        let mut members = world_on(9, 1, shard, None);
        let before = driver.counter("no_cu_copies", None);
        ensure_gathers(&mut members, 1, "pieces");
        assert_eq!(driver.counter("no_cu_copies", None) - before, 2);
        driver.set("STALL_MIB", "0");
    });
}

fn alone(device: u32, engine: EngineKind) -> Fabric {
    let options = Options { device, engine, ..Options::default() };
    let mut fabric = Fabric::open_with(Rank(0), 1, options).unwrap();
    let address = fabric.address();
    fabric.connect(Rank(0), &address, soon()).unwrap();
    fabric
}

/// If streams can wait only on signal memory, engines over streams fail to open, and `Auto` selects SDMA
/// engines.
#[test]
fn sdma_engines_are_selected_if_streams_need_signal_memory() {
    in_own_process(|| {
        let (driver, _turn) = machine();
        driver.set("WAIT_MEMORY", "signal");
        let error =
            alone(10, EngineKind::Streams).engine(Default::default()).expect_err("no waits");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert_eq!(
            error.to_string(),
            "signals and waits cannot be used on device 10 (Simulated Instinct): a test wait on a \
             stream for a word of device memory failed: hipStreamWaitValue64 failed on device 10 \
             (Simulated Instinct): hipErrorInvalidValue (1), invalid argument"
        );
        let engine = alone(10, EngineKind::Auto).engine(Default::default()).unwrap();
        assert_eq!(engine.kind(), EngineKind::Sdma);
        driver.set("WAIT_MEMORY", "any");
        assert_eq!(
            alone(11, EngineKind::Auto).engine(Default::default()).unwrap().kind(),
            EngineKind::Streams
        );
    });
}

/// HIP may wait for the work of a stream that is destroyed, so the stream of a test that timed out is kept.
#[test]
fn a_test_that_does_not_end_does_not_block() {
    in_own_process(|| {
        let (driver, _turn) = machine();
        let fabric = alone(14, EngineKind::Streams);
        driver.set("JITTER_US", "60000000");
        let start = Instant::now();
        let error = fabric.engine(Default::default()).expect_err("memory operations take too long");
        driver.set("JITTER_US", "0");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("did not complete within 2s"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(8), "it took {:?}", start.elapsed());
    });
}

/// An error of the backend's calls must not become the last error of the caller's thread.
#[test]
fn a_failed_call_leaves_no_last_error() {
    in_own_process(|| {
        let (driver, _turn) = machine();
        let mut members = world_on(12, 1, 300_000, None);
        driver.fail("hipMemcpyAsync", 0, 4242);
        let error = members[0].try_submit(1, PLAIN).expect_err("a call failed");
        assert_eq!(error.kind(), ErrorKind::Other);
        assert!(error.to_string().contains("result code 4242"), "{error}");
        let hip = hip_sys::Library::load().expect("the simulated driver was installed");
        // SAFETY: the call takes no arguments.
        let last = unsafe { (hip.get_last_error)() };
        assert_eq!(last, hip_sys::hipError_t::hipSuccess);
    });
}

/// `hipFree` waits for all streams of the device, also for one that waits for a peer.
#[test]
fn memory_is_freed_while_a_stream_waits() {
    in_own_process(|| {
        const TIMEOUT: Duration = Duration::from_secs(10);
        let (driver, _turn) = machine();
        let fabric = alone(15, EngineKind::Streams);
        let (flags, other) = (
            fabric.memory().allocate(64, Role::Flags).unwrap(),
            fabric.memory().allocate(64, Role::Flags).unwrap(),
        );
        let mut engine = fabric.engine(Default::default()).unwrap();
        let wait = Op::Wait { flag: Flag { region: &flags, word: 0 }, value: 1, reset: false };
        // SAFETY: the flags outlive the engine.
        unsafe { engine.submit(&[wait]) }.unwrap();
        let before = driver.counter("live_allocations", None);
        let start = Instant::now();
        drop(other);
        assert!(start.elapsed() < Duration::from_secs(10), "it took {:?}", start.elapsed());
        // SAFETY: nobody else accesses these bytes of the region now.
        unsafe { flags.upload(0, &1_u64.to_ne_bytes()) }.unwrap();
        while driver.counter("live_allocations", None) >= before {
            assert!(start.elapsed() < TIMEOUT, "the memory was not freed");
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(engine);
    });
}

/// The buffers and staging memory of an engine and a fabric are freed while another engine of the device
/// waits for a peer.
#[test]
fn an_engine_is_dropped_while_another_waits() {
    in_own_process(|| {
        const TIMEOUT: Duration = Duration::from_secs(10);
        let (driver, _turn) = machine();
        let fabric = alone(3, EngineKind::Streams);
        let flags = fabric.memory().allocate(64, Role::Flags).unwrap();
        let mut engine = fabric.engine(Default::default()).unwrap();
        driver.set("P2P", "off");
        // Puts between devices without peer access use buffers of the device.
        let staged_fabrics = connected(2, soon, |rank| {
            let device = [3, 2][rank.index()];
            let options = Options { device, engine: EngineKind::Streams, ..Options::default() };
            Fabric::open_with(rank, 2, options)
        })
        .unwrap();
        let before = driver.counter("live_allocations", None);
        let staged = staged_fabrics[0].engine(Default::default()).unwrap();
        assert!(driver.counter("live_allocations", None) > before, "the engine has buffers");
        let wait = Op::Wait { flag: Flag { region: &flags, word: 0 }, value: 1, reset: false };
        // SAFETY: the flags outlive the engine.
        unsafe { engine.submit(&[wait]) }.unwrap();
        let start = Instant::now();
        drop((staged, staged_fabrics));
        let took = start.elapsed();
        driver.set("P2P", "on");
        assert!(took < Duration::from_secs(10), "it took {took:?}");
        // SAFETY: nobody else accesses these bytes of the region now.
        unsafe { flags.upload(0, &1_u64.to_ne_bytes()) }.unwrap();
        while driver.counter("live_allocations", None) >= before {
            assert!(start.elapsed() < TIMEOUT, "the memory was not freed");
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(engine);
    });
}
