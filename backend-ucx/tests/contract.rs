//! Runs the contract suite. `cargo test --test contract -- --list` lists the checks.

use std::process::ExitCode;
use std::time::Duration;

use peerlane_conformance::middleware::{DelayLayer, Layered};
use peerlane_conformance::{Harness, Suite};
use peerlane_hal::Rank;
use peerlane_ucx::{Error, Fabric};

struct Backend;

impl Harness for Backend {
    type Fabric = Fabric;

    fn name(&self) -> &str {
        "ucx"
    }

    /// Return an error of kind `Unavailable` if the device is absent: the checks are then ignored.
    fn open(&self, rank: Rank, ranks: usize) -> Result<Fabric, Error> {
        Fabric::open(rank, ranks)
    }
}

fn main() -> ExitCode {
    let delayed = |_: Rank| DelayLayer::new(1, Duration::from_micros(60));
    Suite::new().with(Backend).with(Layered::new(Backend, "delay", delayed)).run()
}
