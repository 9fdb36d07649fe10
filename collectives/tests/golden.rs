//! The plans of all ranks as text, compared with files.
//!
//! Run with `UPDATE_GOLDEN=1` to write the files anew, then read the difference.

use std::path::{Path, PathBuf};
use std::{env, fs};

use peerlane_collectives::allgather::{self, Shape};
use peerlane_collectives::plan::{Algorithm, FlagOrder, Plan};
use peerlane_collectives::topology::Topology;

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn compare(algorithm: Algorithm, ranks: usize, shape: Shape) {
    let plural = |count, what| format!("{count}_{what}{}", if count == 1 { "" } else { "s" });
    let place = if shape.in_place { "in" } else { "out_of" };
    let (ranks_text, parts_text) = (plural(ranks, "rank"), plural(shape.parts as usize, "part"));
    let turn = if shape.outputs == 1 { "" } else { "_in_turn" };
    let flags = if shape.flags == FlagOrder::Prompt { "" } else { "_batched" };
    let path =
        file(&format!("{algorithm}_{ranks_text}_{parts_text}_{place}_place{turn}{flags}.txt"));
    let topology = Topology::flat(ranks).unwrap();
    let plans = allgather::plans(algorithm, &topology, shape).unwrap();
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
fn direct_in_two_parts() {
    compare(Algorithm::Direct, 3, Shape { parts: 2, ..Shape::default() });
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
                Shape { parts: 1, in_place, outputs, flags, tiers: false },
            );
        }
    }
}

#[test]
fn direct_with_batched_flags_in_two_parts() {
    let shape = Shape { parts: 2, flags: FlagOrder::Batched, ..Shape::default() };
    compare(Algorithm::Direct, 3, shape);
}
