//! Runs whole groups over RDMA or UCX on several nodes, one process for each rank: over the network
//! alone, and with host memory inside a node.
//!
//! It also tests what happens to a group when one of its processes is killed or stopped. The nodes
//! are network namespaces, each with a device of the network; without these the tests are skipped.

mod rounds;
mod scenario;
mod stopped;

use std::process::ExitCode;
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};
use peerlane_collectives::bootstrap::Secret;
use peerlane_collectives::bootstrap::tcp::HubOptions;
use peerlane_hal::Deadline;
use peerlane_tests::Outcome;
use peerlane_tests::processes::nodes::{hub_address, nodes, reason_to_skip, start};
use peerlane_tests::processes::{Child, Parent, finish_all};

use scenario::{Scenario, unexpected};

/// How long the ranks may take.
const PATIENCE: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    if let Some(parent) = Parent::find() {
        return parent.exit_code(scenario::run_rank(&parent));
    }
    let mut arguments = Arguments::from_args();
    // Ranks share the processors already.
    arguments.test_threads.get_or_insert(1);
    let of_network = nodes().first().map_or("rdma", |node| node.network);
    let processes = Processes::ALL.into_iter();
    let processes = processes.filter(|it| of_network == "rdma" || !it.scenario.is_stalled());
    let trials = processes.map(|processes| {
        let skip = reason_to_skip(processes.nodes());
        let name = format!("{of_network}_processes::{}::{}", processes.scenario, processes.name());
        let reason = skip.clone().unwrap_or_default();
        let run = move || match skip {
            Some(reason) => Err(Failed::from(reason)),
            None => processes.run().map_err(Into::into),
        };
        let trial = Trial::test(name, run).with_ignored_flag(!reason.is_empty());
        (trial, reason)
    });
    let (trials, reasons): (Vec<_>, Vec<_>) = trials.unzip();
    if let Some(reason) = reasons.iter().find(|reason| !reason.is_empty()) {
        eprintln!("not covered: rdma_processes: {reason}");
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The processes of a scenario, each a rank on a node.
#[derive(Clone, Copy, Debug)]
struct Processes {
    scenario: Scenario,
    node_of_rank: &'static [usize],
}

impl Processes {
    const ALL: [Self; 10] = [
        Self { scenario: Scenario::Network, node_of_rank: &[0] },
        Self { scenario: Scenario::Network, node_of_rank: &[0, 1, 0, 1, 2] },
        Self { scenario: Scenario::Tiers, node_of_rank: &[0, 0, 1, 2, 2] },
        Self { scenario: Scenario::Streams, node_of_rank: &[0, 0, 1] },
        Self { scenario: Scenario::Idle, node_of_rank: &[0, 1] },
        Self { scenario: Scenario::IdleTiers, node_of_rank: &[0, 0, 1] },
        Self { scenario: Scenario::Killed, node_of_rank: &[0, 1, 2] },
        Self { scenario: Scenario::Stopped, node_of_rank: &[0, 1, 2] },
        Self { scenario: Scenario::Stalled, node_of_rank: &[0, 1] },
        Self { scenario: Scenario::StalledAwake, node_of_rank: &[0, 1] },
    ];

    fn nodes(self) -> usize {
        self.node_of_rank.iter().max().map_or(0, |node| node + 1).max(1)
    }

    fn name(self) -> String {
        let nodes: Vec<String> = self.node_of_rank.iter().map(ToString::to_string).collect();
        format!("nodes_{}", nodes.join("_"))
    }

    fn run(self) -> Outcome {
        let ranks = self.node_of_rank.len();
        let secret = Secret::random().map_err(unexpected)?;
        let options = HubOptions::default().secret(secret.clone());
        let hub = options.bind(&hub_address(), ranks).map_err(unexpected)?;
        let nodes = nodes();
        let placed: Vec<String> = self.node_of_rank.iter().map(ToString::to_string).collect();
        let start = |(rank, node): (usize, &usize)| {
            let values = [
                ("RANK", rank.to_string()),
                ("RANKS", ranks.to_string()),
                ("NODES", placed.join(",")),
                ("HUB", hub.address().to_string()),
                ("SECRET", secret.expose().to_owned()),
                ("SCENARIO", self.scenario.to_string()),
            ];
            start(&nodes[*node], &values)
        };
        let mut children: Vec<Child> =
            self.node_of_rank.iter().enumerate().map(start).collect::<Outcome<_>>()?;
        let deadline = Deadline::after(PATIENCE);
        let mut victim = self.scenario.has_victim().then(|| children.pop()).flatten();
        if let Some(victim) = &mut victim {
            victim.read_until("under way", deadline)?;
            if self.scenario == Scenario::Killed { victim.kill()? } else { victim.stop()? }
        }
        finish_all(&mut children, deadline)
    }
}
