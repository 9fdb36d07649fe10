//! Runs groups whose nodes hold different kinds of memory, one process for each rank: devices of
//! the simulated drivers, and host memory, with the host backend as the network between nodes.

mod blocking;
mod cuda;
mod mixed;
mod support;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use peerlane_host as host;
use peerlane_tests::processes::{Child, Parent};
use peerlane_tests::{GpuDriver, Outcome};

use self::cuda as vendor;
use mixed::processes::Kind::{Cuda, Host, Rocm, Sdma};
use mixed::processes::{Processes, Scenario};
use mixed::rank;

const PROCESSES: [Processes; 18] = [
    Processes { scenario: Scenario::Gathers, ranks: &[(0, Cuda), (1, Cuda)] },
    Processes {
        scenario: Scenario::Gathers,
        ranks: &[(0, Cuda), (0, Cuda), (1, Cuda), (2, Cuda), (2, Cuda)],
    },
    Processes { scenario: Scenario::Gathers, ranks: &[(0, Cuda), (1, Host)] },
    Processes { scenario: Scenario::Gathers, ranks: &[(0, Host), (0, Host), (1, Cuda)] },
    Processes {
        scenario: Scenario::Gathers,
        ranks: &[(0, Cuda), (1, Host), (0, Cuda), (1, Host), (2, Cuda)],
    },
    // Devices of two vendors, and a host.
    Processes { scenario: Scenario::Gathers, ranks: &[(0, Cuda), (1, Rocm)] },
    Processes { scenario: Scenario::Gathers, ranks: &[(0, Rocm), (0, Rocm), (1, Cuda), (2, Host)] },
    Processes {
        scenario: Scenario::Gathers,
        ranks: &[(0, Cuda), (0, Cuda), (1, Rocm), (1, Rocm), (2, Host), (2, Host)],
    },
    Processes {
        scenario: Scenario::Gathers,
        ranks: &[(0, Sdma), (1, Cuda), (0, Sdma), (2, Host), (1, Cuda)],
    },
    Processes { scenario: Scenario::Strict, ranks: &[(0, Rocm), (1, Cuda)] },
    Processes { scenario: Scenario::Killed, ranks: &[(0, Cuda), (1, Host), (2, Rocm)] },
    Processes { scenario: Scenario::Strict, ranks: &[(0, Cuda), (1, Cuda)] },
    Processes { scenario: Scenario::Strict, ranks: &[(0, Cuda), (1, Host)] },
    Processes { scenario: Scenario::Disagrees, ranks: &[(0, Cuda), (0, Host), (1, Cuda)] },
    Processes { scenario: Scenario::Killed, ranks: &[(0, Cuda), (1, Cuda), (2, Cuda)] },
    Processes { scenario: Scenario::Killed, ranks: &[(0, Host), (1, Cuda), (1, Cuda)] },
    Processes { scenario: Scenario::Killed, ranks: &[(0, Cuda), (0, Cuda), (1, Cuda), (1, Cuda)] },
    Processes { scenario: Scenario::Killed, ranks: &[(0, Cuda), (1, Cuda), (1, Cuda)] },
];

/// Around a slot, and beyond all slots together.
const BLOCKS: [usize; 4] = [1, 5001, (256 << 10) + 1, 2_200_001];

fn main() -> ExitCode {
    if let Some(parent) = Parent::find() {
        return parent.exit_code(rank::run_rank(&parent, |rank, ranks| {
            Ok(host::Fabric::open(rank, ranks)?)
        }));
    }
    let driver = GpuDriver::load::<peerlane_cuda::Context>();
    eprintln!("running on: {driver:?}");
    let mut arguments = Arguments::from_args();
    // Ranks share the processors already.
    arguments.test_threads.get_or_insert(1);
    let trials = PROCESSES.into_iter().map(|processes| {
        let name = format!("{}::{}", driver.name::<peerlane_cuda::Context>(), processes.name());
        Trial::test(name, move || processes.run("127.0.0.1:0", &BLOCKS, start).map_err(Into::into))
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

/// Starts this program as a rank; all nodes are this machine.
fn start(_: usize, values: &[(&str, String)]) -> Outcome<Child> {
    Child::start("rank", values)
}
