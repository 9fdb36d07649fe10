//! What goes wrong around GPUs: drivers, devices, memory and peers that are not what they should be.
//! Each fault has processes of its own; the kind of the error and the words that matter are wanted,
//! and whoever survives goes on using its device.
//!
//! On GPUs what must be made to go wrong inside the driver is ignored.

pub(crate) mod cast;
mod engines;
mod memory;
pub(crate) mod opener;
mod peers;
mod rank;
mod staged;
mod survivor;
mod ways;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use peerlane_conformance::processes::Parent;
use peerlane_conformance::{Failure, GpuDriver, Outcome};

use crate::opening;
use crate::vendor::Context;

/// Why a fault is not tried on GPUs.
const ON_DEMAND: &str = "the fault is made inside of the simulated driver";

pub(crate) fn main() -> ExitCode {
    if let Some(parent) = Parent::find() {
        return parent.exit_code(play(&parent));
    }
    let driver = GpuDriver::load::<Context>();
    eprintln!("running on: {driver:?}");
    let mut arguments = Arguments::from_args();
    // Several cases say how soon something must be over.
    arguments.test_threads.get_or_insert(1);
    let faults = [opening::faults(), memory::faults(), ways::faults(), engines::faults()];
    let faults = faults.into_iter().flatten().chain(staged::faults()).chain(peers::faults());
    let trials = faults.map(|Fault { name, on_demand, play }| {
        let name = format!("{}::{name}", driver.name::<Context>());
        Trial::test(name, move || play(driver).map_err(Into::into))
            .with_ignored_flag(on_demand && driver == GpuDriver::Device)
    });
    let trials = trials.collect();
    if driver == GpuDriver::Device {
        eprintln!("some are ignored: {ON_DEMAND}");
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// A call that fails after so many that do not, and how errors name it.
pub(crate) type Failing = (&'static str, u32, &'static str);

/// One thing that goes wrong.
pub(crate) struct Fault {
    name: String,
    /// Whether only the simulated driver can do it.
    on_demand: bool,
    play: Box<dyn Fn(GpuDriver) -> Outcome + Send>,
}

impl Fault {
    /// One that GPUs can have as well.
    pub(crate) fn new(
        name: impl Into<String>,
        play: impl Fn(GpuDriver) -> Outcome + Send + 'static,
    ) -> Self {
        Self { name: name.into(), on_demand: false, play: Box::new(play) }
    }

    /// One that is made inside of the simulated driver.
    pub(crate) fn simulated(
        name: impl Into<String>,
        play: impl Fn(GpuDriver) -> Outcome + Send + 'static,
    ) -> Self {
        Self { on_demand: true, ..Self::new(name, play) }
    }
}

/// What this process was started for.
fn play(parent: &Parent) -> Outcome {
    match parent.role() {
        "open" => rank::open(parent),
        "gather" => rank::gather(parent),
        "capture" => rank::capture(parent),
        "memory" => memory::play(parent),
        "staged" => staged::gather(parent),
        "strict" => staged::refuse(parent),
        "survive" => survivor::play(parent),
        role => Err(Failure::new(format!("there is no role {role:?}"))),
    }
}
