//! Tests which checks the suite runs, skips and abandons, and what it says about them.

use std::collections::BTreeSet;
use std::time::Duration;

use peerlane_conformance::checks::{Abilities, Check, Need, all};
use peerlane_conformance::middleware::{
    DelayLayer, Downgrade, DowngradeLayer, Erased, Error, Layer, Layered,
};
use peerlane_conformance::{Failure, Harness, HostHarness, Suite, run_bounded};
use peerlane_hal::{EngineRequirements, ErrorKind, Fabric, Rank, SharedQueues};

/// A layer whose hardware is absent.
#[derive(Clone)]
struct Absent;

// SAFETY: it creates no engine.
unsafe impl<F: Fabric> Layer<F> for Absent {
    type Engine = Downgrade<F::Engine>;

    fn engine(
        &self,
        _: &F,
        _: u64,
        _: EngineRequirements,
    ) -> Result<Self::Engine, Error<F::Error>> {
        Err(Error::layer(ErrorKind::Unavailable, "no device; plug one in"))
    }
}

/// The host backend as a backend that may be absent.
struct Optional(HostHarness);

impl Harness for Optional {
    type Fabric = peerlane_host::Fabric;

    fn name(&self) -> &str {
        "optional"
    }

    fn open(&self, rank: Rank, ranks: usize) -> Result<Self::Fabric, peerlane_host::Error> {
        self.0.open(rank, ranks)
    }
}

/// Returns the name of each trial, and whether it is ignored.
fn trials(suite: &Suite) -> Vec<(String, bool)> {
    suite.trials().map(|(name, ignored)| (name.to_owned(), ignored)).collect()
}

#[test]
fn absent_hardware_is_skipped_with_its_reason() {
    let harness = Layered::new(Optional(HostHarness::default()), "absent", |_| Absent);
    let suite = Suite::new().with(harness);
    let ignored = all().into_iter().map(|check| (format!("optional+absent::{check:?}"), true));
    assert_eq!(trials(&suite), ignored.collect::<Vec<_>>());
    let skipped: Vec<_> = suite.skipped().iter().collect();
    let [((harness, reason), checks)] = &skipped[..] else { panic!("{skipped:?}") };
    assert_eq!((&**harness, &**reason), ("optional+absent", "no device; plug one in"));
    assert_eq!(checks.len(), all().len());
    assert_eq!(checks[0], "order::ops_to_one_peer_take_effect_in_submission_order");
}

#[test]
fn layers_that_need_more_than_the_engines_have_are_skipped() {
    let polls = |_| DowngradeLayer { queued_wait: false, ..DowngradeLayer::default() };
    let polled = Layered::new(HostHarness::default(), "polled", polls);
    let delayed = |_| DelayLayer::new(1, Duration::ZERO);
    let delayed = Layered::new(polled, "delay", delayed);
    let suite = Suite::new().with(Layered::new(delayed, "plain", |_| DowngradeLayer::default()));
    let skipped: Vec<_> = suite.skipped().iter().collect();
    let [((_, reason), checks)] = &skipped[..] else { panic!("{skipped:?}") };
    assert_eq!(checks.len(), all().len());
    assert!(reason.starts_with("the layer holds ops back with waits: expected caps"), "{reason}");
}

#[test]
fn absent_hardware_that_is_required_is_not_skipped() {
    let harness = Layered::new(HostHarness::default(), "absent", |_| Absent);
    let suite = Suite::new().with(harness);
    let to_run = all().into_iter().map(|check| (format!("host+absent::{check:?}"), false));
    assert_eq!(trials(&suite), to_run.collect::<Vec<_>>());
    assert!(suite.skipped().is_empty());
}

#[test]
fn a_check_that_blocks_is_abandoned() {
    let harness = HostHarness::default();
    let harness = Layered::new(harness, "absent", |_| Absent).timeout(Duration::from_millis(1));
    let run = |_: &_| {
        std::thread::sleep(Duration::from_secs(3));
        Ok(())
    };
    let next = "Look at `submit`.";
    let check = Check { topic: "topic", name: "a_name", needs: &[], next, run };
    let failure = run_bounded(&Erased::new(harness), &check).unwrap_err();
    assert_eq!(
        failure.to_string(),
        "the backend breaks the contract, section topic, \"a name\": the check did not return \
         within 9ms: a call to the backend blocks\nnext: Look at `submit`."
    );
}

#[test]
fn every_check_says_in_one_short_sentence_what_to_look_at_next() {
    let checks = all();
    for check in &checks {
        let next = check.next;
        assert!(next.ends_with('.') && !next.contains(". "), "{check:?} is one sentence: {next}");
        assert!((2..=140).contains(&next.len()), "{check:?} has {} bytes: {next}", next.len());
        let code = next.split('`').count();
        assert!(code >= 3 && code % 2 == 1, "{check:?} names no method or field: {next}");
    }
    let different: BTreeSet<_> = checks.iter().map(|check| check.next).collect();
    assert_eq!(different.len(), checks.len(), "two checks say the same");
}

#[test]
fn a_blocked_engine_needs_queues_that_others_can_use() {
    let missing = |count| {
        let mut options = peerlane_host::Options::default();
        options.caps.shared_queues = Some(SharedQueues { count, variable: "QUEUES" });
        let harness = HostHarness::new("few-queues", options);
        Abilities::probe(&harness).unwrap().missing(&[Need::HardwareQueues])
    };
    assert!(missing(7).is_some_and(|reason| reason.contains("fewer than 8 hardware queues")));
    assert_eq!(missing(8), None);
}

#[test]
fn a_broken_check_begins_with_its_sentence_and_ends_with_what_to_look_at_next() {
    let harness = Erased::new(HostHarness::default());
    for check in all() {
        let run = |_: &_| Err(Failure::new("rank 0 of 1: found 1, expected 2"));
        let check = Check { run, ..check };
        let text = run_bounded(&harness, &check).unwrap_err().to_string();
        let sentence = check.name.replace('_', " ");
        let begin = format!(
            "the backend breaks the contract, section {}, \"{sentence}\": rank 0",
            check.topic
        );
        assert!(text.starts_with(&begin), "{text}");
        assert!(text.ends_with(&format!("expected 2\nnext: {}", check.next)), "{text}");
    }
}
