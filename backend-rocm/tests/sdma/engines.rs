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
fn no_engine_idles_while_another_holds_two() {
    let mut machine = Machine::new();
    machine.set("COPY_DELAY_US", "30000", "0");
    for (engines, bytes) in [("2", 100 * MIB + 77), ("3", 100 * MIB + 1)] {
        machine.set("ENGINES_PER_LINK", engines, "2");
        let engines: usize = engines.parse().unwrap();
        // On a loaded machine, the host may submit a piece too late.
        let idles = |_| is_idle_beside_two(&put_alone(&machine, bytes), engines);
        assert!(!(0..5).all(idles), "an engine of {engines} is idle in each of five puts");
    }
}

/// Checks that each engine holds two pieces at most, and returns whether one was idle while another held two.
fn is_idle_beside_two(log: &[Transfer], engines: usize) -> bool {
    /// Time that the host needs to submit the next piece.
    const SLACK_NS: u64 = 15_000_000;
    assert!(log.len() >= 3 * engines, "{log:?}");
    let mut numbers: Vec<_> = log.iter().map(|copy| copy.engine).collect();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), engines, "{numbers:?}");
    let of = |engine: u64| log.iter().filter(move |copy| copy.engine == engine);
    // An engine holds a piece from its submission to its end.
    let held = |engine: u64, at: u64| {
        of(engine).filter(|copy| copy.submitted_ns <= at && at < copy.end_ns).count()
    };
    let begins = numbers.iter().map(|engine| of(*engine).map(|copy| copy.submitted_ns).min());
    let begin = begins.max().unwrap().unwrap();
    log.iter().filter(|copy| copy.end_ns > begin).any(|copy| {
        // Check when a piece ends, and again when the host had time to react.
        let at = copy.end_ns + SLACK_NS;
        let most = numbers.iter().map(|engine| held(*engine, at)).max().unwrap();
        assert!(most <= 2, "{log:?}");
        let mut numbers = numbers.iter();
        let idle = numbers.any(|it| held(*it, at) == 0 && held(*it, copy.end_ns) == 0);
        idle && most == 2
    })
}

#[test]
fn a_copy_above_128_mib_does_not_stall() {
    let mut machine = Machine::new();
    machine.set("STALL_MIB", "128", "0");
    machine.set("ENGINES_PER_LINK", "1", "2");
    let log = put_alone(&machine, 128 * MIB + 4099);
    assert!(log.len() == 2 && log.iter().all(|copy| copy.bytes <= 128 * MIB), "{log:?}");
}
