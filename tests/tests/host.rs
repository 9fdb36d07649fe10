//! Runs the conformance suite on the host backend, with its capabilities removed one by one, and
//! under every layer. One more engine keeps the contract and no more, so that a check that expects more fails here.

mod late;

use std::process::ExitCode;
use std::time::Duration;

use peerlane_hal::{ErrorKind, Rank};
use peerlane_host::Options;
use peerlane_tests::middleware::{
    DelayLayer, DowngradeLayer, Erased, FailAtLayer, Layered, StreamLayer, ThrottleLayer,
    TraceLayer, TraceLog,
};
use peerlane_tests::{HostHarness, Suite};

fn host(name: &str, change: impl FnOnce(&mut Options)) -> HostHarness {
    let mut options = Options::default();
    change(&mut options);
    HostHarness::new(name, options)
}

fn delayed(seed: u64) -> Layered<HostHarness, DelayLayer> {
    Layered::new(HostHarness::default(), "delay", move |_: Rank| {
        DelayLayer::new(seed, Duration::from_micros(60))
    })
}

/// Slow enough to be seen, and fast enough for every check.
const THROTTLE: ThrottleLayer =
    ThrottleLayer { bytes_per_second: 2e9, delay: Duration::from_micros(50) };

fn throttled(layer: ThrottleLayer) -> Layered<HostHarness, ThrottleLayer> {
    let what = if layer.bytes_per_second.is_finite() { "throttle" } else { "far" };
    Layered::new(HostHarness::default(), what, move |_| layer)
}

fn main() -> ExitCode {
    let single_ops = host("host-single-ops", |options| {
        options.caps.slice_ops_max = 1;
        options.queue_ops = 3;
    });
    let tiny_pieces = host("host-tiny-pieces", |options| {
        options.caps.piece_bytes_max = 7;
        options.caps.put_align_bytes = 1;
    });
    let no_queued_wait = DowngradeLayer { queued_wait: false, ..DowngradeLayer::default() };
    let coarse = DowngradeLayer { slice_ops_max: 3, put_align_bytes: 32, ..no_queued_wait };
    let broken = FailAtLayer { ops: u64::MAX, kind: ErrorKind::DeviceLost, peer: None };
    Suite::new()
        .with(HostHarness::default())
        .with(host("host-no-queued-wait", |options| options.caps.queued_wait = false))
        .with(single_ops)
        .with(tiny_pieces)
        .with(host("host-aligned", |options| options.caps.put_align_bytes = 16))
        .with(host("host-streaming", |options| options.streaming_bytes_min = Some(1)))
        .with(delayed(1))
        .with(Layered::<_, DowngradeLayer>::new(delayed(2), "downgrade", move |_| no_queued_wait))
        .with(Layered::new(HostHarness::default(), "downgrade", move |_| coarse))
        .with(Layered::new(HostHarness::default(), "fail-at", move |_| broken))
        .with(throttled(THROTTLE))
        .with(Layered::new(throttled(THROTTLE), "downgrade", move |_| no_queued_wait))
        .with(throttled(ThrottleLayer { bytes_per_second: f64::INFINITY, ..THROTTLE }))
        .with(Layered::new(HostHarness::default(), "streams", |_| StreamLayer::default()))
        .with(Layered::new(HostHarness::default(), "trace", |_| TraceLayer::new(TraceLog::new())))
        .with(Layered::new(HostHarness::default(), "late", |_| late::LateLayer))
        .with(Layered::new(Erased::new(host("host-erased", |_| ())), "trace", |_| {
            TraceLayer::new(TraceLog::new())
        }))
        .run()
}
