//! Runs random programs of one-sided messages on the host backend, and over engines that delay every op or only
//! its effect on peers.

mod late;
mod messages;

use std::time::Duration;

use peerlane_tests::middleware::{DelayLayer, StreamLayer};

const SOON: Duration = Duration::from_secs(20);

#[test]
fn programs_agree_with_the_model() {
    for ranks in 2..=8 {
        messages::run(|_| StreamLayer::default(), ranks, 0..300, SOON).unwrap();
    }
}

#[test]
fn programs_agree_with_the_model_under_delay() {
    for ranks in 2..=8 {
        let delay = |_| DelayLayer::new(ranks as u64, Duration::from_micros(50));
        messages::run(delay, ranks, 0..100, SOON).unwrap();
    }
}

#[test]
fn programs_agree_with_the_model_if_effects_come_after_tickets() {
    for ranks in 2..=4 {
        messages::run(|_| late::LateLayer, ranks, 0..20, SOON).unwrap();
    }
}
