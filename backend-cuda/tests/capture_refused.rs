//! A driver whose captures cannot be trusted: capturing is refused before anything is recorded, and
//! eager starts go on.
//!
//! What a device can do is found out once in a process, so this is a program of its own.

#[path = "engine/backend.rs"]
#[allow(dead_code, unused_imports, reason = "a part of it is used here")]
mod backend;
#[path = "../../hal/toolkit/tests/streams/world.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod world;

mod support;

use backend::{Compute, Mode};
use peerlane_hal::{CopyEngine as _, Error as _, ErrorKind};
use support::driver;
use world::{PLAIN, world};

/// One device for each way in which a driver can be wrong.
#[test]
fn captures_that_do_something_else_are_refused() {
    let wrong = [("DROP_COPIES", "local"), ("CAPTURED_WORDS", "refuse")];
    for (ranks, (setting, value)) in (1..).zip(wrong) {
        let (driver, _turn) = driver();
        let well = if setting == "DROP_COPIES" { "none" } else { "record" };
        driver.set(setting, value);
        let mut members = world(ranks, 500, None);
        driver.set(setting, well);
        let member = members.last_mut().unwrap();
        let compute = Compute::new(member.me);
        compute.begin_capture(Mode::Global);
        let error = member.engine.fork(&compute.handle()).expect_err("captures are broken");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{setting}={value}: {error}");
        assert!(error.to_string().contains("Simulated GPU"), "{error}");
        compute.end_empty_capture();
        members.iter().for_each(|member| member.fill(member.me as u8));
        let tickets: Vec<_> = members.iter_mut().map(|member| member.submit(1, PLAIN)).collect();
        for (member, ticket) in members.iter_mut().zip(tickets) {
            member.finish(ticket);
            member.ensure_gathered(|rank| rank as u8, value);
        }
    }
}
