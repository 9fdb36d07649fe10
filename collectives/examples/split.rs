//! Measures how long a split of a group takes, and the first operation and the close of the new group.
//!
//! `cargo run --release -p peerlane-collectives --example split -- [RANKS]`; every rank is a process.

use std::process::Command;
use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::tcp::{Hub, TcpBootstrap};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::Group;
use peerlane_hal::{Deadline, Rank};
use peerlane_host as host;

const LEN: usize = 1024;
const WARM_UP: usize = 10;
const ROUNDS: usize = 1000;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match &words[..] {
        [rank, ranks, hub] => {
            let (rank, ranks) = (rank.parse().expect("a rank"), ranks.parse().expect("a number"));
            measure(Rank(rank), ranks, hub).expect("all ranks succeed");
        }
        _ => start(words.first().map_or(4, |ranks| ranks.parse().expect("a number of ranks"))),
    }
}

fn start(ranks: usize) {
    let hub = Hub::bind("127.0.0.1:0", ranks).expect("a free port");
    let program = std::env::current_exe().expect("the path of this program");
    let start = |rank: usize| {
        let words = [rank.to_string(), ranks.to_string(), hub.address().to_string()];
        Command::new(&program).args(words).spawn().expect("a process")
    };
    for mut rank in (0..ranks).map(start).collect::<Vec<_>>() {
        assert!(rank.wait().expect("a rank ends").success());
    }
}

fn measure(rank: Rank, ranks: usize, hub: &str) -> Result<(), Error> {
    let environment = Environment::at_hub(hub, rank, ranks);
    let bootstrap = TcpBootstrap::join(&environment, Deadline::after(Duration::from_secs(20)))?;
    let mut world = Group::open(bootstrap, host::Fabric::open(rank, ranks)?)?;
    for colors in [1, 2, 1, 2] {
        let mut times: [Vec<Duration>; 3] = Default::default();
        for _ in 0..WARM_UP + ROUNDS {
            world.barrier()?;
            let begun = Instant::now();
            let mut group = world.split(Some(rank.0 % colors), 0)?.expect("every rank has a color");
            times[0].push(begun.elapsed());
            let begun = Instant::now();
            drop(group.all_gather::<u32>(LEN).prepare()?);
            times[1].push(begun.elapsed());
            let begun = Instant::now();
            group.close()?;
            times[2].push(begun.elapsed());
        }
        for (what, mut times) in ["split", "prepare", "close"].into_iter().zip(times) {
            times.drain(..WARM_UP);
            times.sort();
            if rank == Rank(0) {
                let [low, median, high] =
                    [ROUNDS / 10, ROUNDS / 2, ROUNDS * 9 / 10].map(|at| times[at]);
                println!("{colors} groups, {what}: {median:?}, 10 to 90 %: {low:?} to {high:?}");
            }
        }
    }
    world.close()
}
