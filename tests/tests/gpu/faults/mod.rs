//! Tests faults of drivers, devices, memory and peers.
//!
//! Each fault has its own processes. The kind of the error and the important words of its text are
//! checked, and the surviving ranks must be able to use their devices.
//!
//! On GPUs the faults that must be injected into the driver are ignored.

mod driver_variants;
mod engines;
mod memory;
pub(crate) mod opener;
mod peers;
pub(crate) mod processes;
mod rank;
mod staged;
mod survivor;

use libtest_mimic::Trial;
use peerlane_tests::processes::Parent;
use peerlane_tests::{Failure, GpuDriver, Outcome};

use crate::opening;
use crate::vendor::Context;

/// Why a fault is not tried on GPUs.
const ON_DEMAND: &str = "the fault is made inside of the simulated driver";

/// Lists the faults.
pub(crate) fn trials(driver: GpuDriver) -> Vec<Trial> {
    let faults =
        [opening::faults(), memory::faults(), driver_variants::faults(), engines::faults()];
    let faults = faults.into_iter().flatten().chain(staged::faults()).chain(peers::faults(driver));
    let trials = faults.map(|Fault { name, on_demand, run }| {
        let name = format!("{}::faults::{name}", driver.name::<Context>());
        Trial::test(name, move || run(driver).map_err(Into::into))
            .with_ignored_flag(on_demand && driver == GpuDriver::Device)
    });
    if driver == GpuDriver::Device {
        eprintln!("not covered: some faults of {}: {ON_DEMAND}", driver.name::<Context>());
    }
    trials.collect()
}

/// A call that fails after so many that do not, and how errors name it.
pub(crate) type Failing = (&'static str, u32, &'static str);

/// One thing that goes wrong.
pub(crate) struct Fault {
    name: String,
    /// Whether only the simulated driver can do it.
    on_demand: bool,
    run: Box<dyn Fn(GpuDriver) -> Outcome + Send>,
}

impl Fault {
    /// One that GPUs can have as well.
    pub(crate) fn new(
        name: impl Into<String>,
        run: impl Fn(GpuDriver) -> Outcome + Send + 'static,
    ) -> Self {
        Self { name: name.into(), on_demand: false, run: Box::new(run) }
    }

    /// One that is made inside of the simulated driver.
    pub(crate) fn simulated(
        name: impl Into<String>,
        run: impl Fn(GpuDriver) -> Outcome + Send + 'static,
    ) -> Self {
        Self { on_demand: true, ..Self::new(name, run) }
    }
}

/// What this process was started for.
pub(crate) fn run_rank(parent: &Parent) -> Outcome {
    match parent.role() {
        "open" => rank::open(parent),
        "gather" => rank::gather(parent),
        "capture" => rank::capture(parent),
        "memory" => memory::run_rank(parent),
        "staged" => staged::gather(parent),
        "strict" => staged::refuse(parent),
        "survive" => survivor::run_rank(parent),
        role => Err(Failure::new(format!("there is no role {role:?}"))),
    }
}
