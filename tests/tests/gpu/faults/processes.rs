//! Starts and reads the processes of a fault, from the side of the test.

use std::ffi::OsStr;
use std::process::Command;
use std::time::Duration;

use peerlane_collectives::bootstrap::tcp::Hub;
use peerlane_hal::Deadline;
use peerlane_tests::processes::Child;
use peerlane_tests::{Failure, Gpu as _, GpuDriver, Outcome};

use crate::support::data::unexpected;
use crate::vendor::Context;

/// A bound for what no fault waits for on purpose.
pub(crate) fn patience() -> Deadline {
    Deadline::after(Duration::from_secs(40))
}

/// A process that is about to be started.
pub(crate) struct Player {
    role: &'static str,
    command: Command,
}

impl Player {
    pub(crate) fn new(driver: GpuDriver, role: &'static str) -> Outcome<Self> {
        let program = std::env::current_exe();
        let program = program.map_err(|error| {
            Failure::new(format!("cannot find the file of the test program: {error}"))
        })?;
        let mut command = Command::new(program);
        command.env("PEERLANE_TEST_ROLE", role);
        command.env(Context::CHOICE, driver.choice());
        command.env("PEERLANE_SIM_GRANULARITY_KIB", "64");
        Ok(Self { role, command })
    }

    /// A value that only our own code reads.
    pub(crate) fn value(mut self, name: &str, value: impl ToString) -> Self {
        self.command.env(format!("PEERLANE_TEST_{name}"), value.to_string());
        self
    }

    pub(crate) fn variable(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Takes the driver from a folder, as a program does that knows nothing of tests.
    pub(crate) fn driver_from(self, folder: impl AsRef<OsStr>) -> Self {
        self.variable(Context::CHOICE, "device").variable("LD_LIBRARY_PATH", folder)
    }

    pub(crate) fn start(self) -> Outcome<Child> {
        Child::spawn(self.role, self.command)
    }
}

/// Starts a rank for each number; `change` makes one what it shall be.
pub(crate) fn ranks(
    driver: GpuDriver,
    role: &'static str,
    ranks: usize,
    change: impl Fn(usize, Player) -> Player,
) -> Outcome<(Hub, Vec<Child>)> {
    let hub = Hub::bind("127.0.0.1:0", ranks).map_err(unexpected)?;
    let start = |rank| {
        let player = Player::new(driver, role)?.value("RANK", rank).value("RANKS", ranks);
        change(rank, player.value("HUBS", hub.address())).start()
    };
    let children = (0..ranks).map(start).collect::<Outcome<_>>()?;
    Ok((hub, children))
}

/// What every process says next.
pub(crate) fn words(children: &mut [Child]) -> Outcome<Vec<String>> {
    let deadline = patience();
    children.iter_mut().map(|child| child.read_line(deadline)).collect()
}

pub(crate) fn finish(mut children: Vec<Child>) -> Outcome {
    let deadline = patience();
    children.iter_mut().try_for_each(|child| child.finish(deadline))
}

/// Fails unless the text begins so and holds all of these words.
pub(crate) fn says(who: &str, text: &str, begins: &str, holds: &[&str]) -> Outcome {
    let missing: Vec<_> = holds.iter().filter(|words| !text.contains(**words)).collect();
    if text.starts_with(begins) && missing.is_empty() {
        return Ok(());
    }
    Err(Failure::new(format!("{who} said {text:?}, expected {begins:?} and {missing:?}")))
}
