//! Tests drivers with faulty captures: `fork` fails before anything is recorded, and eager starts work.

use peerlane_hal::{CopyEngine as _, Error as _, ErrorKind};
use peerlane_simulated_driver::in_own_process;

use crate::backend::{Compute, Mode};
use crate::streams::world::{PLAIN, world};
use crate::support::driver;

/// Each fault has a device of its own, because a device is tried once.
#[test]
fn faulty_captures_are_refused() {
    in_own_process(|| {
        let faults = [("DROP_COPIES", "local"), ("CAPTURED_WORDS", "refuse")];
        for (ranks, (setting, value)) in (1..).zip(faults) {
            let (driver, _turn) = driver();
            let sound = if setting == "DROP_COPIES" { "none" } else { "record" };
            driver.set(setting, value);
            let mut members = world(ranks, 500, None);
            driver.set(setting, sound);
            let member = members.last_mut().unwrap();
            let compute = Compute::new(member.me);
            compute.begin_capture(Mode::Global);
            let error = member
                .engine
                .streams()
                .unwrap()
                .fork(&compute.handle())
                .expect_err("captures are broken");
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{setting}={value}: {error}");
            assert!(error.to_string().contains("Simulated GPU"), "{error}");
            compute.end_empty_capture();
            members.iter().for_each(|member| member.fill(member.me as u8));
            let tickets: Vec<_> =
                members.iter_mut().map(|member| member.submit(1, PLAIN)).collect();
            for (member, ticket) in members.iter_mut().zip(tickets) {
                member.finish(ticket);
                member.ensure_gathered(|rank| rank as u8, value);
            }
        }
    });
}
