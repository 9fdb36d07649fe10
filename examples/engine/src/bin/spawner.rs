//! Starts its ranks itself, as processes, and connects them with a hub of its own.
//!
//! `cargo run --bin spawner -- 4`; the program starts itself once more for each rank.

use std::env;
use std::error::Error;
use std::process::{Child, Command, ExitCode};
use std::time::Duration;

use peerlane::bootstrap::environment::Environment;
use peerlane::bootstrap::tcp::{Hub, TcpBootstrap};
use peerlane::{Backend, Deadline, Group, OpenOptions, Rank};

/// Begins the arguments of a rank: the address of the hub, the rank, and the number of ranks.
const RANK: &str = "--rank";
const LEN: usize = 1000;
const START_TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments[..] {
        [RANK, hub, rank, ranks] => run_rank(hub, rank, ranks),
        [ranks] => start_ranks(ranks),
        _ => start_ranks("4"),
    };

    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Starts all ranks and waits for them.
fn start_ranks(ranks: &str) -> Result<(), Box<dyn Error>> {
    let ranks: usize = ranks.parse().map_err(|_| format!("{ranks} is no number of ranks"))?;

    // The hub of a launcher outlives its ranks, so it tells each of them who was lost. Port 0 lets
    // the system choose a free one.
    let hub = Hub::bind("127.0.0.1:0", ranks)?;
    let program = env::current_exe()?;
    let start = |rank: usize| {
        let mut command = Command::new(&program);
        let numbers = [hub.address().to_string(), rank.to_string(), ranks.to_string()];
        command.arg(RANK).args(numbers).spawn()
    };
    let children = (0..ranks).map(start).collect::<Result<Vec<Child>, _>>()?;

    // If a rank ends early, the others end with an error that names it, so nobody has to be killed.
    let mut failed = Vec::new();
    for (rank, mut child) in children.into_iter().enumerate() {
        let status = child.wait()?;
        if !status.success() {
            failed.push(format!("rank {rank}: {status}"));
        }
    }

    if !failed.is_empty() {
        return Err(failed.join(", ").into());
    }
    println!("{ranks} ranks have gathered {LEN} elements from each other");
    Ok(())
}

/// Runs one rank, in a process of its own.
fn run_rank(hub: &str, rank: &str, ranks: &str) -> Result<(), Box<dyn Error>> {
    let mut group = join(hub, Rank(rank.parse()?), ranks.parse()?)?;
    let rank = group.rank();

    let mut gather = group.all_gather::<u32>(LEN).prepare()?;
    gather.input_mut()?.fill(rank.0);
    gather.run()?;
    for peer in Rank::all(group.ranks()) {
        assert_eq!(gather.output_of(peer)?, [peer.0; LEN]);
    }

    drop(gather);
    Ok(group.close()?)
}

fn join(hub: &str, rank: Rank, ranks: usize) -> Result<Group, peerlane::Error> {
    let environment = Environment::at_hub(hub, rank, ranks);
    let bootstrap = TcpBootstrap::join(&environment, Deadline::after(START_TIMEOUT))?;

    // Without this line, the group uses the GPUs of the machine if there are any.
    let options = OpenOptions::default().backend(Backend::Host);
    options.open(bootstrap)
}
