//! Gathers between processes: this program starts itself once for each rank.

use std::process::Command;
use std::time::Duration;

use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::tcp::{Hub, TcpBootstrap};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::Group;
use peerlane_hal::{Deadline, Rank};
use peerlane_ucx::Fabric;

const RANKS: usize = 3;
/// The variable that makes this program a rank: the address of the hub and the rank.
const RANK: &str = "PEERLANE_LOOPBACK_TEST_RANK";

#[test]
fn processes_gather() {
    if let Ok(text) = std::env::var(RANK) {
        let (hub, rank) = text.split_once(' ').expect("a hub and a rank");
        return gather(hub, Rank(rank.parse().unwrap())).unwrap();
    }
    if let Err(error) = peerlane_ucx::version() {
        return peerlane_test_support::not_covered("processes_gather", &error.to_string());
    }
    let hub = Hub::bind("127.0.0.1:0", RANKS).unwrap();
    let program = std::env::current_exe().unwrap();
    let start = |rank: Rank| {
        let mut command = Command::new(&program);
        command.args(["--exact", "processes_gather", "--nocapture"]);
        command.env(RANK, format!("{} {rank}", hub.address())).spawn().unwrap()
    };
    let ranks: Vec<_> = Rank::all(RANKS).map(start).collect();
    for (rank, mut process) in Rank::all(RANKS).zip(ranks) {
        assert!(process.wait().unwrap().success(), "rank {rank} failed; its error is above");
    }
}

fn gather(hub: &str, rank: Rank) -> Result<(), Error> {
    let environment = Environment::at_hub(hub, rank, RANKS);
    let bootstrap = TcpBootstrap::join(&environment, Deadline::after(Duration::from_secs(30)))?;
    let fabric = Fabric::open(rank, bootstrap.ranks());
    let fabric = fabric.map_err(|error| Error::of_backend("open the backend", error))?;
    let mut group = Group::open(bootstrap, fabric)?;
    for len in [1, 1000, 100_001] {
        let mut gather = group.all_gather::<u32>(len).prepare()?;
        for round in 0..3 {
            gather.input_mut()?.fill(100 * round + rank.0);
            gather.run()?;
            for (other, block) in (0..).zip(gather.output()?.chunks(len)) {
                assert!(block.iter().all(|it| *it == 100 * round + other), "{len}, rank {other}");
            }
        }
    }
    group.close()
}
