//! What goes wrong in the runtime, and what becomes of it.

use std::time::{Duration, Instant};

use peerlane_hal::{CopyEngine as _, Error as _, ErrorKind, Fabric as _, Rank};
use peerlane_rocm::{EngineKind, Stream};

use crate::world::{Machine, Member, drive, gather, in_another_process, open, soon, world};

const ON_ENGINE: &str = "hsa_amd_memory_async_copy_on_engine";
const COPY: &str = "hsa_amd_memory_async_copy";

#[test]
fn an_engine_that_is_refused_is_replaced() {
    let machine = Machine::new();
    let mut members = world(2, 9000);
    // HSA_STATUS_ERROR_INVALID_ARGUMENT.
    machine.driver.fail(ON_ENGINE, 0, 0x1001);
    gather(&mut members, 1).unwrap();
    let ways = members[0].engine.sdma_ways();
    let put = |peer: usize| ways[peer].put.as_str();
    assert!(put(0) == "SDMA 1 (by number)" || put(1) == "SDMA 3 (preferred)", "{ways:?}");
    // All of them: the runtime chooses.
    machine.driver.fail_always(ON_ENGINE, 0, 0x1001);
    gather(&mut members, 2).unwrap();
    for way in members[1].engine.sdma_ways() {
        assert_eq!(way.put, "SDMA of the runtime's choice");
    }
}

#[test]
fn a_runtime_that_takes_no_copy_says_so() {
    let machine = Machine::new();
    let mut members = world(2, 9000);
    machine.driver.fail_always(ON_ENGINE, 0, 0x1001);
    machine.driver.fail_always(COPY, 0, 0x7777);
    let error = gather(&mut members, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Other);
    let text = error.to_string();
    let begin = "hsa_amd_memory_async_copy on device 0 (Simulated Instinct): result 30583, which the HSA \
                 runtime (/";
    assert!(text.starts_with(begin) && text.ends_with(") has no name for"), "{text}");
    // It stays the engine's error.
    let again = members[0].engine.completed().unwrap_err();
    assert_eq!(again.to_string(), error.to_string());
}

#[test]
fn a_full_runtime_is_waited_for() {
    let mut machine = Machine::new();
    machine.set("SDMA_QUEUE", "1", "4096");
    machine.set("COPY_DELAY_US", "100", "0");
    let mut members = world(3, 3 << 20);
    for epoch in 1..=2 {
        gather(&mut members, epoch).unwrap();
    }
}

#[test]
fn signals_are_scarce() {
    let mut machine = Machine::new();
    let fabric = |machine: &mut Machine, signals| {
        machine.set("SIGNALS", signals, "65536");
        let mut fabric = open(Rank(0), 1, EngineKind::Sdma).unwrap();
        let address = fabric.address();
        fabric.connect(Rank(0), &address, soon()).unwrap();
        fabric
    };
    let error = fabric(&mut machine, "5").engine(Default::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    let text = error.to_string();
    assert!(text.starts_with("hsa_amd_signal_create on device 0 (Simulated Instinct): "), "{text}");
    // What there is is enough.
    machine.set("SIGNALS", "24", "65536");
    let mut members = world(1, 9 << 20);
    gather(&mut members, 1).unwrap();
}

#[test]
fn a_device_that_breaks_ends_its_copies() {
    in_another_process("faults::broken", "7.2");
}

/// The device stays broken.
#[test]
#[ignore = "run by a_device_that_breaks_ends_its_copies"]
fn broken() {
    let mut machine = Machine::new();
    // The copy stands still until the device breaks.
    machine.set("STALL_MIB", "1", "0");
    let mut members = world(2, (2 << 20) - 1);
    members[0].submit(|me| vec![me.put(1), me.signal(1, 1)]).unwrap();
    machine.driver.break_device(0, 719);
    let error = drive(&mut members[..1], |member| member.engine.completed().map(|_| false));
    let error = error.unwrap_err();
    assert_eq!(
        error.to_string(),
        "a put to rank 1 of 2097151 bytes by SDMA 2 on device 0 (Simulated Instinct): the runtime left \
         -1 in its signal, wanted 0"
    );
    assert!(members[0].engine.release().is_err(), "the error stays");
}

#[test]
fn a_copy_that_never_ends_does_not_hold_its_engine_s_owner() {
    in_another_process("faults::stalled", "7.2");
}

/// The SDMA engine stays stuck.
#[test]
#[ignore = "run by a_copy_that_never_ends_does_not_hold_its_engine_s_owner"]
fn stalled() {
    let mut machine = Machine::new();
    // Below what is cut, so that it is one copy.
    let bytes = (2 << 20) - 1;
    let mut members = world(2, bytes);
    machine.set("STALL_MIB", "1", "0");
    let ticket = members[0].submit(|me| vec![me.put(1), me.signal(1, 1)]).unwrap();
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(300) {
        assert!(members[0].engine.completed().unwrap() < ticket);
        members[0].engine.park(Duration::from_millis(5)).unwrap();
    }
    members[0].engine.release().unwrap();
    assert!(members[0].engine.completed().unwrap() < ticket, "the copy is not over");
    let Member { engine, .. } = members.remove(0);
    drop(engine);
    let took = start.elapsed();
    assert!(took < Duration::from_secs(30), "{took:?}");
    // Memory that a stuck engine may write to is not given back.
    std::mem::forget(members);
}

#[test]
fn streams_of_the_caller_are_refused() {
    let _machine = Machine::new();
    let mut members = world(1, 100);
    // SAFETY: the number of the legacy default stream, which is never followed.
    let stream = unsafe { Stream::from_raw(std::ptr::null_mut()) };
    let error = members[0].engine.streams().unwrap().fork(&stream).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}
