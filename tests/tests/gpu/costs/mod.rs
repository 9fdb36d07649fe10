//! Measures the cost of groups on GPUs: driver calls and allocations of a start, concurrent copies,
//! and what remains when groups are closed.
//!
//! The simulated driver counts its calls; on GPUs only allocations are counted, and the use of compute units is observed.
//! Each rank is a process.

mod calls;
mod compute;
mod machine;

use std::process::Command;
use std::time::Duration;

use libtest_mimic::Trial;
use peerlane_collectives::bootstrap::tcp::Hub;
use peerlane_hal::Deadline;
use peerlane_tests::processes::{Child, Parent};
use peerlane_tests::{Failure, GpuDriver, Outcome};

use crate::support::data::{check, unexpected};
use crate::support::test_rank::TestRank;
use crate::vendor::Context;

/// Why most of it is not looked at on GPUs.
const COUNTED: &str = "only the simulated driver counts";
/// Why one is not looked at on the simulated driver.
const OBSERVED: &str = "only a GPU has compute units";
const PATIENCE: Duration = Duration::from_secs(60);

/// Settings of the simulated driver.
type Variables = &'static [(&'static str, &'static str)];

const ENGINES: [Variables; 4] = [
    &[("COPY_ENGINES", "1")],
    &[("COPY_ENGINES", "2")],
    &[("COPY_ENGINES", "3")],
    &[("COPY_ENGINES", "5")],
];
const LEFTOVERS: [Variables; 3] = [&[], &[("VMM", "off")], &[("PEER_WRITES", "refuse")]];

/// The role of a process that is one rank.
pub(crate) const ROLE: &str = "cost";

/// Lists what is counted.
pub(crate) fn trials(driver: GpuDriver) -> Vec<Trial> {
    let mut trials = Vec::new();
    let mut add = |bill: Bill| {
        let runs = match bill.what {
            "allocations" => true,
            "compute_units" => driver == GpuDriver::Device,
            _ => driver == GpuDriver::Simulated,
        };
        let name = format!("{}::costs::{bill}", driver.name::<Context>());
        let trial = Trial::test(name, move || bill.run(driver).map_err(Into::into));
        trials.push(trial.with_ignored_flag(!runs));
    };
    for ranks in 1..=4 {
        add(Bill { what: "calls", ranks, variables: &[] });
        add(Bill { what: "allocations", ranks, variables: &[] });
    }
    for variables in ENGINES {
        add(Bill { what: "copies", ranks: 4, variables });
    }
    for variables in LEFTOVERS {
        add(Bill { what: "leftovers", ranks: 2, variables });
    }
    add(Bill { what: "captured_leftovers", ranks: 2, variables: &[] });
    add(Bill { what: "compute_units", ranks: 1, variables: &[] });
    let why = if driver == GpuDriver::Device { COUNTED } else { OBSERVED };
    eprintln!("some are ignored: {why}");
    trials
}

/// What is counted, of how many ranks, on which machine.
#[derive(Clone, Copy, Debug)]
struct Bill {
    what: &'static str,
    ranks: usize,
    variables: Variables,
}

impl std::fmt::Display for Bill {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}::{}_ranks", self.what, self.ranks)?;
        self.variables.iter().try_for_each(|(name, value)| write!(f, "::{name}_{value}"))
    }
}

impl Bill {
    fn run(self, driver: GpuDriver) -> Outcome {
        let groups = if self.what.ends_with("leftovers") { 1 + machine::GROUPS } else { 1 };
        let hubs = (0..groups).map(|_| Hub::bind("127.0.0.1:0", self.ranks));
        let hubs = hubs.collect::<Result<Vec<_>, _>>().map_err(unexpected)?;
        let addresses: Vec<_> = hubs.iter().map(|hub| hub.address().to_string()).collect();
        let start = |rank| self.start(driver, rank, &addresses.join(","));
        let mut children = (0..self.ranks).map(start).collect::<Outcome<Vec<_>>>()?;
        let deadline = Deadline::after(PATIENCE);
        let said = children.iter_mut().map(|child| child.read_line(deadline));
        let said = said.collect::<Outcome<Vec<_>>>()?;
        check(said.iter().all(|text| text == "done"), || said.join("\n"))?;
        children.iter_mut().try_for_each(|child| child.finish(deadline))
    }

    fn start(self, driver: GpuDriver, rank: usize, hubs: &str) -> Outcome<Child> {
        let program = std::env::current_exe();
        let program = program.map_err(|error| {
            Failure::new(format!("cannot find the file of the test program: {error}"))
        })?;
        let mut command = Command::new(program);
        command.env("PEERLANE_TEST_ROLE", ROLE);
        command.env("PEERLANE_TEST_WHAT", self.what);
        command.env("PEERLANE_TEST_RANK", rank.to_string());
        command.env("PEERLANE_TEST_RANKS", self.ranks.to_string());
        command.env("PEERLANE_TEST_HUBS", hubs);
        let choice = match driver {
            GpuDriver::Device => "device",
            GpuDriver::Simulated => "simulated",
        };
        command.env("PEERLANE_TEST_CUDA", choice);
        command.env("PEERLANE_SIM_GRANULARITY_KIB", "64");
        for (name, value) in self.variables {
            command.env(format!("PEERLANE_SIM_{name}"), value);
        }
        Child::spawn(self.what, command)
    }
}

/// One rank.
pub(crate) fn run_rank(parent: &Parent) -> Outcome {
    let mut test_rank = TestRank::open(parent)?;
    match parent.value::<String>("WHAT")?.as_str() {
        "calls" => calls::calls(&mut test_rank),
        "allocations" => calls::allocations(&mut test_rank),
        "copies" => machine::copies(&mut test_rank),
        "leftovers" => machine::leftovers(&mut test_rank),
        "compute_units" => compute::compute_units(&mut test_rank),
        "captured_leftovers" => machine::captured_leftovers(&mut test_rank),
        what => Err(Failure::new(format!("nothing is called {what:?}"))),
    }?;
    test_rank.group.close().map_err(unexpected)?;
    parent.print_line("done");
    Ok(())
}
