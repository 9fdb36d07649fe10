//! The plans in docs/PROTOCOLS.md are those that the algorithms make.

use peerlane_collectives::collective::Collective;
use peerlane_collectives::plan::{Algorithm, Plan};
use peerlane_collectives::schedule::{self, Shape};
use peerlane_collectives::topology::Topology;
use peerlane_hal::Rank;

const PAGE: &str = include_str!("../../docs/PROTOCOLS.md");

/// The plan that a line such as `peerlane plan --ranks 3 --rank 0` asks for.
fn asked(options: &str) -> Plan {
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
            "--rank" => rank = Rank(value().parse().unwrap()),
            "--in-place" => shape.in_place = true,
            "--tiers" => shape.tiers = true,
            "--collective" => goal = value(),
            "--root" => root = Rank(value().parse().unwrap()),
            other => panic!("{other} in {options:?}"),
        }
    }
    shape.collective = match goal {
        "broadcast" => Collective::Broadcast { root },
        "all-to-all" => Collective::AllToAll,
        _ => Collective::AllGather,
    };
    schedule::plan(algorithm, &topology.unwrap(), rank, shape).unwrap()
}

#[test]
fn the_page_shows_what_is_made() {
    let (mut shown, mut collectives) = (Vec::new(), Vec::new());
    for example in PAGE.split("`peerlane plan ").skip(1).filter(|text| text.contains("`:\n\n")) {
        let Some((options, rest)) = example.split_once("`:\n\n```text\n") else { continue };
        let text = rest.split("\n```").next().unwrap();
        let plan = asked(options);
        assert_eq!(format!("{text}\n"), plan.to_string(), "of {options}");
        shown.push(plan.algorithm);
        collectives.push(plan.collective.name());
    }
    for name in Collective::NAMES {
        assert!(collectives.contains(name), "{name} is not shown");
    }
    for algorithm in Algorithm::ALL {
        assert!(shown.contains(algorithm), "{algorithm} is not shown");
    }
}
