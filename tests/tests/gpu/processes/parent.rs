//! Starts the ranks of a scenario and reads their results, from the side of the test.

use std::process::Command;
use std::time::Duration;

use peerlane_collectives::bootstrap::tcp::Hub;
use peerlane_hal::Deadline;
use peerlane_tests::processes::{Child, finish_all};
use peerlane_tests::{Failure, Gpu as _, GpuDriver, Outcome};

use super::Scenario;
use crate::support::data::unexpected;
use crate::support::machine::Machine;
use crate::vendor::{Context, devices, folder_without};

/// Why groups of more ranks need the simulated driver.
pub(crate) const TOO_MANY: &str = "only the simulated driver has a device for each of so many";
/// Why other machines need it.
pub(crate) const OTHER: &str = "only the simulated driver can lack what GPUs have";
/// Why threads need a device each.
pub(crate) const SHARED: &str = "ranks of one process that share a GPU share its hardware queues, so their waits hold each other up";
/// How long a rank may take for a scenario.
const PATIENCE: Duration = Duration::from_secs(100);
/// Groups of the same ranks at once.
const GROUPS: usize = 3;
/// Ranks beyond this need the simulated driver.
const DEVICES: usize = 4;
/// Of the simulated driver.
const DEVICES_SIMULATED: usize = 9;

/// The ranks of one scenario.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Processes {
    pub(crate) driver: GpuDriver,
    pub(crate) ranks: usize,
    pub(crate) scenario: Scenario,
    pub(crate) machine: Machine,
    /// The kind of its engines.
    pub(crate) engine: &'static str,
    /// Whether the ranks are threads of one process.
    pub(crate) are_threads: bool,
}

impl Processes {
    pub(crate) fn reason_to_skip(self) -> Option<&'static str> {
        match (self.driver, self.machine) {
            (GpuDriver::Simulated, _) => None,
            (GpuDriver::Device, Machine::Whole) if self.are_threads => {
                (self.ranks > devices()).then_some(SHARED)
            }
            (GpuDriver::Device, Machine::Whole) => (self.ranks > DEVICES).then_some(TOO_MANY),
            (GpuDriver::Device, _) => Some(OTHER),
        }
    }

    pub(crate) fn run(self) -> Outcome {
        let hubs: Result<Vec<Hub>, _> =
            (0..GROUPS).map(|_| Hub::bind("127.0.0.1:0", self.ranks)).collect();
        let hubs = hubs.map_err(unexpected)?;
        let addresses: Vec<_> = hubs.iter().map(|hub| hub.address().to_string()).collect();
        let start = |rank| self.start(rank, &addresses.join(","));
        let processes = if self.are_threads { 1 } else { self.ranks };
        let mut children: Vec<Child> = (0..processes).map(start).collect::<Outcome<_>>()?;
        finish_all(&mut children, Deadline::after(PATIENCE))
    }

    fn start(self, rank: usize, hubs: &str) -> Outcome<Child> {
        let program = std::env::current_exe();
        let program = program.map_err(|error| {
            Failure::new(format!("cannot find the file of the test program: {error}"))
        })?;
        let mut command = Command::new(program);
        command.env("PEERLANE_TEST_ROLE", super::ROLE);
        for (name, value) in [
            ("RANK", rank.to_string()),
            ("RANKS", self.ranks.to_string()),
            ("HUBS", hubs.to_owned()),
            ("SCENARIO", self.scenario.to_string()),
            ("ENGINE", self.engine.to_owned()),
            ("ARE_THREADS", self.are_threads.to_string()),
        ] {
            command.env(format!("PEERLANE_TEST_{name}"), value);
        }
        match self.driver {
            GpuDriver::Device => command.env(Context::CHOICE, "device"),
            GpuDriver::Simulated => self.simulate(rank, &mut command),
        };
        Child::spawn(super::ROLE, command)
    }

    /// A machine with a device for each rank, and with copies that take their time.
    fn simulate(self, rank: usize, command: &mut Command) -> &mut Command {
        let devices = if self.ranks > DEVICES { DEVICES_SIMULATED } else { DEVICES };
        command.env(Context::CHOICE, "simulated");
        command.env("PEERLANE_SIM_DEVICES", devices.to_string());
        command.env("PEERLANE_SIM_GRANULARITY_KIB", "64");
        match self.machine {
            Machine::Whole => {}
            Machine::With(setting, value) => {
                command.env(format!("PEERLANE_SIM_{setting}"), value);
            }
            Machine::Without(symbol) => {
                // Found as a program finds it that knows nothing of tests.
                command.env(Context::CHOICE, "device");
                command.env("LD_LIBRARY_PATH", folder_without(symbol));
            }
            Machine::Release(release) => {
                command.env(format!("{}_RELEASE", Context::CHOICE), release);
            }
        }
        if self.scenario == Scenario::Delayed {
            command.env("PEERLANE_SIM_JITTER_US", "300");
            command.env("PEERLANE_SIM_SEED", rank.to_string());
        }
        command
    }
}
