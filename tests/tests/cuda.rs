//! Runs the conformance suite on the CUDA backend, with each kind of signal and under the layers.
//!
//! It runs on GPUs if there are any, otherwise on the simulated driver.

use std::process::ExitCode;
use std::time::Duration;

use cudarc::driver::CudaContext;
use peerlane_cuda::{Context, Options, SelfCopy, SignalBy};
use peerlane_hal::{ErrorKind, Rank};
use peerlane_tests::middleware::{
    DelayLayer, DowngradeLayer, FailAtLayer, Layered, TraceLayer, TraceLog,
};
use peerlane_tests::{CudaHarness, GpuDriver, Suite};

fn main() -> ExitCode {
    let driver = GpuDriver::load::<Context>();
    eprintln!("running on: {driver:?}");
    let cuda = |name, change: fn(&mut Options)| {
        let mut options = Options::default();
        change(&mut options);
        CudaHarness::new(name, driver, options)
    };
    let plain = || cuda("", |_| {});
    let delayed =
        Layered::new(plain(), "delay", |_: Rank| DelayLayer::new(1, Duration::from_micros(60)));
    let coarse =
        DowngradeLayer { slice_ops_max: 3, put_align_bytes: 32, ..DowngradeLayer::default() };
    let broken = FailAtLayer { ops: u64::MAX, kind: ErrorKind::DeviceLost, peer: None };
    // Both pass everything on, so that a check fails whichever of them does not.
    let passing = Layered::new(plain(), "fail-at", move |_: Rank| broken);
    let traced = Layered::new(passing, "trace", |_: Rank| TraceLayer::new(TraceLog::new()));
    // As many as CUDA has: the ranks of a check share them, and it opens contexts more slowly with them.
    let connections = vec![(peerlane_cuda::connections().variable, "32".to_owned())];
    // The driver opens a context for each check otherwise.
    let _context = (driver == GpuDriver::Device).then(|| CudaContext::new(0));
    let suite = match driver {
        GpuDriver::Simulated => Suite::new(),
        GpuDriver::Device if driver.shares_devices::<Context>() => {
            Suite::new().process_each(connections)
        }
        GpuDriver::Device => Suite::new().one_by_one(),
    };
    suite
        .with(plain())
        .with(cuda("-signal-by-copy", |options| options.signal = Some(SignalBy::Copy)))
        .with(cuda("-self-copy-by-link", |options| options.self_copy = SelfCopy::Link))
        .with_layers(delayed)
        .with_layers(Layered::new(plain(), "downgrade", move |_| coarse))
        .with_layers(traced)
        .run()
}
