//! Costs: hand-computed times, bytes as the plans carry them, choices, and their texts in files.
//!
//! Run with `UPDATE_GOLDEN=1` to write the files anew, then read the difference.

use std::path::Path;
use std::{env, fs};

use fastrand::Rng;
use peerlane_hal::{LinkKind, Rank};
use peerlane_planning::collective::Collective;
use peerlane_planning::cost::{self, Cost, Link, Links, Question, Traffic};
use peerlane_planning::layout::Layout;
use peerlane_planning::plan::{Algorithm, FlagOrder, Step, Tier};
use peerlane_planning::schedule::{self, Shape};
use peerlane_planning::topology::Topology;

use crate::support::processor_time::processor_time_of_thread;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn uneven(node_ranks: &[usize]) -> Topology {
    let nodes = (0u32..).zip(node_ranks).flat_map(|(node, ranks)| vec![node; *ranks]);
    Topology::of_nodes(&nodes.collect::<Vec<_>>()).unwrap()
}

/// 1 µs a put, 10 µs a hop, 1 GB/s everywhere, one put at a time, nothing else.
fn plain() -> Links {
    let mut links = Links::default();
    let link = Link {
        put_seconds: 1e-6,
        get_seconds: 1e-6,
        flag_seconds: 10e-6,
        step_seconds: 0.0,
        submit_seconds: 0.0,
        bytes_per_second: 1e9,
        get_bytes_per_second: None,
        passed_on_bytes_per_second: None,
        passed_on_seconds: 0.0,
        engine_bytes_per_second: 1e9,
        send_bytes_per_second: 1e9,
        receive_bytes_per_second: 1e9,
        puts_in_flight: 1,
        by_processor: false,
    };
    (links.own, links.local, links.network) = (link.clone(), link.clone(), link);
    links.start_seconds = 0.0;
    links.lane_seconds = 0.0;
    links
}

fn cost(
    algorithm: Algorithm,
    topology: &Topology,
    shape: Shape,
    bytes: u64,
    links: &Links,
) -> Cost {
    cost::predict(algorithm, topology, shape, &vec![bytes; topology.ranks()], links).unwrap()
}

#[test]
fn times_are_those_computed_by_hand() {
    let in_place = Shape { in_place: true, ..Shape::default() };
    let two_chunks = Shape { chunks: 2, ..in_place };
    let four = Topology::flat(4).unwrap();
    let links = plain();
    let micros = |algorithm, topology: &Topology, shape, bytes| {
        cost(algorithm, topology, shape, bytes, &links).picoseconds as f64 / 1e6
    };
    // Ready 10; three puts of 1 + 20; the last arrival 10.
    assert_eq!(micros(Algorithm::Direct, &four, in_place, 20_000), 10.0 + 3.0 * 21.0 + 10.0);
    assert_eq!(micros(Algorithm::Pull, &four, in_place, 20_000), 10.0 + 3.0 * 21.0 + 10.0);
    // Each of the three steps waits for what the one before has put.
    assert_eq!(micros(Algorithm::Ring, &four, in_place, 20_000), 10.0 + 3.0 * 21.0 + 3.0 * 10.0);
    // In two chunks of 1 + 10 the hop hides all but 10 - 11 of itself behind the other chunk.
    assert_eq!(micros(Algorithm::Ring, &four, two_chunks, 20_000), 10.0 + 6.0 * 11.0 + 10.0);
    // In a get ring, two of the three steps also wait for a relay inside the previous rank. The other
    // chunk does not hide that.
    assert_eq!(micros(Algorithm::GetRing, &four, in_place, 20_000), 10.0 + 3.0 * 21.0 + 5.0 * 10.0);
    assert_eq!(micros(Algorithm::GetRing, &four, two_chunks, 20_000), {
        10.0 + 3.0 * 11.0 + 11.0 + 5.0 * 10.0
    });
    // Gets of half the rate; and what was just put here costs 2 µs and 1 ns a byte more.
    let mut far = plain();
    far.local.get_bytes_per_second = Some(0.5e9);
    far.local.passed_on_seconds = 2e-6;
    far.local.passed_on_bytes_per_second = Some(1e9);
    let micros_far =
        |algorithm, shape| cost(algorithm, &four, shape, 20_000, &far).picoseconds as f64 / 1e6;
    assert_eq!(micros_far(Algorithm::Pull, in_place), 10.0 + 3.0 * 41.0 + 10.0);
    let passed_on = 2.0 * (2.0 + 20.0);
    let ring = 10.0 + 3.0 * 21.0 + 3.0 * 10.0 + passed_on;
    assert_eq!(micros_far(Algorithm::Ring, in_place), ring);
    let get_ring = 10.0 + 3.0 * 41.0 + 5.0 * 10.0;
    assert_eq!(micros_far(Algorithm::GetRing, in_place), get_ring);
    assert_eq!(micros_far(Algorithm::Direct, in_place), 10.0 + 3.0 * 21.0 + 10.0);
    // Nodes 2 x 2: one block over the network, which home passes on: 1 + 20, the hop, 1 + 20 again.
    let tiers = Shape { tiers: true, ..in_place };
    let ground = uneven(&[2, 2]);
    let hierarchical = micros(Algorithm::Hierarchical, &ground, tiers, 20_000);
    assert_eq!(hierarchical, 10.0 + (10.0 + 21.0 + 10.0 + 21.0) + 10.0);
    // One rank a node: only the rails.
    let ground = uneven(&[1, 1, 1]);
    let hierarchical = micros(Algorithm::Hierarchical, &ground, tiers, 20_000);
    assert_eq!(hierarchical, 10.0 + (10.0 + 2.0 * 21.0 + 10.0));
    // A single rank has only the self copy.
    let one = Topology::flat(1).unwrap();
    for algorithm in schedule::algorithms(Collective::AllGather) {
        assert_eq!(micros(algorithm, &one, Shape::default(), 20_000), 21.0, "{algorithm}");
        assert_eq!(micros(algorithm, &one, in_place, 20_000), 0.0, "{algorithm}");
    }
    // The root puts three parts of 1 + 10, and each other rank passes two of them on. In two rounds
    // of 1 + 5, only what a rank passes on in the last one is not hidden, and a third flag is.
    let broadcast = Shape { collective: Collective::Broadcast { root: Rank(1) }, ..in_place };
    let in_parts =
        |chunks| micros(Algorithm::ScatterAllGather, &four, Shape { chunks, ..broadcast }, 30_000);
    assert_eq!(in_parts(3), 10.0 + 3.0 * 11.0 + 2.0 * 11.0 + 2.0 * 10.0);
    assert_eq!(in_parts(6), 10.0 + 6.0 * 6.0 + 2.0 * 6.0 + 3.0 * 10.0);
}

#[test]
fn more_bytes_never_take_less_time() {
    for links in [Links::default(), Links::of_kinds(LinkKind::SharedMemory, LinkKind::Rdma)] {
        for nodes in [&[4][..], &[2, 2], &[3, 1, 2], &[1, 1, 1, 1]] {
            let topology = uneven(nodes);
            let shape = Shape { tiers: true, ..Shape::default() };
            for algorithm in schedule::fitting(&topology, shape) {
                let times =
                    (0..30).map(|power| cost(algorithm, &topology, shape, 1 << power, &links));
                let times: Vec<u64> = times.map(|cost| cost.picoseconds).collect();
                assert!(times.is_sorted(), "{algorithm} on {nodes:?}: {times:?}");
            }
        }
    }
}

/// What the plans of all ranks carry: to oneself, over the local fabric, over the network.
fn carried(
    algorithm: Algorithm,
    topology: &Topology,
    shape: Shape,
    blocks: &[u64],
) -> [Traffic; 3] {
    let plans = schedule::plans(algorithm, topology, shape).unwrap();
    let layout = Layout::new(shape.collective, blocks, shape.chunks).unwrap();
    let mut traffic = [Traffic::default(); 3];
    for plan in &plans {
        let mut of_rank = [0; 3];
        for lane in &plan.lanes {
            for step in &lane.steps {
                let (peer, receiver, cell) = match *step {
                    Step::Put { peer, cell, .. } => (peer, peer, cell),
                    Step::Get { peer, cell, .. } => (peer, plan.rank, cell),
                    _ => continue,
                };
                let to = match lane.tier {
                    _ if peer == plan.rank => 0,
                    Tier::Local => 1,
                    Tier::Network => 2,
                };
                of_rank[to] += match step.contributes(shape.collective) {
                    true => layout.contribution(cell, receiver).bytes,
                    false => layout.cell(cell, receiver).bytes,
                };
            }
        }
        for (traffic, bytes) in traffic.iter_mut().zip(of_rank) {
            traffic.rank_bytes_max = traffic.rank_bytes_max.max(bytes);
            traffic.total_bytes += bytes;
        }
    }
    traffic
}

#[test]
fn bytes_of_reductions_are_those_that_the_plans_carry() {
    for nodes in [&[1][..], &[5], &[3, 3], &[1, 1, 1, 1]] {
        let topology = uneven(nodes);
        for &collective in Collective::ALL.iter().filter(|one| one.is_reduction()) {
            let shape = Shape { collective, chunks: 2, tiers: true, ..Shape::default() };
            let blocks = vec![4 * KIB; topology.ranks()];
            let (algorithm, links) = (Algorithm::Direct, Links::default());
            let cost = cost::predict(algorithm, &topology, shape, &blocks, &links).unwrap();
            let seen = carried(algorithm, &topology, shape, &blocks);
            let context = format!("{collective} on {nodes:?}");
            let said = [cost.own, cost.local, cost.network];
            assert_eq!(
                said.map(|one| one.total_bytes),
                seen.map(|one| one.total_bytes),
                "{context}"
            );
            for (said, seen) in said.into_iter().zip(seen) {
                assert!(said.rank_bytes_max >= seen.rank_bytes_max, "{context}: {cost:?}");
            }
            let times = (0..30).map(|power| {
                let blocks = vec![1 << power; topology.ranks()];
                cost::predict(algorithm, &topology, shape, &blocks, &links).unwrap().picoseconds
            });
            assert!(times.is_sorted(), "{context}");
        }
    }
}

#[test]
fn bytes_are_those_that_the_plans_carry() {
    for nodes in [&[1][..], &[5], &[2, 4], &[3, 3], &[3, 1, 2], &[1, 1, 1, 1], &[2, 2, 2]] {
        let topology = uneven(nodes);
        for (chunks, in_place, tiers) in [(1, false, true), (4, true, true), (2, false, false)] {
            let shape = Shape { chunks, in_place, tiers, ..Shape::default() };
            for algorithm in schedule::fitting(&topology, shape) {
                let blocks = vec![4 * KIB; topology.ranks()];
                let cost =
                    cost::predict(algorithm, &topology, shape, &blocks, &Links::default()).unwrap();
                let seen = carried(algorithm, &topology, shape, &blocks);
                let even = nodes.iter().all(|ranks| *ranks == nodes[0]);
                let context = format!("{algorithm} on {nodes:?}, {shape:?}");
                for (said, seen) in [cost.own, cost.local, cost.network].into_iter().zip(seen) {
                    assert!(said.rank_bytes_max >= seen.rank_bytes_max, "{context}: {cost:?}");
                    // Two directions share the ways between nodes about evenly.
                    if algorithm != Algorithm::DoubleRing {
                        assert_eq!(said.total_bytes, seen.total_bytes, "{context}");
                    }
                    if even && matches!(algorithm, Algorithm::Direct | Algorithm::Hierarchical) {
                        assert_eq!(said.rank_bytes_max, seen.rank_bytes_max, "{context}");
                    }
                }
            }
        }
    }
}

fn question<'a>(topology: &'a Topology, block_bytes: &'a [u64], links: &'a Links) -> Question<'a> {
    let shape =
        Shape { flags: FlagOrder::Batched, tiers: topology.nodes() > 1, ..Shape::default() };
    let (algorithm, chunks, refused) = (None, None, &[]);
    Question { topology, block_bytes, shape, links, measured: false, algorithm, chunks, refused }
}

#[test]
fn the_choice_depends_on_nothing_but_the_question() {
    let topology = uneven(&[3, 1, 2]);
    for bytes in [0, 1, KIB, MIB, 64 * MIB, 1 << 40] {
        let blocks = vec![bytes; topology.ranks()];
        // As every rank does it: on its own, with links that came over the wire.
        let choices = (0..topology.ranks()).map(|_| {
            let text = serde_json::to_string(&Links::default()).unwrap();
            let links: Links = serde_json::from_str(&text).unwrap();
            cost::choose(&question(&topology, &blocks, &links)).unwrap()
        });
        let choices: Vec<_> = choices.collect();
        assert!(choices.windows(2).all(|pair| pair[0] == pair[1]), "{bytes}");
        assert_eq!(choices[0].algorithm, choices[0].candidates[0].algorithm);
    }
}

#[test]
fn what_is_refused_is_not_chosen() {
    let (topology, links) = (uneven(&[4, 4]), Links::default());
    let blocks = vec![64 * MIB; 8];
    let asked = question(&topology, &blocks, &links);
    assert_eq!(cost::choose(&asked).unwrap().algorithm, Algorithm::Hierarchical);
    let refused =
        [(Algorithm::Hierarchical, "has two lanes"), (Algorithm::HierarchicalRing, "too")];
    let choice = cost::choose(&Question { refused: &refused, ..asked }).unwrap();
    assert_eq!(choice.algorithm, Algorithm::Direct);
    assert!(choice.explain().contains("hierarchical       not used: has two lanes"), "{choice}");
    let error = cost::choose(&Question {
        refused: &refused,
        algorithm: Some(Algorithm::Hierarchical),
        ..asked
    });
    let text = error.unwrap_err().to_string();
    assert_eq!(text, "no algorithm supports this operation: hierarchical: has two lanes");
}

#[test]
fn what_the_caller_has_said_stays() {
    let (topology, links) = (uneven(&[4, 4]), Links::default());
    let blocks = vec![64 * MIB; 8];
    let asked = question(&topology, &blocks, &links);
    let wanted = Question { algorithm: Some(Algorithm::Ring), chunks: Some(3), ..asked };
    let choice = cost::choose(&wanted).unwrap();
    assert_eq!((choice.algorithm, choice.chunks, choice.candidates.len()), (Algorithm::Ring, 3, 1));
}

#[test]
fn impossible_questions_are_named() {
    let (topology, links) = (Topology::flat(2).unwrap(), Links::default());
    let text = |question: Question<'_>| cost::choose(&question).unwrap_err().to_string();
    let asked = question(&topology, &[1, 2, 3], &links);
    assert_eq!(text(asked), "block_bytes has 3 blocks, expected one for each of 2 ranks");
    let asked = Question { chunks: Some(0), ..question(&topology, &[1, 2], &links) };
    assert_eq!(text(asked), "chunks is 0, expected 1 to 65536");
}

#[test]
fn a_root_that_does_not_exist_is_named() {
    let (topology, links) = (Topology::flat(2).unwrap(), Links::default());
    let shape = Shape { collective: Collective::Broadcast { root: Rank(9) }, ..Shape::default() };
    let asked = Question { shape, ..question(&topology, &[1, 2], &links) };
    let text = "root is 9, expected a rank below 2";
    assert_eq!(cost::choose(&asked).unwrap_err().to_string(), text);
    let predicted = cost::predict(Algorithm::Direct, &topology, shape, &[1, 2], &links);
    assert_eq!(predicted.unwrap_err().to_string(), text);
}

/// With a second inbox, a start has no first phase, in which ranks wait for `ready`.
#[test]
fn inboxes_in_turn_save_the_time_of_ready() {
    let (topology, links) = (Topology::flat(4).unwrap(), Links::default());
    let reductions = Collective::ALL.iter().filter(|one| one.is_reduction());
    for collective in reductions.map(|one| one.with_root(Rank(1))) {
        let cost = |inboxes| {
            let shape = Shape { collective, inboxes, ..Shape::default() };
            cost::predict(Algorithm::Direct, &topology, shape, &[KIB; 4], &links).unwrap()
        };
        let has_ready = |cost: &Cost| cost.terms.iter().any(|term| term.name == "ready");
        let (single, turn) = (cost(1), cost(2));

        assert_eq!((has_ready(&single), has_ready(&turn)), (true, false), "{collective}");
        assert!(turn.picoseconds < single.picoseconds, "{collective}");
        assert!(turn.memory_bytes >= single.memory_bytes + 4 * KIB, "{collective}");
        assert!(turn.memory_bytes < 2 * single.memory_bytes, "{collective}");
    }

    let shape = Shape { inboxes: 2, ..Shape::default() };
    let predicted = cost::predict(Algorithm::Direct, &topology, shape, &[KIB; 4], &links);
    let text = "inboxes is 2, expected 1 in an all-gather by the algorithm direct";
    assert_eq!(predicted.unwrap_err().to_string(), text);
    let asked = Question { shape, ..question(&topology, &[KIB; 4], &links) };
    assert_eq!(cost::choose(&asked).unwrap_err().to_string(), text);
    assert_eq!(schedule::fitting(&topology, shape).count(), 0);
}

#[test]
fn choosing_for_16384_ranks_takes_no_time() {
    let topology = uneven(&[8; 2048]);
    let blocks = vec![MIB; 16384];
    let links = Links::default();
    let started = processor_time_of_thread();
    let choice = cost::choose(&question(&topology, &blocks, &links)).unwrap();
    let took = processor_time_of_thread() - started;
    assert_eq!(choice.algorithm, Algorithm::Hierarchical);
    // Below 1 ms; the rest is for a build that is not optimised.
    assert!(took.as_millis() < 50, "{took:?}");
}

/// Direct's largest sender puts its block to all, while on a ring every link carries about as much.
#[test]
fn unlike_blocks_go_around_a_ring() {
    let topology = Topology::flat(4).unwrap();
    let links = Links::default();
    // Assumed links leave the simpler algorithm a margin of 20 %.
    let asked = |blocks: &[u64]| {
        let question = Question { measured: true, ..question(&topology, blocks, &links) };
        cost::choose(&question).unwrap()
    };
    for total in [64 * MIB, 256 * MIB, 1024 * MIB] {
        let blocks = [1, 2, 3, 4].map(|share| total / 10 * share);
        let choice = asked(&blocks);
        let rings = [Algorithm::Ring, Algorithm::DoubleRing];
        assert!(rings.contains(&choice.algorithm), "{choice}");
        let choice = asked(&[total / 4; 4]);
        assert_eq!(choice.algorithm, Algorithm::Direct, "{choice}");
    }
}

fn compare(name: &str, topology: &Topology) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/cost_{name}.txt"));
    let links = Links::default();
    let texts = [KIB, MIB, 64 * MIB].map(|bytes| {
        let blocks: Vec<u64> = Rank::all(topology.ranks()).map(|_| bytes).collect();
        cost::choose(&question(topology, &blocks, &links)).unwrap().explain()
    });
    let text = texts.join("\n");
    if env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
        fs::write(&path, &text).unwrap();
    }
    let golden = fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}; run with UPDATE_GOLDEN=1", path.display()));
    assert_eq!(text, golden, "{} differs; run with UPDATE_GOLDEN=1 if it should", path.display());
}

#[test]
fn explanations_on_one_node() {
    for ranks in 1..=8 {
        let plural = if ranks == 1 { "" } else { "s" };
        compare(&format!("{ranks}_rank{plural}"), &Topology::flat(ranks).unwrap());
    }
}

#[test]
fn explanations_on_several_nodes() {
    compare("2x4", &uneven(&[4, 4]));
    compare("3x2", &uneven(&[2, 2, 2]));
    compare("4x1", &uneven(&[1, 1, 1, 1]));
    compare("3+1+2", &uneven(&[3, 1, 2]));
}

/// Returns a value at or between the bounds that [`Links::check`] allows.
fn extreme(rng: &mut Rng, least: f64, most: f64) -> f64 {
    match rng.u32(..4) {
        0 => least,
        1 => most,
        _ => least + (most - least) * rng.f64().powi(9),
    }
}

#[test]
fn times_of_the_slowest_links_and_the_longest_blocks_saturate() {
    let topologies = ["1x1", "1x2", "1x5", "2x1", "2x2", "3+1+2", "1+7", "0,1,0", "5x3"];
    for seed in 0..300 {
        let mut rng = Rng::with_seed(seed);
        let mut links = Links::default();
        let figure = |least, most, rng: &mut Rng| extreme(rng, least, most);
        for link in [&mut links.own, &mut links.local, &mut links.network] {
            for seconds in [
                &mut link.put_seconds,
                &mut link.get_seconds,
                &mut link.flag_seconds,
                &mut link.step_seconds,
                &mut link.submit_seconds,
                &mut link.passed_on_seconds,
            ] {
                *seconds = figure(0.0, 1e3, &mut rng);
            }
            for rate in [
                &mut link.bytes_per_second,
                &mut link.engine_bytes_per_second,
                &mut link.send_bytes_per_second,
                &mut link.receive_bytes_per_second,
            ] {
                *rate = figure(1.0, 1e18, &mut rng);
            }
            let forwarding = figure(1.0, 1e18, &mut rng);
            link.passed_on_bytes_per_second = rng.bool().then_some(forwarding);
            link.puts_in_flight = [1, 2, u32::MAX][rng.usize(..3)];
            link.by_processor = rng.bool();
        }
        links.node.nics = [None, Some(1), Some(u32::MAX)][rng.usize(..3)];
        links.node.processors = [None, Some(1), Some(u32::MAX)][rng.usize(..3)];
        links.start_seconds = figure(0.0, 1e3, &mut rng);
        links.lane_seconds = figure(0.0, 1e3, &mut rng);

        let topology: Topology = topologies[rng.usize(..topologies.len())].parse().unwrap();
        let bytes: Vec<u64> = (0..topology.ranks())
            .map(|_| [0, 1, 1 << 40, u64::MAX / 7, u64::MAX][rng.usize(..5)])
            .collect();
        for &collective in Collective::ALL {
            let in_place = rng.bool() && collective.runs_in_place();
            let shape = Shape {
                collective,
                chunks: [1, 3, 65_536][rng.usize(..3)],
                in_place,
                outputs: if in_place { 1 } else { rng.u32(1..=2) },
                inboxes: if collective.is_reduction() { rng.u32(1..=2) } else { 1 },
                flags: if rng.bool() { FlagOrder::Prompt } else { FlagOrder::Batched },
                tiers: rng.bool(),
            };
            for algorithm in schedule::fitting(&topology, shape) {
                let cost = cost::predict(algorithm, &topology, shape, &bytes, &links);
                assert!(!cost.unwrap().to_string().is_empty(), "seed {seed}");
            }
            let question = Question {
                topology: &topology,
                block_bytes: &bytes,
                shape,
                links: &links,
                measured: rng.bool(),
                algorithm: None,
                chunks: None,
                refused: &[],
            };
            assert!(!cost::choose(&question).unwrap().explain().is_empty(), "seed {seed}");
        }
    }
}
