//! Runs the conformance suite on the ROCm backend, with each kind of engine and of signal.
//!
//! The layers wrap engines over streams, which are those of CUDA, under `cuda.rs`.
//!
//! It runs on GPUs if there are any, otherwise on the simulated driver.

use std::process::ExitCode;

use peerlane_rocm::{Context, EngineKind, Options, SelfCopy, SignalBy};
use peerlane_tests::middleware::{DowngradeLayer, Layered};
use peerlane_tests::{GpuDriver, RocmHarness, Suite};

fn main() -> ExitCode {
    let driver = GpuDriver::load::<Context>();
    eprintln!("running on: {driver:?}");
    let rocm = |name, change: fn(&mut Options)| {
        let mut options = Options::default();
        change(&mut options);
        RocmHarness::new(name, driver, options)
    };
    let plain = || rocm("-streams", |options| options.engine = EngineKind::Streams);
    let sdma = || rocm("-sdma", |options| options.engine = EngineKind::Sdma);
    let coarse =
        DowngradeLayer { slice_ops_max: 3, put_align_bytes: 32, ..DowngradeLayer::default() };
    let mut suite = match driver.shares_devices::<Context>() {
        true => Suite::new().process_each(Vec::new()),
        // To give memory back, HIP waits for all streams of the device.
        false => Suite::new().one_by_one(),
    };
    suite = suite.with(plain());
    match peerlane_rocm::runtimes().map(|runtimes| runtimes.hsa) {
        // Where HIP's symbols are those of another vendor's driver.
        Ok(Err(why)) => eprintln!("not covered: the contract on SDMA engines: {why}"),
        _ => {
            let downgraded = Layered::new(sdma(), "downgrade", move |_| coarse);
            suite = suite.with(sdma()).with(downgraded);
        }
    }
    suite
        .with(rocm("-signal-by-copy", |options| options.signal = Some(SignalBy::Copy)))
        .with(rocm("-self-copy-by-link", |options| options.self_copy = SelfCopy::Link))
        .run()
}
