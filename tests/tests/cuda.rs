//! Runs the conformance suite on the CUDA backend, with each kind of signal and under the layers.
//!
//! It runs on GPUs if there are any, otherwise on the simulated driver.

use std::process::ExitCode;
use std::time::Duration;

use peerlane_conformance::middleware::{
    DelayLayer, DowngradeLayer, FailAtLayer, Layered, TraceLayer, TraceLog,
};
use peerlane_conformance::{CudaHarness, GpuDriver, Suite};
use peerlane_cuda::{Context, Options, SelfCopy, SignalBy};
use peerlane_hal::{ErrorKind, Rank};

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
    let broken = FailAtLayer { ops: u64::MAX, kind: ErrorKind::DeviceLost };
    let suite = match driver {
        GpuDriver::Simulated => Suite::new(),
        GpuDriver::Device if driver.shares_a_device::<Context>() => Suite::new().one_process_each(),
        GpuDriver::Device => Suite::new().one_by_one(),
    };
    suite
        .with(plain())
        .with(cuda("-signal-by-copy", |options| options.signal = Some(SignalBy::Copy)))
        .with(cuda("-self-copy-by-link", |options| options.self_copy = SelfCopy::Link))
        .with(delayed)
        .with(Layered::new(plain(), "downgrade", move |_| coarse))
        .with(Layered::new(plain(), "fail-at", move |_| broken))
        .with(Layered::new(plain(), "trace", |_| TraceLayer::new(TraceLog::new())))
        .run()
}
