//! Runs groups whose nodes hold different kinds of memory, with RDMA or UCX between them, one
//! process for each rank.
//!
//! The memory is that of simulated devices, which neither a soft RoCE device nor UCX can register,
//! and host memory. The nodes are network namespaces, each with a device of the network; without
//! these the tests are skipped.

mod blocking;
mod cuda;
mod mixed;
mod support;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use peerlane_tests::processes::nodes::{self, hub_address, nodes, reason_to_skip};
use peerlane_tests::processes::{Child, Parent};
use peerlane_tests::{GpuDriver, Outcome};

use self::cuda as vendor;
use mixed::processes::Kind::{Cuda, Host};
use mixed::processes::{Processes, Scenario};
use mixed::rank;

/// `mixed_processes` has more of them; these show that a NIC which cannot register the memory of a device stages it, and
/// that launches inside of a node wait for what comes through it.
const PROCESSES: [Processes; 4] = [
    Processes { scenario: Scenario::Gathers, ranks: &[(0, Cuda), (1, Host), (1, Host), (2, Cuda)] },
    Processes { scenario: Scenario::Gathers, ranks: &[(0, Cuda), (0, Cuda), (1, Cuda)] },
    Processes { scenario: Scenario::Strict, ranks: &[(0, Cuda), (1, Host)] },
    Processes { scenario: Scenario::Killed, ranks: &[(0, Cuda), (1, Cuda)] },
];

/// Inside a slot, and of several; software devices in a virtual machine take their time.
const BLOCKS: [usize; 2] = [5001, 300_001];

fn main() -> ExitCode {
    if let Some(parent) = Parent::find() {
        let open = |rank, ranks| nodes::open_network(&parent, rank, ranks);
        return parent.exit_code(rank::run_rank(&parent, open));
    }
    let driver = GpuDriver::load::<peerlane_cuda::Context>();
    let mut arguments = Arguments::from_args();
    // Ranks share the processors already.
    arguments.test_threads.get_or_insert(1);
    let trials = PROCESSES.into_iter().map(|processes| {
        let skip = reason_to_skip(processes.nodes());
        if let Some(reason) = &skip {
            eprintln!("not covered: rdma_mixed {}: {reason}", processes.name());
        }
        let ignored = skip.is_some();
        let run = move || match skip {
            Some(reason) => Err(Failed::from(reason)),
            None => processes.run(&hub_address(), &BLOCKS, start).map_err(Into::into),
        };
        let name = format!(
            "{}_mixed::{}::{}",
            nodes().first().map_or("rdma", |node| node.network),
            driver.name::<peerlane_cuda::Context>(),
            processes.name()
        );
        Trial::test(name, run).with_ignored_flag(ignored)
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

/// Starts this program as a rank on a node.
fn start(node: usize, values: &[(&str, String)]) -> Outcome<Child> {
    nodes::start(&nodes()[node], values)
}
