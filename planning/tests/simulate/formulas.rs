//! The closed formulas of the cost model against the simulation, which takes every step.
//!
//! They differ where many ranks send to the lone rank of a small node at once: the others wait for
//! each other there, which no formula sees.

use peerlane_hal::{LinkKind, Rank};
use peerlane_planning::collective::Collective;
use peerlane_planning::cost::{self, Links};
use peerlane_planning::layout::Layout;
use peerlane_planning::plan::FlagOrder;
use peerlane_planning::schedule::{self, Shape};
use peerlane_planning::simulate::{self, Options};
use peerlane_planning::topology::Topology;

#[test]
fn formulas_and_simulation_agree_on_all_gathers() {
    agree(Collective::AllGather);
}

#[test]
fn formulas_and_simulation_agree_on_broadcasts() {
    agree(Collective::Broadcast { root: Rank(0) });
}

#[test]
fn formulas_and_simulation_agree_on_all_to_alls() {
    agree(Collective::AllToAll);
}

#[test]
fn formulas_and_simulation_agree_on_gathers() {
    agree(Collective::Gather { root: Rank(0) });
}

#[test]
fn formulas_and_simulation_agree_on_scatters() {
    agree(Collective::Scatter { root: Rank(0) });
}

/// Checks a collective with the first and with the last rank as the root, if it has one.
fn agree(collective: Collective) {
    agree_with_root(|_| collective);
    if collective.root().is_some() {
        agree_with_root(|ranks| collective.with_root(Rank::at(ranks - 1)));
    }
}

/// Checks that 19 of 20 predictions are within a fourth of the simulation.
fn agree_with_root(collective: impl Fn(usize) -> Collective) {
    let gpu = Links::default();
    let host = Links::of_kinds(LinkKind::SharedMemory, LinkKind::Rdma);
    let mut off = Vec::new();
    let mut count = 0;
    // What a peer has just put here takes as long again, and so does asking for bytes, which come half
    // as fast.
    let mut far = host.clone();
    far.local.passed_on_bytes_per_second = Some(far.local.bytes_per_second);
    far.local.passed_on_seconds = 10.0 * far.local.put_seconds;
    far.local.get_seconds = 2.0 * far.local.put_seconds;
    far.local.get_bytes_per_second = Some(far.local.bytes_per_second / 2.0);
    for (name, links, flags) in [
        ("gpu", gpu, FlagOrder::Batched),
        ("host", host, FlagOrder::Prompt),
        ("far", far, FlagOrder::Prompt),
    ] {
        let mut links = links;
        links.local.submit_seconds = 0.0;
        links.network.submit_seconds = 0.0;
        links.own.submit_seconds = 0.0;
        links.start_seconds = 0.0;
        links.lane_seconds = 0.0;
        if flags == FlagOrder::Batched {
            // The simulation knows no batches of flags.
            links.local.step_seconds = 0.0;
            links.network.step_seconds = 0.0;
            links.own.step_seconds = 0.0;
        }
        for nodes in ["1x2", "1x4", "1x7", "2x4", "3x2", "4x1", "3+1+2", "8x4"] {
            let topology: Topology = nodes.parse().unwrap();
            let collective = collective(topology.ranks());
            let in_place = collective.runs_in_place();
            for (bytes, chunks) in [(4 << 10, 1), (1 << 20, 1), (1 << 20, 4), (64 << 20, 8)] {
                let tiers = topology.nodes() > 1;
                let shape =
                    Shape { collective, chunks, in_place, flags, tiers, ..Shape::default() };
                for algorithm in schedule::fitting(&topology, shape) {
                    let blocks = vec![bytes; topology.ranks()];
                    let layout = Layout::new(collective, &blocks, chunks).unwrap();
                    let plan = |rank| schedule::plan(algorithm, &topology, rank, shape);
                    let simulated =
                        simulate::simulate(&topology, &layout, &links, &Options::default(), plan)
                            .unwrap()
                            .seconds();
                    let said = cost::predict(algorithm, &topology, shape, &blocks, &links);
                    let ratio = said.unwrap().seconds() / simulated;
                    count += 1;
                    if !(0.8..=1.25).contains(&ratio) {
                        off.push(format!(
                            "{name} {nodes} {algorithm} {bytes} x{chunks}: {ratio:.2} of {:.1} µs",
                            simulated * 1e6
                        ));
                    }
                }
            }
        }
    }
    assert!(off.len() * 20 <= count, "{} of {count} are off\n{}", off.len(), off.join("\n"));
}
