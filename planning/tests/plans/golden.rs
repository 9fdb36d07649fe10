//! Compares the text of plans with golden files, and with the plans in docs/PROTOCOLS.md.
//!
//! Run with `UPDATE_GOLDEN=1` to write the golden files again, then review the difference.

use std::path::{Path, PathBuf};
use std::{env, fs};

use peerlane_hal::Rank;
use peerlane_planning::collective::Collective;
use peerlane_planning::plan::{Algorithm, FlagOrder, Plan};
use peerlane_planning::schedule::{self, Shape};
use peerlane_planning::topology::Topology;

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// The ranks whose plans a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GoldenRanks {
    All,
    Rank0,
}

fn compare(algorithm: Algorithm, ranks: usize, shape: Shape) {
    let topology = Topology::flat(ranks).unwrap();
    compare_on(algorithm, &topology, &plural(ranks, "rank"), shape, GoldenRanks::All);
}

/// Compares the plan of rank 0; the others have the same pattern.
fn compare_rank_0(algorithm: Algorithm, ranks: usize, shape: Shape) {
    let topology = Topology::flat(ranks).unwrap();
    compare_on(algorithm, &topology, &plural(ranks, "rank"), shape, GoldenRanks::Rank0);
}

/// Compares the plans on nodes with these numbers of ranks.
fn compare_nodes(algorithm: Algorithm, nodes: &[usize], shape: Shape, golden_ranks: GoldenRanks) {
    let node_of_rank: Vec<u32> =
        (0..).zip(nodes).flat_map(|(node, &ranks)| std::iter::repeat_n(node, ranks)).collect();
    let topology = Topology::of_nodes(&node_of_rank).unwrap();
    let name: Vec<String> = nodes.iter().map(usize::to_string).collect();
    compare_on(algorithm, &topology, &format!("nodes_{}", name.join("+")), shape, golden_ranks);
}

fn plural(count: usize, what: &str) -> String {
    format!("{count}_{what}{}", if count == 1 { "" } else { "s" })
}

fn compare_on(
    algorithm: Algorithm,
    topology: &Topology,
    ranks: &str,
    shape: Shape,
    golden_ranks: GoldenRanks,
) {
    let place = if shape.in_place { "in" } else { "out_of" };
    let chunks = plural(shape.chunks as usize, "chunk");
    let turn = match (shape.outputs, shape.inboxes) {
        (1, 1) => "",
        (1, _) => "_inboxes_in_turn",
        _ => "_in_turn",
    };
    let flags = if shape.flags == FlagOrder::Prompt { "" } else { "_batched" };
    let tiers = if shape.tiers { "_tiers" } else { "" };
    let rank = if golden_ranks == GoldenRanks::All { "" } else { "_rank_0" };
    let goal = match shape.collective {
        Collective::AllGather => String::new(),
        goal => format!("{}_", goal.to_string().replace(' ', "_")),
    };
    let name =
        format!("{goal}{algorithm}_{ranks}_{chunks}_{place}_place{turn}{flags}{tiers}{rank}.txt");
    let path = file(&name);
    let mut plans = schedule::plans(algorithm, topology, shape).unwrap();
    if golden_ranks == GoldenRanks::Rank0 {
        plans.truncate(1);
    }
    let texts: Vec<String> = plans.iter().map(ToString::to_string).collect();
    let text = texts.join("\n");
    if env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
        fs::write(&path, &text).unwrap();
    }
    let golden = fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}; run with UPDATE_GOLDEN=1", path.display()));
    assert_eq!(text, golden, "{} differs; run with UPDATE_GOLDEN=1 if it should", path.display());
    let read: Vec<Plan> = golden.split("\n\n").map(|text| text.parse().unwrap()).collect();
    assert_eq!(read, plans);
}

#[test]
fn direct_out_of_place() {
    for ranks in 1..=4 {
        compare(Algorithm::Direct, ranks, Shape::default());
    }
}

#[test]
fn direct_in_place() {
    for ranks in 1..=4 {
        compare(Algorithm::Direct, ranks, Shape { in_place: true, ..Shape::default() });
    }
}

#[test]
fn direct_in_two_chunks() {
    compare(Algorithm::Direct, 3, Shape { chunks: 2, ..Shape::default() });
}

#[test]
fn direct_with_outputs_in_turn() {
    compare(Algorithm::Direct, 3, Shape { outputs: 2, ..Shape::default() });
}

#[test]
fn direct_with_batched_flags() {
    for ranks in 1..=4 {
        for (in_place, outputs) in [(false, 1), (false, 2), (true, 1)] {
            let flags = FlagOrder::Batched;
            compare(
                Algorithm::Direct,
                ranks,
                Shape { in_place, outputs, flags, ..Shape::default() },
            );
        }
    }
}

#[test]
fn direct_with_batched_flags_in_two_chunks() {
    let shape = Shape { chunks: 2, flags: FlagOrder::Batched, ..Shape::default() };
    compare(Algorithm::Direct, 3, shape);
}

#[test]
fn algorithms_of_one_node() {
    for algorithm in [Algorithm::Pull, Algorithm::Ring, Algorithm::DoubleRing, Algorithm::GetRing] {
        for ranks in 1..=4 {
            compare(algorithm, ranks, Shape::default());
        }
        let (chunks, in_place) = (2, true);
        compare(algorithm, 3, Shape { chunks, in_place, ..Shape::default() });
        let (outputs, flags) = (2, FlagOrder::Batched);
        compare(algorithm, 3, Shape { outputs, flags, ..Shape::default() });
        compare(algorithm, 3, Shape { flags, ..Shape::default() });
    }
    compare(Algorithm::DoubleRing, 4, Shape { chunks: 2, ..Shape::default() });
}

#[test]
fn more_ranks_of_one_node() {
    for algorithm in [Algorithm::Direct, Algorithm::Pull, Algorithm::Ring, Algorithm::DoubleRing] {
        for ranks in 5..=8 {
            compare_rank_0(algorithm, ranks, Shape::default());
        }
    }
}

#[test]
fn hierarchical_algorithms() {
    let tiers = true;
    for algorithm in [Algorithm::Hierarchical, Algorithm::HierarchicalRing] {
        compare(algorithm, 3, Shape::default());
        compare_nodes(algorithm, &[1; 4], Shape { tiers, ..Shape::default() }, GoldenRanks::All);
        compare_nodes(algorithm, &[2; 3], Shape { tiers, ..Shape::default() }, GoldenRanks::Rank0);
        compare_nodes(algorithm, &[4; 2], Shape { tiers, ..Shape::default() }, GoldenRanks::Rank0);
        compare_nodes(algorithm, &[3, 1, 2], Shape { tiers, ..Shape::default() }, GoldenRanks::All);
        let (chunks, in_place, flags) = (2, true, FlagOrder::Batched);
        let shape = Shape { chunks, in_place, flags, tiers, ..Shape::default() };
        compare_nodes(algorithm, &[2; 2], shape, GoldenRanks::Rank0);
        compare_nodes(
            algorithm,
            &[2; 2],
            Shape { outputs: 2, ..Shape::default() },
            GoldenRanks::Rank0,
        );
    }
}

#[test]
fn broadcasts() {
    let of = |root| Collective::Broadcast { root: Rank(root) };
    let shape = Shape { collective: of(1), chunks: 2, ..Shape::default() };
    compare(Algorithm::GetRing, 3, shape);
    for algorithm in [Algorithm::Direct, Algorithm::Ring] {
        for ranks in 1..=4 {
            compare(algorithm, ranks, Shape { collective: of(0), ..Shape::default() });
        }
        compare(algorithm, 3, shape);
        compare(algorithm, 3, Shape { in_place: true, flags: FlagOrder::Batched, ..shape });
        compare_nodes(algorithm, &[3, 1, 2], Shape { tiers: true, ..shape }, GoldenRanks::All);
    }
}

#[test]
fn gathers_and_scatters() {
    let gather = |root| Collective::Gather { root: Rank(root) };
    let scatter = |root| Collective::Scatter { root: Rank(root) };
    for (first, second) in [(gather(0), gather(1)), (scatter(0), scatter(1))] {
        for ranks in 1..=4 {
            compare(Algorithm::Direct, ranks, Shape { collective: first, ..Shape::default() });
        }
        let shape = Shape { collective: second, chunks: 2, ..Shape::default() };
        for algorithm in [Algorithm::Direct, Algorithm::Pull] {
            compare(algorithm, 3, shape);
            compare(algorithm, 3, Shape { flags: FlagOrder::Batched, ..shape });
            compare_nodes(algorithm, &[3, 1, 2], Shape { tiers: true, ..shape }, GoldenRanks::All);
        }
    }
}

#[test]
fn reductions() {
    let reductions = Collective::ALL.iter().filter(|goal| goal.is_reduction());
    for &goal in reductions {
        let shape = Shape { collective: goal.with_root(Rank(1)), ..Shape::default() };
        compare(Algorithm::Direct, 3, shape);
        let batched = Shape { chunks: 2, outputs: 2, flags: FlagOrder::Batched, ..shape };
        compare(Algorithm::Direct, 3, batched);
        let tiers = Shape { tiers: true, ..shape };
        compare_nodes(Algorithm::Direct, &[2, 1], tiers, GoldenRanks::All);
        compare(Algorithm::Direct, 3, Shape { inboxes: 2, ..shape });
    }
    let in_place = Shape { collective: Collective::AllReduce, in_place: true, ..Shape::default() };
    compare(Algorithm::Direct, 3, in_place);
    let batched = Shape { chunks: 2, inboxes: 2, flags: FlagOrder::Batched, ..in_place };
    compare(Algorithm::Direct, 3, batched);
}

#[test]
fn scatter_and_all_gather() {
    let of = |root| Collective::Broadcast { root: Rank(root) };
    for (ranks, root) in [(1, 0), (2, 0), (4, 2)] {
        let shape = Shape { collective: of(root), chunks: 6, ..Shape::default() };
        compare(Algorithm::ScatterAllGather, ranks, shape);
    }
    let batched = Shape { collective: of(0), flags: FlagOrder::Batched, ..Shape::default() };
    compare(Algorithm::ScatterAllGather, 4, Shape { chunks: 3, ..batched });
    compare(Algorithm::ScatterAllGather, 3, Shape { chunks: 4, outputs: 2, ..batched });
}

#[test]
fn recursive_doubling() {
    for ranks in [1, 2, 4] {
        compare(Algorithm::RecursiveDoubling, ranks, Shape::default());
    }
    let shape = Shape { chunks: 2, in_place: true, flags: FlagOrder::Batched, ..Shape::default() };
    compare(Algorithm::RecursiveDoubling, 4, shape);
    let batched = Shape { flags: FlagOrder::Batched, ..Shape::default() };
    compare(Algorithm::RecursiveDoubling, 4, batched);
    let tiers = Shape { tiers: true, ..Shape::default() };
    compare_nodes(Algorithm::RecursiveDoubling, &[2, 2], tiers, GoldenRanks::All);
    compare_nodes(Algorithm::RecursiveDoubling, &[1, 1, 1, 1], tiers, GoldenRanks::Rank0);
}

#[test]
fn all_to_alls() {
    let shape = Shape { collective: Collective::AllToAll, ..Shape::default() };
    for ranks in 1..=4 {
        compare(Algorithm::Direct, ranks, shape);
    }
    compare(Algorithm::Direct, 3, Shape { outputs: 2, flags: FlagOrder::Batched, ..shape });
    compare(Algorithm::Pull, 3, shape);
    let shape = Shape { tiers: true, ..shape };
    compare_nodes(Algorithm::Direct, &[3, 1, 2], shape, GoldenRanks::Rank0);
}

#[test]
fn other_algorithms_with_a_network() {
    let shape = Shape { tiers: true, ..Shape::default() };
    for algorithm in [Algorithm::Direct, Algorithm::Pull, Algorithm::Ring, Algorithm::DoubleRing] {
        compare_nodes(algorithm, &[3, 1, 2], shape, GoldenRanks::All);
    }
}

/// A page of the docs that shows plans.
const PAGE: &str = include_str!("../../../docs/PROTOCOLS.md");

/// Returns the plan of a line such as `peerlane plan --ranks 3 --rank 0`.
fn plan_of(options: &str) -> Plan {
    let mut words = options.split(' ');
    let (mut topology, mut algorithm, mut rank) = (None, Algorithm::Direct, Rank(0));
    let mut shape = Shape::default();
    let (mut goal, mut root) = ("all-gather", Rank(0));
    while let Some(option) = words.next() {
        let mut value = || words.next().unwrap();
        match option {
            "--ranks" => topology = Some(Topology::flat(value().parse().unwrap()).unwrap()),
            "--nodes" => topology = Some(value().parse().unwrap()),
            "--algorithm" => algorithm = value().parse().unwrap(),
            "--chunks" => shape.chunks = value().parse().unwrap(),
            "--inboxes" => shape.inboxes = value().parse().unwrap(),
            "--rank" => rank = Rank(value().parse().unwrap()),
            "--in-place" => shape.in_place = true,
            "--tiers" => shape.tiers = true,
            "--collective" => goal = value(),
            "--root" => root = Rank(value().parse().unwrap()),
            other => panic!("{other} in {options:?}"),
        }
    }
    shape.collective = Collective::of_name(goal).unwrap().with_root(root);
    schedule::plan(algorithm, &topology.unwrap(), rank, shape).unwrap()
}

#[test]
fn the_plans_in_the_docs_are_those_of_the_algorithms() {
    let (mut shown, mut collectives) = (Vec::new(), Vec::new());
    for example in PAGE.split("`peerlane plan ").skip(1).filter(|text| text.contains("`:\n\n")) {
        let Some((options, rest)) = example.split_once("`:\n\n```text\n") else { continue };
        let text = rest.split("\n```").next().unwrap();
        let plan = plan_of(options);
        assert_eq!(format!("{text}\n"), plan.to_string(), "of {options}");
        shown.push(plan.algorithm);
        collectives.push(plan.collective.name());
    }
    for name in Collective::ALL.iter().map(|one| one.name()) {
        assert!(collectives.contains(&name), "{name} is not shown");
    }
    for algorithm in Algorithm::ALL {
        assert!(shown.contains(algorithm), "{algorithm} is not shown");
    }
}
