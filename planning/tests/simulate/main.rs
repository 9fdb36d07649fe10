//! Tests the simulation of plans over links.
//!
//! | module | shows |
//! | --- | --- |
//! | `algorithms` | every algorithm ends, moves what its definition says, and takes the time of its formula |
//! | `by_hand` | small plans take the times that can be worked out in the head |
//! | `faults` | plans and arguments that cannot be simulated are refused, with the reason |
//! | `formulas` | the closed formulas of the cost model agree with the simulation |
//! | `golden` | the times of a few topologies are those of a file |

mod algorithms;
mod by_hand;
mod choice;
mod faults;
mod formulas;
mod golden;

use peerlane_planning::collective::Collective;
use peerlane_planning::cost::{Link, Links, Node};
use peerlane_planning::error::Error;
use peerlane_planning::layout::Layout;
use peerlane_planning::plan::Plan;
use peerlane_planning::simulate::{self, Options, Simulation};
use peerlane_planning::topology::Topology;

/// A byte takes a picosecond, everything else no time.
fn link() -> Link {
    let rate = 1e12;
    Link {
        put_seconds: 0.0,
        get_seconds: 0.0,
        flag_seconds: 0.0,
        step_seconds: 0.0,
        submit_seconds: 0.0,
        bytes_per_second: rate,
        get_bytes_per_second: None,
        passed_on_bytes_per_second: None,
        passed_on_seconds: 0.0,
        engine_bytes_per_second: rate,
        send_bytes_per_second: rate,
        receive_bytes_per_second: rate,
        puts_in_flight: 1,
        by_processor: false,
    }
}

fn links() -> Links {
    Links {
        engine: String::new(),
        own: link(),
        local: link(),
        network: link(),
        node: Node::default(),
        start_seconds: 0.0,
        lane_seconds: 0.0,
        residuals: Vec::new(),
    }
}

/// Plans of as many lines as it takes, `|` between the lanes of a rank and a blank line between
/// ranks, of as many ranks as there are nodes named.
struct Case {
    plans: Vec<Plan>,
    topology: Topology,
    block_bytes: Vec<u64>,
    options: Options,
}

impl Case {
    /// Ranks on `nodes`, each with 1000 bytes, and what each lane of each does; lane 1 and those
    /// behind it are on the network if `network`.
    fn new(nodes: &[u32], network: bool, lanes: &[&[&str]]) -> Self {
        let plan = |(rank, lanes): (usize, &&[&str])| {
            let ranks = nodes.len();
            let mut text =
                format!("all-gather direct: rank {rank} of {ranks}, 1 chunk, in place\n");
            for (lane, steps) in lanes.iter().enumerate() {
                let tier = if lane > 0 && network { " network" } else { "" };
                text += &format!("lane {lane}{tier}\n{}\n", steps.replace("; ", "\n"));
            }
            text.parse().unwrap_or_else(|error| panic!("{error}"))
        };
        Self {
            plans: lanes.iter().enumerate().map(plan).collect(),
            topology: Topology::of_nodes(nodes).unwrap(),
            block_bytes: vec![1000; nodes.len()],
            options: Options { forks: true, ..Options::default() },
        }
    }

    /// With ranks that start late.
    fn delayed(mut self, delays: &[u64]) -> Self {
        self.options.delays = delays.to_vec();
        self
    }

    fn run(&self, links: &Links) -> Result<Simulation, Error> {
        let layout = Layout::new(Collective::AllGather, &self.block_bytes, 1).unwrap();
        let plan = |rank: peerlane_hal::Rank| Ok(self.plans[rank.index()].clone());
        simulate::simulate(&self.topology, &layout, links, &self.options, plan)
    }

    /// When the ranks end, in picoseconds.
    fn ends(&self, links: &Links) -> Vec<u64> {
        self.run(links).unwrap_or_else(|error| panic!("{error}")).ends_ps
    }
}
