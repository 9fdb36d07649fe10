//! Tests engines whose driver fails: refused calls and a lost device.
//!
//! A lost device stays lost in its process, and what was tried on it stays known, so each test has its own process,
//! and each case in it devices of its own.

use std::time::{Duration, Instant};

use peerlane_hal::{
    CopyEngine as _, Error as _, ErrorKind, Fabric as _, Flag, Op, PeerMemory as _, Rank, Role,
};
use peerlane_simulated_driver::in_own_process;

use super::world::{PLAIN, world, world_on};
use crate::backend::{DEVICE_NAME, Fabric, LOSSES, REFUSALS, driver, soon};

const PATIENCE: Duration = Duration::from_secs(10);

/// Sets the number of devices of the machine.
pub(crate) const DEVICES: &str = "8";

/// Opens a fabric of one rank on a device.
pub(crate) fn alone(device: u32) -> Fabric {
    let mut fabric = Fabric::open(Rank(0), 1, device).unwrap();
    let address = fabric.address();
    fabric.connect(Rank(0), &address, soon()).unwrap();
    fabric
}

/// A refused call poisons one engine, for every error code; other engines continue.
#[test]
fn a_refused_call_poisons_one_engine() {
    in_own_process(|| {
        for (call, code, kind) in REFUSALS {
            let (driver, _turn) = driver();
            driver.set("DEVICES", DEVICES);
            let mut members = world(2, 300_000, None);
            let mut other = world(2, 300_000, None);
            driver.fail(call, 0, code);
            let (first, rest) = members.split_first_mut().unwrap();
            let error = first.try_submit(1, PLAIN).expect_err(call);
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(&format!("device 0 ({DEVICE_NAME})")), "{error}");
            for _ in 0..2 {
                let answers = [
                    first.try_submit(1, PLAIN).map(drop),
                    first.engine.completed().map(drop),
                    first.engine.park(Duration::ZERO),
                    first.engine.release(),
                ];
                for answer in answers {
                    assert_eq!(answer.expect_err("poisoned").kind(), kind, "{call}");
                }
            }
            // The peer of the failed rank waits and is released.
            let last = rest[0].submit(1, PLAIN);
            let start = Instant::now();
            while rest[0].engine.completed().unwrap() < last {
                rest[0].engine.release().unwrap();
                assert!(start.elapsed() < PATIENCE);
            }
            for member in &other {
                member.fill(member.me as u8);
            }
            let tickets: Vec<_> = other.iter_mut().map(|member| member.submit(1, PLAIN)).collect();
            for (member, ticket) in other.iter_mut().zip(tickets) {
                member.finish(ticket);
                member.ensure_gathered(|rank| rank as u8, call);
            }
            let start = Instant::now();
            drop(members);
            assert!(start.elapsed() < PATIENCE, "the drop took {:?}", start.elapsed());
        }
    });
}

/// The loss of a device is detected without a call for it.
#[test]
fn a_lost_device_is_noticed_behind_a_wait() {
    in_own_process(|| {
        for (device, lose) in (6..).zip(LOSSES) {
            let (driver, _turn) = driver();
            driver.set("DEVICES", DEVICES);
            let fabric = alone(device);
            let flags = fabric.memory().allocate(64, Role::Flags).unwrap();
            let mut engine = fabric.engine(Default::default()).unwrap();
            let wait = Op::Wait { flag: Flag { region: &flags, word: 0 }, value: 1, reset: false };
            // SAFETY: the flags outlive the engine.
            unsafe { engine.submit(&[wait]) }.unwrap();
            engine.completed().unwrap();
            lose(&driver, device);
            let start = Instant::now();
            let error = loop {
                match engine.completed() {
                    Ok(done) => assert_eq!(done.0, 0),
                    Err(error) => break error,
                }
                assert!(start.elapsed() < PATIENCE, "nobody noticed");
                std::thread::sleep(Duration::from_millis(1));
            };
            assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
            let start = Instant::now();
            drop(engine);
            assert!(start.elapsed() < PATIENCE, "the drop took {:?}", start.elapsed());
        }
    });
}

/// Signals are copied where a driver refuses stream writes to peers, or loses them.
#[test]
fn signals_find_their_way() {
    in_own_process(|| {
        // The method between two devices is probed once.
        for (first, writes, copies) in [(0, "allow", 2), (2, "refuse", 4), (4, "drop", 4)] {
            let (driver, _turn) = driver();
            driver.set("DEVICES", DEVICES);
            driver.set("PEER_WRITES", writes);
            let mut members = world_on(first, 2, 1000, None);
            members.iter().for_each(|member| member.fill(member.me as u8));
            let before = driver.counter("copies", None);
            let tickets: Vec<_> =
                members.iter_mut().map(|member| member.submit(1, PLAIN)).collect();
            for (member, ticket) in members.iter_mut().zip(tickets) {
                member.finish(ticket);
            }
            assert_eq!(driver.counter("copies", None) - before, 2 * copies, "{writes}");
            members.iter().for_each(|member| member.ensure_gathered(|rank| rank as u8, writes));
            drop(members);
            driver.set("PEER_WRITES", "allow");
        }
    });
}
