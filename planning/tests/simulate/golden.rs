//! The simulated times of a few topologies, compared with a file, so that a change of a schedule or
//! of the model shows what it costs.
//!
//! Run with `UPDATE_GOLDEN=1` to write the file anew, then read the difference.

use std::fmt::Write;
use std::path::Path;
use std::{env, fs};

use peerlane_planning::collective::Collective;
use peerlane_planning::cost::Links;
use peerlane_planning::layout::Layout;
use peerlane_planning::plan::Algorithm;
use peerlane_planning::schedule::{self, Shape};
use peerlane_planning::simulate::{self, LinkClass, Options};
use peerlane_planning::topology::Topology;

const TOPOLOGIES: [(&str, &[u32]); 7] = [
    ("1", &[0]),
    ("2", &[0, 0]),
    ("4", &[0, 0, 0, 0]),
    ("2x4", &[0, 0, 0, 0, 1, 1, 1, 1]),
    ("3x2", &[0, 0, 1, 1, 2, 2]),
    ("4x1", &[0, 1, 2, 3]),
    ("3+1+2", &[0, 0, 0, 1, 2, 2]),
];

fn table() -> String {
    let mut text = String::from(
        "# Simulated times over the default links: NVLink inside nodes, RDMA between them.\n",
    );
    for (name, nodes) in TOPOLOGIES {
        let topology = Topology::of_nodes(nodes).unwrap();
        for (block, chunks) in [(4096, 1), (16 << 20, 1), (16 << 20, 4)] {
            writeln!(text, "\n{name}, blocks of {block} bytes in {chunks} chunks").unwrap();
            let shape = Shape { chunks, tiers: true, ..Shape::default() };
            for algorithm in schedule::fitting(&topology, shape) {
                text += &row(algorithm, &topology, block, chunks);
            }
        }
    }
    text
}

fn row(algorithm: Algorithm, topology: &Topology, block: u64, chunks: u32) -> String {
    let shape = Shape { chunks, tiers: true, ..Shape::default() };
    let layout =
        Layout::new(Collective::AllGather, &vec![block; topology.ranks()], chunks).unwrap();
    let plan = |rank| schedule::plan(algorithm, topology, rank, shape);
    let options = Options::default();
    let simulation =
        simulate::simulate(topology, &layout, &Links::default(), &options, plan).unwrap();
    format!(
        "  {algorithm:<18} {:>11.3} µs, {:>10} bytes local, {:>10} network, path of {:>3} steps, \
         incast {} local, {} network\n",
        simulation.end_ps() as f64 / 1e6,
        simulation.bytes(LinkClass::Local),
        simulation.bytes(LinkClass::Network),
        simulation.critical_path.len(),
        simulation.incast[0].flows,
        simulation.incast[1].flows,
    )
}

#[test]
fn simulated_times_are_those_of_the_file() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/simulated_times.txt");
    let text = table();
    if env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
        fs::write(&path, &text).unwrap();
    }
    let golden = fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}; run with UPDATE_GOLDEN=1", path.display()));
    assert_eq!(text, golden, "{} differs; run with UPDATE_GOLDEN=1 if it should", path.display());
}
