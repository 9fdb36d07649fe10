//! All algorithms over many topologies: they end, move what the definition says, and take the time
//! that their formulas say.

use peerlane_hal::Rank;
use peerlane_planning::collective::Collective;
use peerlane_planning::cost::Links;
use peerlane_planning::layout::Layout;
use peerlane_planning::plan::{Algorithm, FlagOrder};
use peerlane_planning::schedule::{self, Shape};
use peerlane_planning::simulate::{self, LinkClass, Options, Simulation};
use peerlane_planning::topology::Topology;

use super::links;

fn simulate(
    algorithm: Algorithm,
    topology: &Topology,
    block_bytes: &[u64],
    shape: Shape,
    links: &Links,
    options: &Options,
) -> Simulation {
    let layout = Layout::new(Collective::AllGather, block_bytes, shape.chunks).unwrap();
    let plan = |rank| schedule::plan(algorithm, topology, rank, shape);
    simulate::simulate(topology, &layout, links, options, plan)
        .unwrap_or_else(|error| panic!("{algorithm} on {topology}, {shape:?}: {error}"))
}

fn topologies() -> Vec<Topology> {
    let flat = (1..=9).map(|ranks| vec![0; ranks]);
    let nodes = [
        vec![0, 0, 0, 0, 1, 1, 1, 1],
        vec![0, 0, 1, 1, 2, 2],
        vec![0, 1, 2, 3],
        vec![0, 0, 0, 1, 2, 2],
        vec![0, 1, 0, 2, 1, 0, 0],
    ];
    flat.chain(nodes).map(|nodes| Topology::of_nodes(&nodes).unwrap()).collect()
}

#[test]
fn all_algorithms_end_and_move_what_the_definition_says() {
    for topology in topologies() {
        let ranks = topology.ranks();
        let uneven: Vec<u64> = (0..ranks as u64).map(|rank| rank % 3 * 10_007).collect();
        let tiered = Shape { tiers: true, ..Shape::default() };
        for algorithm in schedule::fitting(&topology, tiered) {
            for chunks in [1, 3] {
                for (in_place, outputs) in [(false, 1), (true, 1), (false, 2)] {
                    for flags in [FlagOrder::Prompt, FlagOrder::Batched] {
                        for tiers in [false, true] {
                            let shape = Shape {
                                chunks,
                                in_place,
                                outputs,
                                flags,
                                tiers,
                                ..Shape::default()
                            };
                            let forks = chunks == 3;
                            let options = Options { forks, ..Options::default() };
                            let links = Links::default();
                            let simulation =
                                simulate(algorithm, &topology, &uneven, shape, &links, &options);
                            check_bytes(&simulation, &uneven, in_place);
                        }
                    }
                }
            }
        }
    }
}

fn check_bytes(simulation: &Simulation, block_bytes: &[u64], in_place: bool) {
    let total: u64 = block_bytes.iter().sum();
    for (own, rank) in block_bytes.iter().zip(&simulation.ranks) {
        let received = |class: LinkClass| rank.traffic[class as usize].received_bytes;
        assert_eq!(received(LinkClass::Own), if in_place { 0 } else { *own });
        assert_eq!(received(LinkClass::Local) + received(LinkClass::Network), total - own);
    }
    for class in LinkClass::ALL {
        let received =
            simulation.ranks.iter().map(|rank| rank.traffic[class as usize].received_bytes);
        assert_eq!(received.sum::<u64>(), simulation.bytes(class));
    }
}

#[test]
fn a_simulation_repeats_to_the_picosecond() {
    let topology = Topology::of_nodes(&[0, 0, 0, 1, 1, 2]).unwrap();
    let shape = Shape { chunks: 2, tiers: true, ..Shape::default() };
    for algorithm in schedule::fitting(&topology, shape) {
        let options = Options {
            delays: vec![0, 5_000_000, 1, 77_777],
            traced: Rank::all(6).collect(),
            forks: false,
        };
        let bytes = [1 << 20, 3, 700_001, 0, 1 << 19, 4096];
        let run = || simulate(algorithm, &topology, &bytes, shape, &Links::default(), &options);
        let simulation = run();
        assert_eq!(run(), simulation);
        let path = &simulation.critical_path;
        assert_eq!(path.first().map(|step| step.begin_ps), Some(0));
        assert!(path.windows(2).all(|pair| pair[0].end_ps == pair[1].begin_ps));
        assert!(path.iter().all(|step| step.begin_ps <= step.end_ps));
        assert!(simulation.end_ps() >= path.last().unwrap().end_ps);
        // Every step is recorded, copies as often as they are.
        assert_eq!(simulation.slices.len() as u64, simulation.steps, "{algorithm}");
    }
}

#[test]
fn a_ring_takes_a_put_and_a_flag_for_each_step() {
    for ranks in 2..=9u64 {
        let mut links = links();
        links.local.put_seconds = 100e-12;
        links.local.flag_seconds = 30e-12;
        let topology = Topology::flat(ranks as usize).unwrap();
        let shape = Shape { in_place: true, ..Shape::default() };
        let bytes = vec![6400; ranks as usize];
        let options = Options::default();
        let whole = simulate(Algorithm::Ring, &topology, &bytes, shape, &links, &options);
        // One flag more for `ready` at the start.
        assert_eq!(whole.end_ps(), 30 + (ranks - 1) * (100 + 6400 + 30));
        // In chunks a step's flags are hidden behind the next chunk.
        let shape = Shape { chunks: 10, ..shape };
        let chunks = simulate(Algorithm::Ring, &topology, &bytes, shape, &links, &options);
        assert_eq!(chunks.end_ps(), 30 + (ranks - 1) * 10 * (100 + 640) + 30);
        // All blocks but the own one were just put here: later, and half as fast.
        links.local.passed_on_bytes_per_second = Some(1e12);
        links.local.passed_on_seconds = 7e-12;
        let whole = Shape { chunks: 1, ..shape };
        let whole = simulate(Algorithm::Ring, &topology, &bytes, whole, &links, &options);
        let passed_on = (ranks - 2) * (100 + 7 + 2 * 6400 + 30);
        assert_eq!(whole.end_ps(), 30 + (100 + 6400 + 30) + passed_on);
    }
}

#[test]
fn a_get_ring_takes_a_get_a_relay_and_a_flag_for_each_step() {
    for ranks in 2..=9u64 {
        let mut links = links();
        links.local.get_seconds = 100e-12;
        (links.local.flag_seconds, links.own.flag_seconds) = (30e-12, 7e-12);
        let topology = Topology::flat(ranks as usize).unwrap();
        let shape = Shape { in_place: true, ..Shape::default() };
        let bytes = vec![6400; ranks as usize];
        let options = Options::default();
        let whole = simulate(Algorithm::GetRing, &topology, &bytes, shape, &links, &options);
        // The first get waits for `ready` instead of a relay, and the last one ends with `taken`.
        let steps = 30 + (ranks - 1) * (100 + 6400) + (ranks - 2) * (7 + 30) + 30;
        // Lane 1 begins and ends with a flag, both while lane 0 gets.
        assert_eq!(whole.end_ps(), steps);
        // In chunks a step's flags are hidden behind the next chunk.
        let shape = Shape { chunks: 10, ..shape };
        let chunks = simulate(Algorithm::GetRing, &topology, &bytes, shape, &links, &options);
        assert_eq!(chunks.end_ps(), 30 + (ranks - 1) * 10 * (100 + 640) + 30);
    }
}

#[test]
fn direct_takes_a_put_for_each_peer_and_pull_the_same() {
    for ranks in 2..=9u64 {
        let mut links = links();
        (links.local.put_seconds, links.local.get_seconds) = (100e-12, 100e-12);
        links.local.flag_seconds = 30e-12;
        let topology = Topology::flat(ranks as usize).unwrap();
        let shape = Shape { in_place: true, ..Shape::default() };
        let bytes = vec![1000; ranks as usize];
        for algorithm in [Algorithm::Direct, Algorithm::Pull] {
            let options = Options::default();
            let simulation = simulate(algorithm, &topology, &bytes, shape, &links, &options);
            assert_eq!(simulation.end_ps(), 30 + (ranks - 1) * 1100 + 30, "{algorithm}");
            assert_eq!(simulation.incast[0].flows, 1, "{algorithm}: no two into one rank");
        }
        links.local.get_seconds = 300e-12;
        let simulation =
            simulate(Algorithm::Pull, &topology, &bytes, shape, &links, &Options::default());
        assert_eq!(simulation.end_ps(), 30 + (ranks - 1) * 1300 + 30);
        // A thread that gets at half the rate of its puts.
        links.local.get_bytes_per_second = Some(0.5e12);
        links.local.by_processor = true;
        let simulation =
            simulate(Algorithm::Pull, &topology, &bytes, shape, &links, &Options::default());
        assert_eq!(simulation.end_ps(), 30 + (ranks - 1) * 2300 + 30);
    }
}

#[test]
fn hierarchical_hides_the_nodes_behind_the_network() {
    let topology = Topology::of_nodes(&[0, 0, 0, 0, 1, 1, 1, 1]).unwrap();
    let shape = Shape { in_place: true, tiers: true, chunks: 16, ..Shape::default() };
    let mut links = links();
    // Three local puts for each that comes over the network: both legs take equally long.
    links.local.engine_bytes_per_second = 3e12;
    links.local.bytes_per_second = 3e12;
    links.local.send_bytes_per_second = 3e12;
    links.local.receive_bytes_per_second = 3e12;
    let bytes = [64_000 * 16; 8];
    let options = Options::default();
    let simulation = simulate(Algorithm::Hierarchical, &topology, &bytes, shape, &links, &options);
    // The own block is spread first, which the last chunks wait for.
    let (network, own) = (64_000 * 16, 64_000 * 16);
    assert!(simulation.end_ps() >= network, "{}", simulation.end_ps());
    assert!(simulation.end_ps() <= network + own + 64_000, "{}", simulation.end_ps());
}

#[test]
fn a_rank_that_is_late_holds_up_those_that_need_it() {
    let topology = Topology::flat(4).unwrap();
    let late = 1_000_000_000;
    let run = |delays: Vec<u64>| {
        let options = Options { delays, ..Options::default() };
        let links = Links::default();
        simulate(Algorithm::Ring, &topology, &[1 << 20; 4], Shape::default(), &links, &options)
    };
    let (prompt, delayed) = (run(vec![]).end_ps(), run(vec![0, 0, late]).end_ps());
    assert!((late..=late + prompt).contains(&delayed), "{prompt}, then {delayed}");
}
