//! Tests flags in host memory that several fabrics of a rank share, on the simulated driver.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use peerlane_cuda::{Engine, Fabric, Local, Remote};
use peerlane_hal::{
    CopyEngine as _, Error as _, ErrorKind, Fabric as _, Flag, Op, PeerMemory as _, Rank,
    Region as _, Role, Space, Ticket,
};
use peerlane_host as host;
use peerlane_simulated_driver::in_own_process;

use crate::support::{driver, pointer, ranks, soon};

type OpOf<'a> = Op<'a, Local, Remote>;

fn address(words: &[AtomicU64]) -> u64 {
    words.as_ptr() as u64
}

fn zeros(count: usize) -> Box<[AtomicU64]> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

/// Registers flags and imports them again as an alias.
fn register(fabric: &Fabric, address: u64, words: u64) -> (Remote, Local) {
    // SAFETY: every test keeps the memory until it has dropped the region; it is zero.
    let local = unsafe { fabric.memory().register(pointer(address), words * 8, Role::Flags) };
    let local = local.unwrap();
    let key = fabric.memory().export(&local).unwrap();
    (fabric.memory().import(fabric.rank(), &key, soon()).unwrap(), local)
}

fn submit(engine: &mut Engine, ops: &[OpOf<'_>]) -> Ticket {
    // SAFETY: tests drop engines before regions, and each flag has one writer and one reader.
    unsafe { engine.submit(ops) }.unwrap()
}

fn finish(engine: &mut Engine, ticket: Ticket) {
    let deadline = soon();
    while engine.completed().unwrap() < ticket {
        assert!(!deadline.has_passed(), "{ticket:?} is not complete");
        engine.park(Duration::from_millis(1)).unwrap();
    }
}

fn signal(region: &Remote, word: u64, value: u64) -> OpOf<'_> {
    Op::Signal { flag: Flag { region, word }, value }
}

fn wait(region: &Local, word: u64, value: u64) -> OpOf<'_> {
    Op::Wait { flag: Flag { region, word }, value, reset: false }
}

/// Submits a wait and a signal; the host sets the flag that is waited for and observes the signal.
fn wait_then_signal(fabric: &mut Fabric, words: &[AtomicU64]) {
    let (alias, local) = register(fabric, address(words), words.len() as u64);
    assert_eq!((local.space(), local.bytes()), (Space::Host, words.len() as u64 * 8));
    let mut engine = fabric.engine(Default::default()).unwrap();
    let last = submit(&mut engine, &[wait(&local, 0, 3), signal(&alias, 1, 8)]);
    std::thread::sleep(Duration::from_millis(10));
    assert!(engine.completed().unwrap() < last);
    assert_eq!(words[1].load(Ordering::Acquire), 0);
    words[0].store(3, Ordering::Release);
    finish(&mut engine, last);
    assert_eq!(words[1].load(Ordering::Acquire), 8);
    assert_eq!(local.flags().unwrap()[1].load(Ordering::Acquire), 8);
    assert_eq!((local.flag_value(1), local.flag_value(words.len() as u64)), (Some(8), None));
}

#[test]
fn flags_in_memory_of_the_caller() {
    let (_driver, _turn) = driver();
    let mut fabric = ranks(1).unwrap().remove(0);
    for count in [2, 3, 1000] {
        wait_then_signal(&mut fabric, &zeros(count));
    }
    // Flags may start at any word of an allocation.
    let words = zeros(1000);
    wait_then_signal(&mut fabric, &words[700..705]);
}

#[test]
fn flags_that_another_fabric_allocated() {
    let (_driver, _turn) = driver();
    let mut fabric = ranks(1).unwrap().remove(0);
    let host = host::Fabric::open(Rank(0), 1).unwrap();
    for bytes in [16, 4096, 100_000] {
        let region = host.memory().allocate(bytes, Role::Flags).unwrap();
        wait_then_signal(&mut fabric, region.flags().unwrap());
    }
}

/// Engines of two backends signal each other in turns.
#[test]
fn a_flag_between_the_engines_of_two_fabrics() {
    let (_driver, _turn) = driver();
    let fabric = ranks(1).unwrap().remove(0);
    let mut other = host::Fabric::open(Rank(0), 1).unwrap();
    let own_address = other.address();
    other.connect(Rank(0), &own_address, soon()).unwrap();
    let region = other.memory().allocate(64, Role::Flags).unwrap();
    let key = other.memory().export(&region).unwrap();
    let foreign = other.memory().import(Rank(0), &key, soon()).unwrap();
    let (alias, local) = register(&fabric, address(region.flags().unwrap()), 8);
    let (mut engine, mut writer) =
        (fabric.engine(Default::default()).unwrap(), other.engine(Default::default()).unwrap());
    for round in 1..=50 {
        let last = submit(&mut engine, &[wait(&local, 0, round), signal(&alias, 1, round)]);
        let flag = |word| Flag { region: &foreign, word };
        let ops = [
            Op::Signal { flag: flag(0), value: round },
            Op::Wait { flag: Flag { region: &region, word: 1 }, value: round, reset: false },
        ];
        // SAFETY: as in `submit`.
        let answered = unsafe { writer.submit(&ops) }.unwrap();
        let deadline = soon();
        while writer.completed().unwrap() < answered {
            assert!(!deadline.has_passed(), "round {round}");
            std::thread::yield_now();
        }
        finish(&mut engine, last);
    }
}

/// Regions that share pages share one registration with the driver, which ends with the last region.
#[test]
fn pages_are_registered_once() {
    in_own_process(|| {
        let (driver, _turn) = driver();
        let fabrics = ranks(2).unwrap();
        let (registered, given_back) = ("cuMemHostRegister_v2", "cuMemHostUnregister");
        let words = zeros(8 << 10);
        // Each engine registers a page of its own.
        let mut engine = fabrics[1].engine(Default::default()).unwrap();
        let before = [registered, given_back].map(|call| driver.calls(call));
        let calls = |driver: &peerlane_simulated_driver::Driver| {
            [driver.calls(registered) - before[0], driver.calls(given_back) - before[1]]
        };
        let whole = register(&fabrics[0], address(&words), words.len() as u64);
        let part = register(&fabrics[1], address(&words[100..]), 8);
        let again = register(&fabrics[0], address(&words[100..]), 8);
        assert_eq!(calls(&driver), [1, 0]);
        drop((whole, again));
        assert_eq!(calls(&driver), [1, 0]);
        let last = submit(&mut engine, &[signal(&part.0, 2, 6)]);
        finish(&mut engine, last);
        assert_eq!(words[102].load(Ordering::Acquire), 6);
        drop(part);
        assert_eq!(calls(&driver), [1, 1]);
        drop(register(&fabrics[0], address(&words[4000..]), 4));
        assert_eq!(calls(&driver), [2, 2]);
    });
}

#[test]
fn another_rank_of_the_process_signals_them() {
    let (_driver, _turn) = driver();
    let fabrics = ranks(2).unwrap();
    let words = zeros(8);
    let (_alias, local) = register(&fabrics[0], address(&words), 8);
    let key = fabrics[0].memory().export(&local).unwrap();
    let remote = fabrics[1].memory().import(Rank(0), &key, soon()).unwrap();
    let mut engine = fabrics[1].engine(Default::default()).unwrap();
    let last = submit(&mut engine, &[signal(&remote, 5, 77)]);
    finish(&mut engine, last);
    // A completed ticket does not say that the other rank sees the flag.
    let deadline = soon();
    while words[5].load(Ordering::Acquire) != 77 {
        assert!(!deadline.has_passed(), "the signal has not come");
        std::thread::yield_now();
    }
}

#[test]
fn memory_that_cannot_be_registered_is_reported() {
    let (driver, _turn) = driver();
    let fabrics = ranks(1).unwrap();
    let words = zeros(4096);
    let refused = |address, bytes, role| {
        // SAFETY: nothing is ever done with what is registered.
        unsafe { fabrics[0].memory().register(pointer(address), bytes, role) }.unwrap_err()
    };
    let error = refused(address(&words) + 4, 8, Role::Flags);
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains("expected a multiple of 8 bytes"), "{error}");
    // Data lies in device memory, unless a fabric has allocated it.
    let error = refused(address(&words), 8, Role::Data);
    assert!(error.to_string().contains("expected device memory"), "{error}");
    let held = register(&fabrics[0], address(&words), 8);
    let error = refused(address(&words), 8 * 4096, Role::Flags);
    assert!(error.to_string().contains("only a part of them is page-locked"), "{error}");
    drop(held);
    driver.fail("cuMemHostRegister_v2", 0, 801);
    let error = refused(address(&words), 8, Role::Flags);
    assert!(error.to_string().contains("cuMemHostRegister_v2"), "{error}");
    wait_then_signal(&mut ranks(1).unwrap()[0], &words[..8]);
}
