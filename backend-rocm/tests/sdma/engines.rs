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

/// Puts once from rank 0 to rank 1, and returns the copies of the put that the engines logged.
fn put_alone(machine: &Machine, bytes: u64) -> Vec<Transfer> {
    let mut ranks = open_ranks(2, bytes);
    ranks[0].fill(1);
    machine.driver.clear_log();
    let ticket = ranks[0].submit(|own| vec![own.put(1), own.signal(1, 1)]).unwrap();
    let (putting, others) = ranks.split_at_mut(1);
    // A completed ticket does not say that the bytes have arrived.
    drive(putting, |rank| Ok(rank.engine.completed()? >= ticket && others[0].seen_from(0) == 1))
        .unwrap();
    let mut log = machine.driver.log();
    // A signal is a copy of its own.
    log.retain(|copy| copy.bytes > 8);
    let mut seen = vec![0; bytes as usize];
    // SAFETY: nobody else accesses these bytes of the region now.
    unsafe { ranks[1].output.download(0, &mut seen) }.unwrap();
    assert!(seen == crate::ranks::pattern(10, bytes));
    assert_eq!(log.iter().map(|copy| copy.bytes).sum::<u64>(), bytes);
    log
}

#[test]
fn at_the_end_of_a_copy_no_engine_idles_while_another_holds_two() {
    let mut machine = Machine::new();
    machine.set("COPY_DELAY_US", "30000", "0");
    for (engines, bytes) in [(2, 100 * MIB + 77), (3, 100 * MIB + 1)] {
        machine.set("ENGINES_PER_LINK", &engines.to_string(), "2");
        check_held(put_alone(&machine, bytes), engines);
    }
}

/// Checks how many pieces an engine holds when it is given another. When pieces are submitted depends on what else the
/// machine does, but not what they are submitted to.
fn check_held(mut log: Vec<Transfer>, engines: usize) {
    assert!(log.len() >= 3 * engines, "{log:?}");
    log.sort_by_key(|piece| piece.submitted_ns);
    let mut numbers: Vec<_> = log.iter().map(|piece| piece.engine).collect();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), engines, "{numbers:?}");

    for (place, piece) in log.iter().enumerate() {
        let before = log[..place].iter().filter(|other| other.engine == piece.engine);
        let held = before.filter(|other| piece.submitted_ns < other.end_ns).count();
        // Near the end, an engine that holds a piece leaves the others to engines that become idle.
        let is_last = log.len() - place <= 2 * engines;
        let limit = if is_last { 0 } else { 1 };
        assert!(held <= limit, "piece {place} goes to an engine that holds {held}: {log:?}");
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
