//! Tests which engine makes which copy, from the log of the simulated device.

use peerlane_hal::CopyEngine as _;
use peerlane_simulated_driver::Transfer;

use crate::ranks::{Machine, drive, gather, open_ranks};

const MIB: u64 = 1 << 20;

#[test]
fn every_link_has_its_own_engines() {
    let machine = Machine::new();
    let mut ranks = open_ranks(4, 3 * MIB);
    machine.driver.clear_log();
    gather(&mut ranks, 1).unwrap();
    let log: Vec<Transfer> = machine.driver.log();
    let copies: Vec<_> = log.iter().filter(|copy| copy.bytes > 8).collect();
    assert!(copies.len() >= 16, "{copies:?}");
    for copy in &copies {
        assert_ne!(copy.engine, Transfer::COMPUTE, "compute units were used: {copy:?}");
        assert_eq!(copy.far, 0, "an engine of another link: {copy:?}");
        let own = copy.source == copy.destination;
        assert_eq!(own, copy.engine < 2, "{copy:?}");
        for other in &copies {
            let same_engine = other.device == copy.device && other.engine == copy.engine;
            assert!(!same_engine || other.destination == copy.destination, "{copy:?} {other:?}");
        }
    }
    // Each copy is large enough to be striped over both engines of its link.
    let puts = copies.iter().filter(|copy| copy.device == 0 && copy.destination == 1);
    let mut engines: Vec<_> = puts.map(|copy| copy.engine).collect();
    engines.sort_unstable();
    engines.dedup();
    assert_eq!(engines.len(), 2);
}

/// Puts once from rank 0 to rank 1, and returns the copies that the engines logged.
fn put_alone(machine: &Machine, bytes: u64) -> Vec<Transfer> {
    let mut ranks = open_ranks(2, bytes);
    ranks[0].fill(1);
    machine.driver.clear_log();
    let ticket = ranks[0].submit(|own| vec![own.put(1)]).unwrap();
    drive(&mut ranks[..1], |rank| Ok(rank.engine.completed()? >= ticket)).unwrap();
    let log = machine.driver.log();
    let mut seen = vec![0; bytes as usize];
    ranks[1].output.download(0, &mut seen).unwrap();
    assert!(seen == crate::ranks::pattern(10, bytes));
    assert_eq!(log.iter().map(|copy| copy.bytes).sum::<u64>(), bytes);
    log
}

#[test]
fn no_engine_idles_while_another_holds_two() {
    /// Time that the host may need to submit the next piece on a loaded machine.
    const SLACK_NS: u64 = 15_000_000;
    let mut machine = Machine::new();
    machine.set("COPY_DELAY_US", "30000", "0");
    for (engines, bytes) in [("2", 100 * MIB + 77), ("3", 100 * MIB + 1)] {
        machine.set("ENGINES_PER_LINK", engines, "2");
        let log = put_alone(&machine, bytes);
        let engines: u64 = engines.parse().unwrap();
        assert!(log.len() as u64 >= 3 * engines, "{log:?}");
        let mut numbers: Vec<_> = log.iter().map(|copy| copy.engine).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len() as u64, engines, "{numbers:?}");
        // An engine holds a piece from its submission to its end.
        let held = |engine: u64, at: u64| {
            let of = log.iter().filter(|copy| copy.engine == engine);
            of.filter(|copy| copy.submitted_ns <= at && at < copy.end_ns).count()
        };
        let begin = numbers.iter().map(|engine| {
            log.iter()
                .filter(|copy| copy.engine == *engine)
                .map(|copy| copy.submitted_ns)
                .min()
                .unwrap()
        });
        let begin = begin.max().unwrap();
        for copy in log.iter().filter(|copy| copy.end_ns > begin) {
            // Check when a piece ends, and again when the host had time to react.
            let at = copy.end_ns + SLACK_NS;
            let most = numbers.iter().map(|engine| held(*engine, at)).max().unwrap();
            let idle = numbers
                .iter()
                .any(|engine| held(*engine, at) == 0 && held(*engine, copy.end_ns) == 0);
            assert!(most <= 2, "{log:?}");
            assert!(!(idle && most == 2), "idle at {at}: {log:?}");
        }
    }
}

#[test]
fn a_copy_above_128_mib_does_not_stall() {
    let mut machine = Machine::new();
    machine.set("STALL_MIB", "128", "0");
    machine.set("ENGINES_PER_LINK", "1", "2");
    let log = put_alone(&machine, 128 * MIB + 4099);
    assert!(log.len() == 2 && log.iter().all(|copy| copy.bytes <= 128 * MIB), "{log:?}");
}
