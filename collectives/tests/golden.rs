//! The plans of all ranks as text, compared with files.
//!
//! Run with `UPDATE_GOLDEN=1` to write the files anew, then read the difference.

use std::path::{Path, PathBuf};
use std::{env, fs};

use peerlane_collectives::collective::Collective;
use peerlane_collectives::plan::{Algorithm, FlagOrder, Plan};
use peerlane_collectives::schedule::{self, Shape};
use peerlane_collectives::topology::Topology;
use peerlane_hal::Rank;

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Whose plans a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    All,
    Rank0,
}

fn compare(algorithm: Algorithm, ranks: usize, shape: Shape) {
    let topology = Topology::flat(ranks).unwrap();
    compare_on(algorithm, &topology, &plural(ranks, "rank"), shape, Whose::All);
}

/// Compares the plan of rank 0: the others show the same pattern.
fn compare_rank_0(algorithm: Algorithm, ranks: usize, shape: Shape) {
    let topology = Topology::flat(ranks).unwrap();
    compare_on(algorithm, &topology, &plural(ranks, "rank"), shape, Whose::Rank0);
}

/// Compares the plans on nodes with so many ranks each.
fn compare_nodes(algorithm: Algorithm, nodes: &[usize], shape: Shape, whose: Whose) {
    let node_of_rank: Vec<u32> =
        (0..).zip(nodes).flat_map(|(node, &ranks)| std::iter::repeat_n(node, ranks)).collect();
    let topology = Topology::of_nodes(&node_of_rank).unwrap();
    let name: Vec<String> = nodes.iter().map(usize::to_string).collect();
    compare_on(algorithm, &topology, &format!("nodes_{}", name.join("+")), shape, whose);
}

fn plural(count: usize, what: &str) -> String {
    format!("{count}_{what}{}", if count == 1 { "" } else { "s" })
}

fn compare_on(algorithm: Algorithm, topology: &Topology, ranks: &str, shape: Shape, whose: Whose) {
    let place = if shape.in_place { "in" } else { "out_of" };
    let chunks = plural(shape.chunks as usize, "chunk");
    let turn = if shape.outputs == 1 { "" } else { "_in_turn" };
    let flags = if shape.flags == FlagOrder::Prompt { "" } else { "_batched" };
    let tiers = if shape.tiers { "_tiers" } else { "" };
    let rank = if whose == Whose::All { "" } else { "_rank_0" };
    let goal = match shape.collective {
        Collective::AllGather => String::new(),
        goal => format!("{}_", goal.to_string().replace(' ', "_")),
    };
    let name =
        format!("{goal}{algorithm}_{ranks}_{chunks}_{place}_place{turn}{flags}{tiers}{rank}.txt");
    let path = file(&name);
    let mut plans = schedule::plans(algorithm, topology, shape).unwrap();
    if whose == Whose::Rank0 {
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
    for algorithm in [Algorithm::Pull, Algorithm::Ring, Algorithm::DoubleRing] {
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
        compare_nodes(algorithm, &[1; 4], Shape { tiers, ..Shape::default() }, Whose::All);
        compare_nodes(algorithm, &[2; 3], Shape { tiers, ..Shape::default() }, Whose::Rank0);
        compare_nodes(algorithm, &[4; 2], Shape { tiers, ..Shape::default() }, Whose::Rank0);
        compare_nodes(algorithm, &[3, 1, 2], Shape { tiers, ..Shape::default() }, Whose::All);
        let (chunks, in_place, flags) = (2, true, FlagOrder::Batched);
        let shape = Shape { chunks, in_place, flags, tiers, ..Shape::default() };
        compare_nodes(algorithm, &[2; 2], shape, Whose::Rank0);
        compare_nodes(algorithm, &[2; 2], Shape { outputs: 2, ..Shape::default() }, Whose::Rank0);
    }
}

#[test]
fn broadcasts() {
    let of = |root| Collective::Broadcast { root: Rank(root) };
    for algorithm in [Algorithm::Direct, Algorithm::Ring] {
        for ranks in 1..=4 {
            compare(algorithm, ranks, Shape { collective: of(0), ..Shape::default() });
        }
        let shape = Shape { collective: of(1), chunks: 2, ..Shape::default() };
        compare(algorithm, 3, shape);
        compare(algorithm, 3, Shape { in_place: true, flags: FlagOrder::Batched, ..shape });
        compare_nodes(algorithm, &[3, 1, 2], Shape { tiers: true, ..shape }, Whose::All);
    }
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
    compare_nodes(Algorithm::Direct, &[3, 1, 2], shape, Whose::Rank0);
}

#[test]
fn other_algorithms_with_a_network() {
    let shape = Shape { tiers: true, ..Shape::default() };
    for algorithm in [Algorithm::Direct, Algorithm::Pull, Algorithm::Ring, Algorithm::DoubleRing] {
        compare_nodes(algorithm, &[3, 1, 2], shape, Whose::All);
    }
}
