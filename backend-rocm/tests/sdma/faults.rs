//! Tests failures of the runtime and of devices.

use std::time::{Duration, Instant};

use peerlane_hal::{CopyEngine as _, Error as _, ErrorKind, Fabric as _, Rank};
use peerlane_rocm::EngineKind;

use crate::ranks::{Machine, SdmaRank, drive, gather, in_another_process, open, open_ranks, soon};

const ON_ENGINE: &str = "hsa_amd_memory_async_copy_on_engine";
const COPY: &str = "hsa_amd_memory_async_copy";

#[test]
fn a_rejected_engine_is_replaced() {
    let machine = Machine::new();
    let mut ranks = open_ranks(2, 9000);
    // HSA_STATUS_ERROR_INVALID_ARGUMENT.
    machine.driver.fail(ON_ENGINE, 0, 0x1001);
    gather(&mut ranks, 1).unwrap();
    let engines = ranks[0].engine.sdma_engines();
    let put = |peer: usize| engines[peer].put.as_str();
    assert!(put(0) == "SDMA 1 (by number)" || put(1) == "SDMA 3 (preferred)", "{engines:?}");
    // If every engine is rejected, the runtime selects.
    machine.driver.fail_always(ON_ENGINE, 0, 0x1001);
    gather(&mut ranks, 2).unwrap();
    for engines in ranks[1].engine.sdma_engines() {
        assert_eq!(engines.put, "SDMA of the runtime's choice");
    }
}

#[test]
fn a_runtime_that_rejects_all_copies_is_an_error() {
    let machine = Machine::new();
    let mut ranks = open_ranks(2, 9000);
    machine.driver.fail_always(ON_ENGINE, 0, 0x1001);
    machine.driver.fail_always(COPY, 0, 0x7777);
    let error = gather(&mut ranks, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Other);
    let text = error.to_string();
    let begin = "hsa_amd_memory_async_copy failed on device 0 (Simulated Instinct): unknown result \
                 code 30583 of the HSA runtime (/";
    assert!(text.starts_with(begin) && text.ends_with(")"), "{text}");
    // Later calls return the same error.
    let again = ranks[0].engine.completed().unwrap_err();
    assert_eq!(again.to_string(), error.to_string());
}

#[test]
fn copies_wait_for_a_full_runtime() {
    let mut machine = Machine::new();
    machine.set("SDMA_QUEUE", "1", "4096");
    machine.set("COPY_DELAY_US", "100", "0");
    let mut ranks = open_ranks(3, 3 << 20);
    for epoch in 1..=2 {
        gather(&mut ranks, epoch).unwrap();
    }
}

#[test]
fn too_few_signals_are_an_error() {
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
    assert!(
        text.starts_with("hsa_amd_signal_create failed on device 0 (Simulated Instinct): "),
        "{text}"
    );
    // With fewer signals than usual the engine works.
    machine.set("SIGNALS", "24", "65536");
    let mut ranks = open_ranks(1, 9 << 20);
    gather(&mut ranks, 1).unwrap();
}

#[test]
fn a_broken_device_fails_its_copies() {
    in_another_process("faults::broken", "7.2");
}

/// Runs in a process of its own, because the device stays broken.
#[test]
#[ignore = "run by a_broken_device_fails_its_copies"]
fn broken() {
    let mut machine = Machine::new();
    // The copy stalls until the device breaks.
    machine.set("STALL_MIB", "1", "0");
    let mut ranks = open_ranks(2, (2 << 20) - 1);
    ranks[0].submit(|own| vec![own.put(1), own.signal(1, 1)]).unwrap();
    machine.driver.break_device(0, 719);
    let error = drive(&mut ranks[..1], |rank| rank.engine.completed().map(|_| false));
    let error = error.unwrap_err();
    assert_eq!(
        error.to_string(),
        "put to rank 1 of 2097151 bytes by SDMA 2 failed on device 0 (Simulated Instinct): the \
         completion signal has the value -1, expected 0"
    );
    assert!(ranks[0].engine.release().is_err(), "the error stays");
}

#[test]
fn a_stalled_copy_does_not_block_the_drop_of_its_engine() {
    in_another_process("faults::stalled", "7.2");
}

/// Runs in a process of its own, because the SDMA engine stays stalled.
#[test]
#[ignore = "run by a_stalled_copy_does_not_block_the_drop_of_its_engine"]
fn stalled() {
    let mut machine = Machine::new();
    // Too small to be striped, so it is one copy.
    let bytes = (2 << 20) - 1;
    let mut ranks = open_ranks(2, bytes);
    machine.set("STALL_MIB", "1", "0");
    let ticket = ranks[0].submit(|own| vec![own.put(1), own.signal(1, 1)]).unwrap();
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(300) {
        assert!(ranks[0].engine.completed().unwrap() < ticket);
        ranks[0].engine.park(Duration::from_millis(5)).unwrap();
    }
    ranks[0].engine.release().unwrap();
    assert!(ranks[0].engine.completed().unwrap() < ticket, "the copy is not complete");
    let SdmaRank { engine, .. } = ranks.remove(0);
    drop(engine);
    let took = start.elapsed();
    assert!(took < Duration::from_secs(30), "{took:?}");
    // Memory that a stalled engine may write to must not be freed.
    std::mem::forget(ranks);
}

#[test]
fn there_is_no_order_against_streams_of_the_caller() {
    let _machine = Machine::new();
    let mut ranks = open_ranks(1, 100);
    assert!(ranks[0].engine.streams().is_none());
}
