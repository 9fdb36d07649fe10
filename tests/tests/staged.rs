//! Runs the conformance suite on device memory that is staged through the host, with the host
//! backend as the network: with its default queues, with tiny ones, and with delays.

use std::process::ExitCode;
use std::time::Duration;

use peerlane_hal::Rank;
use peerlane_host::Options;
use peerlane_tests::middleware::{DelayLayer, Layered};
use peerlane_tests::{CudaHarness, GpuDriver, HostHarness, StagedHarness, Suite};

fn main() -> ExitCode {
    let driver = GpuDriver::load::<peerlane_cuda::Context>();
    eprintln!("running on: {driver:?}");
    let cuda = || CudaHarness::new("", driver, peerlane_cuda::Options::default());
    let host = |name, change: fn(&mut Options)| {
        let mut options = Options::default();
        change(&mut options);
        HostHarness::new(name, options)
    };
    let single_ops = host("host-single-ops", |options| {
        options.caps.slice_ops_max = 1;
        options.queue_ops = 3;
    });
    let delayed = Layered::new(HostHarness::default(), "delay", |_: Rank| {
        DelayLayer::new(3, Duration::from_micros(60))
    });
    Suite::new()
        .with(StagedHarness::new(cuda(), HostHarness::default()))
        .with(StagedHarness::new(cuda(), single_ops))
        .with(StagedHarness::new(cuda(), delayed))
        .run()
}
